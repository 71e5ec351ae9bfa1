"""Refuse a wrong setting, result or answer where its author writes it, with its name, its value and what it may be."""

from __future__ import annotations

import functools
import heapq
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

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


# Refuse a misspelt keyword argument with the name that was probably meant. Python's own error does not tell it.

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


# Find the name that was probably meant by one that does not exist.

ALIKE = 0.6
"""difflib's ratio from which on two names count as alike."""

_MAX_COMPARED_CHARS = 20_000
"""Most characters of all candidates that are looked at, together."""
_MAX_NAME_CHARS = 80
_MAX_CLOSE = 4
"""Candidates that are compared in full, those with the most letters in common: each takes up to a millisecond."""


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `name`, if any is alike at all: of equals the one that begins so, then the first.

    Work is bounded, whatever the name is.
    """
    import difflib  # only for those who misspell

    name = name[:_MAX_NAME_CHARS]
    matcher = difflib.SequenceMatcher(None, "", name)
    likely = list[tuple[float, int, str]]()
    left = _MAX_COMPARED_CHARS
    for place, candidate in enumerate(candidates):
        if (left := left - len(candidate)) < 0:
            break
        if len(candidate) <= 2 * _MAX_NAME_CHARS:
            matcher.set_seq1(candidate)
            if matcher.real_quick_ratio() >= ALIKE and (upper := matcher.quick_ratio()) >= ALIKE:
                likely.append((-upper, place, candidate))
    found = list[tuple[float, bool, int, str]]()
    for _, place, candidate in heapq.nsmallest(_MAX_CLOSE, likely):
        matcher.set_seq1(candidate)
        if (ratio := matcher.ratio()) >= ALIKE:
            found.append((-ratio, not candidate.startswith(name), place, candidate))
    return min(found)[-1] if found else None


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return 'did you mean x?', or `otherwise` when nothing is alike."""
    match = closest(name, known)
    return f"did you mean {match}?" if match else otherwise


def did_you_mean(name: str, candidates: Iterable[str], quote: str = "`") -> str:
    """Shape: ' (did you mean `query`?)', or nothing."""
    match = closest(name, candidates)
    return f" (did you mean {quote}{match}{quote}?)" if match else ""


def is_async(function: Callable[..., Any]) -> bool:
    """True when calling it gives something to await, as far as can be told beforehand."""
    target = inspect.unwrap(function)
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
