"""Connections to servers: how many there are, how long names are looked up, and what servers send too early or for ever."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.abc
import psutil
import pytest
from anyio.abc import ByteStream

from builtin.webkit import Names, Site, page, serve
from egress.doors import TOKEN, Door, code_of, door
from egress.test_attacks import of
from held import left_after
from toolcell.builtin.web.policy import WebPolicy
from toolcell.egress import Allow, run_requests, sending
from toolcell.egress.connector import GuardedTransport
from toolcell.egress.resolver import MAX_LOOKUPS, SystemResolver
from toolcell.egress.streams import MAX_HEAD_BYTES

pytestmark = [
    pytest.mark.quick,
    pytest.mark.every_loop,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning"),
]


async def endless(stream: ByteStream) -> None:
    while True:
        await stream.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 1000)


async def test_answers_that_only_announce_another_one_are_bounded() -> None:
    async with serve({"/": endless}) as site, door(of(site)) as run:
        with anyio.fail_after(60):
            result = await run.send(site.url(host="127.0.0.1"))

    assert code_of(result) == "EgressProtocolError"
    assert f"no answer within {MAX_HEAD_BYTES} bytes" in result.message


async def test_a_few_of_them_are_followed_by_the_answer_and_a_long_body() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 100
    async with serve({"/": hints + page("x" * MAX_HEAD_BYTES * 2)}) as site, door(of(site)) as run:
        found = (await run.send(site.url(host="127.0.0.1"))).value
        size = len(found["body"])
        while part := (await run.call("http_read", {"rest": found["rest"], "size": 1 << 18})).files[0].data:
            size += len(part)

    assert (found["status"], size) == (200, MAX_HEAD_BYTES * 2)


@pytest.mark.parametrize("size", [200_000, 8_000_000])
async def test_an_answer_that_comes_before_the_body_is_sent_is_the_answer(size: int) -> None:
    async def hasty(stream: ByteStream) -> None:
        await stream.send(page("too long", "text/plain", "413 Content Too Large", "Connection: close"))

    async with serve({"/": hasty}) as site, door(of(site)) as run:
        for _ in range(5):
            answer = (await run.send(site.url(host="127.0.0.1"), "POST", **run.upload(b"x" * size))).value
            assert (answer["status"], answer["body"]) == (413, b"too long")


async def test_an_address_of_ipv6_is_reached_as_its_rule_says() -> None:
    try:
        listener = await anyio.create_tcp_listener(local_host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    site = Site({"/": page("six")}, port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, site.answer)
        async with door(Allow("http://[::1]", ports=[port])) as run:
            answer = await run.send(f"http://[0:0:0:0:0:0:0:1]:{port}/")
        async with door(Allow("http://[::2]", ports=[port]), Allow("https://[::ffff:7f00:1]")) as run:
            assert code_of(await run.send(f"http://[::1]:{port}/")) == "EgressRefused"
        tasks.cancel_scope.cancel()

    assert answer.value["body"] == b"six"
    assert f"Host: [::1]:{port}\r\n" in site.requests[0]


class SlowNames:
    """An operating system that knows no name until it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.goes_on = threading.Event()

    def getaddrinfo(self, host: str, *_more: Any, **_options: Any) -> Any:
        if host.endswith(".slow.test"):
            self.asked.append(host)
            self.goes_on.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowNames]:
    made = SlowNames()
    monkeypatch.setattr("toolcell.egress.resolver.socket.getaddrinfo", made.getaddrinfo)
    yield made
    made.goes_on.set()


async def test_names_that_nobody_answers_hold_up_no_other_run(names: SlowNames) -> None:
    async with door(Allow("*.slow.test"), Allow("quick.test")) as run:
        other = Door(run.registry)
        for number in range(2 * MAX_LOOKUPS):
            late = await run.send(f"https://{number}.slow.test/", timeout_s=0.05)
            assert code_of(late) == "EgressTimeout" and "too many are open" not in late.message
        async with other.requests.until_end():
            with anyio.fail_after(60):
                refused = await other.send("https://quick.test/")

    assert len(names.asked) == MAX_LOOKUPS  # those that nobody waits for any more count as well
    assert "loopback" in refused.message


async def test_a_resolver_goes_on_when_names_were_found(names: SlowNames) -> None:
    resolver = SystemResolver()
    for number in range(2 * MAX_LOOKUPS):
        with anyio.move_on_after(0.05):
            await resolver.resolve(f"{number}.slow.test", 443)
    names.goes_on.set()
    with anyio.fail_after(60):
        assert await resolver.resolve("a.test", 443) == ["127.0.0.1"]


