"""The fuzz target, run for a short time, and a proof that it finds faults."""

from __future__ import annotations

import pytest

from rows import each_row
from toolcell_bridge.wire import connection
from toolcell_bridge.wire.messages import TAGS
from wire.fuzz_frames import fuzz


@pytest.mark.conforms("T7", "T-b1")
@each_row("seed", [1, 2])
def test_mutated_frames_are_followed_or_end_the_connection(seed: int) -> None:
    tally = fuzz(10_000, seed)
    assert tally.refused > 1000
    assert set(tally.delivered) == {kind.__name__ for kind in TAGS.values()}


@each_row("escaping", [KeyError, ValueError, MemoryError, RecursionError, UnicodeDecodeError])
def test_the_fuzzer_reports_whatever_else_escapes(escaping: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: bytes, most: int) -> None:
        raise escaping.__new__(escaping)

    monkeypatch.setattr(connection, "decode_counted", broken)
    with pytest.raises(AssertionError, match=f"{escaping.__name__} from [0-9a-f]+"):
        fuzz(100, 1)


def test_the_fuzzer_reports_a_connection_that_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_state(end: connection.Connection, state: connection.State) -> None:
        if state is not connection.State.DEAD:
            vars(end)["state"] = state

    kept = property(lambda end: vars(end)["state"], set_state)
    monkeypatch.setattr(connection.Connection, "state", kept, raising=False)
    with pytest.raises(AssertionError):
        fuzz(100, 1)
