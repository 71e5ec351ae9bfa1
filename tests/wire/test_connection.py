"""Both ends of the bridge: every legal move, and every illegal one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.wire import messages as msg
from toolcell_bridge.wire.codec import PRINTED_BYTES, encode
from toolcell_bridge.wire.connection import GUEST_MOVES, HOST_MOVES, LATE_MOVES, Connection, State
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError, UnsendableValue, ValueTooLarge
from wire.wire_strategies import HELLO, RUN, deliver, idle_pair, running_pair

pytestmark = pytest.mark.quick

SAMPLES: dict[type[msg.Message], msg.Message] = {
    type(message): message
    for message in (
        *(
            HELLO,
            RUN,
            msg.PutFile("a", b"", True),
            msg.Stay(100),
            msg.ToolReturn(1, None),
            msg.ToolFail(1, "c", "m", False, None),
        ),
        *(msg.CallTool(2, "f", {}, None), msg.CancelCall(1), msg.Log(1, ""), msg.Progress(None), msg.Result(None, [])),
        *(
            msg.FilePart("a", "", b"", True),
            msg.FileProblem("a", 0, ""),
            msg.Leftover([], [], False),
            msg.ReadPipes(1),
            msg.Done(True, None),
        ),
        *(),
    )
}

call = msg.CallTool(1, "search", {"q": "x"}, 3)


def ends_in(state: State) -> tuple[Connection, Connection]:
    """Host and guest in `state`, with call 1 outstanding where there can be one."""
    match state:
        case State.NEW:
            return Connection.host(), Connection.guest()
        case State.IDLE:
            return idle_pair()
        case State.RUNNING:
            host, guest = running_pair()
            deliver(guest, call, host)
            return host, guest
    host, guest = Connection.host(), Connection.guest()
    for end in host, guest:
        end.receive_data(b"\0\0\0\0")
        with pytest.raises(RemoteProtocolError):
            end.next_message()
    return host, guest


def test_the_samples_hold_every_message() -> None:
    assert set(SAMPLES) == set(msg.TAGS.values())


@each_row("kind", SAMPLES)
@each_row("state", State)
def test_each_end_sends_exactly_what_its_table_allows(state: State, kind: type[msg.Message]) -> None:
    for end, moves in zip(ends_in(state), (HOST_MOVES, GUEST_MOVES), strict=True):
        if (state, kind) in moves:
            assert end.send(SAMPLES[kind]) == encode(SAMPLES[kind])
            assert end.state is moves[state, kind]
        else:
            with pytest.raises(LocalProtocolError):
                end.send(SAMPLES[kind])
            assert end.state is state


@pytest.mark.conforms("T7")
@each_row("kind", SAMPLES)
@each_row("state", [State.NEW, State.IDLE, State.RUNNING])
def test_each_end_receives_exactly_what_the_others_table_allows(state: State, kind: type[msg.Message]) -> None:
    for end, moves in zip(ends_in(state), (GUEST_MOVES, HOST_MOVES), strict=True):
        end.receive_data(encode(SAMPLES[kind]))
        if (state, kind) in moves:
            assert end.next_message() == SAMPLES[kind]
            assert end.state is moves[state, kind]
        else:
            with pytest.raises(RemoteProtocolError):
                end.next_message()
            assert end.state is State.DEAD


def test_late_moves_change_no_state_and_add_to_no_other_table() -> None:
    assert all(before is after for (before, _), after in LATE_MOVES.items())
    assert not LATE_MOVES.keys() & HOST_MOVES.keys()


@given(st.binary())
def test_garbage_from_a_guest_is_a_remote_protocol_error_and_nothing_else(garbage: bytes) -> None:
    host = Connection.host()
    host.receive_data(garbage)
    try:
        list(iter(host.next_message, None))
    except RemoteProtocolError:
        assert host.state is State.DEAD


def test_a_dead_connection_stays_dead_and_says_why() -> None:
    host, _ = running_pair()
    host.receive_data(encode(RUN) + encode(msg.Log(1, "believe me")))
    with pytest.raises(RemoteProtocolError, match="RunScript is illegal in state running"):
        host.next_message()
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="dead: RunScript is illegal"):
            host.next_message()
        with pytest.raises(RemoteProtocolError, match="dead: RunScript is illegal"):
            host.receive_data(b"")
        with pytest.raises(LocalProtocolError, match="dead: RunScript is illegal"):
            host.send(msg.ToolReturn(1, None))
    assert not host.outstanding


def test_messages_before_the_illegal_one_are_still_delivered() -> None:
    host, guest = running_pair()
    host.receive_data(guest.send(msg.Log(1, "a")) + encode(HELLO))
    assert host.next_message() == msg.Log(1, "a")
    with pytest.raises(RemoteProtocolError):
        host.next_message()


@pytest.mark.conforms("T-b1")
def test_another_protocol_version_is_refused_at_hello() -> None:
    host = Connection.host()
    host.receive_data(encode(msg.Hello(2, "9.9", "3.14", {})))
    with pytest.raises(RemoteProtocolError, match="protocol version 2, 1 is spoken here"):
        host.next_message()
    with pytest.raises(LocalProtocolError):
        Connection.guest().send(msg.Hello(0, "", "", {}))


def test_a_failed_send_changes_nothing() -> None:
    host, guest = running_pair(max_frame_bytes=1000)
    for bad, error in (
        (msg.CallTool(1, "f", {"x": 2**64}, None), UnsendableValue),
        (msg.CallTool(1, "f", {"x": "x" * 1000}, None), ValueTooLarge),
        (msg.CallTool(0, "f", {}, None), LocalProtocolError),
    ):
        with pytest.raises(error):
            guest.send(bad)
        assert not guest.outstanding
    assert deliver(guest, call, host) == call


def test_messages_sent_together_are_all_sent_or_none() -> None:
    host, guest = running_pair(max_outstanding=2)
    deliver(guest, call, host)
    second, third = msg.CallTool(2, "f", {}, None), msg.CallTool(3, "f", {}, None)
    for last, error in (
        (third, LocalProtocolError),
        (msg.Progress(2**64), UnsendableValue),
        (HELLO, LocalProtocolError),
    ):
        with pytest.raises(error):
            guest.send(msg.Log(1, "x"), msg.CancelCall(1), second, msg.FilePart("a", "", b"", False), last)
        assert list(guest.outstanding) == [1]
        assert not guest.is_cancelled(1)

    host.receive_data(guest.send(second, msg.Log(1, "x"), msg.Done(True, None)))
    assert list(iter(host.next_message, None)) == [second, msg.Log(1, "x"), msg.Done(True, None)]
    assert guest.send() == b""


@pytest.mark.conforms("T7", "Q-b5")
def test_a_frame_over_the_limit_kills_the_connection() -> None:
    host, _ = running_pair(max_frame_bytes=1000)
    host.receive_data((1001).to_bytes(4, "big"))
    with pytest.raises(RemoteProtocolError, match="1001 bytes"):
        host.next_message()


@pytest.mark.conforms("T-b1")
@given(st.lists(st.sampled_from(list(SAMPLES.values())), max_size=12), st.booleans())
def test_any_order_of_wellformed_messages_is_followed_or_ends_the_connection(
    order: list[msg.Message], at_host: bool
) -> None:
    end = running_pair()[0 if at_host else 1]
    end.receive_data(b"".join(map(encode, order)))
    for _ in itertools.count():
        try:
            if end.next_message() is None:
                break
        except RemoteProtocolError:
            assert end.state is State.DEAD
            break
    assert len(end.outstanding) <= len(order)


def test_a_run_says_how_many_elements_its_messages_may_have_and_the_next_run_begins_anew() -> None:
    host, guest = idle_pair()
    guest.receive_data(host.send(replace(RUN, message_elements=5000, answer_elements=6000)))
    assert guest.next_message() is not None
    for size, fits in ((4000, True), (6000, False)):
        if fits:
            host.receive_data(guest.send(msg.Progress([None] * size)))
            assert host.next_message() == msg.Progress([None] * size)
        else:
            with pytest.raises(ValueTooLarge, match=r"> 5000 elements\).*message_elements"):
                guest.send(msg.Progress([None] * size))
    host.receive_data(guest.send(msg.CallTool(1, "search", {}, None)))
    assert host.next_message() is not None
    with pytest.raises(ValueTooLarge, match=r"> 6000 elements\).*answer_elements"):
        host.send(msg.ToolReturn(1, [None] * 7000))
    guest.receive_data(host.send(msg.ToolReturn(1, [None] * 5500)))
    assert guest.next_message() == msg.ToolReturn(1, [None] * 5500)
    host.receive_data(guest.send(msg.Done(True, None)))
    assert host.next_message() == msg.Done(True, None)

    guest.receive_data(host.send(replace(RUN, inputs={"x": [None] * 7000})))
    assert guest.next_message() is not None
    host.receive_data(guest.send(msg.Progress([None] * 7000)))
    assert host.next_message() == msg.Progress([None] * 7000)


def test_a_host_refuses_more_elements_than_the_run_allows() -> None:
    host, guest = idle_pair()
    guest.receive_data(host.send(replace(RUN, message_elements=5000)))
    assert guest.next_message() is not None
    host.receive_data(encode(msg.Progress([None] * 6000)))
    with pytest.raises(RemoteProtocolError, match="5000"):
        host.next_message()


@given(
    pieces=st.lists(
        st.tuples(
            st.sampled_from([1, 2]),
            st.sampled_from(["a", "é", "\n", "b\n", "c" * 40, "d" * PRINTED_BYTES, "e" * 300, ""]),
        )
    ),
    splits=st.lists(st.integers(1, 60)),
)
def test_joined_texts_are_those_that_were_sent_in_their_order(pieces: list[tuple[int, str]], splits: list[int]) -> None:
    host, guest = Connection.host(joins_logs=True), Connection.guest()
    deliver(guest, HELLO, host)
    deliver(host, RUN, guest)
    data = b"".join(guest.send(msg.Log(stream, text)) for stream, text in pieces)
    received: list[tuple[int, str]] = []
    while data:
        size = splits.pop() if splits else len(data)
        host.receive_data(data[:size])
        data = data[size:]
        while (message := host.next_message()) is not None:
            assert isinstance(message, msg.Log)
            received.append((message.stream, message.text))
    for stream in (1, 2):
        assert "".join(text for each, text in received if each == stream) == "".join(
            text for each, text in pieces if each == stream
        )
    order = [stream for stream, text in pieces if text]
    assert [key for key, _ in itertools.groupby(each for each, text in received if text)] == [
        key for key, _ in itertools.groupby(order)
    ]
