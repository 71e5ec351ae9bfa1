"""Describe the script's frames of an exception with their local variables, so that a model can mend the script.

Bounded in every direction, and only plain values are shown: a `__repr__` of the script's own classes is not called.
What looks like a secret by its name is left out; the host takes out those that it knows.
"""

from __future__ import annotations

import re
import reprlib
import sys
import types
from types import FrameType, TracebackType
from typing import Any, Final

from toolcell_bridge.guest.scripts import is_script
from toolcell_bridge.guest.tools import GUEST_NAMES, ToolFunction
from toolcell_bridge.wire.messages import Plain

FRAMES: Final = 6
"""Innermost frames that are described."""

LOCALS: Final = 12
"""Variables of one frame, those that were set last."""

CHARS: Final = 160
"""Most characters of one name or value."""

HIDDEN: Final = "[redacted]"

_SECRET = re.compile(r"passw|secret|token|api_?key|credential|authorization|cookie", re.IGNORECASE)
_LEFT_OUT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, ToolFunction)
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, type(None), range)


class _ShortRepr(reprlib.Repr):
    """`repr` of plain values; of others, their type and size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple, self.maxset = 3, 6, 8, 8, 8
        self.maxstring = self.maxother = 100

    def repr1(self, x: Any, level: int) -> str:
        """Describe one value at a depth."""
        return super().repr1(x, level) if type(x) in _PLAIN else _kind(x)


def _kind(value: object) -> str:
    """Return type and size of a value that is not plain."""
    name = type(value).__name__
    if type(value).__module__.partition(".")[0] in ("numpy", "pandas"):
        return f"<{name} of shape {getattr(value, 'shape', ())}>"
    return f"<{name}>"


def describe_frames(traceback: TracebackType | None) -> list[Plain]:
    """Return the script's innermost frames, outermost first. Shape: [{"line", "function", "locals": {name: text}}]."""
    found: list[tuple[int, FrameType]] = []
    while traceback is not None:
        if is_script(traceback.tb_frame.f_code.co_filename):
            found.append((traceback.tb_lineno, traceback.tb_frame))
            del found[:-FRAMES]
        traceback = traceback.tb_next
    return [_described(line, frame) for line, frame in found]


def _described(line: int, frame: FrameType) -> Plain:
    names = [name for name, value in frame.f_locals.items() if _is_shown(name, value)]
    short = _ShortRepr()
    shown = {name: _text(short, name, frame.f_locals[name]) for name in names[-LOCALS:]}
    return {"line": line, "function": frame.f_code.co_name[:CHARS], "locals": dict(shown)}


def _is_shown(name: object, value: object) -> bool:
    if (
        type(name) is not str
        or len(name) > CHARS
        or not name.isidentifier()
        or name.startswith("__")
        or name in GUEST_NAMES
    ):
        return False
    return not issubclass(type(value), _LEFT_OUT) and value is not sys.modules.get("__main__")


def _text(short: reprlib.Repr, name: str, value: object) -> str:
    if _SECRET.search(name):
        return HIDDEN
    try:
        text = short.repr(value)
    except Exception as exc:  # a number of too many digits
        text = f"<{type(value).__name__}: {type(exc).__name__}>"
    return text if len(text) <= CHARS else f"{text[:CHARS]}..."
