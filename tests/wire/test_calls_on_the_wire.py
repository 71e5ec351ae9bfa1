"""Calls, answers, cancellations and ends of runs that cross on the wire, one by one and in random order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rows import each_row
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.connection import Connection, State
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError
from toolcell_bridge.wire.messages import (
    CallTool,
    CancelCall,
    Done,
    FilePart,
    FileProblem,
    Log,
    Message,
    Progress,
    PutFile,
    Result,
    ToolFail,
    ToolReturn,
)
from wire.wire_strategies import HELLO, RUN, deliver, idle_pair, running_pair

pytestmark = pytest.mark.quick

call = CallTool(1, "search", {"q": "x"}, 3)


def refused(sender: Connection, message: Message, receiver: Connection, said: str | None = None) -> None:
    """Check that one end does not send a message, and that the other takes none that was sent nevertheless."""
    with pytest.raises(LocalProtocolError, match=said):
        sender.send(message)
    receiver.receive_data(encode(message))
    with pytest.raises(RemoteProtocolError, match=said):
        receiver.next_message()


@pytest.mark.conforms("Q-b6")
def test_answers_are_matched_by_id_in_any_order() -> None:
    host, guest = running_pair()
    for number in (1, 2, 5):
        deliver(guest, CallTool(number, "f", {}, None), host)
    assert list(host.outstanding) == list(guest.outstanding) == [1, 2, 5]

    for answer in (ToolReturn(5, "e"), ToolFail(1, "c", "m", True, None), ToolReturn(2, None)):
        assert deliver(host, answer, guest) == answer
    assert not host.outstanding
    assert not guest.outstanding


@each_row("number", [-1, 0, 1, 4, 5])
def test_a_call_id_that_does_not_increase_is_refused(number: int) -> None:
    host, guest = running_pair()
    deliver(guest, CallTool(5, "f", {}, None), host)
    deliver(host, ToolReturn(5, None), guest)
    refused(guest, CallTool(number, "f", {}, None), host, f"call id {number} does not come after 5")


def test_call_ids_keep_increasing_from_run_to_run() -> None:
    host, guest = running_pair()
    deliver(guest, call, host)
    deliver(guest, Done(True, None), host)
    deliver(host, RUN, guest)
    refused(guest, call, host)


@each_row("answer", [ToolReturn(1, None), ToolFail(1, "c", "m", False, None)])
def test_a_call_is_answered_once_and_only_if_it_was_made(answer: Message) -> None:
    host, guest = running_pair()
    with pytest.raises(LocalProtocolError, match="not outstanding"):
        host.send(answer)
    deliver(guest, call, host)
    deliver(host, answer, guest)
    refused(host, answer, guest, "not outstanding")


def test_outstanding_calls_are_bounded_on_both_sides() -> None:
    host, guest = running_pair(max_outstanding=2)
    deliver(guest, CallTool(1, "f", {}, None), host)
    deliver(guest, CallTool(2, "f", {}, None), host)
    with pytest.raises(LocalProtocolError, match="more than 2 calls"):
        guest.send(CallTool(3, "f", {}, None))
    deliver(host, ToolReturn(1, None), guest)
    deliver(guest, CallTool(3, "f", {}, None), host)
    refused(guest, CallTool(4, "f", {}, None), host, "more than 2 calls")


def test_a_cancelled_call_is_still_answered_once_and_the_guest_drops_the_answer() -> None:
    host, guest = running_pair()
    deliver(guest, call, host)
    assert not host.is_cancelled(1)
    assert deliver(guest, CancelCall(1), host) == CancelCall(1)
    assert host.is_cancelled(1)
    assert list(host.outstanding) == [1]

    assert deliver(host, ToolReturn(1, "late"), guest) is None
    assert not guest.outstanding
    assert not host.is_cancelled(1)
    with pytest.raises(LocalProtocolError):
        host.send(ToolReturn(1, "again"))


def test_a_cancel_that_crosses_the_answer_is_dropped_by_the_host() -> None:
    host, guest = running_pair()
    deliver(guest, call, host)
    answer = host.send(ToolReturn(1, "value"))
    cancel = guest.send(CancelCall(1))

    host.receive_data(cancel)
    guest.receive_data(answer)
    assert host.next_message() is None
    assert guest.next_message() is None
    assert host.state is guest.state is State.RUNNING


@each_row("number", [0, 2, -1, 2**64 - 1])
def test_a_cancel_of_a_call_never_made_is_refused(number: int) -> None:
    host, guest = running_pair()
    deliver(guest, call, host)
    refused(guest, CancelCall(number), host)


def test_a_call_is_cancelled_once_and_only_before_its_answer() -> None:
    host, guest = running_pair()
    deliver(guest, call, host)
    deliver(guest, CancelCall(1), host)
    with pytest.raises(LocalProtocolError, match="second cancel"):
        guest.send(CancelCall(1))
    deliver(host, ToolReturn(1, None), guest)
    with pytest.raises(LocalProtocolError, match="not outstanding"):
        guest.send(CancelCall(1))
    deliver(guest, CallTool(2, "f", {}, None), host)
    host.receive_data(encode(CancelCall(2)) * 2)
    assert host.next_message() == CancelCall(2)
    with pytest.raises(RemoteProtocolError, match="second cancel"):
        host.next_message()


# The end of a run, and what crosses it.


def test_done_drops_the_calls_still_outstanding_on_both_sides() -> None:
    host, guest = running_pair()
    deliver(guest, call, host)
    deliver(guest, Done(True, None), host)
    assert not host.outstanding
    assert not guest.outstanding
    with pytest.raises(LocalProtocolError, match="ToolReturn is illegal in state idle"):
        host.send(ToolReturn(1, "nobody asks any more"))


def test_what_was_under_way_when_the_guest_was_done_is_dropped() -> None:
    host, guest = running_pair()
    for number in (1, 2, 3):
        deliver(guest, CallTool(number, "f", {}, None), host)
    deliver(guest, CancelCall(3), host)
    late = host.send(ToolReturn(2, "x")) + host.send(ToolFail(3, "c", "m", False, None))
    deliver(guest, Done(True, None), host)

    guest.receive_data(late)
    assert guest.next_message() is None
    assert deliver(host, RUN, guest) == RUN
    guest.receive_data(encode(ToolReturn(1, "from the last run")))
    with pytest.raises(RemoteProtocolError, match="not outstanding"):
        guest.next_message()


def test_a_late_answer_is_accepted_once_and_only_for_a_call_that_was_open() -> None:
    for late in (ToolReturn(1, None), ToolReturn(9, None)):
        host, guest = running_pair()
        deliver(guest, call, host)
        late_answer = host.send(ToolReturn(1, None))
        deliver(guest, Done(True, None), host)
        guest.receive_data(late_answer + encode(late))
        with pytest.raises(RemoteProtocolError, match="not outstanding"):
            guest.next_message()


@each_row("late", [call, Log(1, "x"), Result(1, []), Done(True, None), CancelCall(1)])
def test_after_done_a_guest_has_nothing_to_say(late: Message) -> None:
    host, guest = running_pair()
    deliver(guest, Done(True, None), host)
    refused(guest, late, host, "illegal in state idle")


@pytest.mark.conforms("Q-b7")
def test_a_result_may_be_repeated_and_voids_half_sent_files() -> None:
    host, guest = running_pair()
    script: list[Message] = [
        *(Result(1, ["a"]), FilePart("a", "", b"1", False)),
        *(Result(2, ["b"]), FilePart("b", "", b"2", False), FilePart("b", "", b"3", True), Done(True, None)),
    ]
    for message in script:
        assert deliver(guest, message, host) == message


def test_pieces_of_two_files_are_never_mixed() -> None:
    host, guest = running_pair()
    deliver(guest, FilePart("a", "", b"1", False), host)
    deliver(guest, Log(1, "other messages may pass"), host)
    for other in (FilePart("b", "", b"2", True), FileProblem("b", 1, "gone")):
        with pytest.raises(LocalProtocolError, match="between the pieces"):
            guest.send(other)
    deliver(guest, FileProblem("a", 1, "unreadable"), host)
    deliver(guest, FilePart("b", "", b"2", False), host)
    host.receive_data(encode(FilePart("c", "", b"2", True)))
    with pytest.raises(RemoteProtocolError, match="between the pieces"):
        host.next_message()


def test_a_run_waits_for_the_last_piece_of_a_file() -> None:
    host, guest = idle_pair()
    deliver(host, PutFile("a", b"1", False), guest)
    for bad in (RUN, PutFile("b", b"", True)):
        with pytest.raises(LocalProtocolError):
            host.send(bad)
    deliver(host, PutFile("a", b"2", True), guest)
    assert deliver(host, RUN, guest) == RUN


def test_a_file_half_sent_at_done_does_not_haunt_the_next_run() -> None:
    host, guest = running_pair()
    deliver(guest, FilePart("a", "", b"1", False), host)
    deliver(guest, Done(False, None), host)
    deliver(host, RUN, guest)
    assert deliver(guest, FilePart("b", "", b"1", True), host) == FilePart("b", "", b"1", True)


class HonestEnds(RuleBasedStateMachine):
    """Two ends that send what their own connection allows, over a wire that delivers any piece at any time.

    Invariant: neither ever accuses the other, every answer reaches the guest at most once, and when the wire is empty
    both agree on what is outstanding.
    """

    @initialize()
    def start(self) -> None:
        self.host, self.guest = Connection.host(), Connection.guest()
        self.to_host, self.to_guest = bytearray(), bytearray()
        self.next_id = 1
        self.answered: set[int] = set()
        self.to_host += self.guest.send(HELLO)

    @precondition(lambda self: self.guest.state is State.RUNNING)
    @rule(step=st.integers(1, 3))
    def guest_calls(self, step: int) -> None:
        self.next_id += step
        self.to_host += self.guest.send(CallTool(self.next_id, "f", {}, None))

    @precondition(lambda self: any(not self.guest.is_cancelled(number) for number in self.guest.outstanding))
    @rule(data=st.data())
    def guest_cancels(self, data: st.DataObject) -> None:
        mine = [number for number in self.guest.outstanding if not self.guest.is_cancelled(number)]
        self.to_host += self.guest.send(CancelCall(data.draw(st.sampled_from(mine))))

    @precondition(lambda self: self.guest.state is State.RUNNING)
    @rule(message=st.sampled_from([Log(1, "x"), Progress(1), Result(2, []), FilePart("a", "", b"", False)]))
    def guest_talks(self, message: Message) -> None:
        self.to_host += self.guest.send(message)

    @precondition(lambda self: self.guest.state is State.RUNNING)
    @rule()
    def guest_is_done(self) -> None:
        self.to_host += self.guest.send(Done(True, None))

    @precondition(lambda self: self.host.state is State.IDLE)
    @rule()
    def host_runs(self) -> None:
        self.to_guest += self.host.send(PutFile("a", b"", True)) + self.host.send(RUN)

    @precondition(lambda self: self.host.outstanding)
    @rule(data=st.data(), ok=st.booleans())
    def host_answers(self, data: st.DataObject, ok: bool) -> None:
        number = data.draw(st.sampled_from(list(self.host.outstanding)))
        self.to_guest += self.host.send(ToolReturn(number, None) if ok else ToolFail(number, "c", "m", False, None))

    @rule(size=st.integers(1, 200))
    def bytes_reach_the_host(self, size: int) -> None:
        self.host.receive_data(bytes(self.to_host[:size]))
        del self.to_host[:size]
        for message in iter(self.host.next_message, None):
            assert (type(message) is CancelCall) <= self.host.is_cancelled(getattr(message, "id", 0))

    @rule(size=st.integers(1, 200))
    def bytes_reach_the_guest(self, size: int) -> None:
        self.guest.receive_data(bytes(self.to_guest[:size]))
        del self.to_guest[:size]
        for message in iter(self.guest.next_message, None):
            if isinstance(message, (ToolReturn, ToolFail)):
                assert message.id not in self.answered
                self.answered.add(message.id)

    @invariant()
    def an_empty_wire_means_agreement(self) -> None:
        if not self.to_host and not self.to_guest:
            assert self.host.state is self.guest.state
            assert list(self.host.outstanding) == list(self.guest.outstanding)


@pytest.mark.slow
@pytest.mark.conforms("T7", "T-b1", "Q-b6")
def test_two_honest_ends_never_accuse_each_other() -> None:
    run_state_machine_as_test(HonestEnds)
