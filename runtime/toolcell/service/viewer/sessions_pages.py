"""Sessions: a terminal for each, with what its script prints as it prints it, and the files in its workspace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.responses import RedirectResponse, Response, StreamingResponse

from toolcell.errors import ToolcellError, UsageError
from toolcell.run import CallEnded, CallStarted, LogPrinted, RunFinished
from toolcell.service.problems import Problem
from toolcell.service.routes.sessions import session_members
from toolcell.service.run_arguments import context_of
from toolcell.service.running import under_way
from toolcell.service.runs_under_way import RunUnderWay
from toolcell.service.viewer.live_runs import LiveRun, Reader, Tell, event_stream
from toolcell.service.viewer.rendering import as_download, as_image, to_text
from toolcell.service.viewer.service_host import host_of, principal_of_visitor
from toolcell.service.viewer.site import PageMissing, Visit, form, page
from toolcell.service.viewer.visitors import EXECUTE, READ
from toolcell.sessions import Session
from toolcell.support.data_text import shown_text
from toolcell_bridge.guest.pictures import picture_type

MAX_PRINTED_CHARS: Final = 200_000
"""Shown of what one script prints."""
MAX_FILE_BYTES: Final = 32 << 20


async def sessions(visit: Visit) -> Response:
    tenant = await host_of(visit).tenant_of(visit.visitor)
    found = [session_members(*each) for each in await tenant.sessions.list()]
    return visit.page("sessions", sessions=found, may_run=visit.visitor.can(EXECUTE))


async def create(visit: Visit) -> Response:
    api = await host_of(visit).api_request(visit.request, visit.visitor)
    name = visit.fields.get("name", "").strip() or None
    async with under_way(api):
        session = await api.tenant.sessions.create(name, {"context": context_of(api)})
    return RedirectResponse(f"/sessions/{session.id}", 303)


async def show(visit: Visit) -> Response:
    name = _name(visit)
    tenant = await host_of(visit).tenant_of(visit.visitor)
    found = next((session_members(*each) for each in await tenant.sessions.list() if each[0] == name), None)
    if found is None:
        raise PageMissing(f"there is no session {name}")
    return visit.page("session", session=found, may_run=visit.visitor.can(EXECUTE))


async def run(visit: Visit) -> Response:
    """Run what was typed, and return the place in the page where its output appears."""
    code = visit.fields.get("code", "").replace("\r\n", "\n")
    if not code.strip():
        raise UsageError("type a script first")
    host, session = host_of(visit), await _session(visit)
    api = await host.api_request(visit.request, visit.visitor, outlives=True)

    async def work(tell: Tell) -> None:
        try:
            async with under_way(api) as one:
                options: dict[str, Any] = {"cancel": one.cancel, "context": context_of(api)}
                async with session.stream(code, on_approval="suspend", **options) as stream:
                    await _tell(stream, tell, one)
        except Problem as exc:
            tell("part", to_text("parts/problem", {"why": exc.detail or exc.title}))
        except ToolcellError as exc:
            tell("part", to_text("parts/problem", {"why": str(exc)}))
        finally:
            tell("end", "")

    return visit.part("terminal_entry", code=code, live=host.live.begin(visit.visitor.tenant, work))


async def _tell(stream: Any, tell: Tell, one: RunUnderWay) -> None:
    left = MAX_PRINTED_CHARS
    async for event in stream:
        match event:
            case LogPrinted(name, text) if left > 0:
                shown, left = text[:left], left - len(text)
                note = "" if left > 0 else f"more than {MAX_PRINTED_CHARS:,} characters are not shown here"
                tell("part", to_text("parts/printed", {"text": shown, "stream": name, "note": note}))
            case CallStarted() | CallEnded():
                tell("part", to_text("parts/called", {"call": event, "is_over": isinstance(event, CallEnded)}))
            case RunFinished(result):
                one.check_allowed()
                value = shown_text(result.value) if result.has_value else ""
                tell("part", to_text("parts/finished", {"result": result, "value": value}))


async def events(visit: Visit) -> Response:
    live = host_of(visit).live.find(visit.visitor.tenant, visit.request.path_params["live"])
    if live is None:
        raise PageMissing("there is no such run; it may have made room for newer ones")
    last = visit.request.headers.get("last-event-id", "")
    first = int(last) + 1 if last.isascii() and last.isdecimal() and len(last) < 9 else 0
    return StreamingResponse(event_stream(_followed(visit, live, first)), media_type="text/event-stream")


async def _followed(visit: Visit, live: LiveRun, first: int) -> AsyncIterator[tuple[int, str, str]]:
    """Yield the events of a run for as long as the visitor may read them."""
    host, reader = host_of(visit), Reader()
    asking = host.asking(visit.request)
    principal = principal_of_visitor(visit.visitor)
    with host.service.revocations.ending(principal, asking, lambda problem: live.refuse(reader)):
        async for event in live.follow(reader, first):
            yield event


async def interrupt(visit: Visit) -> Response:
    was = await (await _session(visit)).interrupt()
    return visit.part("note", text="interrupted" if was else "nothing is under way")


async def reset(visit: Visit) -> Response:
    api, session = await host_of(visit).api_request(visit.request, visit.visitor), await _session(visit)
    async with under_way(api):
        await session.reset()
    return visit.part("note", text="names and files are forgotten")


async def forget(visit: Visit) -> Response:
    """Close a session and remove its journal."""
    tenant = await host_of(visit).tenant_of(visit.visitor)
    await tenant.sessions.forget(_name(visit))
    return RedirectResponse("/sessions", 303)


async def files(visit: Visit) -> Response:
    api, session = await host_of(visit).api_request(visit.request, visit.visitor), await _session(visit)
    async with under_way(api):
        found = await session.files()
    return visit.part("session_files", name=_name(visit), files=found)


async def file(visit: Visit) -> Response:
    """Return a file of the workspace: a picture to look at, if that is asked for, or a file to keep."""
    api, session = await host_of(visit).api_request(visit.request, visit.visitor), await _session(visit)
    params = visit.request.query_params
    path = params.get("path", "")
    async with under_way(api):
        listed = {each.name: each.size for each in await session.files()}
        if path not in listed:
            raise PageMissing("there is no such file in the workspace")
        if listed[path] > MAX_FILE_BYTES:
            raise UsageError(f"the file has {listed[path]} bytes; the pages hand out at most {MAX_FILE_BYTES}")
        content = await session.read_file(path)
    if params.get("as") == "picture" and picture_type(content):
        return as_image(content) or as_download(path, content)
    return as_download(path, content)


def _name(visit: Visit) -> str:
    return str(visit.request.path_params["name"])


async def _session(visit: Visit) -> Session:
    tenant = await host_of(visit).tenant_of(visit.visitor)
    return await tenant.sessions.get(_name(visit))


ONE = "/sessions/{name}"
ROUTES = (
    page("/sessions", sessions, READ),
    form("/sessions", create, EXECUTE),
    page(ONE, show, READ),
    form(f"{ONE}/run", run, EXECUTE),
    page(f"{ONE}/runs/{{live}}/events", events, EXECUTE),
    form(f"{ONE}/interrupt", interrupt, EXECUTE),
    form(f"{ONE}/reset", reset, EXECUTE),
    form(f"{ONE}/forget", forget, EXECUTE),
    page(f"{ONE}/files", files, EXECUTE),
    page(f"{ONE}/file", file, EXECUTE),
)
