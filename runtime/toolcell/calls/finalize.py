"""Makes a result of what a tool returned or raised: bounded, redacted, and with the ids of its call.

Decides, and tells the user; it never runs a tool.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from toolcell.calls.call import Call
from toolcell.calls.checker_process import find_problem
from toolcell.calls.concurrency import maybe_await, passes_on
from toolcell.calls.options import ToolOptions
from toolcell.calls.result import (
    ErrorCode,
    File,
    Image,
    Part,
    Status,
    Text,
    ToolFailure,
    ToolResult,
    of_plain,
    of_text,
    part_data,
    to_json,
)
from toolcell.calls.run_state import NO_SECRETS, Secrets
from toolcell.calls.schema import pointed
from toolcell.calls.values import (
    LARGE_ELEMENTS,
    MAX_INTEGER,
    MIN_INTEGER,
    bounded_json,
    described_bytes,
    in_thread_if_large,
    is_large,
    plain_or_text,
    plain_value,
    values_in,
)
from toolcell.errors import ToolError
from toolcell.support import daemon_threads
from toolcell.support.checks import text_of
from toolcell.support.log import logger_of
from toolcell.support.text import cut_bytes, one_line
from toolcell_bridge.guest.pictures import picture_type
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.messages import ToolFail

_NOT_DATA = frozenset({Text, Image, File})

MAX_REMEMBERED_FAILURES = 256
"""Most failures of a run, of calls that failed."""


def as_result(value: Any, requires_result: bool = False) -> ToolResult:
    """Return a tool's return value as a result. A value that cannot be one is a failure of the call."""
    kind = type(value)
    if kind is str:
        return of_text(value)
    if kind is bool or kind is float or (kind is int and MIN_INTEGER <= value <= MAX_INTEGER):
        return of_plain(value)
    if kind is dict or (kind is list and _NOT_DATA.isdisjoint(map(type, value))):
        return _structured(value)
    if value is None:
        if not requires_result:
            return ToolResult()
        return ToolResult.fail("tool returned no result", code=ErrorCode.NO_RESULT)
    return _well_formed(value) if isinstance(value, ToolResult) else _odd_result(value)


async def made_result(value: Any, requires_result: bool = False) -> ToolResult:
    """Do the same as `as_result`: in a thread, where much is looked at."""
    make = partial(as_result, value, requires_result)
    return await daemon_threads.run_large(make) if holds_much(value) else make()


def holds_much(value: Any) -> bool:
    """Return whether a result is made of a list of records or the like, or of an object that has one."""
    if isinstance(value, set | frozenset | deque):
        return len(value) > LARGE_ELEMENTS
    if isinstance(value, Text | Image | File):
        return False
    if isinstance(value, ToolResult):
        return is_large(value.value)
    return is_large(
        value if isinstance(value, dict | list | tuple | str | bytes) else getattr(value, "__dict__", value)
    )


def _odd_result(value: Any) -> ToolResult:
    if hasattr(value, "to_tool_result"):
        return as_result(value.to_tool_result(), requires_result=True)
    match value:
        case File():
            return ToolResult(files=(value,), parts=(Text(f"({value.name}, {len(value.data)} bytes)"),))
        case Text() | Image():
            return ToolResult(parts=(value,))
        case tuple() if value and all(isinstance(part, Text | Image | File) for part in value):
            return ToolResult(parts=value)
        case list() if all(isinstance(part, str | Text | Image | File) for part in value):
            parts = tuple(Text(part) if isinstance(part, str) else part for part in value)
            return ToolResult(parts=parts, value=[*map(part_data, parts)], has_value=True)
        case str():
            return of_text(str.__str__(value))
    return _structured(value)


def _well_formed(result: ToolResult) -> ToolResult:
    """Return a tool's own result with its value as plain data, or a failure that says where it is none."""
    if not result.has_value:
        return result
    value = _plain(result.value)
    if type(value) is ToolResult:
        return value
    return result if value is result.value else dataclasses.replace(result, value=value)


def _plain(value: Any) -> Any:
    """Return a value as plain data, or a failure that says where it is none."""
    try:
        return plain_value(value)
    except ValueError as exc:
        return ToolResult.fail(f"tool returned data that is not JSON: {exc}", code=ErrorCode.NO_RESULT)


def _structured(value: Any) -> ToolResult:
    """Return any other value by the table that scripts send by: what a script may return, a tool may return."""
    match plain := _plain(value):
        case ToolResult():
            return plain
        case str():
            return of_text(plain)
        case bytes():
            ending = (picture_type(plain) or "/bin").partition("/")[2]
            return ToolResult(files=(File(f"result.{ending}", plain),), parts=(Text(described_bytes(plain)),))
        case None:
            return ToolResult()
        case _:
            return of_plain(plain)


