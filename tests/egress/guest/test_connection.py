"""Requests as libraries write them, read without any library: any split of the bytes means the same."""

from __future__ import annotations

from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.guest.channel import Channel, PendingReply, Request
from toolcell_bridge.guest.egress.connection import Cause, EgressFailed, HostCall, HttpConnection, Steps
from toolcell_bridge.guest.egress.host_calls import HostCalls
from toolcell_bridge.wire.messages import PART_BYTES, ToolReturn
from toolcell_bridge.wire.plain import PackedValue

pytestmark = pytest.mark.quick

PLAIN = (
    b"POST /a?b=1 HTTP/1.1\r\nHost: a.example\r\nX-Two:  words here \r\nContent-Length: 5\r\n\r\nhello",
    {
        "method": "POST",
        "url": "http://a.example/a?b=1",
        "headers": [["Host", "a.example"], ["X-Two", "words here"], ["Content-Length", "5"]],
        "body": b"hello",
    },
)
CHUNKED = (
    b"PUT /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n",
    {"method": "PUT", "url": "http://a.example/c", "headers": [["Transfer-Encoding", "chunked"]], "body": b"abcde"},
)


class FakeHost:
    """Answers the calls of a connection."""

    def __init__(self, *parts: bytes, headers: list[list[str]], version: str = "1.1") -> None:
        self.parts, self.headers, self.version = [*parts], headers, version
        self.requests: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}

    def run(self, steps: Steps[Any]) -> Any:
        try:
            call = next(steps)
            while True:
                call = steps.send(self.answer(call))
        except StopIteration as end:
            return end.value

    def answer(self, call: HostCall) -> Any:
        args = call.args
        if call.tool == "http_upload":
            assert len(args["data"]) <= PART_BYTES
            name = args["upload"] or f"upload-{len(self.uploads)}"
            self.uploads[name] = self.uploads.get(name, b"") + args["data"]
            return name
        if call.tool == "http_read":
            return self.parts.pop(0) if self.parts else b""
        self.requests.append(args)
        first = self.parts.pop(0) if self.parts else b""
        return {
            "status": 200,
            "reason": "OK",
            "version": self.version,
            "headers": self.headers,
            "body": first,
            "rest": "rest" if self.parts else None,
        }


def read_all(host: FakeHost, connection: HttpConnection, size: int) -> bytes:
    found = b""
    while data := host.run(connection.read(size)):
        assert len(data) <= size
        found += data
    return found


@pytest.mark.parametrize(("written", "meant"), [PLAIN, CHUNKED])
@given(data=st.data())
def test_a_request_does_not_depend_on_how_it_was_written(
    written: bytes, meant: dict[str, Any], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    host, connection = FakeHost(b"x", headers=[["Content-Length", "1"]]), HttpConnection("a.example", 80)

    for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        host.run(connection.write(written[start:end]))
    host.run(connection.read(100, 2.5))

    assert host.requests == [meant | {"upload": None, "timeout_s": 2.5}]


@given(sizes=st.lists(st.integers(1, PART_BYTES + 5), min_size=1, max_size=6))
def test_a_long_body_is_uploaded_in_parts_and_a_short_one_is_in_its_request(sizes: list[int]) -> None:
    body = b"".join(bytes([number % 256]) * size for number, size in enumerate(sizes))
    host, connection = FakeHost(headers=[["Content-Length", "0"]]), HttpConnection("a.example", 80)

    host.run(connection.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)))
    start = 0
    for size in sizes:
        host.run(connection.write(body[start : start + size]))
        start += size
    host.run(connection.read(100))

    (request,) = host.requests
    assert (request["upload"] is None) == (len(body) <= PART_BYTES)
    assert host.uploads.get(request["upload"] or "", b"") + request["body"] == body


