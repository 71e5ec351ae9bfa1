"""From what was received to what can be validated: JSON text parsed, the tool's own preparation applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolcell.errors import ToolAbort
from toolcell.tools.call import Call
from toolcell.tools.hooks import maybe_await
from toolcell.tools.result import ErrorCode
from toolcell.tools.values import MAX_TEXT_CHARS, BadValue, copy_arguments


class ArgumentError(Exception):
    """Arguments cannot be used; the message is for the model."""

    def __init__(self, message: str, code: str = ErrorCode.INVALID_ARGUMENTS, fields: Mapping[str, str] | None = None):
        super().__init__(message)
        self.code = code
        self.details = {"fields": dict(fields)} if fields else {}


def parse_arguments(text: str) -> Any:
    """Arguments that came as JSON text.

    Raises:
        NotPrepared: it is not JSON.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ArgumentError(f"invalid args: {len(text)} characters of JSON, more than {MAX_TEXT_CHARS}")
    if not text.strip():
        return {}  # how several providers write "no arguments"
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ArgumentError(f"invalid args: {exc}") from exc


async def prepare_arguments(call: Call) -> Any:
    """Parse text, then let the tool's own preparation rewrite a private copy.

    Raises:
        NotPrepared: not JSON, or the preparation failed.
    """
    received = parse_arguments(call.raw_args) if isinstance(call.raw_args, str) else call.raw_args
    assert call.tool is not None
    prepare = call.tool.spec.prepare
    if prepare is None or not isinstance(received, Mapping):
        return received
    try:
        mine = copy_arguments(received).args
    except BadValue as exc:
        raise ArgumentError(f"invalid tool arguments: {exc}") from exc
    try:
        prepared = await maybe_await(prepare(mine))
    except ToolAbort:
        raise
    except Exception as exc:
        message = f"preparing the arguments failed: {type(exc).__name__}: {exc}"
        raise ArgumentError(message, ErrorCode.PREPARE_FAILED) from exc
    if not isinstance(prepared, dict):
        kind = type(prepared).__name__
        raise ArgumentError(f"preparing the arguments gave {kind}, not a dict", ErrorCode.PREPARE_FAILED)
    return prepared