async def test_the_connections_of_all_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_OF_ALL", 2)

    async def silent(stream: ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await stream.receive()

    async with serve({"/": silent, "/b": page("b")}) as site, door(of(site)) as run:
        other = Door(run.registry)
        async with other.requests.until_end():
            first, second = [(await run.send(site.url(host="127.0.0.1"))).value["rest"] for _ in range(2)]
            refused = await other.send(site.url("/b", "127.0.0.1"), timeout_s=0.05)
            for rest in (first, second):
                await run.call("http_read", {"rest": rest, "size": 0})
            sent = await other.send(site.url("/b", "127.0.0.1"))

    assert code_of(refused) == "EgressTimeout" and "within 0.05 s: too many are open" in refused.message
    assert sent.value["body"] == b"b"


async def reset(stream: ByteStream) -> None:
    sock = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def silent(stream: ByteStream) -> None:
    await stream.receive()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = page("x" * 300_000)

FAILURES: dict[str, tuple[str, str, bool]] = {
    # what is asked for, the code of its failure, and whether the same request may succeed later
    "http://private.test:{port}/": ("EgressRefused", "address", False),
    "http://unknown.test:{port}/": ("EgressConnectError", "was not found", True),
    "http://nowhere.test:{port}/": ("EgressConnectError", "has no address", True),
    "http://127.0.0.1:{closed}/": ("EgressConnectError", "refused", True),
    "https://127.0.0.1:{port}/": ("EgressTimeout", "Timeout", True),
    "http://127.0.0.1:{port}/silent": ("EgressTimeout", "Timeout", True),
    "http://127.0.0.1:{port}/reset": ("EgressConnectionReset", "ReadError", False),
    "http://127.0.0.1:{port}/closed": ("EgressProtocolError", "disconnected", False),
    "http://127.0.0.1:{port}/garbage": ("EgressProtocolError", "Protocol", False),
    "http://127.0.0.1:{port}/coded": ("EgressProtocolError", "content-encoding", False),
    "http://127.0.0.1:{port}/damaged": ("EgressProtocolError", "decompressed", False),
    "http://127.0.0.1:{port}/long": ("EgressLimit", "more than 200000 bytes", False),
}


async def test_a_request_that_failed_holds_no_connection_and_says_whether_it_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room for one connection, each failure is followed by another, and all of them by an answer."""
    monkeypatch.setattr(sending, "MAX_OF_ALL", 1)
    pages = {
        "/silent": silent,
        "/reset": reset,
        "/closed": b"",
        "/garbage": b"no HTTP\r\n\r\n",
        "/coded": page("x", "text/plain", "200 OK", "Content-Encoding: br"),
        "/damaged": page("x" * 99, "text/plain", "200 OK", "Content-Encoding: gzip"),
        "/long": LONG,
        "/": page("answer"),
    }
    names = Names(private_test=[["10.0.0.7"]], nowhere_test=[[]])
    found = dict[str, Any]()
    async with serve(pages) as site:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            closed = unused.getsockname()[1]
            ports = {"ports": [site.port, closed]}
            rules = [of(site, max_bytes=200_000, **ports)]
            rules += [Allow(f"{name}.test", **ports) for name in ("private", "unknown", "nowhere")]
            async with door(*rules, resolver=names, secrets={"TOKEN": TOKEN}) as run:

                async def fail() -> None:
                    for url, (code, said, _) in FAILURES.items():
                        timeout_s = 0.05 if code == "EgressTimeout" else 10
                        result = await run.send(url.format(port=site.port, closed=closed), timeout_s=timeout_s)
                        assert result.error is not None and said in result.message, url
                        found[url] = code_of(result), result.error.retryable

                assert not await left_after(fail)
                answer = await run.send(site.url(host="127.0.0.1"))

    assert found == {url: (code, may_retry) for url, (code, _, may_retry) in FAILURES.items()}
    assert answer.value["body"] == b"answer"


async def test_an_answer_that_nobody_reads_on_holds_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed when the script drops it, reads too many others, or ends."""
    monkeypatch.setattr(run_requests, "MAX_RESTS", 2)
    own, counts = psutil.Process(), list[int]()
    async with serve({"/": page("x" * 600_000)}) as site, door(of(site)) as run:

        def count() -> None:
            found = own.net_connections("tcp4")
            counts.append(sum(bool(each.raddr) and each.raddr.port == site.port for each in found))

        rest = (await run.send(site.url(host="127.0.0.1"))).value["rest"]
        count()
        await run.call("http_read", {"rest": rest, "size": 0})
        count()
        other = Door(run.registry)
        async with other.requests.until_end():
            rests = [(await other.send(site.url(host="127.0.0.1"))).value["rest"] for _ in range(4)]
            count()
            parts = [await other.call("http_read", {"rest": rest, "size": 1}) for rest in rests]
        count()

    assert counts == [1, 0, 2, 0]
    assert [*map(code_of, parts)] == ["EgressProtocolError"] * 2 + ["sent"] * 2


async def test_http_fetch_has_the_same_bounds() -> None:
    import httpx

    async with serve({"/": endless}) as site:
        transport = GuardedTransport(WebPolicy(private=("127.0.0.1/32",), ports=None).check_address)
        async with httpx.AsyncClient(transport=transport) as client:
            with anyio.fail_after(60), pytest.raises(Exception, match="no answer within"):
                await client.get(site.url(host="127.0.0.1"))


@pytest.mark.parametrize("secrets", [None, {"TOKEN": TOKEN}])
@pytest.mark.parametrize("body", [b"", b"3\r\nabc\r\n", b"5\r\nabc"])
async def test_an_answer_whose_body_breaks_off_has_its_head(body: bytes, secrets: dict[str, str] | None) -> None:
    head = b"HTTP/1.1 207 Multi-Status\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serve({"/": head + body}) as site, door(of(site), secrets=secrets) as run:
        answer = (await run.send(site.url(host="127.0.0.1"))).value
        more = await run.call("http_read", {"rest": answer["rest"], "size": 10})

    assert answer["status"] == 207
    assert answer["body"] == (b"" if secrets else body[3:6])
    assert code_of(more) == "EgressProtocolError"
