"""Answer requests that have an `Idempotency-Key`: each is carried out once, and answered as often as it is sent.

Such a request goes on when its client has gone: the client comes back with the same key for the answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import anyio
from starlette.requests import Request
from starlette.responses import Response

from toolcell.errors import SandboxUnavailable, StoreError, ToolcellError
from toolcell.service.idempotency import KEY, Entry, IdempotencyStore, digest_of
from toolcell.service.interrupted_runs import interrupted_problem
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem, problem_in
from toolcell.service.tenants import Tenant
from toolcell.support import daemon_threads
from toolcell.support.http_protocol import CONNECTION
from toolcell.support.lifetime import Lifetime
from toolcell.support.log import logger_of

logger = logger_of("toolcell.service.idempotent_requests")

HEADER: Final = "idempotency-key"
"""Source: draft-ietf-httpapi-idempotency-key-header."""
REPLAYED: Final = {"Idempotency-Replayed": "true"}
LONGEST_WAIT_S: Final = 300.0
RETRY_S: Final = 1
_WAIT: Final = re.compile(r"(?:^|[,;]\s*)wait=([0-9]{1,6})(?:$|\s*[,;])")

CarryOut = Callable[[Request], Awaitable[Response]]
"""Gets the request without its client: it does not end when the client goes."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """What is asked with a key."""

    http: Request
    principal: Principal
    tenant: Tenant
    sent: bytes
    """The body as it came."""
    run_id: str
    began: anyio.Event
    """Set once something may have been done."""


class IdempotentRequests:
    """The requests of a service that have keys."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._here: dict[tuple[str, str], asyncio.Future[Response | Problem]] = {}
        """What is carried out by this process, by tenant and key."""
        self._lifetime = Lifetime("IdempotentRequests", self._open)

    async def open(self) -> None:
        """Open the store."""
        await self._lifetime.open()

    async def close(self) -> None:
        """Cancel what is carried out, and close the store. What had no answer yet is interrupted."""
        await self._lifetime.close()

    async def _open(self, stack: AsyncExitStack) -> None:
        await daemon_threads.run_sync(self._store.open)
        stack.callback(self._store.close)
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._tasks.cancel_scope.cancel)

    async def answer(self, request: KeyedRequest, carry_out: CarryOut) -> Response:
        """Carry a request out if its key is new; otherwise answer with what became of the one that had it.

        Raises:
            Problem: the key is malformed (400), was used for another request (422), its request is under way or was
                interrupted (409), or the tenant has too many keys (429).
        """
        tenant, key = request.tenant.name, key_of(request.http)
        if "text/event-stream" in request.http.headers.get("accept", "").lower():
            detail = "a stream of events is not kept, so send a key with Accept: application/json"
            raise Problem(400, "invalid_key", "The Idempotency-Key is wrong", detail)
        url = request.http.url
        # An answer is for nobody who might not have got it.
        lacking = [scope for scope in Scope if scope is not Scope.OPERATOR and not request.principal.may(scope)]
        digest = digest_of(request.http.method, url.path, url.query, request.sent, *lacking)
        until = anyio.current_time() + wanted_wait_s(request.http)
        while True:
            entry = await self._entry(tenant, key, digest, request.run_id)
            match entry.state:
                case "begun":
                    return await self._begin(request, key, carry_out)
                case "answered":
                    if entry.body is None:
                        raise _not_kept(entry.run_id)
                    return Response(entry.body, entry.status, REPLAYED, entry.media_type)
                case "running":
                    if not entry.is_here or not await self._wait_ended((tenant, key), until):
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

    async def _entry(self, tenant: str, key: str, digest: bytes, run_id: str) -> Entry:
        try:
            return await daemon_threads.run_sync(self._store.begin, tenant, key, digest, run_id)
        except StoreError as exc:
            logger.error("the store of keys: %s", exc)
            headers = {"Retry-After": f"{RETRY_S}"}
            detail = "the key could not be noted, so nothing was begun"
            raise Problem(503, "store_error", "The store of keys cannot be used", detail, headers=headers) from exc

    async def _wait_ended(self, place: tuple[str, str], until: float) -> bool:
        """Wait until a request has ended. Return False if it has not."""
        if (found := self._here.get(place)) is None:
            return False
        return bool((await asyncio.wait([found], timeout=max(0.0, until - anyio.current_time())))[0])

    async def _begin(self, request: KeyedRequest, key: str, carry_out: CarryOut) -> Response:
        # Between the note in the store and this task there is no await: the note is always followed by the work.
        under_way: asyncio.Future[Response | Problem] = asyncio.get_running_loop().create_future()
        self._here[request.tenant.name, key] = under_way
        self._tasks.start_soon(self._carry_out, request, key, carry_out, under_way)
        await asyncio.wait([under_way])
        if under_way.cancelled():
            raise _in_progress(request.run_id)
        answer = under_way.result()
        if isinstance(answer, Problem):
            raise answer
        return answer

    async def _carry_out(
        self, request: KeyedRequest, key: str, carry_out: CarryOut, under_way: asyncio.Future[Response | Problem]
    ) -> None:
        try:
            answer, is_final = await self._answer_of(request, carry_out)
            kept = answer.response() if isinstance(answer, Problem) else answer
            with anyio.CancelScope(shield=True):
                await self._note(request.tenant.name, key, kept if is_final else None)
            under_way.set_result(answer)
        finally:
            del self._here[request.tenant.name, key]
            under_way.cancel()

    async def _answer_of(self, request: KeyedRequest, carry_out: CarryOut) -> tuple[Response | Problem, bool]:
        """Return the answer, and whether it is final: anything may have been done before it."""
        is_about_start = False
        try:
            scope = {name: each for name, each in request.http.scope.items() if name != CONNECTION}
            return await carry_out(Request(scope, _never)), True
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

    async def _note(self, tenant: str, key: str, answer: Response | None) -> None:
        """Keep an answer; with None, free the key. A store that fails is logged: the run was made, and is answered."""
        try:
            if answer is None:
                await daemon_threads.run_sync(self._store.release, tenant, key)
                return
            media_type = answer.headers.get("content-type", "application/octet-stream")
            await daemon_threads.run_sync(
                self._store.finish, tenant, key, answer.status_code, media_type, bytes(answer.body)
            )
        except StoreError as exc:
            logger.error("the answer to key %r of %s could not be kept: %s", key, tenant, exc)


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


def wanted_wait_s(http: Request) -> float:
    """Return how long the client wants to wait for a request that is under way: `Prefer: wait=30`. Source: RFC 7240."""
    match = _WAIT.search(http.headers.get("prefer", ""))
    return min(LONGEST_WAIT_S, float(match[1])) if match else 0.0


def _in_progress(run_id: str) -> Problem:
    return Problem(
        409,
        "in_progress",
        "The request is under way",
        "it was sent before with this key; send it again for its answer, with `Prefer: wait=30` to wait for it",
        headers={"Retry-After": f"{RETRY_S}"},
        run_id=run_id,
    )


def _not_kept(run_id: str) -> Problem:
    detail = f"run {run_id} was made and has ended, but its answer was too large or is too old; it is not made again"
    return Problem(409, "answer_not_kept", "The answer is not kept any more", detail, run_id=run_id)


async def _never() -> Any:
    await anyio.sleep_forever()
