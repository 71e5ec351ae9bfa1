"""JSON in texts: as models write it, in fences and broken off, and in the text of tools, which scripts get as data."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from toolcell.calls.checker_process import find_problem
from toolcell.calls.options import ToolOptions
from toolcell.calls.parts import Text
from toolcell.calls.result import ErrorCode, Status, ToolResult
from toolcell.calls.schema import pointed
from toolcell.calls.values import plain_value
from toolcell.support import daemon_threads
from toolcell.support.text import one_line


class ParseMode(enum.StrEnum):
    """How a text was read as JSON."""

    STRICT = "strict"
    """It is JSON."""
    REPAIRED = "repaired"
    """Complete, but with small mistakes: code fences, raw line breaks in strings, trailing commas."""
    PARTIAL = "partial"
    """It breaks off; what was there has been kept."""
    INVALID = "invalid"
    """It cannot be read."""


SAFE_MODES = frozenset({ParseMode.STRICT, ParseMode.REPAIRED})
"""Arguments read in any other way may lack what the model was about to say; such calls are not run."""

_FENCE = re.compile(r"```(?:json)?[^\S\n]*+\n(?P<body>.*)```", re.DOTALL)
_MISTAKES = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*+"?)|,(?=\s*+[}\]])', re.DOTALL)
"""Strings, finished or not, and commas before a closing bracket. Possessive, so that work is linear."""
_CONTROL = re.compile(r"[\x00-\x1f]")


def parse_json(text: str) -> tuple[Any, ParseMode]:
    """Read JSON that a model's stream may have left unfinished or slightly wrong.

    Shape: (value, mode); the value of invalid text is None. pydantic reads what breaks off; it takes no fences, no raw
    line breaks and no trailing commas, so these are mended before.
    """
    try:
        return json.loads(text), ParseMode.STRICT
    except (ValueError, RecursionError):
        pass
    text = text.removeprefix("\ufeff")
    if fenced := _FENCE.fullmatch(text.strip()):
        text = fenced["body"]
    text = _MISTAKES.sub(_mended, text)
    try:
        return json.loads(text), ParseMode.REPAIRED
    except (ValueError, RecursionError):
        pass
    from pydantic_core import from_json

    try:
        from_json(text)
    except TypeError:  # a lone surrogate
        return None, ParseMode.INVALID
    except ValueError as exc:
        if "EOF while parsing" not in str(exc):  # something is wrong before the end
            return None, ParseMode.INVALID
    try:
        return from_json(text, allow_partial="trailing-strings"), ParseMode.PARTIAL
    except ValueError:
        return None, ParseMode.INVALID


def _mended(mistake: re.Match[str]) -> str:
    string = mistake["string"]
    return "" if string is None else _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], string)


INLINE_CHARS = 100_000
"""Longer text is read in a thread: it takes milliseconds."""
MAX_PARTS = 200
"""Most parts of a return type, that are looked at to find out whether it takes text. A part counts as often as it is
named."""


async def with_data(name: str, options: ToolOptions, result: ToolResult, *, is_foreign: bool) -> ToolResult:
    """Return a tool's own result with the data that its text is.

    A declared return type decides: where it takes text, nothing changes; where it does not, the text must be JSON of
    that type, or the call has failed. Without one, a JSON object or array is data, and any other text stays text.
    `ToolOptions(raw=True)` leaves every text as it is. `is_foreign`: a stranger declared the type.
    """
    if not may_be_data(options, result):
        return result
    if len(result.output) > INLINE_CHARS:
        read = await daemon_threads.run_sync(as_data, name, options, result)
    else:
        read = as_data(name, options, result)
    returns = options.returns
    if returns is None or not read.has_value or not _says_a_type(returns):
        return read
    if (problem := await find_problem(returns, read.value, is_foreign=is_foreign)) is None:
        return read
    at = "/".join(map(str, problem.path)) or "root"
    return _mismatch(name, result, f"the JSON in its text does not fit: {at}: {problem.message}")


def as_data(name: str, options: ToolOptions, result: ToolResult) -> ToolResult:
    """Do the same at once, whatever it takes, but do not check the data."""
    if not may_be_data(options, result):
        return result
    returns, text = options.returns, result.output
    wants_data = returns is not None and _says_a_type(returns)
    try:
        value = _parsed(text)
    except (ValueError, RecursionError) as exc:
        return _mismatch(name, result, f"its text is not JSON: {exc}") if wants_data else result
    return dataclasses.replace(result, value=value, has_value=True)


def may_be_data(options: ToolOptions, result: ToolResult) -> bool:
    """Return whether a result has text alone that has to be read as JSON."""
    if result.has_value or not result.parts or result.status is not Status.OK or options.raw or options.orchestrates:
        return False
    if result.files or not all(type(part) is Text for part in result.parts):
        return False
    returns = options.returns
    if returns is not None and _says_a_type(returns):
        return not _takes_text(returns, returns, iter(range(MAX_PARTS)))
    return result.output.lstrip()[:1] in ("{", "[")


def has_to_be_checked(options: ToolOptions, result: ToolResult) -> bool:
    """Return whether the data of a result's text has to be of a declared type."""
    returns = options.returns
    return returns is not None and _says_a_type(returns) and may_be_data(options, result)


def strict_json(text: str) -> Any:
    """Return the data of a JSON text. NaN and infinities are not JSON.

    Raises:
        ValueError, RecursionError: it is not JSON, or is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _parsed(text: str) -> Any:
    return plain_value(strict_json(text))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _mismatch(name: str, result: ToolResult, problem: str) -> ToolResult:
    message = f'tool "{name}" declares what it returns, and {one_line(problem, 300)}'
    failure = ToolResult.fail(message, code=ErrorCode.NO_RESULT, output=result.output, retryable=False)
    return dataclasses.replace(failure, details=result.details, usage=result.usage)


def _says_a_type(schema: Mapping[str, Any]) -> bool:
    return not schema.keys().isdisjoint({"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"})


def _takes_text(schema: object, root: Mapping[str, Any], turns: Iterator[int]) -> bool:
    """Return whether some text is of this type. What cannot be found out in so many turns may be text."""
    if not isinstance(schema, Mapping) or next(turns, None) is None:
        return True
    if "const" in schema or "enum" in schema:
        return any(isinstance(each, str) for each in (schema.get("const"), *schema.get("enum", ())))
    if isinstance(target := schema.get("$ref"), str):
        return _takes_text(pointed(root, target), root, turns)
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(name), list):
            return any(_takes_text(choice, root, turns) for choice in choices)
    if isinstance(every := schema.get("allOf"), list):
        return all(_takes_text(each, root, turns) for each in every)
    kinds = schema.get("type")
    return kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
