"""Run something for a request: counted as under way, and ended when its client has gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import anyio
from starlette.requests import Request

from toolcell.service.endpoints import ApiRequest
from toolcell.service.problems import Problem
from toolcell.service.runs_under_way import RunUnderWay
from toolcell.support.http_protocol import CONNECTION

T = TypeVar("T")

END_S = 5.0
"""What work may take to end by itself after its client has gone. Then it is cancelled."""


@asynccontextmanager
async def under_way(request: ApiRequest) -> AsyncIterator[RunUnderWay]:
    """Have a place, and be under way, until the end of the block. It waits for the place, as long as the client does.

    Raises:
        Problem: nothing new may begin now, or no place became free (503).
    """
    service, tenant = request.service, request.tenant
    deadline = anyio.current_time() + tenant.config.queue_s
    async with AsyncExitStack() as stack:
        await _while_wanted(request.http, stack.enter_async_context(service.admission.slot(tenant.name, deadline)))
        with service.runs.one(tenant.name, request.principal.subject) as run:
            request.began.set()
            if request.reservation is not None:
                request.reservation.give_back()
            with service.revocations.ending(request.principal, request.ask_who, run.refuse):
                yield run


async def _while_wanted(http: Request, waiting: Awaitable[None]) -> None:
    """Wait for something, as long as the client does.

    Raises:
        Problem: the client has gone (503); or as from `waiting`.
    """
    scope = anyio.CancelScope()

    async def wait() -> None:
        with scope:
            await waiting
            return
        raise Problem(503, "cancelled", "The request was cancelled", "its client has gone")

    await _unless_gone(http, scope.cancel, wait)


async def run_for(request: ApiRequest, work: Callable[[RunUnderWay], Awaitable[T]], end_s: float = END_S) -> T:
    """Return what `work` returns. It is told to end when the client has gone, and when the service does; it is
    cancelled `end_s` later.

    Raises:
        Problem: nothing new may begin now (503), or it was cancelled (503, or 401 when its token was revoked).
        Exception: as from `work`.
    """
    async with under_way(request) as run:
        run.end_s = end_s
        return await _unless_gone(request.http, run.stop, lambda: _cancellable(run, work))


async def _unless_gone(http: Request, when_gone: Callable[[], None], work: Callable[[], Awaitable[T]]) -> T:
    """Do some work; when the client goes meanwhile, call `when_gone`."""
    connection = http.scope.get(CONNECTION)
    if connection is None:
        return await _watched(http, when_gone, work)
    connection.on_gone = when_gone
    if connection.transport.is_closing():
        when_gone()
    try:
        return await work()
    finally:
        connection.on_gone = None


async def _cancellable(run: RunUnderWay, work: Callable[[RunUnderWay], Awaitable[T]]) -> T:
    with run.scope:
        done = await work(run)
        run.check_allowed()
        return done
    run.check_allowed()
    raise Problem(503, "cancelled", "The request was cancelled", "its client has gone, or the service ends")


async def _watched(http: Request, when_gone: Callable[[], None], work: Callable[[], Awaitable[T]]) -> T:
    """Do the work where another ASGI server tells of clients that go: only a task can wait for that."""
    failure: Exception | None = None
    done: list[T] = []
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await wait_gone(http)
            when_gone()

        tasks.start_soon(watch)
        try:
            done.append(await work())
        except Exception as exc:  # the task group would wrap it
            failure = exc
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return done[0]


async def wait_gone(http: Request) -> None:
    """Wait until the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
