"""Text that is JSON as data: what a script and a plan are given of a tool that answers with JSON text.

The model still reads the text as the tool wrote it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NoReturn

from toolcell.errors import RegistrationError
from toolcell.support import daemon_threads
from toolcell.support.text import one_line
from toolcell.tools.options import ToolOptions
from toolcell.tools.parts import Text
from toolcell.tools.result import ErrorCode, Status, ToolResult
from toolcell.tools.stub_types import declared
from toolcell.tools.value_check import ValueCheck
from toolcell.tools.values import plain_value

INLINE_CHARS = 100_000
"""Longer text is read in a thread: it takes milliseconds."""
MAX_REFERENCES = 8
"""Followed to find out whether a return type takes text."""


async def with_data(name: str, options: ToolOptions, result: ToolResult) -> ToolResult:
    """Return a tool's own result with the data that its text is.

    A declared return type decides: where it takes text, nothing changes; where it does not, the text must be JSON of
    that type, or the call has failed. Without one, a JSON object or array is data, and any other text stays text.
    `ToolOptions(raw=True)` leaves every text as it is.
    """
    if not may_be_data(options, result):
        return result
    if len(result.output) > INLINE_CHARS:
        return await daemon_threads.run_sync(as_data, name, options, result)
    return as_data(name, options, result)


def as_data(name: str, options: ToolOptions, result: ToolResult) -> ToolResult:
    """Do the same at once, whatever it takes."""
    if not may_be_data(options, result):
        return result
    returns, text = declared(options.returns), result.output
    wants_data = returns is not None and _says_a_type(returns)
    try:
        value = _parsed(text)
    except (ValueError, RecursionError) as exc:
        return _mismatch(name, result, f"its text is not JSON: {exc}") if wants_data else result
    if returns is not None and wants_data and (problem := _problem(returns, value)):
        return _mismatch(name, result, f"the JSON in its text does not fit: {problem}")
    return dataclasses.replace(result, value=value, has_value=True)


def may_be_data(options: ToolOptions, result: ToolResult) -> bool:
    """Return whether a result has text alone that has to be read as JSON."""
    if result.has_value or not result.parts or result.status is not Status.OK or options.raw or options.orchestrates:
        return False
    if result.files or not all(type(part) is Text for part in result.parts):
        return False
    returns = declared(options.returns)
    if returns is not None and _says_a_type(returns):
        return not _takes_text(returns, returns, MAX_REFERENCES)
    return result.output.lstrip()[:1] in ("{", "[")


def _parsed(text: str) -> Any:
    return plain_value(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _mismatch(name: str, result: ToolResult, problem: str) -> ToolResult:
    message = f'tool "{name}" declares what it returns, and {one_line(problem, 300)}'
    failure = ToolResult.fail(message, code=ErrorCode.NO_RESULT, output=result.output, retryable=False)
    return dataclasses.replace(failure, details=result.details, usage=result.usage)


def _says_a_type(schema: Mapping[str, Any]) -> bool:
    return not schema.keys().isdisjoint({"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"})


def _takes_text(schema: object, root: Mapping[str, Any], left: int) -> bool:
    """Return whether some text is of this type. What cannot be found out may be text."""
    if not isinstance(schema, Mapping) or left == 0:
        return True
    if "const" in schema or "enum" in schema:
        return any(isinstance(each, str) for each in (schema.get("const"), *schema.get("enum", ())))
    if isinstance(target := schema.get("$ref"), str):
        return _takes_text(_target(root, target), root, left - 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(name), list):
            return any(_takes_text(choice, root, left - 1) for choice in choices)
    if isinstance(every := schema.get("allOf"), list):
        return all(_takes_text(each, root, left - 1) for each in every)
    kinds = schema.get("type")
    return kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _target(root: Mapping[str, Any], reference: str) -> object:
    part: object = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        part = part.get(step) if isinstance(part, Mapping) and step else part
    return part


def _problem(schema: Mapping[str, Any], value: object) -> str:
    """Return what is wrong with a value of a declared type; empty when nothing is."""
    try:
        check = _check(json.dumps(schema, default=str))
    except RegistrationError:  # a return type that says nothing that can be checked
        return ""
    problem = check.problem(value)
    return "" if problem is None else f"{'/'.join(map(str, problem.path)) or 'root'}: {problem.message}"


@lru_cache(128)
def _check(schema: str) -> ValueCheck:
    return ValueCheck(json.loads(schema))
