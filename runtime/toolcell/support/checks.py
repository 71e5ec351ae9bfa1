"""Refuse a wrong setting, result or answer where its author writes it, with its name, its value and what it may be."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from toolcell.errors import UsageError


def check_kind(name: str, value: object, *kinds: type, cure: str = "") -> None:
    """Refuse a value of another type.

    Raises:
        UsageError: names the type it must have.
    """
    if not isinstance(value, kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise UsageError(f"{name} must be {wanted}, not {brief(value)}{f'; {cure}' if cure else ''}")


def check_path(name: str, value: object) -> None:
    """Refuse what is not a path, and an empty text, which would be the current directory.

    Raises:
        UsageError: it is one of these.
    """
    check_kind(name, value, str, os.PathLike)
    if value == "":
        raise UsageError(f"{name} must be a path, not an empty text; the current directory is '.'")


def check_does(name: str, value: object, protocol: type, cure: str) -> None:
    """Refuse an object that lacks methods of a runtime-checkable protocol, and a class in place of an object.

    Raises:
        UsageError: names the protocol; `cure` says what to write.
    """
    if isinstance(value, type) or not isinstance(value, protocol):
        raise UsageError(f"{name} must be of the kind {protocol.__name__}, {cure}, not {brief(value)}")


def check_one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a value that is not in a list.

    Raises:
        UsageError: names the values it may have.
    """
    known = list(allowed)
    if not any(type(value) is type(each) and value == each for each in known):
        raise UsageError(f"{name} must be one of {', '.join(map(repr, known))}, not {brief(value)}")


def check_count(name: str, value: object, least: int, *, optional: bool = False) -> None:
    """Refuse what is not a whole number of at least `least`; `optional`: None is allowed.

    Raises:
        UsageError: names the least.
    """
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {brief(value)}")


def check_seconds(name: str, value: object, *, optional: bool = False) -> None:
    """Refuse what is not a duration. `math.inf` is one; `optional`: None is allowed.

    Raises:
        UsageError: it is negative, NaN or no number.
    """
    if optional and value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value < 0:  # type: ignore[arg-type,operator]
        raise UsageError(f"{name} must be a number of seconds, at least 0, not {brief(value)}")


def brief(value: Any) -> str:
    """Return the beginning of a value's `repr`, or its type where that fails."""
    try:
        return f"{value!r:.80}"
    except (Exception, SystemExit):
        return f"a {type(value).__name__}"


def text_of(value: object) -> str:
    """Return anything as text that can be sent: its `str`, without lone surrogates."""
    try:
        text = str.__str__(value) if isinstance(value, str) else str(value)
    except (Exception, SystemExit):  # an exception whose __str__ fails must not take the batch with it
        return ""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def check_fields(checked: object, fields: Iterable[tuple[str, type | tuple[type, ...], str]]) -> None:
    """Check the kinds of an object's fields. Shape: (name, kind, what to write), for each field.

    Raises:
        UsageError: one is of another kind; names it.
    """
    for name, kind, cure in fields:
        value = getattr(checked, name)
        if not isinstance(value, kind):
            raise UsageError(f"{type(checked).__name__}({name}) must be {cure}, not {brief(value)}")