def failure_of(call: Call, exc: BaseException) -> ToolResult:
    """Return a tool's exception as a failure: class and message for the model, the traceback only in `exc`."""
    given = getattr(exc, "__notes__", None)
    notes = "".join(f"\n{note}" for note in given if isinstance(note, str)) if isinstance(given, list) else ""
    if isinstance(exc, ToolError):
        return ToolResult.fail(exc.message + notes, code=exc.code, retryable=exc.retryable, facts=exc.details, exc=exc)
    said = text_of(exc)
    named = f"{type(exc).__name__}{f': {said}' if said else ''}"
    if call.options.expose_errors:
        return ToolResult.fail(named + notes, exc=exc)
    return ToolResult.fail(f'tool "{call.name}" raised {named}', code=ErrorCode.EXCEPTION, exc=exc)


_UNEXPECTED = {
    ErrorCode.EXCEPTION: "the tool raised {}",
    ErrorCode.PREPARE_FAILED: "preparing the arguments failed: {}",
    ErrorCode.HOOK_ERROR: "blocked: a hook failed while looking at this call ({})",
}


def is_unexpected(result: ToolResult) -> bool:
    """Return True for a failure with the text of an exception that nobody wrote for whoever called."""
    error, exc = result.error, result.exc
    return error is not None and error.code in _UNEXPECTED and exc is not None and not isinstance(exc, ToolError)


def told_failure(result: ToolResult) -> str:
    """Return what a script, or whoever wrote a plan, is told of a failure: never an exception's own text.

    That may hold anything of the host. A tool that wants its words read raises `ToolError`, returns
    `ToolResult.fail()` or has `expose_errors`. Only a model whose loop this program runs reads class and message.
    """
    if not is_unexpected(result) or result.error is None:
        return result.text
    return _UNEXPECTED[ErrorCode(result.error.code)].format(type(result.exc).__name__)


def failure(call_id: int, result: ToolResult) -> ToolFail:
    """Return a failed result as the guest may see it: never an exception's own text or traceback."""
    error = result.error
    assert error is not None
    if is_unexpected(result):
        return ToolFail(call_id, str(error.code), told_failure(result), error.retryable, {})
    try:
        details = to_plain(dict(error.details), "details")
    except (ValueError, TypeError) as exc:
        return unsendable(call_id, "no_result", exc)
    return ToolFail(call_id, str(error.code), result.text, error.retryable, details)


def unsendable(call_id: int, code: str, problem: Exception) -> ToolFail:
    """Return the answer to a call whose result cannot be sent."""
    return ToolFail(call_id, code, f"the tool's result cannot be sent: {problem}", False, {})


def finalize(result: ToolResult, call: Call, duration_s: float, job_id: str | None = None) -> ToolResult:
    """Return the result as everybody else gets it: without secrets, bounded, with its call's ids on it.

    `job_id`: of work that the tool announced; a pending result without an id gets it.
    """
    truncated = result.meta.truncated
    if call.run.secrets is not NO_SECRETS:  # before anything is cut: half a secret is not found any more
        try:
            result = _redacted(result, call.run.secrets)
        except RecursionError:  # what cannot be searched for secrets is not passed on
            result = ToolResult.fail("tool returned data that is nested without end", code=ErrorCode.NO_RESULT)
    if (limit := call.options.max_result_bytes) is not None:
        result, was_cut = _bounded(result, limit)
        truncated = truncated or was_cut
    if result.status is Status.PENDING and result.job_id is None and job_id is not None:
        result = dataclasses.replace(result, job_id=job_id)
    return result.stamped(call.call_id, call.name, int(duration_s * 1e6) / 1000, truncated)


async def finalize_soon(result: ToolResult, call: Call, duration_s: float, job_id: str | None = None) -> ToolResult:
    """Do the same as `finalize`, and keep the event loop free while a large result is looked through for secrets."""
    if call.run.secrets is not NO_SECRETS and is_large(
        [result.value, result.details, result.for_user, *map(part_data, (*result.parts, *result.files))]
    ):
        with suppress(MemoryError):  # there is none for a thread
            return await daemon_threads.run_large(finalize, result, call, duration_s, job_id)
    return finalize(result, call, duration_s, job_id)


async def show_user(call: Call, result: ToolResult) -> None:
    """Give the agent above what a tool shows to the user. The result stands, whatever `on_user` raises."""
    on_user, text = call.run.scope.on_user, result.user_text
    if on_user is None or text is None:
        return
    try:
        await maybe_await(on_user(text, result))
    except BaseException as exc:
        if passes_on(exc):
            raise
        logger.exception("on_user failed at what %s shows", call.name)


def _bounded(result: ToolResult, limit: int) -> tuple[ToolResult, bool]:
    size = 0
    if result.has_value:
        size = len(to_json(result.value).encode("utf-8", "replace")) + sum(map(len, values_in(result.value, bytes)))
    size = max(size, sum(len(part.data) for part in (*result.parts, *result.files) if not isinstance(part, Text)))
    if size > limit:
        return ToolResult.fail(f"result too large ({size} > {limit} bytes)", code=ErrorCode.TOO_LARGE), False
    left, was_cut, error = limit, False, result.error

    def cut(text: str) -> str:
        nonlocal left, was_cut
        kept, is_cut = cut_bytes(text, left)
        left, was_cut = max(0, left - len(kept.encode("utf-8", "replace"))), was_cut or is_cut
        return kept

    if error is not None:
        room, details = left, error.details
        error = dataclasses.replace(error, message=cut(error.message))
        if details and len(to_json(plain_or_text(dict(details))).encode("utf-8", "replace")) > room:
            was_cut, error = True, dataclasses.replace(error, details={"truncated": True})
    parts = tuple(Text(cut(part.text)) if isinstance(part, Text) else part for part in result.parts)
    for_user = cut_bytes(result.for_user, limit)[0] if result.for_user else result.for_user
    if not was_cut and for_user == result.for_user:
        return result, False
    return dataclasses.replace(result, error=error, parts=parts, for_user=for_user), True


