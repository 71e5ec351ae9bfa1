"""Every exception the wire raises, in one tree.

ProtocolError(Exception)
├── LocalProtocolError     us: this side tried to send something illegal; a bug in the caller
└── RemoteProtocolError    them: the peer is hostile or broken, its connection is finished

UnsendableValue(TypeError) a value has no form on the wire; the message names its path
ValueTooLarge(ValueError)  a value is too large or too deep for the wire; names size and limit
"""


class ProtocolError(Exception):
    """The bridge protocol was broken by one of its two sides."""


class LocalProtocolError(ProtocolError):
    """This side tried an illegal move. A bug here, not an attack."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something illegal. Nothing it says afterwards can be believed."""


class UnsendableValue(TypeError):
    """A value has no form on the wire."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"cannot send {path}: {problem}")
        self.path = path


CURES = {
    "bytes": "; send less at a time",
    "elements": "; the limit is message_elements, or answer_elements for what a tool returns: send less at a time, or "
    "one text, such as json.dumps(x), which counts as one element",
}
"""What to do about a value that is too large, by the unit of the limit."""


class ValueTooLarge(ValueError):
    """A value has a form on the wire, but it is larger or deeper than the limit."""

    def __init__(self, what: str, size: int, limit: int, unit: str = "bytes", cure: str = "") -> None:
        super().__init__(f"{what} too large ({size} > {limit} {unit}){cure or CURES.get(unit, '')}")
        self.size = size
        self.limit = limit
