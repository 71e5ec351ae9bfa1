"""`HostWork`: what one run makes the host do, in units that are linear in what its guest sent."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from toolcell_bridge.wire.tables import Array, Table

ELEMENT_WORK: Final = 64
"""For a list, a dict, and each item and key in them. Also their memory in bytes, roughly: however short on the wire."""

MESSAGE_WORK: Final = 256
"""For each message: an empty one costs the host time too."""


KEPT_BYTES: Final = 64 << 20
"""Most bytes of what the latest runs leave in memory for a later commit, and as much for a revert. The oldest make
room."""


LONG_BYTES: Final = 1 << 18
"""Size of what calls were made with: digesting, signing and writing more of it is done in a thread."""


NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""To ask whether one is a mapping takes longer than all else, and there may be 260,000 of them."""


def about_bytes(data: object) -> int:
    """Return what data takes in memory, about. What stands in it twice counts once."""
    rest, seen, count = [data], set[int](), 0
    while rest:
        value = rest.pop()
        count += ELEMENT_WORK
        if type(value) in NUMBERS:
            continue
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            if id(value) not in seen:
                seen.add(id(value))
                count += len(value)
        elif isinstance(value, (dict, list, tuple, Mapping)) and id(value) not in seen:
            seen.add(id(value))
            rest += value
            if not isinstance(value, (list, tuple)):
                rest += value.values()
        elif isinstance(value, Array | Table):
            count += value.nbytes
    return count


@dataclass(slots=True)
class HostWork:
    """The work of one run. Whoever does the work counts it, before or after; the run ends past the limit."""

    limit: int
    used: int = 0
    calls: int = 0
    """Part of the work: what the messages of the tool calls took that were admitted. About their memory in bytes."""
    uploaded: int = 0
    """Bytes that were uploaded and are among the arguments of calls now. The limits of requests are for them."""
    tool_calls: int = sys.maxsize
    """Calls that the run may make, together with the saved scripts that run in it."""
    calls_made: int = 0
    """Calls that they have made."""
    above: HostWork | None = None
    """Work of the run that this one is a part of, as the run of a saved script is."""

    def call_limit_reached(self) -> int | None:
        """Return None while one more call may be made, or the limit that has been reached."""
        run: HostWork | None = self
        while run is not None:
            if run.calls_made >= run.tool_calls:
                return run.tool_calls
            run = run.above
        return None

    def count_call(self) -> None:
        """Count a call, here and in the runs above."""
        run: HostWork | None = self
        while run is not None:
            run.calls_made += 1
            run = run.above