@given(parts=st.lists(st.binary(min_size=1, max_size=50), max_size=5), size=st.integers(1, 60))
def test_an_answer_does_not_depend_on_the_parts_in_which_it_came(parts: list[bytes], size: int) -> None:
    body = b"".join(parts)
    headers = [["Content-Length", str(len(body))]]
    host, connection = FakeHost(*parts, headers=headers), HttpConnection("a.example", 80)
    host.run(connection.write(b"GET / HTTP/1.1\r\n\r\n"))

    assert read_all(host, connection, size) == b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def test_an_answer_of_unknown_length_is_chunked_and_one_of_http_1_0_ends_the_connection() -> None:
    answers = []
    for version in ("1.1", "1.0"):
        host, connection = FakeHost(b"ab", b"c", headers=[], version=version), HttpConnection("a.example", 80)
        host.run(connection.write(b"GET / HTTP/1.1\r\n\r\n"))
        answers.append((read_all(host, connection, 1000), connection.is_ended))

    assert answers == [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", True),
    ]


def test_an_answer_to_head_has_no_body() -> None:
    host, connection = FakeHost(headers=[["Content-Length", "10"]]), HttpConnection("a.example", 80)
    for _ in range(2):
        host.run(connection.write(b"HEAD / HTTP/1.1\r\n\r\n"))
        assert read_all(host, connection, 1000) == b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


@each_row(
    ("host", "port", "scheme", "url"),
    [
        ("a.example", 443, "https", "https://a.example/x"),
        ("a.example", 443, "http", "http://a.example:443/x"),
        ("::1", 8080, "http", "http://[::1]:8080/x"),
        ("[::1]", 80, "http", "http://[::1]/x"),
    ],
)
def test_the_url_is_of_the_place_that_the_library_connected_to(host: str, port: int, scheme: str, url: str) -> None:
    fake, connection = FakeHost(headers=[]), HttpConnection(host, port)
    connection.scheme = scheme
    fake.run(connection.write(b"GET /x HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n"))
    fake.run(connection.read(10))

    assert [each["url"] for each in fake.requests] == [url]


@each_row(
    ("written", "why"),
    [
        (b"GET http://b.example/ HTTP/1.1\r\n\r\n", "leave out proxies"),
        (b"CONNECT b.example:443 HTTP/1.1\r\n\r\n", "leave out proxies"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
        (b"EHLO a.example\r\n\r\n", "other protocols"),
        (b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n", "websocket"),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", "not a header"),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", "not a header"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "size of a chunk"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\n", "size of a chunk"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000, "at most"),
        (b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", "no answer yet"),
    ],
)
def test_what_the_host_does_not_do_is_refused_with_the_reason(written: bytes, why: str) -> None:
    host, connection = FakeHost(headers=[]), HttpConnection("a.example", 80)

    with pytest.raises(EgressFailed, match=why) as raised:
        host.run(connection.write(written))

    assert raised.value.cause in (Cause.CONNECT, Cause.BROKEN)
    assert host.requests == []


def test_reading_before_the_request_is_complete_fails() -> None:
    host, connection = FakeHost(headers=[]), HttpConnection("a.example", 80)
    host.run(connection.write(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhel"))

    with pytest.raises(EgressFailed, match="not complete"):
        host.run(connection.read(10))


class FakeChannel:
    """Keeps calls, and answers each with an answer that has a rest."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def call(self, requests: list[Request]) -> list[tuple[int, PendingReply]]:
        self.made += [(name, decoded(args)) for name, args, _ in requests]
        return [(len(self.made), PendingReply())]

    def wait(self, reply: PendingReply) -> ToolReturn:
        answer = {"status": 200, "reason": "OK", "version": "1.1", "headers": [], "body": b"a", "rest": "rest"}
        return ToolReturn(len(self.made), answer)


def decoded(packed: PackedValue) -> dict[str, Any]:
    value: dict[str, Any] = msgpack.unpackb(packed.data)
    return value


def test_the_rest_of_an_answer_that_nobody_reads_is_dropped_with_the_next_call() -> None:
    channel = FakeChannel()
    calls = HostCalls(cast("Channel", channel))

    def send(connection: HttpConnection) -> None:
        calls.run(connection.write(b"GET / HTTP/1.1\r\n\r\n"))
        calls.run(connection.read(1000))

    first = HttpConnection("a.example", 80)
    send(first)
    calls.drop(first.close())
    assert [name for name, _ in channel.made] == ["http"]  # a destructor must not send

    send(HttpConnection("a.example", 80))
    assert [name for name, _ in channel.made] == ["http", "http_read", "http"]
    assert channel.made[1][1] == {"rest": "rest", "size": 0}
