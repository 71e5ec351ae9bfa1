"""`ExecutionRunner`: one request as a run of a tenant's runtime, with the files of its session."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import httpx

from toolcell import daemon_threads
from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable, StoreError, UsageError
from toolcell.results import ExecutionResult
from toolcell.run.input_files import guest_files
from toolcell.runtime import Runtime
from toolcell.sandbox.backend import GuestFile
from toolcell.service.compat.messages import Answer, ExecutionRequest, error, result_body
from toolcell.service.compat.settings import MAX_TIMEOUT_S, CompatSettings
from toolcell.service.compat.tool_calls import Callback, CalledBackTools
from toolcell.service.compat.workspaces import SessionFolder, Workspaces
from toolcell.tools.call import RunContext
from toolcell.tools.run_state import new_id

CPU_FOR_WALL: Final = 4
"""CPU seconds for each second of the timeout. The timeout is what the client asked for; the processor is not."""

_WHOLE_WORKSPACE: Final = "set_result(None, files=['.'])"

Notes = list[str]
"""For the logs of a run."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One request to carry out, and whose it is."""

    tenant: str
    subject: str
    ident: str
    """The client's execution_id, or one of ours."""
    request: ExecutionRequest
    run_id: str = field(default_factory=new_id)


class ExecutionRunner:
    """Runs scripts, and keeps what they leave in their sessions' workspaces."""

    def __init__(
        self,
        runtime_of: Callable[[str], Awaitable[Runtime]],
        workspaces: Callable[[str], Workspaces],
        settings: CompatSettings,
        http: httpx.AsyncClient,
    ) -> None:
        """`runtime_of` and `workspaces` take a tenant's name."""
        self._runtime_of, self._workspaces, self._settings, self._http = runtime_of, workspaces, settings, http

    async def run(self, execution: Execution, cancel: anyio.Event) -> tuple[Answer, bool]:
        """Run a script. Return the answer, and whether any of the script ran.

        Raises:
            AuditError: the run, or a call of it, could not be recorded.
        """
        request = execution.request
        try:
            runtime = await self._runtime_of(execution.tenant)
            limits = limits_of(runtime.limits, request.timeout_s, self._settings)
            given = self._arguments(execution, limits, cancel)
            if request.session_id:
                async with self._workspaces(execution.tenant).use(request.session_id) as workspace:
                    result, notes = await self._run_in(workspace, runtime, request, given)
            else:
                result, notes = await runtime.execute_code(request.code, files=request.files, **given), []
        except SandboxUnavailable as exc:
            return error(503, f"no sandbox could be started: {exc}"), False
        except StoreError as exc:
            return error(500, f"workspace error: {exc}"), False
        except UsageError as exc:
            return error(400, str(exc)), False
        body = await daemon_threads.run_sync(result_body, result, limits.wall_s, self._settings, notes)
        return Answer(200, body), True

    def _arguments(self, execution: Execution, limits: Limits, cancel: anyio.Event) -> dict[str, Any]:
        request = execution.request
        tools = CalledBackTools(Callback(request.callback_url, request.callback_token, execution.ident), self._http)
        about = {"execution_id": execution.ident, "workspace": request.session_id}
        context = RunContext(run_id=execution.run_id, user_id=execution.subject, custom=about)
        return {"tools": tools, "context": context, "cancel": cancel, "limits": limits}

    async def _run_in(
        self, workspace: SessionFolder, runtime: Runtime, request: ExecutionRequest, given: dict[str, Any]
    ) -> tuple[ExecutionResult, Notes]:
        """Run a script on the files of its session, and keep what it leaves of them."""
        files = _together(await workspace.files(), request.files)
        limits: Limits = given["limits"]
        everything = limits.model_copy(update={"files": limits.inodes, "files_bytes": limits.disk_bytes})
        async with runtime.session(restore="empty", limits=limits, cpu_s=limits.cpu_s * 2) as session:
            result = await session.execute_code(request.code, files=files, **given)
            if not session.is_live:
                return result, [f"the workspace is as it was before this run: {_why_lost(result)}"]
            left = await session.execute_code(_WHOLE_WORKSPACE, tools=[], lint="off", limits=everything)
        return result, await _kept(workspace, left)


def limits_of(own: Limits, timeout_s: float, settings: CompatSettings) -> Limits:
    """Return the limits of a run: the operator's, and the time that the client asked for, up to 300 seconds.

    An operator who set `wall_s` or `cpu_s` allows no more than that.
    """
    set_here = own.model_fields_set
    wall_s = min(timeout_s, own.wall_s if "wall_s" in set_here else MAX_TIMEOUT_S)
    cpu_s = own.cpu_s if "cpu_s" in set_here else max(own.cpu_s, wall_s * CPU_FOR_WALL)
    return own.model_copy(update={"wall_s": wall_s, "cpu_s": cpu_s, "output_bytes": settings.max_output_bytes})


def _together(kept: dict[str, bytes], sent: tuple[GuestFile, ...]) -> tuple[GuestFile, ...]:
    """Put what the client sent over what is kept.

    Raises:
        UsageError: a folder of one is a file of the other; names it.
    """
    names = {os.path.normpath(each.name): each.data for each in sent}
    return guest_files(kept | names)


async def _kept(workspace: SessionFolder, left: ExecutionResult) -> Notes:
    """Keep the files that a run has left, and say what could not be kept."""
    before = "the workspace is as it was before this run"
    if not left.ok:
        said = left.error.message if left.error is not None else left.outcome
        return [f"{before}: its files could not be read: {said}"]
    try:
        await workspace.replace({each.name: each.data for each in left.files if each.data is not None})
    except StoreError as exc:
        return [f"{before}: {exc}"]
    return [f"file {each.name!r} was not kept: {each.problem}" for each in left.files if each.data is None]


def _why_lost(result: ExecutionResult) -> str:
    lost = result.session.lost if result.session is not None else ""
    return lost or f"it ended with outcome {result.outcome}"


def folder_of(root: Path, tenant: str, default: str) -> Path:
    """Return the folder of a tenant's workspaces. No session and no tenant has a name with a dot."""
    return root if tenant == default else root / ".tenants" / tenant
