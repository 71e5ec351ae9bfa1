"""What `http_fetch` sends and answers, and what it does with servers that mean no good."""

from __future__ import annotations

import datetime
import gzip
import json
import logging
import ssl
import sys
import tracemalloc
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.streams.tls
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

import toolcell
from builtin.webkit import LOOPBACK, Names, Page, Site, call, local, page, redirect, serve, stream_of
from rows import each_row
from toolcell import Allow, Egress, UsageError
from toolcell.builtin import Http, WebPolicy
from toolcell.builtin.encodings import text_of
from toolcell.builtin.web.fetch import Fetcher, HostPace, Outgoing, Response, parse_robots, read_body
from toolcell.builtin.web.pages import article_of, kind_of, read_page, strip_tags
from toolcell.egress import connector
from toolcell.errors import ToolError
from toolcell.tools import ToolRegistry, ToolResult
from tools.toolkit import PATIENCE_S

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

HOSTS = Names(site_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
ARTICLE = (
    "<html><head><title>A &amp; B</title><style>x{}</style></head><body><nav><a href=/>Home</a></nav><article><h1>Head</h1>"
    + "".join(
        f"<p>Sentence number {n} of the article is long enough to be taken for its text, with caf&eacute;.</p>"
        for n in range(8)
    )
    + "</article><script>evil()</script><footer>Imprint</footer></body></html>"
)
SECRET = "s3cret-token-0123456789"
RULES = Egress(
    Allow("example.com", methods=["GET", "POST"], paths=["/api/1", "/api/2"]),
    Allow("*.example.org"),
)


async def fetched(
    pages: Mapping[str, Page], path: str = "/", raw: bool = False, **policy: Any
) -> tuple[ToolResult, Site]:
    async with serve(pages) as site:
        tool = Http(local(**policy), resolver=HOSTS)
        result = await call(tool, "http_fetch", url=site.url(path), raw=raw)
        return result, site


# What it answers


@pytest.mark.conforms("S6", "S-b2")
async def test_the_article_of_a_page_is_its_text() -> None:
    pytest.importorskip("trafilatura")
    result, site = await fetched({"/": page(ARTICLE)})
    assert "Sentence number 3 of the article" in result.text and "café" in result.text
    for gone in ("evil()", "<p>", "x{}", "Home", "Imprint"):
        assert gone not in result.text
    assert result.value == {
        "status": 200,
        "url": site.url(),
        "title": "A & B",
        "body": result.text,
        "content_type": "text/html; charset=utf-8",
        "truncated": False,
    }
    assert site.requests[0].startswith("GET / HTTP/1.1\r\n")
    assert f"User-Agent: Mozilla/5.0 (compatible; toolcell/{toolcell.__version__})\r\n" in site.requests[0]


@pytest.mark.conforms("S6")
async def test_a_page_without_an_article_loses_its_tags_also_without_trafilatura(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    body = "<p>One &lt; two</p><script>no()</script><ul><li>a<li>b</ul>x<br>y<!-- hidden --><STYLE>no</STYLE> 1 < 2"
    result, _ = await fetched({"/": page(body)})
    assert result.text == "One < two\na\nb\nx\ny 1 < 2"


@pytest.mark.conforms("S6")
@each_row("status", ["404 Not Found", "500 Oops", "429 Slow"])
async def test_a_status_of_400_or_more_is_an_error(status: str) -> None:
    result, site = await fetched({"/": page("sorry", status=status)})
    assert result.message == f"HTTP {status[:3]} from {site.url()}"
    assert result.error is not None and result.error.details["status"] == int(status[:3])
    assert result.error.retryable is not status.startswith("404")


@pytest.mark.conforms("S6")
async def test_the_model_reads_8000_characters_and_code_gets_all() -> None:
    result, _ = await fetched({"/": page("x" * 9000, "text/plain")})
    assert result.text == "x" * 8000 + "\n... (truncated)"
    assert result.value["body"] == "x" * 9000


@pytest.mark.conforms("S-b5")
async def test_json_is_left_as_it_is_and_binary_data_only_comes_when_asked_for() -> None:
    document = json.dumps({"html": "<p>x</p>"})
    result, _ = await fetched({"/": page(document, "application/ld+json")})
    assert (result.text, result.value["body"]) == (document, document)
    picture = page(b"\x89PNG\0", "image/png")
    refused, _ = await fetched({"/": picture})
    assert "is not text (image/png, 5 bytes)" in refused.message
    raw, _ = await fetched({"/": picture}, raw=True)
    assert (raw.text, raw.value["body"]) == ("(image/png, 5 bytes)", b"\x89PNG\0")
    markup, _ = await fetched({"/": page(ARTICLE)}, raw=True)
    assert markup.value["body"] == ARTICLE


@pytest.mark.conforms("S-b5")
@each_row(
    ("content", "content_type", "text"),
    [
        ("é".encode("latin-1"), "text/plain; charset=ISO-8859-1", "é"),
        (b"\x93x\x94", "text/plain; charset=latin1", "“x”"),
        ("é".encode(), "text/plain", "é"),
        (b"caf\xe9!!!!!", "text/plain", "café!!!!!"),
        ("日本".encode("shift_jis"), 'text/plain; charset="Shift_JIS"', "日本"),
        ("Ж".encode("cp1251"), "text/plain; charset=windows-1251", "Ж"),
        (b"\xff\xfe" + "ü".encode("utf-16-le"), "text/plain; charset=utf-8", "ü"),
        (b"x\xc3", "text/plain", "x�"),
        (b"abc", "text/plain; charset=punycode", "abc"),
        (b"abc", "text/plain; charset=zlib_codec", "abc"),
        (b"abc", "text/plain; charset=no-such", "abc"),
    ],
)
async def test_characters_are_read_by_header_mark_or_guess(content: bytes, content_type: str, text: str) -> None:
    assert text_of(content, content_type) == text


def test_a_page_names_its_own_charset_and_other_text_does_not() -> None:
    body = b'<meta http-equiv=x content="text/html; charset=koi8-r"><p>\xf7</p>'
    assert "В" in text_of(body, "text/html", is_page=True)
    assert "В" not in text_of(body, "text/plain")
    assert text_of(b"<meta charset=utf-16><p>x", "text/html", is_page=True).endswith("x")
    kinds = {
        "text/html;x": "html",
        "application/json": "json",
        "text/csv": "text",
        "": "html",
        "font/woff": "binary",
        "image/svg+xml": "text",
    }
    assert {name: kind_of(name, b" <!DOCTYPE html>") for name in kinds} == kinds
    assert kind_of("", b"\0\1") == "binary" and kind_of("", b"[1]") == "json"


@given(st.text(st.sampled_from("<>/!-ab script&;\n"), max_size=60))
def test_any_markup_becomes_text(text: str) -> None:
    assert "<script" not in strip_tags(f"{text}<script >x</script >")
    assert isinstance(article_of(text[:30]), str)


def test_hostile_markup_takes_linear_time() -> None:
    """Each of these takes minutes when it is searched again from every position."""
    for piece in ("<!--", "<script>", "<a ", "<", "&", "<div>", "</", "<title>"):
        text = piece * (200_000 // len(piece))
        assert len(strip_tags(text)) <= len(text)
        read_page(Response(200, "", "text/html", text.encode(), False), raw=True)


# Bounds


async def endless(stream: anyio.abc.ByteStream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        await stream.send(b"x" * 65536)


@pytest.mark.conforms("S6")
async def test_an_endless_body_is_read_up_to_the_bound() -> None:
    result, _ = await fetched({"/": endless}, max_body_bytes=100_000)
    assert (len(result.value["body"]), result.value["truncated"]) == (100_000, True)


@each_row(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(b"x" * 30_000_000)),
        ("deflate", zlib.compress(b"x" * 30_000_000)),
        ("gzip", gzip.compress(b"") * 60_000),
    ],
    ids=["gzip", "deflate", "empty members"],
)
def test_a_bomb_is_decompressed_up_to_the_bound(encoding: str, body: bytes) -> None:
    pieces = stream_of(body[at : at + 65536] for at in range(0, len(body), 65536))
    tracemalloc.start()
    try:
        content, is_cut = anyio.run(read_body, pieces, encoding, 50_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(content) <= 50_000 and is_cut


@given(st.binary(max_size=300), st.integers(1, 40), st.sampled_from(["gzip", "deflate", "raw", "two", ""]))
def test_a_body_is_decompressed_alike_however_it_is_cut(content: bytes, step: int, how: str) -> None:
    raw = zlib.compressobj(wbits=-15)
    sent = {
        "gzip": gzip.compress(content),
        "deflate": zlib.compress(content),
        "raw": raw.compress(content) + raw.flush(),
        "two": gzip.compress(content[:9]) + gzip.compress(content[9:]),
        "": content,
    }[how]
    pieces = stream_of(sent[at : at + step] for at in range(0, len(sent), step))
    encoding = {"raw": "deflate", "two": "gzip"}.get(how, how)
    assert anyio.run(read_body, pieces, encoding, 1000) == (content, False)


@each_row(
    ("answer", "message"),
    [
        (page(b"x", "text/plain", "200 OK", "Content-Encoding: br"), "content-encoding 'br'"),
        (page(b"x", "text/plain", "200 OK", "Content-Encoding: gzip, gzip"), "content-encoding"),
        (page(b"no gzip", "text/plain", "200 OK", "Content-Encoding: gzip"), "cannot be decompressed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "did not answer with HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000, "did not answer with HTTP"),
        (b"", "did not answer with HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", "did not answer with HTTP"),
        (redirect("http://[::1"), "not an IPv6 address"),
        (redirect(""), "url is required"),
    ],
)
async def test_answers_that_make_no_sense_are_errors(answer: bytes, message: str) -> None:
    result, _ = await fetched({"/": answer})
    assert message in result.message


async def test_a_server_that_never_answers_is_left_after_the_timeout() -> None:
    left = anyio.Event()

    async def silent(stream: anyio.abc.ByteStream) -> None:
        try:
            await stream.receive()
        except anyio.EndOfStream:
            left.set()

    async with serve({"/": silent}) as site:
        result = await call(Http(local(timeout_s=0.2), resolver=HOSTS), "http_fetch", url=site.url())
        assert (result.message, result.error and result.error.code) == (
            f"no answer from {site.url()} in 0.2 s",
            "timeout",
        )
        with anyio.fail_after(PATIENCE_S):
            await left.wait()  # the connection is closed: nothing outlives the call


async def test_a_host_that_cannot_be_reached_is_an_error() -> None:
    async with serve({}) as site:
        closed = site.port
    tool = Http(local(), resolver=HOSTS)
    gone = await call(tool, "http_fetch", url=f"http://site.test:{closed}/")
    assert "cannot be reached" in gone.message and gone.error is not None and gone.error.retryable
    assert "was not found" in (await call(tool, "http_fetch", url="http://nowhere.test/")).message


# Rules


@each_row(
    ("rules", "method", "url", "allowed"),
    [
        ({"egress": RULES}, "GET", "https://example.com/api/1", True),
        ({"egress": RULES}, "POST", "https://example.com/api/1", True),
        ({"egress": RULES}, "POST", "https://www.example.org/", False),
        ({"egress": RULES}, "GET", "https://EXAMPLE.com.:443/api/1", True),
        ({"egress": RULES}, "GET", "https://evil-example.com/api/1", False),
        ({"egress": RULES}, "GET", "https://www.example.com/api/1", False),
        ({"egress": RULES}, "GET", "https://www.example.org/", True),
        ({"egress": RULES}, "GET", "https://example.org.evil.test/", False),
        ({"egress": RULES}, "GET", "https://example.com/api/..%2fadmin", False),
        ({"egress": RULES}, "GET", "http://example.com/api/1", False),
        ({"egress": RULES, "deny": ["example.com/api/2"]}, "GET", "https://example.com/api/2", False),
        ({"deny": ["example.com/api/2"]}, "GET", "https://example.com/x/..;/api/2", False),
        ({"deny": ["example.com/api/2"]}, "GET", "https://example.com/x/%252e%252e/api/2", False),
        ({"deny": ["example.com/api/2"]}, "GET", "https://example.com/x/..;/api/3", True),
        ({"egress": RULES, "ports": [1]}, "GET", "https://example.com/api/1", True),
        ({"deny": ["example.com/admin*"]}, "GET", "https://example.com/%61dmin", False),
        ({"deny": ["example.com/admin*"]}, "GET", "https://example.com//admin", False),
        ({"deny": ["example.com/admin*"]}, "GET", "https://example.com/x%2f..%2fadmin", False),
        ({"deny": ["example.com/admin*"]}, "GET", "https://example.com/public", True),
        ({"deny": ["POST,DELETE *"]}, "DELETE", "https://example.com/", False),
        ({"deny": ["*.bank"]}, "GET", "https://my.bank/", False),
        ({"ports": None}, "GET", "https://example.com:1234/", True),
        ({"ports": [443]}, "GET", "http://example.com/", False),
    ],
)
async def test_rules_are_about_host_method_path_and_port(
    rules: dict[str, Any], method: str, url: str, allowed: bool
) -> None:
    policy = WebPolicy(robots=False, interval_s=0, **rules)
    fetcher = Fetcher(policy, transport=httpx.MockTransport(lambda request: httpx.Response(200)))
    if allowed:
        assert (await fetcher.fetch(url, Outgoing(method))).status == 200
    else:
        with pytest.raises(ToolError) as refused:
            await fetcher.fetch(url, Outgoing(method))
        assert refused.value.code == "not_permitted"


@each_row(
    "wrong",
    [
        {"deny": "example.com"},
        {"deny": ["http://x/"]},
        {"deny": ["FETCH x.com"]},
        {"private": "10.0.0.0/8"},
        {"max_redirects": -1},
        {"interval_s": -1},
        {"max_body_bytes": 0},
        {"deny": [""]},
    ],
    ids=str,
)
def test_a_wrong_policy_is_refused_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        WebPolicy(**wrong)


async def test_other_methods_are_offered_only_when_the_program_allows_them() -> None:
    only_get = ToolRegistry([Http(local(), resolver=HOSTS)])
    assert set(only_get.definitions()[0].parameters["properties"]) == {"url", "raw"}
    async with serve({"/": page("done", "text/plain"), "/to": redirect("/", "303 See Other")}) as site:
        tool = Http(local(), methods=("GET", "POST"), resolver=HOSTS)
        posted = await call(tool, "http_fetch", url=site.url("/to"), method="post", body='{"a": 1}', json=True)
        assert posted.text == "done"
        assert [request.split(" HTTP")[0] for request in site.requests] == ["POST /to", "GET /"]
        assert "Content-Type: application/json" in site.requests[0] and "Content-Type" not in site.requests[1]
        refused = await call(tool, "http_fetch", url=site.url(), method="DELETE")
        assert refused.message == "method 'DELETE' is not allowed; allowed are GET, POST"
    with pytest.raises(UsageError, match="FETCH"):
        Http(methods=("FETCH",))


async def test_a_body_is_not_sent_on_to_another_host() -> None:
    async with serve({}) as site:
        site.pages["/"] = redirect(site.url("/x", "other.test"), "307 Temporary Redirect")
        tool = Http(local(), methods=("POST",), resolver=HOSTS)
        result = await call(tool, "http_fetch", url=site.url(), method="POST", body="mine")
        assert "another host" in result.message and site.paths == ["/"]


# robots.txt and pace


@each_row(
    ("robots", "path", "allowed"),
    [
        ("User-agent: *\nDisallow: /private", "/private/x", False),
        ("User-agent: *\nDisallow: /private", "/public", True),
        ("User-agent: *\nDisallow: /\nAllow: /pub", "/public", True),
        ("User-agent: TOOLCELL\nDisallow: /a\n\nUser-agent: *\nDisallow: /", "/b", True),
        ("User-agent: other\nUser-agent: toolcell\nDisallow: /a", "/a", False),
        ("User-agent: other\nDisallow: /a", "/a", True),
        ("User-agent: *\nDisallow: /*.pdf$", "/x/y.pdf", False),
        ("User-agent: *\nDisallow: /*.pdf$", "/x/y.pdf?z", True),
        ("User-agent: *\nDisallow: /%7Ejoe", "/~joe/x", False),
        ("User-agent: *\nDisallow: # nothing", "/x", True),
        ("Disallow: /", "/x", True),
        ("\ufeffuser-AGENT:*\r\ndisallow:/x", "/x", True),
        ("User-agent: *\nAllow: /x\nDisallow: /x", "/x", True),
        ("User-agent: *\nDisallow: /" + "*a" * 500, "/" + "a" * 3000, True),
    ],
)
def test_robots_rules_are_read_as_rfc_9309_says(robots: str, path: str, allowed: bool) -> None:
    assert parse_robots(robots, "toolcell").allows(path) is allowed


async def test_robots_txt_is_asked_once_and_on_every_host_of_a_redirect() -> None:
    rules = page("User-agent: *\nDisallow: /private", "text/plain")
    async with serve({"/robots.txt": rules, "/": page("hi", "text/plain"), "/to": redirect("/private")}) as site:
        tool = Http(local(robots=True), resolver=HOSTS)
        for _ in range(2):
            assert (await call(tool, "http_fetch", url=site.url())).text == "hi"
        assert site.paths == ["/robots.txt", "/", "/"]
        for path in ("/private/x", "/to"):
            refused = await call(tool, "http_fetch", url=site.url(path))
            assert "robots.txt of" in refused.message and "does not allow /private" in refused.message
        assert "/private" not in site.paths
        site.pages["/robots.txt"] = page("", status="503 Later")
        assert "does not allow /" in (await call(tool, "http_fetch", url=site.url(host="other.test"))).message


def test_a_request_that_would_end_before_its_turn_takes_no_turn() -> None:
    pace = HostPace(10.0, clock=lambda: 100.0)
    assert [pace.reserve("a", 15), pace.reserve("a", 15)] == [0, 10]
    for _ in range(50):
        with pytest.raises(ToolError, match=r"too many requests to a are waiting: the next turn is 20\.0 s away"):
            pace.reserve("a", 15)
    assert (pace.reserve("b", 15), pace.reserve("a", 25)) == (0, 20)


async def test_requests_that_are_too_late_for_a_host_do_not_keep_others_from_it() -> None:
    fetcher = Fetcher(
        WebPolicy(interval_s=5.0, timeout_s=4.0, robots=False),
        transport=httpx.MockTransport(lambda request: httpx.Response(200, text="x")),
    )
    await fetcher.fetch("http://a.example/")
    for _ in range(20):
        with pytest.raises(ToolError, match="too many requests to a"):
            await fetcher.fetch("http://a.example/")
    assert fetcher._pace.reserve("a.example") <= 5.0


def test_requests_to_one_host_are_spaced_out_and_others_do_not_wait() -> None:
    now = 100.0
    pace = HostPace(2.0, clock=lambda: now)
    assert [pace.reserve("a"), pace.reserve("a"), pace.reserve("b"), pace.reserve("a")] == [0, 2, 0, 4]
    now = 200.0
    assert pace.reserve("a") == 0
    for number in range(3000):
        pace.reserve(str(number))
    assert pace.reserve("2999") == 2


# Credentials


def keyed(host: str = "http://site.test", **more: Any) -> WebPolicy:
    """A policy under which requests to one host have a secret, and other.test may be asked, too."""
    options = {"private": LOOPBACK, "ports": range(1, 65536)}
    rules = Allow(host, secrets={"Authorization": "Bearer {KEY}"}, **options), Allow("http://other.test", **options)
    return local(egress=Egress(*rules, secrets={"KEY": SECRET}), **more)


async def echo(stream: anyio.abc.ByteStream) -> None:
    content = f"you sent {SECRET} {SECRET}".encode()
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; x=" + SECRET.encode() + b"\r\n\r\n" + content)


async def test_a_credential_reaches_its_host_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve({"/": echo}) as site:
        site.pages["/away"] = redirect(site.url("/x", "other.test"))
        site.pages["/leak"] = redirect(f"/{SECRET}")
        site.pages["/x"] = page("there", "text/plain")
        tool = Http(keyed(), resolver=HOSTS)
        shown = await call(tool, "http_fetch", url=site.url())
        assert f"Authorization: Bearer {SECRET}" in site.requests[-1]
        assert shown.text == "you sent {KEY} {KEY}"
        assert (await call(tool, "http_fetch", url=site.url("/away"))).text == "there"
        assert "Host: other.test" in site.requests[-1] and SECRET not in site.requests[-1]
        site.pages["/back"] = redirect(site.url("/order?what=all"))
        site.pages["/order?what=all"] = page("ordered", "text/plain")
        assert (await call(tool, "http_fetch", url=site.url("/back", "other.test"))).text == "ordered"
        assert "GET /order" in site.requests[-1] and SECRET not in site.requests[-1]  # a stranger asked for it
        failed = await call(tool, "http_fetch", url=site.url("/leak"))
        assert failed.message == f"HTTP 404 from {site.url('/{KEY}')}"
        for seen in (repr(shown), repr(failed), repr(keyed()), caplog.text, repr(tool.__dict__)):
            assert SECRET not in seen
        site.pages["/gone"] = redirect(site.url(f"/x?key={SECRET}", "other.test"))
        refused = await call(tool, "http_fetch", url=site.url("/gone"))
        assert refused.error is not None and refused.error.code == "not_permitted"
        assert SECRET not in site.requests[-1].partition("Host:")[0] and SECRET not in refused.message
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{site.port}/x")
        assert "receive_response_headers" in caplog.text  # of others, httpcore logs what it always does


@pytest.mark.slow
async def test_half_a_secret_at_the_cut_end_of_a_body_is_removed() -> None:
    for most in range(1, 60):
        decoded = Fetcher(keyed(max_body_bytes=most), transport=httpx.MockTransport(echoing))
        response = await decoded.fetch("http://site.test/")
        assert b"s3cr" not in response.content


async def test_where_a_body_is_cut_does_not_tell_a_secret() -> None:
    async def length(text: str) -> int:
        send = httpx.MockTransport(lambda request: httpx.Response(200, text=text + "and more"))
        response = await Fetcher(keyed(max_body_bytes=len(text)), transport=send).fetch("http://site.test/")
        return len(response.content)

    assert await length("a line\n" + SECRET[:7]) == await length("a line\n" + "?" * 7)


def echoing(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text=f"you sent {request.headers['authorization']} {SECRET}")


async def test_what_somebody_has_to_approve_is_not_fetched() -> None:
    egress = Egress(Allow("site.test", methods=["GET", "POST"], approval="POST"))
    fetcher = Fetcher(local(egress=egress), transport=httpx.MockTransport(lambda request: httpx.Response(200)))
    with pytest.raises(ToolError, match="somebody has to approve it") as refused:
        await fetcher.fetch("https://site.test/", Outgoing("POST"))
    assert refused.value.code == "not_permitted"


def test_a_tool_has_the_labels_of_its_rules() -> None:
    policy = WebPolicy(egress=Egress(Allow("a.test", sends="acme", reads=["private"]), Allow("b.test")))
    (spec,) = Http(policy).to_specs()
    assert (spec.options.sends, spec.options.reads) == ({"public", "acme"}, {"web", "private"})


# TLS


def certificate(folder: Path, name: str) -> tuple[Path, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"{name}.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file, made


async def test_tls_names_the_host_and_checks_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to the checked address; SNI and the certificate are about the name."""
    file, _ = certificate(tmp_path, "site.test")
    names: list[str] = []
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(file)
    serving.sni_callback = lambda _socket, name, _context: names.append(name)
    trusting = ssl.create_default_context(cafile=str(file))
    monkeypatch.setattr(connector, "tls_context", lambda: trusting)
    site = Site({"/": page("private", "text/plain")}, 0)

    plain = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = plain.extra(anyio.abc.SocketAttribute.local_port)

    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                wrapped = await anyio.streams.tls.TLSStream.wrap(
                    stream, server_side=True, ssl_context=serving, standard_compatible=False
                )
                await site.answer(wrapped)
            except (anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError):
                return

    async with plain, anyio.create_task_group() as tasks:
        tasks.start_soon(plain.serve, handle)
        tool = Http(local(), resolver=HOSTS)
        good = await call(tool, "http_fetch", url=f"https://site.test:{port}/")
        assert (good.text, names) == ("private", ["site.test"])
        wrong = await call(tool, "http_fetch", url=f"https://other.test:{port}/")
        assert "certificate verify failed" in wrong.message.lower()
        tasks.cancel_scope.cancel()
