"""The wire and the guest: what runs inside a sandbox, and the protocol both ends speak.

Knows the standard library and msgpack, nothing of the host package. `toolcell` imports this, never the other way round.
The modules of `wire` are for backends and whoever else speaks the protocol; they are imported by their names.
"""

__version__ = "0.1.0"
