"""Idempotency keys: a request that is sent again is answered again, and never carried out again.

Before a run begins, its key is written to the record of its tenant; when it has ended, the answer is. A key whose
process died has no answer: such a run is never started again, and the answer says which run it was.

A request with a key goes on when its client has gone: the client comes back with the same key for the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from starlette.requests import Request
from starlette.responses import Response

from toolcell.calls.run_state import new_id
from toolcell.errors import SandboxUnavailable, ToolcellError
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem, problem_in
from toolcell.service.tenants import Tenant
from toolcell.support import daemon_threads
from toolcell.support.event_loop import start_task
from toolcell.support.http_protocol import CONNECTION
from toolcell.support.log import logger_of

KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
"""Printable ASCII, so that a key can be a header."""


def digest_of(*parts: bytes | str) -> bytes:
    """Return the digest of a request. Parts are told apart: ("ab", "c") and ("a", "bc") differ."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.digest()


async def interrupted_problem(tenant: Tenant, run_id: str) -> Problem:
    """Return the answer to a request whose run was interrupted.

    Shape: `calls` has each call with `tool`, `args` and `state`, which is `answered`, `in doubt` or `not begun`.
    """
    calls, told = await daemon_threads.run_sync(tenant.runtime.calls_of_interrupted, run_id), ""
    if calls is None:
        calls, told = await _recorded(tenant, run_id)
    elif any(each["state"] == "in doubt" for each in calls):
        told = "; a call in doubt had begun and has no answer: its tool may have done its work"
    count = f"calls that it had begun: {len(calls)}"
    members: dict[str, Any] = {"run_id": run_id, "calls": calls}
    detail = f"the service that carried out run {run_id} was lost or ended, and it is not begun again; {count}{told}"
    return Problem(409, "interrupted", "The run was interrupted", detail, **members)


async def _recorded(tenant: Tenant, run_id: str) -> tuple[list[dict[str, Any]], str]:
    """Return what the record has of a run that cannot go on: it has ended, or had not begun."""
    try:
        run = await tenant.recorded.load(run_id)
    except (Problem, ToolcellError):
        return [], "; the record has no run of this id, so it had not begun"
    calls = [
        {"tool": each["tool"], "args": each["args"], "state": "in doubt" if each["status"] is None else "answered"}
        for each in (call.to_dict() for call in run.calls)
        if each["parent"] is None
    ]
    return calls, f"; the record has its end, with the outcome {run.outcome}" if run.end else ""


logger = logger_of("toolcell.service.idempotency")

HEADER: Final = "idempotency-key"
"""Source: draft-ietf-httpapi-idempotency-key-header."""
REPLAYED: Final = {"Idempotency-Replayed": "true"}
RETRY_S: Final = 1

