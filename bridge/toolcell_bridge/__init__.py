"""The wire and the guest: what runs inside a sandbox, and the protocol both ends speak.

Knows the standard library and msgpack, nothing of the host package. `toolcell` imports this, never the other way round.
The names below are for backends and whoever else speaks the protocol; each is imported when it is first used.
"""

__version__ = "0.1.0"

__all__ = [
    "CELL", "GUEST_NAMES", "HTTP", "HTTP_READ", "INSTALL_PACKAGE", "MAX_DEPTH", "MAX_ELEMENTS", "NOTEBOOK_INPUT",
    "NOTEBOOK_SHELL", "PART_BYTES", "PROTOCOL_VERSION", "SHOWN", "CallTool", "Connection", "Done", "FrameReader",
    "GuestMessage", "Hello", "LocalProtocolError", "Log", "Message", "Plain", "ProtocolError", "PutFile",
    "RemoteProtocolError", "Result", "RunScript", "TableCodec", "ToolFail", "ToolReturn", "UnsendableValue",
    "ValueTooLarge", "__version__", "decode", "is_visible", "picture_type", "syscall", "to_plain", "why_mortal",
]  # fmt: skip

TYPE_CHECKING = False  # the launcher starts without `typing`

if TYPE_CHECKING:
    from toolcell_bridge.entry.immortal_heap import why_mortal
    from toolcell_bridge.guest.notebook_words import CELL, NOTEBOOK_INPUT, NOTEBOOK_SHELL, SHOWN
    from toolcell_bridge.guest.pictures import picture_type
    from toolcell_bridge.guest.tools import GUEST_NAMES
    from toolcell_bridge.guest.values import to_plain
    from toolcell_bridge.isolation.syscalls import syscall
    from toolcell_bridge.wire.codec import TableCodec, decode
    from toolcell_bridge.wire.connection import Connection
    from toolcell_bridge.wire.errors import (
        LocalProtocolError,
        ProtocolError,
        RemoteProtocolError,
        UnsendableValue,
        ValueTooLarge,
    )
    from toolcell_bridge.wire.framing import FrameReader
    from toolcell_bridge.wire.invisible import is_visible
    from toolcell_bridge.wire.messages import (
        MAX_ELEMENTS,
        PROTOCOL_VERSION,
        CallTool,
        Done,
        GuestMessage,
        Hello,
        Log,
        Message,
        Plain,
        PutFile,
        Result,
        RunScript,
        ToolFail,
        ToolReturn,
    )
    from toolcell_bridge.wire.plain import MAX_DEPTH
    from toolcell_bridge.wire.requests import HTTP, HTTP_READ, INSTALL_PACKAGE, PART_BYTES
else:
    _HOMES = {
        "entry.immortal_heap": "why_mortal",
        "guest.notebook_words": "CELL NOTEBOOK_INPUT NOTEBOOK_SHELL SHOWN",
        "guest.pictures": "picture_type",
        "guest.tools": "GUEST_NAMES",
        "guest.values": "to_plain",
        "isolation.syscalls": "syscall",
        "wire.codec": "TableCodec decode",
        "wire.connection": "Connection",
        "wire.errors": "LocalProtocolError ProtocolError RemoteProtocolError UnsendableValue ValueTooLarge",
        "wire.framing": "FrameReader",
        "wire.invisible": "is_visible",
        "wire.messages": (
            "MAX_ELEMENTS PROTOCOL_VERSION CallTool Done GuestMessage Hello Log Message Plain PutFile Result RunScript "
            "ToolFail ToolReturn"
        ),
        "wire.plain": "MAX_DEPTH",
        "wire.requests": "HTTP HTTP_READ INSTALL_PACKAGE PART_BYTES",
    }

    def __getattr__(name):
        for home, names in _HOMES.items():
            if name in names.split():
                from importlib import import_module

                return getattr(import_module(f"{__name__}.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
