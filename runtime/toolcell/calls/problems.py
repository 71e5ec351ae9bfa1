"""What is said of arguments that cannot be used: values as JSON, cut where they get long, and names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from toolcell.calls.parts import readable_leaf
from toolcell.calls.values import MAX_STEP_CHARS, Path, ValueProblem

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_PROBLEMS = 20
MAX_MESSAGE_CHARS = 4_000
"""Most characters of one problem: two long lists of allowed values are more than a model needs to read."""
MAX_LISTED_ERRORS = 1000
"""Errors of pydantic, of which the first `MAX_PROBLEMS` are named. It can only list all of them, and each takes 400
bytes."""
_MAX_VALUE_CHARS = 120


def quoted(value: Any) -> str:
    """A value as JSON, cut where it gets long."""
    return bounded_json(value, _MAX_VALUE_CHARS, "...")


def bounded_json(value: Any, most: int, cut: str, indent: int | None = None) -> str:
    """A value as JSON of at most `most` characters, followed by `cut` where that is not all. Stops encoding there."""
    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, indent=indent, default=readable_leaf).iterencode(value):
            text += piece[: most + 1]
            if len(text) > most:
                return text[:most] + cut
    except (Exception, SystemExit):  # it contains itself, has keys of a strange type, or its own code fails
        return f"({type(value).__name__} that cannot be shown as JSON)"
    return text


MAX_LISTED = 20
"""Names a message lists before it only says how many more there are."""


def list_names(names: Iterable[str]) -> str:
    """Shape: 'a, b, c and 7 more'."""
    every = list(names)
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return ", ".join(every[:MAX_LISTED]) + more


class ParameterError(ValueError):
    """The type of one parameter refuses a value that fits its schema. Keeps pydantic's error until it is described."""

    def __init__(self, name: str, error: ValidationError) -> None:
        super().__init__(name)
        self.name = name
        self.error = error


def described(exc: ValueError | TypeError) -> str:
    """Say what a tool's own Python types found wrong with arguments that fit its schema."""
    from pydantic import ValidationError

    above: Path = ()
    if isinstance(exc, ParameterError):
        above, exc = (exc.name,), exc.error
    if not isinstance(exc, ValidationError):
        return str(exc)[:MAX_MESSAGE_CHARS]
    if (count := exc.error_count()) > MAX_LISTED_ERRORS:
        return f"{count} validation errors for {exc.title[:MAX_STEP_CHARS]}"
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:MAX_PROBLEMS]
    named = [str(ValueProblem((*above, *error["loc"]), error["msg"][:MAX_MESSAGE_CHARS])) for error in errors]
    if count > MAX_PROBLEMS:
        named.append("and more problems")
    return "\n  - ".join(named)