CarryOut = Callable[[Request], Awaitable[Response]]
"""Gets the request without its client: it does not end when the client goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRequest:
    """The part of a request that `IdempotentRequests` needs."""

    http: Request
    principal: Principal
    tenant: Tenant
    sent: bytes = b""
    """The body as it came, where the endpoint has a `body` model."""
    run_id: str = field(default_factory=new_id)
    """Id of the run that it begins, if it begins one."""
    began: anyio.Event = field(default_factory=anyio.Event)
    """Set when it has begun: from then on, something may have been done for it."""


class IdempotentRequests:
    """The requests of a service that have keys."""

    def __init__(self) -> None:
        self._tasks = set[asyncio.Task[Response | Problem]]()
        """What is carried out by this process."""

    async def close(self) -> None:
        """Cancel what is carried out. What had no answer yet is interrupted."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, request: KeyedRequest, carry_out: CarryOut) -> Response:
        """Carry a request out if its key is new; otherwise answer with what became of the one that had it.

        Raises:
            Problem: the key is malformed (400), was used for another request (422), its request is under way or was
                interrupted (409), or the tenant has too many keys (429).
        """
        key = key_of(request.http)
        if "text/event-stream" in request.http.headers.get("accept", "").lower():
            detail = "a stream of events is not kept, so send a key with Accept: application/json"
            raise Problem(400, "invalid_key", "The Idempotency-Key is wrong", detail)
        url = request.http.url
        # An answer is for nobody who might not have got it.
        lacking = [scope for scope in Scope if scope is not Scope.OPERATOR and not request.principal.may(scope)]
        digest = digest_of(request.http.method, url.path, url.query, request.sent, *lacking)
        try:
            entry = await daemon_threads.run_sync(request.tenant.keys.begin, key, digest, request.run_id)
        except OSError as exc:
            logger.error("the key of a request: %s", exc)
            headers = {"Retry-After": f"{RETRY_S}"}
            detail = "the key could not be noted, so nothing was begun"
            raise Problem(503, "store_error", "The store of keys cannot be used", detail, headers=headers) from exc
        match entry.state:
            case "begun":
                return await self._begin(request, key, carry_out)
            case "answered":
                if entry.body is None:
                    raise Problem(
                        409,
                        "answer_not_kept",
                        "The answer is not kept any more",
                        f"run {entry.run_id} was made and has ended, but its answer was too large or is too old; "
                        "it is not made again",
                        run_id=entry.run_id,
                    )
                return Response(entry.body, entry.status, REPLAYED, entry.media_type)
            case "running":
                raise _in_progress(entry.run_id)
            case "interrupted":
                raise await interrupted_problem(request.tenant, entry.run_id)
            case "other request":
                detail = f"{key!r} was used for another request; a new request needs a new key"
                raise Problem(422, "key_reused", "The Idempotency-Key was used before", detail)
            case "full":
                headers = {"Retry-After": f"{entry.retry_after_s:.0f}"}
                detail = "as many keys are kept as may be, and none is forgotten before its time"
                raise Problem(429, "too_many_keys", "Too many keys", detail, headers=headers)

    async def _begin(self, request: KeyedRequest, key: str, carry_out: CarryOut) -> Response:
        # Between the note in the record and this task there is no await: the note is always followed by the work.
        task = start_task(self._carry_out(request, key, carry_out), self._tasks)
        await asyncio.wait([task])
        if task.cancelled():
            raise _in_progress(request.run_id)
        answer: Response | Problem = task.result()
        if isinstance(answer, Problem):
            raise answer
        return answer

    async def _carry_out(self, request: KeyedRequest, key: str, carry_out: CarryOut) -> Response | Problem:
        try:
            answer, is_final = await self._answer_of(request, carry_out)
            response = answer.response() if isinstance(answer, Problem) else answer
            media_type = response.headers.get("content-type", "application/octet-stream")
            kept = (response.status_code, media_type, bytes(response.body)) if is_final else None
            with anyio.CancelScope(shield=True):
                await daemon_threads.run_sync(request.tenant.keys.finish, key, kept)
        except OSError as exc:  # the run was made, and is answered
            logger.error("the answer to key %r of %s could not be kept: %s", key, request.tenant.name, exc)
        finally:
            request.tenant.keys.end(key)
        return answer

    async def _answer_of(self, request: KeyedRequest, carry_out: CarryOut) -> tuple[Response | Problem, bool]:
        """Return the answer, and whether it is final: anything may have been done before it."""
        is_about_start = False
        try:
            scope = {name: each for name, each in request.http.scope.items() if name != CONNECTION}
            return await carry_out(Request(scope, never)), True
        except Problem as exc:
            problem = exc
        except ToolcellError as exc:
            problem, is_about_start = problem_in(request.http, exc), isinstance(exc, SandboxUnavailable)
        except Exception:
            logger.exception("request %s failed", request.run_id)
            problem = Problem(500, "internal_error", "The service failed", "its log has the reason")
        is_final = request.began.is_set() and not is_about_start
        if is_final:
            problem.extra.setdefault("run_id", request.run_id)
        return problem, is_final


def key_of(http: Request) -> str:
    """Return the key of a request.

    Raises:
        Problem: it is none, or there are two (400).
    """
    keys = http.headers.getlist(HEADER)
    key = keys[0].strip() if keys else ""
    if len(keys) == 1 and len(key) > 2 and key[0] == key[-1] == '"':
        key = key[1:-1]  # the draft writes a string of structured fields
    if len(keys) != 1 or not KEY.fullmatch(key):
        detail = "send one Idempotency-Key of 1 to 255 printable ASCII characters without spaces"
        raise Problem(400, "invalid_key", "The Idempotency-Key is wrong", detail)
    return key


def _in_progress(run_id: str) -> Problem:
    return Problem(
        409,
        "in_progress",
        "The request is under way",
        "it was sent before with this key; send it again for its answer after as many seconds as Retry-After says",
        headers={"Retry-After": f"{RETRY_S}"},
        **({"run_id": run_id} if run_id else {}),  # another process may just have begun it
    )


async def never() -> Any:
    """Wait for a client that does not go: `receive` of a request that outlives it."""
    await anyio.sleep_forever()
