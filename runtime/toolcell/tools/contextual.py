"""Views of a contextual tool: what its `set_context` and `set_callback` set is for one call, all else is the author's.

Such a tool keeps its chat or callback in itself, and calls for several chats overlap. A view is an object of the tool's
class that passes everything on to the author's instance, except for the attributes that the two setters set.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from toolcell.errors import RegistrationError

_TOOL, _OWN, _IS_SETTING = "_toolcell_tool", "_toolcell_own", "_toolcell_is_setting"
_READ, _WRITE = object.__getattribute__, object.__setattr__


def view_class(kind: Any) -> Any:
    """Return the class of views of such a tool.

    Raises:
        RegistrationError: its class cannot be derived from.
    """

    def read(view: Any, name: str) -> Any:
        own = _READ(view, _OWN)
        if name in own:
            return own[name]
        tool = _READ(view, _TOOL)
        if name == "__dict__":
            return tool.__dict__
        if name == "__class__":
            return kind
        if name in getattr(tool, "__dict__", ()):
            return getattr(tool, name)
        if isinstance(inspect.getattr_static(kind, name, None), types.MemberDescriptorType):  # of __slots__
            return getattr(tool, name)
        return kind.__getattribute__(view, name)

    def write(view: Any, name: str, value: object) -> None:
        own = _READ(view, _OWN)
        if isinstance(inspect.getattr_static(kind, name, None), property):
            kind.__setattr__(view, name, value)
        elif name in own or _READ(view, _IS_SETTING):
            own[name] = value
        else:
            setattr(_READ(view, _TOOL), name, value)

    def delete(view: Any, name: str) -> None:
        own = _READ(view, _OWN)
        if name in own:
            del own[name]
        else:
            delattr(_READ(view, _TOOL), name)

    body = {"__getattribute__": read, "__setattr__": write, "__delattr__": delete, "__module__": kind.__module__}
    try:
        return type(kind)(kind.__name__, (kind,), body)
    except TypeError as exc:
        raise RegistrationError(
            f"a tool with set_context or set_callback, and its class {kind.__name__} cannot be derived from: {exc}"
        ) from exc


def new_view(view: Any, tool: Any) -> Any:
    """Return a view of a tool for one call."""
    made = object.__new__(view)
    _WRITE(made, _TOOL, tool)
    _WRITE(made, _OWN, {})
    _WRITE(made, _IS_SETTING, False)
    return made


@contextmanager
def setting(view: Any) -> Iterator[None]:
    """Keep what is set inside the block for this view alone."""
    _WRITE(view, _IS_SETTING, True)
    try:
        yield
    finally:
        _WRITE(view, _IS_SETTING, False)
