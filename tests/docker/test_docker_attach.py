"""The attached stream: two streams separated at any split, raw output before Done, and every way it can end."""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.sandbox.docker import attach as attach_module
from toolcell.sandbox.docker.attach import (
    AttachedStream,
    BrokenStream,
    Demultiplexer,
    DoneCounter,
    MarkedOutput,
    pump_through_socket,
)
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.framing import frame
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Done, Hello, Log, RunScript

from .docker_sandboxes import certificate

pytestmark = pytest.mark.every_loop

END_MARKER = b"\0marker-of-a-test"
TIMEOUT_S = 60


def multiplexed(stream: int, data: bytes) -> bytes:
    """As the daemon sends it."""
    return struct.pack(">BxxxI", stream, len(data)) + data


def done_frame() -> bytes:
    return frame(msgpack.packb([24, True, None]))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.binary(max_size=40)), max_size=12),
    st.lists(st.integers(0, 600), max_size=20),
)
def test_streams_are_separated_whatever_the_split(writes: list[tuple[int, bytes]], places: list[int]) -> None:
    parts = Demultiplexer()
    found: dict[int, bytes] = {1: b"", 2: b"", 3: b""}

    for piece in cut(b"".join(multiplexed(*each) for each in writes), places):
        for stream, data in parts.feed(piece):
            found[stream] += data

    assert found == {n: b"".join(data for stream, data in writes if stream == n) for n in (1, 2, 3)}


@each_row("header", [b"\x00\0\0\0\0\0\0\1", b"\x04\0\0\0\0\0\0\1", b"\1\1\0\0\0\0\0\1", b"HTTP/1.1"])
def test_an_invalid_header_breaks_the_stream(header: bytes) -> None:
    with pytest.raises(BrokenStream):
        Demultiplexer().feed(header)


@given(st.lists(st.booleans(), max_size=12), st.lists(st.integers(0, 400), max_size=20))
def test_done_frames_are_counted_whatever_the_split(are_done: list[bool], places: list[int]) -> None:
    guest = Connection.guest(max_frame_bytes=1 << 20)
    guest.send(Hello(PROTOCOL_VERSION, "t", "3", {}))
    other = frame(msgpack.packb([19, 1, "a line with \x93\x18 in it"]))
    counter = DoneCounter()

    for piece in cut(b"".join(done_frame() if is_done else other for is_done in are_done), places):
        counter.feed(piece)

    assert counter.done == sum(are_done)


def test_a_done_frame_of_the_protocol_is_recognised() -> None:
    guest, host = Connection.guest(max_frame_bytes=1 << 20), Connection.host(max_frame_bytes=1 << 20)
    host.receive_data(guest.send(Hello(PROTOCOL_VERSION, "t", "3", {})))
    assert host.next_message() is not None
    guest.receive_data(host.send(RunScript(1, "", {}, "", "off", 64, 0, 0, None, None)))
    assert guest.next_message() is not None
    counter = DoneCounter()

    counter.feed(guest.send(Log(1, "x")))
    assert counter.done == 0
    counter.feed(guest.send(Done(False, {"type": "E", "message": "m"})))
    assert counter.done == 1


@given(st.lists(st.one_of(st.just(END_MARKER), st.binary(max_size=20)), max_size=10), st.lists(st.integers(0, 300)))
def test_only_end_markers_are_removed_whatever_the_split(writes: list[bytes], places: list[int]) -> None:
    output = MarkedOutput(END_MARKER)
    taken = b""

    for piece in cut(b"".join(writes), places):
        output.feed(piece)
        taken += output.take()

    written = sum(each == END_MARKER for each in writes)
    if written == output.markers:  # hypothesis may write one by chance
        assert taken + output.take(is_last=True) == b"".join(writes).replace(END_MARKER, b"")


