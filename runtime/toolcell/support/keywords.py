"""Refuse a misspelt keyword argument with the name that was probably meant. Python's own error does not tell it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from toolcell.errors import UsageError
from toolcell.support.spelling import suggestion

Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Made = TypeVar("Made")

SYNONYMS: Final = {
    "tools": "registry",
    **dict.fromkeys(("audit", "journal"), "record"),
    **dict.fromkeys(("schema", "input_schema", "inputSchema", "parameters"), "parameters"),
}
"""Arguments that have another name where they are given to everything that runs."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def keywords_known(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Return the function with a `UsageError` for a keyword that it does not have, and for too many values without."""

    def refused(args: Sequence[object], kwargs: Iterable[str]) -> UsageError | None:
        """Return the error about the first keyword that is not known, or about what needs one."""
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        everything = inspect.signature(function).parameters.values()
        parameters = [each for each in everything if each.name != "self"]
        known = [each.name for each in parameters if each.kind in _NAMED]
        by_position = [each.name for each in parameters if each.kind in _POSITIONAL]
        kinds = {each.kind for each in parameters}
        unknown = next((each for each in kwargs if each not in known), None)
        if unknown is not None and inspect.Parameter.VAR_KEYWORD not in kinds:
            return UsageError(f"{name}() has no argument {unknown!r:.80}; {_hint(unknown, known)}")
        given = len(args) - (len(parameters) < len(everything))
        if given > len(by_position) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            others = ", ".join(f"{each}=" for each in known if each not in by_position)
            said = f"{name}({', '.join(by_position)}) takes {len(by_position)} by position, not {given}"
            return UsageError(f"{said}; the rest by keyword{': ' * bool(others)}{others:.200}")
        return None

    if not inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
            try:
                return function(*args, **kwargs)
            except TypeError as exc:
                if (error := refused(args, kwargs)) is None:
                    raise
                raise error from exc

        return called

    @functools.wraps(function)
    async def awaited(*args: Given.args, **kwargs: Given.kwargs) -> Any:
        try:
            work = function(*args, **kwargs)
        except TypeError as exc:
            if (error := refused(args, kwargs)) is None:
                raise
            raise error from exc
        return await work  # it is a coroutine

    return awaited  # type: ignore[return-value]


def check_keywords(door: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check the keywords that a method hands on to another one.

    Raises:
        UsageError: names one that is not known, and the one that was probably meant.
    """
    for name in given:
        if name not in known:
            raise UsageError(f"{door}() has no argument {name!r:.80}; {_hint(name, list(known))}")


def fields_known(kind: type[Made]) -> type[Made]:
    """Do the same for the fields of a dataclass."""
    constructor: Any = kind.__init__
    setattr(kind, "__init__", keywords_known(constructor))  # noqa: B010 - mypy takes no assignment
    return kind


def _hint(unknown: str, known: list[str]) -> str:
    if SYNONYMS.get(unknown) in known:
        return f"did you mean {SYNONYMS[unknown]}?"
    extended = [each for each in known if each.startswith(f"{unknown}_")]
    return f"did you mean {extended[0]}?" if extended else suggestion(unknown, known, f"it has {', '.join(known)}")
