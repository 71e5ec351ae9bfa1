"""Constants that a host and a shared container agree on. Imports nothing, so a host on any platform can import it."""

KILL = b"k"
"""Written to a supervisor's control pipe: kill every process of its sandbox."""

FREEZE = b"f"
"""Written to a supervisor's control pipe: stop every process of its sandbox until the sandbox is killed."""

CHANNELS = 3
"""Multiplexed channels of one sandbox: its bridge, and what it writes raw to descriptors 1 and 2."""

CHANNEL_STRIDE = 4
"""Channel c of sandbox n has the number `n * CHANNEL_STRIDE + c`."""