def a_pair(end_marker: bytes = END_MARKER) -> tuple[AttachedStream, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(TIMEOUT_S)
    return AttachedStream(ours, end_marker=end_marker), theirs


@pytest.mark.anyio
async def test_the_bridge_and_the_raw_output_arrive_separately() -> None:
    stream, daemon = a_pair()
    with daemon:
        daemon.sendall(multiplexed(2, b"raw") + multiplexed(1, b"bridge") + multiplexed(3, b" daemon"))
        with anyio.fail_after(TIMEOUT_S):
            assert await stream.receive() == b"bridge"
        assert stream.take_output() == b"raw daemon"
        assert stream.received_bytes == 6
        await stream.send(b"to the guest")
        assert daemon.recv(100) == b"to the guest"
        assert stream.sent_bytes == 12
    stream.close()


@pytest.mark.anyio
async def test_the_done_frame_waits_for_raw_output_written_before_it() -> None:
    stream, daemon = a_pair()
    with daemon:
        daemon.sendall(multiplexed(1, done_frame()))
        async with anyio.create_task_group() as tasks:

            async def late() -> None:
                await anyio.lowlevel.checkpoint()
                daemon.sendall(multiplexed(2, b"written before" + END_MARKER))

            tasks.start_soon(late)
            with anyio.fail_after(TIMEOUT_S):
                assert await stream.receive() == done_frame()
            assert stream.take_output() == b"written before"
    stream.close()


@pytest.mark.anyio
async def test_a_script_that_broke_its_own_output_delays_done_only_briefly() -> None:
    stream, daemon = a_pair()
    with daemon:
        for _ in range(2):
            daemon.sendall(multiplexed(1, done_frame()))
            with anyio.fail_after(TIMEOUT_S):
                assert await stream.receive() == done_frame()
    stream.close()


@pytest.mark.anyio
async def test_an_end_marker_forged_by_a_script_costs_it_only_its_own_output() -> None:
    stream, daemon = a_pair()
    with daemon:
        daemon.sendall(multiplexed(2, END_MARKER + b"mine") + multiplexed(1, done_frame()))
        with anyio.fail_after(TIMEOUT_S):
            assert await stream.receive() == done_frame()
        assert stream.take_output() == b"mine"
    stream.close()


@pytest.mark.anyio
@each_row("last", [b"", multiplexed(1, b"torn")[:-2], multiplexed(1, b"x")[:5], b"HTTP/1.1 500 gone\r\n"])
async def test_a_daemon_that_goes_away_ends_the_stream(last: bytes) -> None:
    stream, daemon = a_pair()
    with daemon:
        daemon.sendall(last)
    with anyio.fail_after(TIMEOUT_S):
        while await stream.receive():
            pass
        assert await stream.receive() == b""
        await stream.send(b"nobody listens")
    assert stream.is_over
    stream.close()


@pytest.mark.anyio
async def test_bytes_from_before_the_end_are_still_delivered() -> None:
    stream, daemon = a_pair()
    with daemon:
        daemon.sendall(multiplexed(1, b"first") + multiplexed(2, b"noise") + multiplexed(1, b" last"))
    received = b""
    with anyio.fail_after(TIMEOUT_S):
        while data := await stream.receive():
            received += data
    assert (received, stream.take_output()) == (b"first last", b"noise")
    stream.close()


@pytest.mark.anyio
async def test_a_half_closed_stream_still_takes_what_is_sent() -> None:
    stream, daemon = a_pair()
    with daemon:
        daemon.shutdown(socket.SHUT_WR)
        with anyio.fail_after(TIMEOUT_S):
            assert await stream.receive() == b""
        await stream.send(b"still there?")
        assert daemon.recv(100) == b"still there?"
    stream.close()


@pytest.mark.anyio
async def test_closing_wakes_a_waiting_receive() -> None:
    stream, daemon = a_pair()
    with daemon:
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with anyio.fail_after(TIMEOUT_S):
                    assert await stream.receive() == b""

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            stream.close()


@pytest.mark.anyio
async def test_a_flood_of_raw_output_is_held_only_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_module, "OUTPUT_BYTES", 64 * 1024)
    stream, daemon = a_pair()
    total = 4 << 20
    flood = threading.Thread(target=lambda: daemon.sendall(multiplexed(2, bytes(total)) + multiplexed(1, b"end")))
    flood.start()
    taken = most = 0
    async with anyio.create_task_group() as tasks:
        done = anyio.Event()

        async def read() -> None:
            with anyio.fail_after(TIMEOUT_S):
                assert await stream.receive() == b"end"
            done.set()

        tasks.start_soon(read)
        while not done.is_set():
            piece = len(stream.take_output())
            taken, most = taken + piece, max(most, piece)
            await anyio.lowlevel.checkpoint()
    flood.join(TIMEOUT_S)
    daemon.close()
    taken += len(stream.take_output())  # while too much of it is held, nothing more is read
    with anyio.fail_after(TIMEOUT_S):
        assert await stream.receive() == b""
    assert taken + len(stream.take_output()) == total
    assert most <= 64 * 1024 + 64 * 1024  # the bound, and one read
    stream.close()


@pytest.fixture
def encrypted(tmp_path: Path) -> tuple[socket.socket, ssl.SSLSocket]:
    """A stream to a daemon behind TLS, and the daemon's end."""
    cert, key = certificate(tmp_path)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(cert, key)
    ours = ssl.create_default_context(cafile=str(cert))
    a, b = socket.socketpair()
    served: list[ssl.SSLSocket] = []
    greeting = threading.Thread(target=lambda: served.append(theirs.wrap_socket(b, server_side=True)))
    greeting.start()
    remote = ours.wrap_socket(a, server_hostname="127.0.0.1")
    greeting.join(TIMEOUT_S)
    served[0].settimeout(TIMEOUT_S)
    return pump_through_socket(remote), served[0]


@pytest.mark.anyio
async def test_a_stream_behind_tls_carries_both_directions_and_its_end(
    encrypted: tuple[socket.socket, ssl.SSLSocket],
) -> None:
    plain, daemon = encrypted
    stream = AttachedStream(plain)
    big = bytes(range(256)) * 8192
    echoed = bytearray()

    def serve() -> None:
        while len(echoed) < len(big):
            echoed.extend(daemon.recv(65536))
        daemon.sendall(multiplexed(1, bytes(echoed)))
        daemon.close()

    serving = threading.Thread(target=serve)
    serving.start()
    received = b""
    with anyio.fail_after(2 * TIMEOUT_S):
        await stream.send(big)
        while data := await stream.receive():
            received += data
    serving.join(TIMEOUT_S)
    assert received == big
    stream.close()


@pytest.mark.anyio
async def test_closing_our_end_ends_a_connection_behind_tls(
    encrypted: tuple[socket.socket, ssl.SSLSocket],
) -> None:
    plain, daemon = encrypted
    AttachedStream(plain).close()
    with anyio.fail_after(TIMEOUT_S):
        try:
            assert await anyio.to_thread.run_sync(daemon.recv, 10) == b""
        except (ssl.SSLError, ConnectionError):
            pass
    daemon.close()
