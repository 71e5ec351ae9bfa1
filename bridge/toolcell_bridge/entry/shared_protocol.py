"""Constants that a host and a shared container agree on. Imports nothing, so a host on any platform can import it."""

KILL = b"k"
"""Written to a supervisor's control pipe: kill every process of its sandbox."""

FREEZE = b"f"
"""Written to a supervisor's control pipe: stop every process of its sandbox, until `THAW` or its end."""

THAW = b"t"
"""Written to a supervisor's control pipe: let every process of its sandbox run again."""

ASK = b"a"
"""Written to a supervisor's control pipe: have the script's main thread write which line it is at to descriptor 2."""

INTERRUPT = b"i"
"""Written to a supervisor's control pipe: interrupt the script of a session."""

CHANNELS = 3
"""Multiplexed channels of one sandbox: its bridge, and what it writes raw to descriptors 1 and 2."""

CHANNEL_STRIDE = 4
"""Channel c of sandbox n has the number `n * CHANNEL_STRIDE + c`."""
