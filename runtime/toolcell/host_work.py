"""`HostWork`: what one run makes the host do, in units that are linear in what its guest sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELEMENT_WORK: Final = 64
"""For a list, a dict, and each item and key in them. Also their memory in bytes, roughly: however short on the wire."""

MESSAGE_WORK: Final = 256
"""For each message: an empty one costs the host time too."""


@dataclass(slots=True)
class HostWork:
    """The work of one run. Whoever does the work counts it, before or after; the run ends past the limit."""

    limit: int
    used: int = 0
    calls: int = 0
    """Part of the work: what the messages of the tool calls took that were admitted. About their memory in bytes."""