def _redacted(result: ToolResult, secrets: Secrets) -> ToolResult:
    parts = tuple(_part_without(part, secrets) for part in result.parts)
    files = tuple(_file_without(file, secrets) for file in result.files)
    error = result.error
    if error is not None:
        code, message = secrets.redact(error.code), secrets.redact(error.message)
        error = ToolFailure(code, message, error.retryable, secrets.redact_value(plain_or_text(dict(error.details))))
    value = secrets.redact_value(result.value) if result.has_value else None
    for_user = secrets.redact(result.for_user) if result.for_user else result.for_user
    details = None if result.details is None else secrets.redact_value(plain_or_text(result.details))
    return dataclasses.replace(
        result, parts=parts, files=files, error=error, value=value, for_user=for_user, details=details
    )


def _part_without(part: Part, secrets: Secrets) -> Part:
    match part:
        case Text(text):
            return Text(secrets.redact(text))
        case Image(data, media_type):
            return Image(secrets.redact_bytes(data), media_type)
        case File():
            return _file_without(part, secrets)


def _file_without(file: File, secrets: Secrets) -> File:
    return File(secrets.redact(file.name), secrets.redact_bytes(file.data), file.media_type)


def with_repeat_hint(call: Call, result: ToolResult, limit: int) -> ToolResult:
    """Add a hint to the error of a call that a model repeats and that keeps failing, from the `limit`-th time on.

    Identical calls of one response count once, and the first of them has the hint. A call that was not run because
    there were too many, and may be asked for again, does not count.
    """
    failures = call.run.state.failures
    error = result.error
    if not (failures or result.is_error) or (call.refusal is not None and error is not None and error.retryable):
        return result
    key = f"{call.name[:MAX_NAME_CHARS]} {args_for_log(call)}"
    if not result.is_error:
        failures.pop(key, None)
        return result
    count, message = failures.pop(key, (0, None))
    is_counted = message is not None and message is call.message
    failures[key] = count, message = count + (not is_counted), call.message
    if len(failures) > MAX_REMEMBERED_FAILURES:
        del failures[next(iter(failures))]
    if is_counted or count < limit or error is None:
        return result
    hint = f"this exact call has now failed {count} times; change its arguments or do something else"
    return dataclasses.replace(result, error=dataclasses.replace(error, message=f"{error.message}\n({hint})"))


# The text of a tool as the data that it is, for scripts and plans


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
    returns, text = options.returns, result.output
    wants_data = returns is not None and _says_a_type(returns)
    try:
        value = await in_thread_if_large(text, partial(_parsed, text))
    except (ValueError, RecursionError) as exc:
        return _mismatch(name, result, f"its text is not JSON: {exc}") if wants_data else result
    problem = await find_problem(returns or {}, value, is_foreign=is_foreign) if wants_data else None
    if problem is not None:
        at = "/".join(map(str, problem.path)) or "root"
        return _mismatch(name, result, f"the JSON in its text does not fit: {at}: {problem.message}")
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


# What Python's log says of a call: bounded, on one line, and without the run's secrets


logger = logger_of("toolcell.tools")

MAX_LOGGED_CHARS = 500
MAX_REDACTED_CHARS = 20_000
"""Looked through for secrets to show `MAX_LOGGED_CHARS` of it. A secret that is cut in two here is not shown."""

MAX_NAME_CHARS = 80


def log_start(call: Call) -> None:
    """Log a call that begins."""
    logger.info("tool %s started: %s", _name(call), args_for_log(call))


def log_end(call: Call, result: ToolResult) -> None:
    """Log how a call ended."""
    duration_ms = result.meta.duration_ms
    if result.is_error:
        message = one_line(result.message, MAX_LOGGED_CHARS)
        level = logging.INFO if result.status is Status.CANCELLED else logging.WARNING
        logger.log(level, "tool %s failed after %.1f ms: %s", _name(call), duration_ms, message)
    elif result.status is Status.PENDING:
        logger.info("tool %s started (async) after %.1f ms", _name(call), duration_ms)
    else:
        logger.info("tool %s completed in %.1f ms, %d characters", _name(call), duration_ms, len(result.output))


def args_for_log(call: Call) -> str:
    """Return the beginning of what a call was made with."""
    args = call.raw_args
    text = args[:MAX_REDACTED_CHARS] if isinstance(args, str) else bounded_json(args, MAX_REDACTED_CHARS, "")
    return one_line(call.run.secrets.redact(text), MAX_LOGGED_CHARS)


def _name(call: Call) -> str:
    return one_line(call.name, MAX_NAME_CHARS)
