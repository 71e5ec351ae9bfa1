"""`CalledBackTools`: the tools of a run whose calls are answered by the client, at its callback URL.

The guest opens no connection. The host makes each call for it, with the run's token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
import httpx

from toolcell.config import MIB
from toolcell.service.compat.settings import CALL_S
from toolcell.tools.call import RunContext
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import Origin
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.result import ErrorCode, ToolResult

ANSWER_BYTES: Final = 8 * MIB
"""Of the answer to one call."""

_NOTE: Final = "answered by the client at its callback URL"


@dataclass(frozen=True, slots=True)
class Callback:
    """Where the calls of one execution go."""

    url: str
    """Empty: the client answers no calls."""
    token: str
    execution_id: str


class CalledBackTools:
    """What a run needs of a registry (`CallableTools`). A script may call any name; the client knows which exist."""

    def __init__(self, callback: Callback, http: httpx.AsyncClient, call_s: float = CALL_S) -> None:
        self._callback, self._http, self._call_s = callback, http, call_s
        self._records = ToolRegistry()

    def snapshot(self) -> CalledBackTools:
        """Return itself."""
        return self

    def names(self, origin: Origin = Origin.CODE) -> list[str]:
        """Return no names: only the client knows them."""
        return []

    def definitions(self, origin: Origin = Origin.CODE) -> list[ToolDefinition]:
        """Return none."""
        return []

    def meant(self, name: str) -> str:
        """Return `name` itself."""
        return name

    async def dispatch(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        *,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
    ) -> ToolResult:
        """Ask the client. The call is recorded as any other."""
        return await self._records.answer(
            name, args, self._asked(name, args, call_id), note=_NOTE, call_id=call_id, origin=origin, context=context
        )

    async def _asked(self, name: str, args: Mapping[str, Any] | str, call_id: str) -> ToolResult:
        if not self._callback.url:
            return ToolResult.fail(f"unknown tool: {name}", code=ErrorCode.UNKNOWN_TOOL)
        asked = {"execution_id": self._callback.execution_id, "call_id": call_id, "name": name, "args": args}
        try:
            with anyio.fail_after(self._call_s):
                status, body = await self._posted(json.dumps(asked, allow_nan=False, default=str).encode())
        except TimeoutError:
            return ToolResult.fail(f"no answer within {self._call_s:g}s", code=ErrorCode.TIMEOUT)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as exc:
            return _unavailable(f"the client did not answer the call: {type(exc).__name__}: {exc}")
        return answered(status, body)

    async def _posted(self, body: bytes) -> tuple[int, bytes]:
        """Post one call. It is never sent twice: it may have been made."""
        headers = {"content-type": "application/json"}
        if self._callback.token:
            headers["authorization"] = f"Bearer {self._callback.token}"
        whole = bytearray()
        async with self._http.stream("POST", self._callback.url, content=body, headers=headers) as response:
            async for piece in response.aiter_bytes():
                whole += piece
                if len(whole) > ANSWER_BYTES:
                    raise ValueError(f"its answer has more than {ANSWER_BYTES} bytes")
        return response.status_code, bytes(whole)


def answered(status: int, body: bytes) -> ToolResult:
    """Read the client's answer to a call: `{"data"}`, `{"error"}`, and from our own client also `{"value"}`."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return _unavailable(f"the client answered {status} without a JSON object")
    if said.get("error"):
        return ToolResult.fail(str(said["error"]), code=str(said.get("code") or ErrorCode.TOOL_ERROR))
    if status != 200:
        return _unavailable(f"the client answered {status}")
    if "value" in said:
        return ToolResult.of(said["value"])
    data = said.get("data", "")
    return ToolResult.of(from_text(data) if isinstance(data, str) else data)


def from_text(text: str) -> Any:
    """Return what a script gets for a text: a JSON object or list is parsed, everything else stays text.

    `123` and `true` may be plain text, and a tool that returns a text returns a text.
    """
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _unavailable(text: str) -> ToolResult:
    return ToolResult.fail(text, code=ErrorCode.UNAVAILABLE)
