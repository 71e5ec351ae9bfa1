"""`Executions`: runs the requests of `POST /execute`, as many at once as are allowed, and each of them once."""

from __future__ import annotations

import hashlib
import logging
import math
from typing import Final

import anyio
from anyio.abc import TaskGroup

from toolcell import daemon_threads
from toolcell.errors import StoreError, ToolcellError
from toolcell.service.compat.messages import Answer, ExecutionRequest, error, failure_body
from toolcell.service.compat.scripts import Execution, ExecutionRunner
from toolcell.service.idempotency import Answered, Begun, Entry, Full, IdempotencyStore, Interrupted, OtherRequest
from toolcell.service.under_way import RunsUnderWay
from toolcell.tools.run_state import new_id

BUSY: Final = "server busy: execution capacity reached"
STOPPING: Final = "the service is stopping"
INTERRUPTED: Final = (
    "execution interrupted: the service ended while it ran. Its tool calls may have been made. It is not run again; "
    "send the code with another execution_id to run it anew"
)
NOT_KEPT: Final = "the execution has ended, and its answer is not kept any more; it is not run again"
CLIENT_GONE_S: Final = 10.0
"""Seconds that a run goes on when nobody waits for it. A client whose connection broke sends its request again."""

LOGGER = logging.getLogger("toolcell.service.compat")


class _Waited:
    """One execution under way, and those who wait for it."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.answer: Answer | None = None
        self._done = anyio.Event()
        self._changed = anyio.Event()
        self._waiting = 0

    def conclude(self, answer: Answer) -> None:
        """Let everybody have its answer."""
        self.answer = answer
        self._done.set()

    async def outcome(self) -> Answer:
        """Wait for its answer."""
        self._count(1)
        try:
            await self._done.wait()
        finally:
            self._count(-1)
        assert self.answer is not None
        return self.answer

    def _count(self, step: int) -> None:
        self._waiting += step
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def cancel_without_client(self, after_s: float, cancel: anyio.Event) -> None:
        """Set `cancel` when nobody has waited for so long."""
        while True:
            with anyio.move_on_after(math.inf if self._waiting else after_s) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                cancel.set()
                return


class Executions:
    """Everything that runs, and what earlier requests were answered."""

    def __init__(
        self,
        scripts: ExecutionRunner,
        kept: IdempotencyStore,
        under_way: RunsUnderWay,
        tasks: TaskGroup,
        *,
        max_concurrent: int,
        client_gone_s: float = CLIENT_GONE_S,
    ) -> None:
        self._scripts, self._kept, self._under_way, self._tasks = scripts, kept, under_way, tasks
        self._max_concurrent, self._client_gone_s = max_concurrent, client_gone_s
        self._waited: dict[tuple[str, str], _Waited] = {}

    async def answer(self, tenant: str, subject: str, request: ExecutionRequest) -> Answer:
        """Run a request, or wait for the run of the one that had its id before.

        Cancellation: the run goes on for a while, for the client to ask for it again.
        """
        place = tenant, request.execution_id or new_id()
        waited = self._waited.get(place)
        if waited is None:
            waited = self._waited[place] = _Waited(request.digest)
            execution = Execution(tenant, subject, place[1], request)
            self._tasks.start_soon(self._conclude, waited, execution)
        elif waited.digest != request.digest:
            return used_before(place[1])
        return await waited.outcome()

    async def _conclude(self, waited: _Waited, execution: Execution) -> None:
        answer = error(503, STOPPING)  # when the service ends first
        try:
            answer = await self._answer(waited, execution)
        except ToolcellError as exc:
            answer = error(500, str(exc))
        except Exception:  # a mistake of ours must not end the service
            LOGGER.exception("execution %s failed", execution.ident)
            answer = error(500, "internal error")
        finally:
            del self._waited[execution.tenant, execution.ident]
            waited.conclude(answer)

    async def _answer(self, waited: _Waited, execution: Execution) -> Answer:
        # A request that was carried out has its answer, however busy the service is; so this is looked up first.
        has_id, request = bool(execution.request.execution_id), execution.request
        key = hashlib.sha256(execution.ident.encode("utf-8", "surrogatepass")).hexdigest()
        begin = (execution.tenant, key, request.digest, execution.run_id)
        entry = await daemon_threads.run_sync(self._kept.begin, *begin) if has_id else Begun()
        if not isinstance(entry, Begun):
            return _answer_of(entry, execution.ident)
        answer, has_begun = error(503, BUSY), False
        try:
            if self._under_way.is_draining:
                answer = error(503, STOPPING)
            elif len(self._under_way) < self._max_concurrent:
                has_begun = True  # whatever ends it: only its own word takes that back
                answer, has_begun = await self._run(waited, execution)
        finally:
            if has_id and not has_begun:
                with anyio.CancelScope(shield=True):
                    await daemon_threads.run_sync(self._kept.release, execution.tenant, key)
        if has_id and has_begun:
            await self._keep(execution, key, answer)
        return answer

    async def _keep(self, execution: Execution, key: str, answer: Answer) -> None:
        """Write an answer down. If that fails the client has it all the same."""
        kept = (execution.tenant, key, answer.status, "application/json", answer.body)
        try:
            await daemon_threads.run_sync(self._kept.finish, *kept)
        except StoreError as exc:
            LOGGER.warning("the answer to execution %s could not be kept: %s", execution.ident, exc)

    async def _run(self, waited: _Waited, execution: Execution) -> tuple[Answer, bool]:
        """Run it, and end it when its client is gone. Return whether any of it ran."""
        with self._under_way.one(execution.tenant, execution.subject) as run:
            async with anyio.create_task_group() as watch:
                watch.start_soon(waited.cancel_without_client, self._client_gone_s, run.cancel)
                try:
                    answered: tuple[Answer, bool] | ToolcellError = await self._scripts.run(execution, run.cancel)
                except ToolcellError as exc:
                    answered = exc  # a task group would wrap it
                watch.cancel_scope.cancel()
        if isinstance(answered, ToolcellError):
            raise answered
        return answered


def used_before(ident: str) -> Answer:
    """Return the answer to an id that came with another request."""
    return error(409, f"execution_id {ident[:80]!r} was used for another request; use a new one for each")


def _answer_of(entry: Entry, ident: str) -> Answer:
    match entry:
        case Answered(body=body, status=status) if body is not None:
            return Answer(status, body)
        case Answered():
            return Answer(200, failure_body(NOT_KEPT))
        case Interrupted():
            return Answer(200, failure_body(INTERRUPTED))
        case OtherRequest():
            return used_before(ident)
        case Full():
            return error(503, "too many executions are remembered; try again later")
    return error(503, "the execution is under way in another process of this service")
