"""Run something for a request: counted as under way, ended when its client has gone; its result as JSON or as events.

Events are server-sent. Source: https://html.spec.whatwg.org/multipage/server-sent-events The run begins when the answer
does. A reader that falls behind holds it up; one that goes ends it.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolcell.errors import ToolcellError
from toolcell.results import ExecutionResult
from toolcell.run import (
    CallEnded,
    CallOutput,
    CallStarted,
    CallUpdated,
    FileReturned,
    LogPrinted,
    ProgressReported,
    RunEvent,
    RunFinished,
    RunStream,
)
from toolcell.runtime import Runtime
from toolcell.service.admission import place, unless_gone, wait_gone
from toolcell.service.answering import Answers
from toolcell.service.endpoints import ApiRequest
from toolcell.service.problems import Problem, problem_in
from toolcell.service.run_arguments import script_options
from toolcell.service.runs_under_way import RunUnderWay
from toolcell.sessions import Session

T = TypeVar("T")

END_S = 5.0
"""What work may take to end by itself after its client has gone. Then it is cancelled."""


@asynccontextmanager
async def under_way(request: ApiRequest) -> AsyncIterator[RunUnderWay]:
    """Have a place, and be under way, until the end of the block. It waits for the place, as long as the client does.

    Raises:
        Problem: nothing new may begin now, or no place became free (503).
    """
    service, tenant = request.service, request.tenant.name
    async with place(request.http, service.admission.slot(tenant, request.queue_until)):
        with service.runs.one(tenant, request.principal.subject) as run:
            request.began.set()
            if request.reservation is not None:
                request.reservation.give_back()
            with service.revocations.ending(request.principal, request.ask_who, run.refuse):
                yield run


async def run_for(request: ApiRequest, work: Callable[[RunUnderWay], Awaitable[T]], end_s: float = END_S) -> T:
    """Return what `work` returns. It is told to end when the client has gone, and when the service does; it is
    cancelled `end_s` later.

    Raises:
        Problem: nothing new may begin now (503), or it was cancelled (503, or 401 when its token was revoked).
        Exception: as from `work`.
    """
    async with under_way(request) as run:
        run.end_s = end_s
        return await unless_gone(request.http, run.stop, lambda: _cancellable(run, work))


async def _cancellable(run: RunUnderWay, work: Callable[[RunUnderWay], Awaitable[T]]) -> T:
    with run.scope:
        done = await work(run)
        run.check_allowed()
        return done
    run.check_allowed()
    raise Problem(503, "cancelled", "The request was cancelled", "its client has gone, or the service ends")


def result_members(result: ExecutionResult) -> dict[str, Any]:
    members = result.to_dict()
    for file, entry in zip(result.files, members["files"], strict=True):
        # None: it was not sent.
        entry["data"] = base64.b64encode(file.data).decode() if file.data is not None else None
    return members


MEDIA_TYPE: Final = "text/event-stream"

HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]

_NAMES: Final = {
    LogPrinted: "log",
    ProgressReported: "progress",
    CallStarted: "call_started",
    CallUpdated: "call_updated",
    CallOutput: "call_output",
    CallEnded: "call_ended",
}


def wants_events(http: Request) -> bool:
    """Return True if the client asks for server-sent events."""
    accepted = http.headers.get("accept", "").lower().split(",")
    return any(each.partition(";")[0].strip() == MEDIA_TYPE for each in accepted)


class RunEventStream(Response):
    """The answer that is a stream of events. `begin` starts the run; it gets the event that ends it."""

    media_type = MEDIA_TYPE

    def __init__(self, request: ApiRequest, begin: Callable[[anyio.Event], RunStream]) -> None:
        super().__init__()
        self._request, self._begin = request, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Errors before the first byte are raised, later ones are an event."""
        async with under_way(self._request) as run:
            stream = self._begin(run.cancel)
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async with anyio.create_task_group() as tasks, stream:
                writer = _Writer(send, self._request.service.config.heartbeat_s, self._request.tenant.answers)
                tasks.start_soon(writer.beat)
                tasks.start_soon(self._leave_when_gone, run, tasks.cancel_scope)
                await _copy(stream, writer, self._request, run)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                tasks.cancel_scope.cancel()

    async def _leave_when_gone(self, run: RunUnderWay, scope: anyio.CancelScope) -> None:
        http = self._request.http
        del self  # as in `Run`: the frames of a task that is cancelled are a cycle
        await wait_gone(http)
        run.cancel.set()
        scope.cancel()


async def _copy(stream: RunStream, writer: _Writer, request: ApiRequest, run: RunUnderWay) -> None:
    try:
        async for event in stream:
            run.check_allowed()
            await writer.event(*_event_fields(event))
    except Problem as problem:
        await writer.event("problem", problem.to_dict())
    except ToolcellError as error:
        await writer.event("problem", problem_in(request.http, error).to_dict())


def _event_fields(event: RunEvent) -> tuple[str, Any]:
    match event:
        case RunFinished(result):
            return "end", result_members(result)
        case FileReturned(file):
            return "file", {name: getattr(file, name) for name in ("name", "media_type", "size", "sha256", "problem")}
    return _NAMES[type(event)], {name: getattr(event, name) for name in event.__slots__}


class _Writer:
    """Writes events, and a comment when there is none for long, so that nobody between ends the connection."""

    def __init__(self, send: Send, heartbeat_s: float, answers: Answers) -> None:
        self._send, self._heartbeat_s, self._answers = send, heartbeat_s, answers
        self._number = 0
        self._last = anyio.current_time()

    async def event(self, name: str, data: Any) -> None:
        """Send one event. JSON text has no line break."""
        self._number += 1
        head = f"id: {self._number}\nevent: {name}\ndata: ".encode()
        await self._write(b"".join((head, await self._answers.text(data), b"\n\n")))

    async def beat(self) -> None:
        """Send comments, for ever."""
        while True:
            if (left := self._last + self._heartbeat_s - anyio.current_time()) > 0:
                await anyio.sleep(left)
            else:
                await self._write(b": still here\n\n")

    async def _write(self, text: bytes) -> None:
        self._last = anyio.current_time()
        await self._send({"type": "http.response.body", "body": text, "more_body": True})


async def answer_script(request: ApiRequest, runner: Runtime | Session) -> Response | Mapping[str, Any]:
    """Run the script of a request with `runner`.

    `Accept: text/event-stream` gets its events as they happen, and the result as the last one.
    """
    source, options = request.body.code, script_options(request)
    if wants_events(request.http):
        return RunEventStream(request, lambda cancel: runner.stream(source, **options, cancel=cancel))

    async def work(run: RunUnderWay) -> Mapping[str, Any]:
        return result_members(await runner.execute_code(source, **options, cancel=run.cancel))

    return await run_for(request, work)
