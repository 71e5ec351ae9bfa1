"""The bodies of `POST /execute`: requests are read and checked, results are written."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError

from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, Outcome
from toolcell.run.input_files import guest_files
from toolcell.sandbox.backend import GuestFile
from toolcell.service.compat.settings import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S, CompatSettings
from toolcell.service.problems import Problem
from toolcell.text import cut_bytes
from toolcell.tools.code import describe_failure
from toolcell.tools.result import to_json

NO_EXIT_CODE: Final = -1
"""Of a run that was ended from outside."""

_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client is sent."""

    status: int
    body: bytes


def error(status: int, message: str) -> Answer:
    """Return an error as an answer."""
    return Answer(status, json_bytes({"error": message}))


def wrong(message: str) -> Problem:
    """Return the error of a request that is wrong; nothing of it ran."""
    return Problem(400, "invalid_request", "The request is wrong", message)


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    mime: str | None = None
    data: str | None = None
    url: str | None = None


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    execution_id: Annotated[str, Field(max_length=200)] | None = None
    callback_url: Annotated[str, Field(max_length=4096)] | None = None
    callback_token: Annotated[str, Field(max_length=4096)] | None = None
    code: str | None = None
    runtime: str | None = None
    session_id: str | None = None
    timeout: StrictInt | StrictFloat | None = None
    files: list[_File] | None = None


@dataclass(frozen=True, slots=True)
class ExecutionRequest:
    """A checked request."""

    execution_id: str
    """Empty when the client named none."""
    code: str
    timeout_s: float
    session_id: str
    """Empty for a run with a workspace of its own."""
    files: tuple[GuestFile, ...]
    callback_url: str
    """Empty when the script has no tools."""
    callback_token: str
    digest: bytes
    """Sha256 of the whole body."""


def read_request(body: bytes, settings: CompatSettings) -> ExecutionRequest:
    """Read and check a body.

    Raises:
        Problem: it is wrong; says what and how to mend it.
    """
    given = _parsed(body)
    if not given.code or not given.code.strip():
        raise wrong("code is required")
    if given.runtime not in (None, "", "python"):
        raise wrong(f"unsupported runtime: {given.runtime:.80}; supported: python")
    return ExecutionRequest(
        execution_id=given.execution_id or "",
        code=given.code,
        timeout_s=_timeout_s(given.timeout),
        session_id=checked_session(given.session_id) if given.session_id else "",
        files=_files(given.files or ()),
        callback_url=_callback_url(given.callback_url, settings) if given.callback_url else "",
        callback_token=given.callback_token or "",
        digest=hashlib.sha256(body).digest(),
    )


def _parsed(body: bytes) -> _Body:
    try:
        return _Body.model_validate_json(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise wrong(f"invalid JSON: {first['msg']}") from exc
        place = ".".join(str(each) for each in first["loc"]) or "the body"
        raise wrong(f"invalid request: {place}: {first['msg']}") from exc


def checked_session(session_id: str) -> str:
    """Return the name of a session.

    Raises:
        Problem: it is none. It names a folder, so no other characters are let through.
    """
    if not session_id:
        raise wrong("session_id is required")
    if not _SESSION.fullmatch(session_id):
        raise wrong(f"session_id {session_id[:80]!r} must have 1 to 64 letters, digits, _ and -")
    return session_id


def _timeout_s(given: float | None) -> float:
    """0 and nothing are the default, too much is the most. Half a second is half a second."""
    if given is None or given == 0:
        return DEFAULT_TIMEOUT_S
    if not given > 0:
        raise wrong(f"timeout must be a number of seconds above 0, not {given}")
    return float(min(given, MAX_TIMEOUT_S))


def _files(given: Sequence[_File]) -> tuple[GuestFile, ...]:
    try:
        return guest_files([(each.name, _content(each)) for each in given])
    except UsageError as exc:
        raise wrong(f"file write error: {exc}") from exc


def _content(file: _File) -> bytes:
    if file.data is None and file.url:
        raise UsageError(f"{file.name!r:.80} has a url, and this service fetches none; send its data as base64")
    try:
        return base64.b64decode(file.data or "", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError(f"the data of {file.name!r:.80} is not base64: {exc}") from exc


def _callback_url(url: str, settings: CompatSettings) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as exc:
        raise wrong(f"callback_url is no URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise wrong(f"callback_url must be an http or https URL, not {url[:80]!r}")
    if not settings.may_call(host, port):
        raise wrong(f"callback_url: tool calls may not be sent to {host}:{port} (SANDBOX_CALLBACK_HOSTS)")
    return url


# Results


def result_body(result: ExecutionResult, timeout_s: float, settings: CompatSettings, notes: Sequence[str]) -> bytes:
    """Write a run's result as the answer's body. `notes` are added to its logs."""
    problems = [f"file {each.name!r} was not returned: {each.problem}" for each in result.files if each.problem]
    files, too_large = _returned(result, settings)
    answer: dict[str, Any] = {
        "output": to_json(result.value) if result.has_value else "",
        "logs": _logs(result, settings, [*problems, *too_large, *notes]),
        "exit_code": _exit_code(result),
    }
    if result.outcome is not Outcome.OK:
        answer["error"] = _error(result, timeout_s)
    if files:
        answer["files"] = files
    return json_bytes(answer)


def failure_body(error: str) -> bytes:
    """Write the answer for a run that has begun and has no result."""
    return json_bytes({"output": "", "logs": "", "exit_code": NO_EXIT_CODE, "error": error})


def json_bytes(data: Any) -> bytes:
    """Strict JSON. A lone surrogate, which UTF-8 does not have, becomes a question mark."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


def _exit_code(result: ExecutionResult) -> int:
    if result.outcome is Outcome.OK:
        return 0
    own = result.error.exit_code if result.error is not None else None
    if result.outcome is Outcome.ERROR:
        return own or 1
    return 1 if result.outcome is Outcome.DENIED else NO_EXIT_CODE


def _error(result: ExecutionResult, timeout_s: float) -> str:
    if result.outcome is Outcome.TIMEOUT:
        return f"execution timed out after {timeout_s:g}s"
    return describe_failure(result)


def _returned(result: ExecutionResult, settings: CompatSettings) -> tuple[list[dict[str, str]], list[str]]:
    files, too_large = [], []
    for each in result.files:
        is_too_large = each.problem is not None and each.problem.startswith("too large")
        if each.problem is not None and not is_too_large:
            continue
        entry = {"name": each.name, "mime": each.media_type}
        if each.data is not None and each.size > settings.max_file_bytes:
            too_large.append(
                f"file {each.name!r} was returned without its data: it has {each.size} bytes, and "
                f"{settings.max_file_bytes} are allowed"
            )
        elif each.data is not None:
            entry["data"] = base64.b64encode(each.data).decode("ascii")
        files.append(entry)
    return files, too_large


def _logs(result: ExecutionResult, settings: CompatSettings, notes: Sequence[str]) -> str:
    """What was printed, in order, within the bytes that are kept; then what the client should know."""
    printed, _ = cut_bytes(result.logs.text, settings.max_output_bytes)
    if not notes:
        return printed
    gap = "\n" if printed and not printed.endswith("\n") else ""
    return f"{printed}{gap}" + "".join(f"[{note}]\n" for note in notes)
