"""Attacks on the door to the network: each meets its refusal, and nothing reaches a server that must not."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import random
import zlib
from pathlib import Path
from urllib.parse import quote

import anyio
import pytest
from anyio.abc import ByteStream

from builtin.webkit import Names, Site, page, redirect, serve
from egress.doors import TOKEN, Door, code_of, door
from rows import each_row
from toolcell import Limits, ToolError, UsageError
from toolcell.calls.options import Origin
from toolcell.egress import Allow, Egress
from toolcell.egress.echoes import Echoes
from toolcell.egress.overrides import INFLATED_BYTES, PIECE_BYTES
from toolcell.support.secrets import forms_of

pytestmark = [
    pytest.mark.quick,
    pytest.mark.anyio,
    # trio's, of a body that is dropped
    pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <async_gen:pytest.PytestUnraisableExceptionWarning"),
]

REFUSED = "EgressRefused"


def of(site: Site, **options: object) -> Allow:
    """Return a rule that allows the site."""
    return Allow("http://127.0.0.1", **{"ports": [site.port], "methods": ["GET", "POST"], **options})  # type: ignore[arg-type]


WEB = ("GET", "HEAD", "OPTIONS")
RULES: list[tuple[Allow, list[str], list[str]]] = [
    # a rule, requests that it allows, and requests that it does not
    (
        Allow("api.example.com"),
        [
            *(f"{method} https://api.example.com/" for method in WEB),
            "GET https://api.example.com:443/x?y#z",
            "GET https://API.Example.COM./",
        ],
        [
            "GET https://evil.test/",
            "GET https://api.example.com.evil.test/",
            "GET https://evilapi.example.com/",
            "GET https://x.api.example.com/",
            "GET https://example.com/",
            "GET https://api.example.com@evil.test/",
            "GET https://me:pass@api.example.com/",
            "GET https://evil.test\\@api.example.com/",
            "GET https://api.example.com:80/",
            "GET https://api.example.com:8443/",
            "GET https://api.example.com:99999/",
            "GET http://api.example.com/",
            "GET http://api.example.com:443/",
            "GET ftp://api.example.com/",
            "GET ftp://api.example.com:443/",
            "GET file:///etc/passwd",
            "GET https:///etc/passwd",
            "GET https://api.example.com/\r\nHost: evil.test",
            "GET https://\u0430pi.example.com/",  # looks alike
            *(f"GET https://{loopback}/" for loopback in ("2130706433", "127.1", "0177.0.0.1", "0x7f000001")),
            "GET https://\uff11\uff12\uff17.0.0.1/",
            "GET https://93.184.216.34/",
            "GET https://[::1]/",
            "GET https://[::ffff:127.0.0.1]/",
            "GET https://[::ffff:7f00:1]/",
            "GET https://[64:ff9b::7f00:1]/",  # IPv4 behind NAT64
            "GET https://[fe80::1%25eth0]/",
            *(f"{method} https://api.example.com/" for method in ("POST", "PUT", "PATCH", "DELETE", "TRACE", "get")),
        ],
    ),
    (
        Allow("*.wild.example.org"),
        ["GET https://a.wild.example.org/", "GET https://a.b.wild.example.org/"],
        [
            "GET https://wild.example.org/",
            "GET https://evilwild.example.org/",
            "GET https://evil-wild.example.org/",
            "GET https://.wild.example.org/",
            "GET https://example.org/",
            "GET https://a.wild.example.org.evil.test/",
            "GET http://a.wild.example.org/",
            "GET http://a.wild.example.org:443/",
        ],
    ),
    (
        Allow("http://*.plain.test"),
        ["GET http://a.plain.test/", "GET http://a.plain.test:80/"],
        ["GET https://a.plain.test/", "GET http://a.plain.test:8080/", "GET http://evilplain.test/"],
    ),
    (
        Allow("ports.test", ports=[8080, 8443]),
        ["GET http://ports.test:8080/", "GET https://ports.test:8443/"],
        ["GET https://ports.test/", "GET http://ports.test/", "GET https://ports.test:808/"],
    ),
    (
        Allow("write.test", methods=["POST"]),
        ["POST https://write.test/"],
        ["GET https://write.test/", "PUT https://write.test/"],
    ),
    (
        Allow("paths.test", paths=["/a/*", "/b"]),
        ["GET https://paths.test/a/", "GET https://paths.test/a/b/c", "GET https://paths.test/b?c=d"],
        [f"GET https://paths.test{path}" for path in ("", "/", "/a", "/A/b", "/ab", "/b/", "/bc", "/c/a/", "/c?/a/b")],
    ),
]


async def test_each_rule_allows_its_own_requests_and_no_others() -> None:
    """A request that is allowed has its host looked up, and a rule that allows one is no help to those of another."""
    found, expected = dict[str, bool](), dict[str, bool]()
    names = Names()
    async with door(*(rule for rule, _, _ in RULES), resolver=names) as run:
        for _, allowed, refused in RULES:
            for text in (*allowed, *refused):
                method, _, url = text.partition(" ")
                names.asked.clear()
                code = code_of(await run.send(url, method))
                assert (code == REFUSED) is not bool(names.asked), text
                found[text], expected[text] = code != REFUSED, text in allowed

    assert found == expected


async def test_spellings_of_an_allowed_host_lead_to_it() -> None:
    async with serve({"/": page("ok")}) as site:
        names = Names(b_xn____c_test=[["127.0.0.1"]])
        names.answers = {"xn--bcher-kva.test": [["127.0.0.1"]], "a.b.wild.test": [["127.0.0.1"]]}
        options = {"ports": [site.port], "private": ["127.0.0.1"]}
        async with door(Allow("bücher.test", **options), Allow("*.wild.test", **options), resolver=names) as run:  # type: ignore[arg-type]
            for host in ("BÜCHER.test", "xn--bcher-kva.test.", "A.b.wild.test"):
                assert code_of(await run.send(f"http://{host}:{site.port}/")) == "sent", host

    assert len(site.requests) == 3


PATHS = (
    "/repos/other", "/repos/acme/../other", "/repos/acme/%2e%2e/other", "/repos/acme/%252e%252e/other",
    "/repos/acme/%25252e%25252e/other", "/repos/acme/..%2fother", "/repos/acme/..%5cother", "/repos/acme/..;/other",
    "/repos/acme/..;x=1/other", "/repos/acme/.%2e;/other", "/other/repos/acme/x", "//repos/acme/x/../../../other",
    "/repos/acme/%c0%ae%c0%ae/other", "/repos/acme/..%c0%afother", "/repos/acme/%25c0%25ae%25c0%25ae/other",
    "/repos/acme/%u002e%u002e/other", "/repos/acme/%uff0e%uff0e%u002fother", "/repos/acme/..%ef%bc%8fother",
    "/repos/acme/%ef%bc%8e%ef%bc%8e/other", "/repos/acme/%e2%80%a5/other", "/repos/acme/%2e%2e%255cother",
    "/repos/acme/x%0d%0aGET /other", "/repos/acme/%00", "/repos/acme/%2525252e%2525252e/x",
    "/repos/acme/%e0%80%ae%e0%80%ae/other", "/repos/acme/%f0%80%80%ae./other", "/repos/acme/..%e2%88%95other",
    "/repos/acme/..%c2%a5other", "/repos/acme/..%20/other", "/repos/acme/.../other",
)  # fmt: skip


@each_row("path", PATHS)
async def test_a_path_that_a_server_may_read_as_another_is_refused(path: str) -> None:
    async with serve({}) as site, door(of(site, paths=["/repos/acme/*"])) as run:
        assert code_of(await run.send(site.url("/repos/acme/x", "127.0.0.1"))) == "sent"
        assert code_of(await run.send(f"http://127.0.0.1:{site.port}{path}")) == REFUSED

    assert site.paths == ["/repos/acme/x"]


@each_row("method", ["PUT", "CONNECT", "TRACE", "get", "GET /x HTTP/1.1\r\nX:", "", "POST\0"])
async def test_methods_that_are_not_listed_are_refused(method: str) -> None:
    async with serve({}) as site, door(of(site)) as run:
        assert code_of(await run.send(site.url(host="127.0.0.1"), method)) == REFUSED

    assert site.requests == []


async def test_a_rule_for_all_methods_allows_none_that_echoes_or_makes_a_tunnel() -> None:
    async with serve({}) as site, door(of(site, methods="*", secrets=["TOKEN"]), secrets={"TOKEN": TOKEN}) as run:
        sent = {
            method: code_of(await run.send(site.url(host="127.0.0.1"), method))
            for method in ("DELETE", "PROPFIND", "CONNECT", "TRACE", "TRACK")
        }

    assert sent == {"DELETE": "sent", "PROPFIND": "sent", **dict.fromkeys(("CONNECT", "TRACE", "TRACK"), REFUSED)}
    assert len(site.requests) == 2
    for method in ("CONNECT", "TRACE", "TRACK"):
        with pytest.raises(UsageError, match="methods such as"):
            Allow("api.example.com", methods=[method])


HEADERS = {
    "another host": ["Host", "evil.test"],
    "a length that is not the body's": ["Content-Length", "0"],
    "a length with a sign": ["Content-Length", "+4"],
    "a coding of the transfer": ["Transfer-Encoding", "gzip, chunked"],
    "a coding that is none": ["Transfer-Encoding", "\x0bchunked"],
    "an underscore": ["Transfer_Encoding", "xchunked"],
    "a header for the connection": ["Connection", "close, X-Secret"],
    "an upgrade": ["Upgrade", "websocket"],
    "HTTP/2 in clear": ["HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"],
    "a password for a proxy": ["Proxy-Authorization", "Basic eDp5"],
    "another method": ["X-HTTP-Method-Override", "DELETE"],
    "another method, spelled otherwise": ["x_http_method_override", "DELETE"],
    "another method, shorter": ["X-HTTP-Method", "DELETE"],
    "another method, behind a proxy": ["X-Forwarded-Method", "DELETE"],
    "another path, behind a proxy": ["X_Forwarded_Uri", "/admin"],
    "another path": ["X-Original-URL", "/admin"],
    "another path, for another server": ["X-Rewrite-URL", "/admin"],
    "another host, behind a proxy": ["X-Forwarded-Host", "evil.test"],
    "another host, in the standard's header": ["Forwarded", "host=evil.test"],
    "a line break in the value": ["X-A", "1\r\nX-B: 2"],
    "a line feed in the value": ["X-A", "1\nX-B: 2"],
    "a zero in the value": ["X-A", "1\0"],
    "a line break in the name": ["X-A: 1\r\nX-B", "2"],
    "a space in the name": ["Host ", "evil.test"],
    "an empty name": ["", "x"],
    "letters that no header has": ["X-A", "\u010a"],
    "too much": ["X-A", "a" * 70_000],
}


@each_row("what", HEADERS)
async def test_headers_that_would_make_it_another_request_are_refused(what: str) -> None:
    async with serve({}) as site, door(of(site)) as run:
        result = await run.send(site.url(host="127.0.0.1"), "POST", [HEADERS[what]], b"body")

    assert code_of(result) == REFUSED
    assert site.requests == []


SECOND_PLACES = (
    "x-amz-copy-source", "x-goog-copy-source", "x-ms-copy-source", "x-amz-website-redirect-location",
    "X-HTTP-Method-Override", "X.HTTP.Method.Override", "X-Method-Override", "X-HTTP-Verb", "X-Original-Method",
    "X-Original-URL", "X-Original-URI", "X-Original-Path", "X-Original-Host", "X-Rewrite-URL", "X-Rewrite-Path",
    "X-Envoy-Original-Path", "X-Envoy-Original-Method", "x-matched-path", "x-invoke-path", "x-invoke-query",
    "x-middleware-rewrite", "x-now-route-matches", "X-Override-URL", "X-HTTP-Host", "X-HTTP-Host-Override", "X-Host",
    "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Path", "X-Forwarded-Prefix", "X-Forwarded-Proto",
    "X-Forwarded-Server", "X-Forwarded-Uri", "X-Real-IP", "True-Client-IP", "CF-Connecting-IP", "Client-IP", "Via",
    "Forwarded", "X-ProxyUser-Ip", "X-Remote-User", "X-SSL-Client-Cert", "X-Accel-Redirect", "X-Sendfile", "SOAPAction",
    "Surrogate-Capability", "Base-Url", "X-Tenant",
)  # fmt: skip
"""Headers by which some server takes a second URL, another method or another sender, and one that only a rule knows."""


async def test_headers_that_are_not_ordinary_are_sent_only_where_a_rule_names_them() -> None:
    async with serve({}) as site, door(of(site, methods="*")) as run:
        url = site.url(host="127.0.0.1")
        spellings = [each for name in SECOND_PLACES for each in (name, name.replace("-", "_"), name.upper())]
        refused = {name: await run.send(url, "PUT", [[name, "/x"]]) for name in spellings}

    assert {name for name, result in refused.items() if code_of(result) != REFUSED} == set()
    assert site.requests == []
    error = refused["X-Tenant"].error
    assert error is not None and 'headers=["X-Tenant"]' in error.message and "+X-Tenant" in error.message

    named = of(site, methods="*", headers=["X-Tenant", "x_acme_*"])
    async with serve({}) as site, door(dataclasses.replace(named, ports=[site.port])) as run:
        sent = {
            name: code_of(await run.send(site.url(host="127.0.0.1"), "PUT", [[name, "/x"]]))
            for name in ("X-Tenant", "x_tenant", "X-Acme-Team", "X-Acme", "X-Tenants")
        }
    assert sent == {
        **dict.fromkeys(("X-Tenant", "x_tenant", "X-Acme-Team"), "sent"),
        **dict.fromkeys(("X-Acme", "X-Tenants"), REFUSED),
    }


def test_headers_of_the_connection_cannot_be_allowed() -> None:
    for name in (
        "Host",
        "Content_Length",
        "Transfer-Encoding",
        "Upgrade",
        "Proxy-Authorization",
        "Connection",
        "*",
        "",
    ):
        with pytest.raises(UsageError, match="headers"):
            Allow("api.example.com", headers=[name])
    assert Allow.parse("GET,PUT example.com:8443/files/* +X-Tenant") == Allow(
        "example.com", methods=("GET", "PUT"), paths=("/files/*",), ports=(8443,), headers=["x-tenant"]
    )


async def test_a_path_with_an_encoded_sign_is_allowed_only_if_all_its_readings_are() -> None:
    async with serve({}) as site, door(of(site, paths=["/*/public"])) as run:
        paths = ("/a/public", "/admin%3f/public", "/admin%3F/public", "/admin%253f/public", "/admin%23/public",
                 "/admin%3b/public", "/admin%2f..%2f..%2fpublic", "/admin%00/public")  # fmt: skip
        sent = [path for path in paths if code_of(await run.send(f"http://127.0.0.1:{site.port}{path}")) == "sent"]

    assert sent == ["/a/public", "/admin%3b/public"]  # without what follows the semicolon, the path is the same
    assert [path.lower() for path in site.paths] == sent


async def test_a_query_does_not_ask_for_another_method() -> None:
    async with serve({}) as site, door(of(site)) as run:
        assert code_of(await run.send(site.url("/?a=1&_method=DELETE", "127.0.0.1"), "POST")) == REFUSED
        assert code_of(await run.send(site.url("/?a=1;%5fmethod=%20delete", "127.0.0.1"), "POST")) == REFUSED
        assert code_of(await run.send(site.url("/?_method=post", "127.0.0.1"), "POST")) == "sent"
        for name in ("$httpMethod", "%24httpMethod", "X-HTTP-Method", "x.http.method.override", "X-Method-Override"):
            assert (name, code_of(await run.send(site.url(f"/?{name}=DELETE", "127.0.0.1"), "POST"))) == (name, REFUSED)


FORMS = {
    "a form": ("application/x-www-form-urlencoded", b"a=1&_method=DELETE"),
    "a form in other letters": ("Application/X-WWW-Form-UrlEncoded; charset=x", b"a=1;%5Fmethod=delete"),
    "a form in parts": ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="_method"'),
    "a form in parts, without quotes": ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: name=_METHOD"),
    "a form in parts, in single quotes": (
        "multipart/form-data; boundary=x",
        b"--x\r\nContent-Disposition: name='_method'",
    ),
    "a form in parts, escaped": ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: name="_me\\thod"'),
    "a form in parts, with a dot": ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: name=".method"'),
    "a form with a dot, as PHP reads it": ("application/x-www-form-urlencoded", b"a=1&%2emethod=DELETE"),
    "a form with a zero, as PHP reads it": ("application/x-www-form-urlencoded", b"a=1&_method%00a=DELETE"),
    "a form without a type, as Rack reads it": ("", b"a=1&_method=DELETE"),
    "a form in EBCDIC": ("application/x-www-form-urlencoded; charset=IBM037", b"&%6d%94%85%a3%88%96%84=DELETE"),
    "JSON": ("application/json", b'{"_method": "DELETE"}'),
    "a form in parts, in pieces": (
        "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name*0="_me"; name*1="thod"',
    ),
    "a form in parts, in an encoded word": (
        "multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="=?utf-8?Q?=5Fmethod?="',
    ),
    "JSON in UTF-16": ("application/json", '{"_method": "DELETE"}'.encode("utf-16")),
    "JSON in UTF-32": ("application/json; charset=utf-8", '{"_method": "DELETE"}'.encode("utf-32-be")),
    "JSON in UTF-7": ("application/json; charset=utf-7", b'{"+AF8-method": "DELETE"}'),
    "JSON, escaped": ("application/vnd.api+json", b'{"a": 1, "\\u005fmeth\\u006Fd"\n: "DELETE"}'),
}


@each_row("what", FORMS)
async def test_a_form_does_not_ask_for_another_method(what: str) -> None:
    kind, body = FORMS[what]
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        result = await run.send(site.url(host="127.0.0.1"), "POST", [["Content-Type", kind]], body)
        assert code_of(result) == REFUSED
        told = await run.send(site.url(host="127.0.0.1"), "POST", [["Content-Type", "text/plain"]], body)
        assert code_of(told) == "sent"


@pytest.mark.slow
@each_row("what", FORMS)
@each_row("before", [0, 800_000, 5 << 20], ids=["short", "long", "longer"])
async def test_an_uploaded_form_does_not_ask_for_another_method(what: str, before: int) -> None:
    kind, body = FORMS[what]
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        for content_type, is_refused in ((kind, True), ("text/plain", False)):
            sent = run.upload(b"x" * before + b"&" + body)
            result = await run.send(site.url(host="127.0.0.1"), "POST", [["Content-Type", content_type]], **sent)
            assert (code_of(result) == REFUSED) is is_refused
            assert bool(site.requests) is not is_refused


@each_row("what", ["a form", "a form in parts", "JSON"])
@each_row("before", [0, 5 << 20], ids=["short", "long"])
async def test_a_compressed_form_does_not_ask_for_another_method(what: str, before: int) -> None:
    kind, body = FORMS[what]
    headers = [["Content-Type", kind], ["Content-Encoding", "GZIP"]]
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        for form, code in ((b"&" + body, REFUSED), (b"&nothing", "sent")):
            sent = run.upload(gzip.compress(b"x" * before + form, 1))
            assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", headers, **sent)) == code


@pytest.mark.slow
async def test_a_body_that_cannot_be_decompressed_is_no_form_that_is_sent() -> None:
    form, packed = ["Content-Type", "application/x-www-form-urlencoded"], ["Content_Encoding", "gzip"]
    bodies = {
        "damaged": ([packed], b"\x1f\x8b..."),
        "not compressed": ([packed], b"_method=DELETE"),
        "another coding": ([["Content-Encoding", "br"]], b"..."),
        "twice": ([["Content-Encoding", "gzip, gzip"]], gzip.compress(gzip.compress(b"a=1"))),
        "a bomb": ([packed], gzip.compress(b"\0" * (INFLATED_BYTES + 1), 1)),
    }
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        for what, (headers, body) in bodies.items():
            for kind in (form, ["Content-Type", "application/json"]):
                result = await run.send(site.url(host="127.0.0.1"), "POST", [kind, *headers], body)
                assert code_of(result) == REFUSED, what
    assert site.requests == []


async def test_a_form_is_looked_through_without_a_type() -> None:
    form = ["Content-Type", "application/x-www-form-urlencoded"]
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", [], b"_method=DELETE")) == REFUSED
        for headers in ([], [form], [["Content-Encoding", "br"]], [["Content-Type", "application/json; charset=utf8"]]):
            assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", headers, b"a=_method")) == "sent", headers


async def test_the_second_url_of_webdav_is_judged_as_the_first() -> None:
    async with serve({}) as site:
        rules = of(site, paths=["/mine/*"], methods=["*"]), of(site, paths=["/shared/*"], methods=["*"], approval="*")
        async with door(*rules) as run:
            here = site.url("/mine/a", "127.0.0.1")
            for place in (
                "/others/x",
                "../others/x",
                "/mine/%2e%2e/x",
                "/shared/x",
                "http://evil.test/mine/x",
                "http://[",
            ):
                assert code_of(await run.send(here, "MOVE", [["Destination", place]])) == REFUSED, place
            assert site.requests == []
            assert code_of(await run.send(here, "MOVE", [["Destination", site.url("/mine/b", "127.0.0.1")]])) == "sent"


BORDERS = {
    "a form in parts": ("multipart/form-data; boundary=x", b'Content-Disposition: form-data; name="_method"'),
    "a form": ("application/x-www-form-urlencoded", b"&+%5fmethod=DELETE"),
}


@each_row("what", BORDERS)
async def test_a_name_on_the_border_of_two_pieces_of_a_form_is_found(what: str) -> None:
    kind, name = BORDERS[what]
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        for place in range(PIECE_BYTES - len(name), PIECE_BYTES + 1):
            sent = run.upload(b"x" * place + name)
            result = await run.send(site.url(host="127.0.0.1"), "POST", [["Content-Type", kind]], **sent)
            assert code_of(result) == REFUSED, place
    assert site.requests == []


LONG_PARAMETERS = {
    "blanks before its name": (b"a=1&" + b"%20" * PIECE_BYTES + b"_method=DELETE", True),
    "blanks after its name": (b"_method" + b"+" * PIECE_BYTES + b"=DELETE", True),
    "a long value": (b"_method=DELETE" + b"x" * PIECE_BYTES, True),
    "the request's own method": (b"_method=POST&" + b"x" * PIECE_BYTES + b"&_method=post", False),
    "a long name that begins like one": (b"_methods" + b"s" * PIECE_BYTES + b"=DELETE", False),
    "one long value that names it": (b"a=" + b"x" * PIECE_BYTES + b"_method=DELETE" + b"x" * PIECE_BYTES, False),
    "bytes that are not a form": (bytes(PIECE_BYTES) + b"_method=DELETE", False),
}


@each_row("what", LONG_PARAMETERS)
async def test_long_parameters_of_a_form_are_looked_through(what: str) -> None:
    body, is_refused = LONG_PARAMETERS[what]
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        kind = [["Content-Type", "application/x-www-form-urlencoded"]]
        result = await run.send(site.url(host="127.0.0.1"), "POST", kind, **run.upload(body))
        assert (code_of(result) == REFUSED) is is_refused
        assert bool(site.requests) is not is_refused


async def test_a_query_that_asks_for_a_write_is_no_read() -> None:
    async with serve({}) as site, door(of(site, methods=["*"], approval="DELETE")) as run:
        assert code_of(await run.send(site.url("/?_method=DELETE", "127.0.0.1"))) == REFUSED

    assert site.requests == []


async def test_a_header_of_a_rule_is_not_added_to_by_another_spelling() -> None:
    async with serve({}) as site, door(of(site, secrets={"X-Api-Key": "{TOKEN}"}), secrets={"TOKEN": TOKEN}) as run:
        await run.send(site.url(host="127.0.0.1"), headers=[["x_api_key", "mine"], ["X_API-KEY", "mine"]])

    assert f"X-Api-Key: {TOKEN}" in site.requests[0]
    assert "mine" not in site.requests[0]


async def test_what_libraries_say_of_their_connection_is_not_sent() -> None:
    headers = [["Connection", "keep-alive"], ["Transfer-Encoding", "chunked"], ["Expect", "100-continue"]]
    async with serve({}) as site, door(of(site)) as run:
        await run.send(site.url("/#part", "127.0.0.1"), "POST", [*headers, ["Host", f"127.0.0.1:{site.port}"]], b"ab")

    assert site.requests[0].startswith(f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nContent-Length: 2\r\n\r\n")


async def test_a_redirect_is_an_answer_and_where_it_leads_is_judged_anew() -> None:
    async with serve({"/": redirect("http://169.254.169.254/latest/")}) as site, door(of(site)) as run:
        answer = (await run.send(site.url(host="127.0.0.1"))).value
        result = await run.send(dict(answer["headers"])["Location"])

    assert answer["status"] == 302
    assert code_of(result) == REFUSED
    assert len(site.requests) == 1


@each_row(
    "answers", [["127.0.0.1"], ["10.0.0.7"], ["::1"], ["93.184.216.34", "127.0.0.1"], ["::ffff:10.0.0.1"], ["0.0.0.0"]]
)
async def test_a_name_of_a_private_address_is_refused(answers: list[str]) -> None:
    async with door(Allow("rebind.test", ports=[8080]), resolver=Names(rebind_test=[answers])) as run:
        result = await run.send("http://rebind.test:8080/")

    assert code_of(result) == REFUSED
    assert "address" in result.message


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to() -> None:
    async with serve({}) as site:
        names = Names(rebind_test=[["127.0.0.1"], ["10.0.0.7"]])
        rule = Allow("rebind.test", ports=[site.port], private=["127.0.0.1"])
        async with door(rule, resolver=names) as run:
            assert code_of(await run.send(f"http://rebind.test:{site.port}/")) == "sent"

    assert names.asked == ["rebind.test"]


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve({}) as site, serve({}) as proxy, door(of(site)) as run:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(host="127.0.0.1"))
        await run.send(site.url(host="127.0.0.1"))

    assert (len(site.requests), proxy.requests) == (1, [])


async def test_cookies_are_not_kept_by_the_host() -> None:
    async with serve({"/": page("", "text/plain", "200 OK", "Set-Cookie: a=1")}) as site, door(of(site)) as run:
        for _ in range(2):
            await run.send(site.url(host="127.0.0.1"))

    assert all("cookie" not in request.lower() for request in site.requests)


# Secrets

RAW = TOKEN.encode()
ECHOES = {
    "as it is": RAW,
    "in base64": base64.b64encode(RAW),
    "in base64, one byte later": base64.b64encode(b"x" + RAW + b"y"),
    "in base64, two bytes later": base64.b64encode(b"xy" + RAW),
    "in base64 for URLs": base64.urlsafe_b64encode(b"u:" + RAW),
    "percent-encoded": quote(TOKEN, safe="").encode(),
    "percent-encoded, in small letters": TOKEN.replace("/", "%2f").replace("+", "%2b").encode(),
    "percent-encoded throughout": "".join(f"%{byte:02x}" for byte in RAW).encode(),
    "in hexadecimal": RAW.hex().encode(),
    "in JSON": json.dumps({"a": TOKEN}).replace("/", "\\/").encode(),
    "in JSON, safe in HTML": json.dumps(TOKEN).replace("+", "\\u002B").encode(),
    "in JSON, escaped throughout": json.dumps(TOKEN).replace("+", "\\u002b").replace("/", "\\u002f").encode(),
    "in HTML": TOKEN.replace("+", "&#43;").encode(),
    "in HTML, escaped throughout": TOKEN.replace("+", "&#x2B;").replace("/", "&#x2F;").encode(),
    "in HTML, slashes": TOKEN.replace("/", "&#x2F;").encode(),
    "percent-encoded twice": quote(quote(TOKEN, safe="")).encode(),
    "in UTF-16": TOKEN.encode("utf-16-le"),
}
CODINGS = {
    "": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "DEFLATE": lambda data: zlib.compress(data)[2:-4],
    "x-gzip": gzip.compress,
}


@each_row("coding", CODINGS)
@each_row("how", ECHOES)
async def test_a_secret_that_is_echoed_is_taken_out_of_the_body(how: str, coding: str) -> None:
    async with serve({}) as site:
        more = [f"Content-Encoding: {coding}"] if coding else []
        site.pages["/"] = page(CODINGS[coding](b"<" + ECHOES[how] + b">"), "text/plain", "200 OK", *more)
        rule = of(site, secrets={"Authorization": "Bearer {TOKEN}"})
        async with door(rule, secrets={"TOKEN": TOKEN}) as run:
            answer = (await run.send(site.url(host="127.0.0.1"))).value

    assert f"Authorization: Bearer {TOKEN}" in site.requests[0]
    assert b"{TOKEN}" in answer["body"]
    assert ECHOES[how] not in answer["body"]
    headers = {name.lower(): value for name, value in answer["headers"]}
    assert headers["content-length"] == str(len(answer["body"]))
    assert "content-encoding" not in headers


async def test_parts_of_an_answer_are_not_asked_for_where_secrets_are_in_play() -> None:
    names = "Range", "if-range", "Request-Range", "x_ms_range"
    asked = [["X-Request-ID", "1"], *([name, "bytes=0-3"] for name in names)]
    async with serve({}) as site:
        async with door(of(site, secrets={"Authorization": "{TOKEN}"}), secrets={"TOKEN": TOKEN}) as run:
            assert code_of(await run.send(site.url(host="127.0.0.1"), "GET", asked)) == "sent"
        async with door(of(site)) as run:
            assert code_of(await run.send(site.url(host="127.0.0.1"), "GET", asked)) == "sent"

    with_secrets, without = (request.lower() for request in site.requests)
    assert "range" not in with_secrets and "x-request-id: 1" in with_secrets
    assert "range: bytes=0-3" in without and "if-range" in without


async def test_a_secret_in_pieces_is_taken_out() -> None:
    async def drip(stream: ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in b"<" + RAW + b">" + RAW[:5]:
            await stream.send(b"1\r\n" + bytes([byte]) + b"\r\n")
        await stream.send(b"0\r\n\r\n")

    async with serve({"/": drip}) as site, door(of(site, secrets=["TOKEN"]), secrets={"TOKEN": TOKEN}) as run:
        answer = (await run.send(site.url(host="127.0.0.1"))).value
        body = answer["body"]
        while (more := (await run.call("http_read", {"rest": answer["rest"], "size": 9})).files) and more[0].data:
            body += more[0].data

    assert body == b"<{TOKEN}>" + RAW[:5]


@each_row("guess", [RAW[:9], RAW[:1], RAW.hex().encode()[:12], quote(TOKEN).encode()[:-2]])
async def test_what_waits_for_the_rest_of_a_secret_does_not_tell_it(guess: bytes) -> None:
    async def parts(said: bytes) -> list[int]:
        async def drip(stream: ByteStream) -> None:
            await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (b"a line\n", b"\n" + said, b"z" * 400, b""):
                await stream.send(b"%x\r\n%b\r\n" % (len(piece), piece))

        async with serve({"/": drip}) as site, door(of(site), secrets={"TOKEN": TOKEN}) as run:
            answer = (await run.send(site.url(host="127.0.0.1"))).value
            found = [answer["body"]]
            while (more := (await run.call("http_read", {"rest": answer["rest"], "size": 999})).files) and more[0].data:
                found.append(more[0].data)
        assert b"".join(found) == b"a line\n\n" + said + b"z" * 400
        assert found[0] == b"a line\n"
        return [*map(len, found)]

    assert await parts(guess) == await parts(b"?" * len(guess))


async def test_a_secret_in_headers_and_reason_is_taken_out() -> None:
    async with serve({}) as site:
        location = f"Location: https://evil.test/?t={quote(TOKEN, safe='')}"
        site.pages["/"] = page("", "text/plain", f"302 {TOKEN}", location, f"X-Sent: Bearer {TOKEN}", "key-1234: x")
        async with door(of(site, secrets=["TOKEN"]), secrets={"TOKEN": TOKEN, "KEY": "key-1234"}) as run:
            answer = (await run.send(site.url(host="127.0.0.1"), headers=[["X-API-Key", "{TOKEN}"]])).value

    assert f"X-API-Key: {TOKEN}" in site.requests[0]
    assert answer["reason"] == "{TOKEN}"
    headers = dict(answer["headers"])
    assert headers["{KEY}"] == "x"
    assert (headers["X-Sent"], headers["Location"]) == ("Bearer {TOKEN}", "https://evil.test/?t={TOKEN}")


async def test_a_secret_in_a_broken_answer_is_not_in_the_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    broken = [f"{TOKEN} 200 OK\r\n\r\n", f"HTTP/1.1 200 OK\r\n{TOKEN}\r\n\r\n", f"HTTP/1.1 {TOKEN}\r\n\r\n"]
    pages = {f"/{number}": text.encode() for number, text in enumerate(broken)}
    async with serve(pages) as site, door(of(site, secrets={"X-Key": "{TOKEN}"}), secrets={"TOKEN": TOKEN}) as run:
        results = [await run.send(site.url(f"/{number}", "127.0.0.1")) for number in range(3)]

    assert [code_of(each) for each in results] == ["EgressProtocolError"] * 3
    assert TOKEN not in repr(results)
    assert TOKEN not in caplog.text


async def test_no_answer_is_compressed_with_a_secret_in_it() -> None:
    async with serve({}) as site:
        for secrets, expected in (({"TOKEN": TOKEN}, "identity"), (None, "gzip, br")):
            async with door(of(site), secrets=secrets) as run:
                await run.send(site.url(host="127.0.0.1"), headers=[["accept-encoding", "gzip, br"]])
            assert f"accept-encoding: {expected}\r\n" in site.requests[-1]


async def test_how_well_an_answer_is_compressed_does_not_show() -> None:
    async def shown(content: bytes) -> list[object]:
        packed = gzip.compress(content)

        async def slow(stream: ByteStream) -> None:
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n")
            for place in range(0, len(packed), 50):
                await stream.send(b"%x\r\n%b\r\n" % (len(packed[place : place + 50]), packed[place : place + 50]))
                await anyio.wait_all_tasks_blocked()
            await stream.send(b"0\r\n\r\n")

        head = page(b"", "text/plain", "200 OK", "Content-Encoding: gzip").replace(b"th: 0", b"th: %d" % len(packed))
        async with (
            serve({"/": slow, "/head": head}) as site,
            door(of(site, methods="*"), secrets={"TOKEN": TOKEN}) as run,
        ):
            answer = (await run.send(site.url(host="127.0.0.1"))).value
            headers = (await run.send(site.url("/head", "127.0.0.1"), "HEAD")).value["headers"]
        return [len(answer["body"]), answer["rest"], headers]

    alike, other = RAW * 20, bytes(random.Random(0).sample(range(256), 180)) * 2
    assert await shown(alike) == [
        len("{TOKEN}") * 20,
        None,
        [["Content-Type", "text/plain"], ["Content-Encoding", "gzip"]],
    ]
    assert (await shown(other))[:2] == [360, None]


async def test_a_body_that_cannot_be_looked_through_is_refused() -> None:
    async with serve({}) as site, door(of(site, secrets=["TOKEN"]), secrets={"TOKEN": TOKEN}) as run:
        for coding in ("br", "zstd", "gzip, gzip"):
            site.pages["/"] = page(b"\x1b...", "text/plain", "200 OK", f"Content-Encoding: {coding}")
            result = await run.send(site.url(host="127.0.0.1"))
            assert code_of(result) == "EgressProtocolError", coding


async def test_a_placeholder_means_nothing_at_another_host() -> None:
    async with serve({}) as own, serve({}) as other:
        rules = of(own, secrets=["TOKEN"]), of(other)
        basic = base64.b64encode(b"me:{TOKEN}").decode()
        async with door(*rules, secrets={"TOKEN": TOKEN}) as run:
            for value in ("{TOKEN}", "Bearer {TOKEN}", f"Basic {basic}"):
                for name in ("Authorization", "X-API-Key", "Cookie"):
                    if name == "Authorization" or "Basic" not in value:
                        result = await run.send(other.url(host="127.0.0.1"), headers=[[name, value]])
                        assert code_of(result) == REFUSED, (name, value)
            await run.send(own.url(host="127.0.0.1"), headers=[["Authorization", f"Basic {basic}"]])
            await run.send(own.url("/{TOKEN}?{TOKEN}", "127.0.0.1"), "POST", body=b"{TOKEN}")

    assert other.requests == []
    assert base64.b64encode(f"me:{TOKEN}".encode()).decode() in own.requests[0]
    assert TOKEN not in own.requests[1]


async def test_a_body_has_the_secrets_that_its_rule_lists() -> None:
    wanted = f"key={TOKEN}&{{OTHER}}"
    async with serve({}) as site, door(of(site, secrets={"body": "{TOKEN}"}), secrets={"TOKEN": TOKEN}) as run:

        async def echo(stream: ByteStream) -> None:
            head, _, body = site.requests[0].partition("\r\n\r\n")
            while len(body) < len(wanted):
                body += (await stream.receive()).decode()
            assert f"Content-Length: {len(wanted)}" in head
            await stream.send(page(body))

        site.pages["/"] = echo
        body = b"key={TOKEN}&{OTHER}"
        length = [["Content-Length", str(len(body))]]
        answer = (await run.send(site.url(host="127.0.0.1"), "POST", length, body)).value

    assert answer["body"] == b"key={TOKEN}&{OTHER}"
    assert dict(answer["headers"])["Content-Length"] == str(len(answer["body"]))


async def test_neither_sizes_nor_limits_tell_how_long_a_secret_is() -> None:
    async def codes(secret: str) -> list[str]:
        async with serve({"/": page("")}) as site:
            rule, limits = of(site, secrets={"body": "{TOKEN}"}, max_bytes=20), Limits(egress_bytes=32)
            async with door(rule, secrets={"TOKEN": secret}, limits=limits) as run:
                url = site.url(host="127.0.0.1")
                made = [await run.send(url, "POST", [], b"{TOKEN}" + b"x" * more) for more in (13, 14, 5, 6)]
            return [each.message if each.error is not None else "sent" for each in made]

    short, long = [await codes(secret) for secret in ("abcd", "abcd" * 100)]
    assert [each.replace("PORT", "") for each in short] != ["sent"] * 4
    assert [each.partition("127.0.0.1")[0] for each in short] == [each.partition("127.0.0.1")[0] for each in long]


@each_row("coding", ["", "gzip"])
async def test_an_answer_that_echoes_a_secret_does_not_tell_how_long_it_is(coding: str) -> None:
    async def received(secret: str) -> list[object]:
        content = b"[" + secret.encode() + b"]" + b"x\n" * 131_060
        if coding:
            content = zlib.compress(content, 0)
        answer = page(content, "text/plain", "200 OK", *(["Content-Encoding: deflate"] if coding else []))
        async with serve({"/": answer}) as site:
            limits, rule = Limits(egress_bytes=270_000), of(site, secrets=["TOKEN"])
            async with door(rule, secrets={"TOKEN": secret}, limits=limits) as run:
                found = (await run.send(site.url(host="127.0.0.1"))).value
                sent = [await run.send(site.url(host="127.0.0.1"), "POST", [], b"x" * size) for size in (7871, 1)]
                return [len(found["body"]), found["rest"], [*dict(found["headers"])], [*map(code_of, sent)]]

    short = await received("abcdef")
    assert short == [262_129, None, ["Content-Type", "Content-Length"], ["EgressLimit", "EgressLimit"]]
    assert await received("abcdef" * 10) == short


async def test_a_few_placeholders_do_not_become_a_huge_request() -> None:
    async with serve({}) as site, door(of(site, secrets={"body": "{T}", "X": "{T}"}), secrets={"T": "x" * 4000}) as run:
        url = site.url(host="127.0.0.1")
        assert code_of(await run.send(url, "POST", [], b"{T}" * 33)) == REFUSED
        assert code_of(await run.send(url, "POST", [["Y", "{T}" * 33]])) == REFUSED
        assert site.requests == []
        assert code_of(await run.send(url, "POST", [], b"{T}" * 2)) == "sent"


async def test_a_secret_is_not_sent_in_clear() -> None:
    async with serve({}) as site:
        rule = Allow("127.0.0.1", ports=[site.port], secrets=["TOKEN"])
        async with door(rule, secrets={"TOKEN": TOKEN}) as run:
            result = await run.send(site.url(host="127.0.0.1"), headers=[["X-API-Key", "{TOKEN}"]])

    assert code_of(result) == REFUSED
    assert site.requests == []


# A guest that speaks by itself

ARGUMENTS = {
    "nothing": {},
    "a method that is no text": {"method": 1, "url": "https://a.test/"},
    "a URL that is no text": {"method": "GET", "url": ["https://a.test/"]},
    "headers in another form": {"method": "GET", "url": "https://a.test/", "headers": {"Host": "x"}},
    "a header of three parts": {"method": "GET", "url": "https://a.test/", "headers": [["a", "b", "c"]]},
    "a header that is no text": {"method": "GET", "url": "https://a.test/", "headers": [["a", 1]]},
    "a body that is text": {"method": "GET", "url": "https://a.test/", "body": "x"},
    "time without end": {"method": "GET", "url": "https://a.test/", "timeout_s": float("inf")},
    "no time": {"method": "GET", "url": "https://a.test/", "timeout_s": -1},
    "an upload of somebody else": {"method": "GET", "url": "https://a.test/", "upload": "upload-1"},
    "too many headers": {"method": "GET", "url": "https://a.test/", "headers": [["a", "b"]] * 300},
    "more than is read": {"method": "GET", "url": "https://a.test/", "note": "approved by everybody"},
    "a body and an upload": {"method": "GET", "url": "https://a.test/", "body": b"x", "upload": "upload-1"},
}


@each_row("what", ARGUMENTS)
async def test_calls_of_another_form_are_refused(what: str) -> None:
    async with door(Allow("a.test"), resolver=Names()) as run:
        assert code_of(await run.call("http", ARGUMENTS[what])) == "invalid_arguments"


async def test_the_rest_of_an_answer_is_read_by_its_own_run_alone() -> None:
    async with serve({"/": page("x" * 600_000)}) as site, door(of(site)) as run, door(of(site)) as other:
        answer = (await run.send(site.url(host="127.0.0.1"))).value
        stolen = await other.call("http_read", {"rest": answer["rest"], "size": 10})
        dropped = await run.call("http_read", {"rest": answer["rest"], "size": 0})
        again = await run.call("http_read", {"rest": answer["rest"], "size": 10})

    assert code_of(stolen) == code_of(again) == "EgressProtocolError"
    assert code_of(dropped) == "sent"


async def test_only_the_code_of_a_script_sends_requests() -> None:
    async with serve({}) as site, door(of(site)) as run:
        for origin in (Origin.MODEL, Origin.PLAN):
            result = await run.call("http", {"method": "GET", "url": site.url(host="127.0.0.1")}, origin)
            assert code_of(result) == "not_permitted"

    assert site.requests == []


@each_row("secrets", [None, {"TOKEN": TOKEN}])
async def test_a_bomb_ends_at_the_limit(secrets: dict[str, str] | None) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    pages, limits = {"/": page(bomb, "text/plain", "200 OK", "Content-Encoding: gzip")}, Limits(egress_bytes=1_000_000)
    async with serve(pages) as site, door(of(site), limits=limits, secrets=secrets) as run:
        result = answer = await run.send(site.url(host="127.0.0.1"))
        while result.error is None and answer.value["rest"]:
            result = await run.call("http_read", {"rest": answer.value["rest"], "size": 262_144})
            if not result.files or not result.files[0].data:
                break

    assert code_of(result) == ("EgressLimit" if secrets else "sent")  # without secrets it is passed on as it came


EMPTY_GZIP = gzip.compress(b"")
NOTHING = {
    "members without content": (b"", EMPTY_GZIP * 500),
    "blocks without content": (EMPTY_GZIP[:10], b"\0\0\0\xff\xff" * 2000),
    "a name without end": (b"\x1f\x8b\x08\x08\0\0\0\0\0\xff", b"n" * 10_000),
}


@each_row("what", NOTHING)
async def test_data_without_end_that_becomes_nothing_ends_at_the_limit(what: str) -> None:
    first, more = NOTHING[what]

    async def forever(stream: ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + first)
        while True:
            await stream.send(more)

    limits, secrets = Limits(egress_bytes=1_000_000), {"TOKEN": TOKEN}
    async with serve({"/": forever}) as site, door(of(site), limits=limits, secrets=secrets) as run:
        with anyio.fail_after(60):
            assert code_of(await run.send(site.url(host="127.0.0.1"))) == "EgressLimit"


async def test_calls_that_read_one_answer_at_once_wait_for_each_other() -> None:
    goes_on = anyio.Event()

    async def slow(stream: ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await goes_on.wait()
        for each in (b"b", b"c", b"d"):
            await stream.send(b"1\r\n%b\r\n" % each)
        await stream.send(b"0\r\n\r\n")

    found: list[bytes] = []
    async with serve({"/": slow}) as site, door(of(site)) as run:
        answer = (await run.send(site.url(host="127.0.0.1"))).value

        async def read() -> None:
            result = await run.call("http_read", {"rest": answer["rest"], "size": 1})
            assert code_of(result) == "sent"
            found.extend(each.data or b"" for each in result.files)

        async with anyio.create_task_group() as readers:
            for _ in range(3):
                readers.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()

    assert sorted(found) == [b"b", b"c", b"d"]


async def test_what_a_server_sends_too_much_is_no_answer_to_another_run() -> None:
    async def talkative(stream: ByteStream) -> None:
        await stream.send(page("its own") + page("more"))
        await stream.receive()

    async with serve({"/": talkative, "/b": page("b")}) as site, door(of(site)) as run:
        other = Door(run.registry)
        async with other.requests.until_end():
            await run.send(site.url(host="127.0.0.1"))
            answer = await other.send(site.url("/b", "127.0.0.1"))

    assert answer.value["body"] == b"b"


async def test_a_body_where_none_belongs_is_not_the_beginning_of_the_next_request() -> None:
    async with serve({}) as site, door(of(site, methods=["*"])) as run:
        for method in ("GET", "HEAD", "OPTIONS", "DELETE", "POST"):
            await run.send(site.url(host="127.0.0.1"), method, [], b"GET /admin HTTP/1.1\r\n\r\n")
        await run.send(site.url(host="127.0.0.1"))

    assert ["\r\nConnection: close\r\n" in each for each in site.requests] == [True] * 4 + [False] * 2


async def test_looking_up_a_host_takes_no_longer_than_the_request_may() -> None:
    class Silent:
        async def resolve(self, host: str, port: int) -> list[str]:
            await anyio.sleep_forever()
            raise AssertionError

    async with door(Allow("a.test"), resolver=Silent()) as run:
        with anyio.fail_after(60):
            assert code_of(await run.send("https://a.test/", timeout_s=0.01)) == "EgressTimeout"


async def test_a_turn_that_is_not_waited_for_is_given_back() -> None:
    async with serve({}) as site, door(of(site, rate=0.01)) as run:
        url = site.url(host="127.0.0.1")
        assert code_of(await run.send(url)) == "sent"
        for _ in range(5):
            with anyio.move_on_after(0.01):
                await run.send(url, timeout_s=86_000)
        refused = await run.send(url, timeout_s=1)

    assert "the next turn is 9" in refused.message or "the next turn is 100.0" in refused.message


async def test_an_upload_that_the_host_has_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    async with door(Allow("a.test")) as run:
        with pytest.raises(ToolError, match="cannot keep an upload: No such file"):
            run.upload(b"x" * 600_000)


async def test_bodies_that_are_sent_count_for_the_bytes_of_a_run() -> None:
    async with serve({"/": page("x" * 600)}) as site, door(of(site), limits=Limits(egress_bytes=1000)) as run:
        assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", body=b"x" * 300)) == "sent"
        assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", body=b"x" * 300)) == "EgressLimit"

    assert len(site.requests) == 1


def test_a_star_asks_for_approval_of_every_method() -> None:
    for approval, asked in (("*", ["GET", "POST", "PURGE"]), ("POST", ["POST"]), ((), [])):
        rule = Allow("a.test", methods="*", approval=approval)
        assert [method for method in ("GET", "POST", "PURGE") if rule.needs_approval(method)] == asked


async def test_sizes_and_rates_of_a_rule_are_kept() -> None:
    async with serve({"/": page("x" * 200)}) as site:
        async with door(of(site, max_bytes=100)) as run:
            assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", body=b"x" * 101)) == "EgressLimit"
            assert site.requests == []
            assert code_of(await run.send(site.url(host="127.0.0.1"))) == "EgressLimit"
            site.pages["/"] = page("x" * 100)
            assert code_of(await run.send(site.url(host="127.0.0.1"), "POST", body=b"x" * 100)) == "sent"
        async with door(of(site, rate=0.001)) as run:
            assert code_of(await run.send(site.url(host="127.0.0.1"), timeout_s=5)) == "sent"
            assert code_of(await run.send(site.url(host="127.0.0.1"), timeout_s=5)) == "EgressLimit"


@each_row(
    "host", ["*", "*.com", "", "a b", "https://a.test/x", "a.test:80", "ftp://a.test", "a@b.test", "*.*.test", "127.1"]
)
def test_a_rule_about_too_much_or_nothing_is_an_error_of_the_program(host: str) -> None:
    with pytest.raises(UsageError):
        Allow(host)


@each_row("secret", [TOKEN, "/" * 20, "'" * 43, "<&" * 50])
def test_no_form_of_a_secret_is_longer_than_what_waits_for_it(secret: str) -> None:
    waits = Echoes({"TOKEN": secret}).held_back(b"?" * 5000)
    assert max(map(len, forms_of(secret))) <= waits


def test_a_rule_names_secrets_that_there_are() -> None:
    with pytest.raises(UsageError, match="TOKEN"):
        Egress(Allow("a.test", secrets={"X-Key": "{TOKEN}"}))
    with pytest.raises(UsageError, match="line of ASCII"):
        Egress(secrets={"TOKEN": "two\nlines"})
    assert TOKEN not in repr(Egress(Allow("a.test", secrets=["TOKEN"]), secrets={"TOKEN": TOKEN}))
