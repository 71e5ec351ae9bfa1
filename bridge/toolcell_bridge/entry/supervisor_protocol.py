"""Words that a host writes to a supervisor's control pipe. Imports nothing, so a host on any platform can import it."""

KILL = b"k"
"""Kill every process of its sandbox."""

FREEZE = b"f"
"""Stop every process of its sandbox, until `THAW` or its end."""

THAW = b"t"
"""Let every process of its sandbox run again."""

ASK = b"a"
"""Have the script's main thread write which line it is at to descriptor 2."""

INTERRUPT = b"i"
"""Interrupt the script of a session."""
