"""Ready-made middleware: retrying what may be repeated, remembering what does not change, holding a pace.

Each is a function of (call, proceed). They run inside the call's deadline and after its hooks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import anyio

from toolcell.support.lru import Lru
from toolcell.tools.call import Call
from toolcell.tools.result import ErrorCode, ToolResult
from toolcell.tools.spec import Middleware, Proceed

MAX_REMEMBERED = 1024


def retry(attempts: int = 3, delay_s: float = 0.1) -> Middleware:
    """Call tools marked `idempotent` again while their error is retryable or an exception, waiting ever longer."""

    async def middleware(call: Call, proceed: Proceed) -> ToolResult:
        result = await proceed()
        for attempt in range(1, attempts):
            if not (call.options.idempotent and _may_pass(result)):
                break
            await anyio.sleep(delay_s * 2 ** (attempt - 1))
            result = await proceed()
        return result

    return middleware


def _may_pass(result: ToolResult) -> bool:
    return result.error is not None and (result.error.retryable or result.error.code == ErrorCode.EXCEPTION)


def cache(ttl_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> Middleware:
    """Answer repeated calls of `read_only` tools from memory; failures are not remembered."""
    remembered: Lru[str, tuple[float, ToolResult]] = Lru(MAX_REMEMBERED)

    async def middleware(call: Call, proceed: Proceed) -> ToolResult:
        if not call.options.read_only:
            return await proceed()
        # Who asks is part of the question: a chat must not see another chat's answer.
        run = call.run
        who = (run.user_id, run.thread_id, run.channel, run.chat_id)
        key = json.dumps([call.name, who, call.args], sort_keys=True, default=repr)
        if (found := remembered.get(key)) is not None and clock() < found[0]:
            return found[1]
        result = await proceed()
        if not result.is_error:
            remembered.put(key, (clock() + ttl_s, result))
        return result

    return middleware


def rate_limit(calls: int, per_s: float, clock: Callable[[], float] = time.monotonic) -> Middleware:
    """Refuse calls of a tool beyond `calls` in any `per_s` seconds, and say when to come back."""
    recent: dict[str, list[float]] = {}

    async def middleware(call: Call, proceed: Proceed) -> ToolResult:
        now = clock()
        times = [moment for moment in recent.get(call.name, []) if now - moment < per_s]
        if len(times) >= calls:
            wait_s = per_s - (now - times[0])
            message = f"rate limit: {call.name} allows {calls} calls in {per_s:g} s; try again in {wait_s:.1f} s"
            return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=True)
        recent[call.name] = [*times, now]
        return await proceed()

    return middleware
