"""The wire and the guest: what runs inside a sandbox, and the protocol both ends speak.

Knows the standard library and msgpack, nothing of the host package. `toolcell` imports this, never the
other way round.
"""

__version__ = "0.1.0"
