"""`ClientSession`: a session at a service: scripts that share one sandbox there, with the tools here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Unpack

import anyio

from toolcell.calls.call import CallableTools
from toolcell.control import ResumeDecision
from toolcell.errors import ServiceError, SessionError, ToolcellError, UsageError
from toolcell.results import ExecutionResult, SessionFile, Suspension
from toolcell.run import FileContent, FileInput, OnLog, OnProgress, RunOptions, RunStream, SessionRunKwargs
from toolcell.service.socket.arguments import plain_decisions
from toolcell.service.socket.values import READERS
from toolcell.service.socket.wire_arguments import wire_files, wire_run, wire_token
from toolcell.support.keywords import keywords_known
from toolcell.support.lifetime import OpenedInBlock
from toolcell.tools import RunContext


class ClientSession(OpenedInBlock):
    """A sandbox that stays at the service. It has the methods of `Session`."""

    def __init__(self, client: Any, arguments: Mapping[str, Any], tools: Any = None, context: RunContext | None = None):
        """`arguments`: what its session is opened with. A `Client` makes it."""
        self._client, self._arguments, self._tools, self._context = client, arguments, tools, context
        self._number = 0
        self._home = ""
        """The client's session with the service: this one ends with it."""
        self._state: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<ClientSession {self.id!r} {'open' if self._number else 'closed'}>"

    @property
    def id(self) -> str:
        """Its name, or what it has in the place of one. Empty before it is opened."""
        return str(self._state.get("id", ""))

    @property
    def is_live(self) -> bool:
        """True while it has a sandbox, as of the last answer of the service."""
        return bool(self._state.get("is_live"))

    @property
    def is_paused(self) -> bool:
        """True while its sandbox is stopped, as of the last answer of the service."""
        return bool(self._state.get("is_paused"))

    @property
    def used_cpu_s(self) -> float:
        """CPU seconds of all scripts so far."""
        return float(self._state.get("used_cpu_s", 0.0))

    @property
    def used_calls(self) -> int:
        """Tool calls of all scripts so far."""
        return int(self._state.get("used_calls", 0))

    @property
    def waiting(self) -> Suspension | str:
        """What the last script waits for; see `Session.waiting`."""
        found = self._state.get("waiting") or ""
        waiting: Suspension | str = READERS["suspension"](found) if isinstance(found, dict) else str(found)
        return waiting

    async def open(self) -> None:
        """Start the sandbox; see `Session.open`."""
        if self._number:
            raise UsageError(f"session {self.id!r} was opened already; session() makes another one")
        await self._open_as("session.open", self._arguments)

    async def _open_as(self, method: str, arguments: Mapping[str, Any], session: str = "") -> None:
        opened = await self._client._ask(
            method,
            arguments,
            "state",
            tools=self._tools,
            makes_calls=False,
            offers=method == "session.open",
            session=session,
        )
        self._number, self._state, self._home = opened["value"], opened["state"], self._client._link.home

    async def close(self) -> None:
        """End the script under way, and destroy the sandbox. May be called twice."""
        number, self._number = self._number, 0
        if not number or self._home != self._client._link.home or not self._client._lifetime.is_open:
            return  # it ended with the client's session
        try:
            with anyio.CancelScope(shield=True):
                await self._client._ask("session.close", {"session": number}, "nothing", makes_calls=False)
        except ToolcellError:
            return  # the service ends it by itself when this client does not come back

    async def __aenter__(self) -> ClientSession:
        if not self._number:
            await self.open()
        return self

    async def _does(self, method: str, kind: str, arguments: Mapping[str, Any], **options: Any) -> Any:
        if not self._number:
            raise SessionError(f"session {self.id!r} is not open; use it as `async with client.session() as session:`")
        options.setdefault("makes_calls", False)
        given = {"session": self._number, **arguments}
        try:
            answer = await self._client._ask(f"session.{method}", given, "state", session=self._home, **options)
        except ServiceError as exc:
            if not exc.may_have_begun:
                raise SessionError(f"session {self.id!r} is closed: {exc}") from exc
            raise
        self._state = answer["state"]
        return READERS[kind](answer["value"])

    # Scripts.

    @keywords_known
    async def execute_code(self, source: str, **options: Unpack[SessionRunKwargs]) -> ExecutionResult:
        """Run a script in the session's sandbox; see `Session.execute_code` and `Client.execute_code`."""
        return await self._execute_script(source, RunOptions.of("execute_code", options, SessionRunKwargs))

    async def _execute_script(self, source: str, options: RunOptions) -> ExecutionResult:
        return await self._run("execute_code", wire_run(source, options), options)

    def stream(self, source: str, **options: Unpack[SessionRunKwargs]) -> RunStream:
        """Run a script as `execute_code` does, and return what happens as events; see `Session.stream`."""
        options["context"] = options.get("context") or self._context
        return RunStream(
            partial(self._execute_script, source),
            RunOptions.of("stream", options, SessionRunKwargs),
            lambda: self._client._tasks,
        )

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        *,
        tools: CallableTools | Iterable[Any] | None = None,
        context: RunContext | None = None,
        cancel: anyio.Event | None = None,
        on_log: OnLog | None = None,
        on_progress: OnProgress | None = None,
    ) -> ExecutionResult:
        """Carry the script on that waits; see `Session.resume`."""
        options = RunOptions(tools=tools, context=context, cancel=cancel, on_log=on_log, on_progress=on_progress)
        arguments = {"token": wire_token(token), "decisions": plain_decisions(decisions)}
        return await self._run("resume", arguments, options)

    async def _run(self, method: str, arguments: Mapping[str, Any], options: RunOptions) -> ExecutionResult:
        result = await self._does(
            method,
            "result",
            arguments,
            makes_calls=True,
            tools=options.tools if options.tools is not None else self._tools,
            context=options.context or self._context,
            handlers=options.handlers,
        )
        assert isinstance(result, ExecutionResult)
        return result

    async def abandon(self) -> None:
        """Give up the script that waits; see `Session.abandon`."""
        await self._does("abandon", "nothing", {})

    async def interrupt(self) -> bool:
        """Interrupt the script under way; see `Session.interrupt`."""
        if not self._number:
            return False
        return bool(await self._does("interrupt", "bool", {}))

    # The state as a whole.

    async def put_files(self, files: Iterable[FileInput] | Mapping[str, FileContent]) -> None:
        """Write files to the workspace; see `Session.put_files`."""
        await self._does("put_files", "nothing", {"files": wire_files(files)})

    async def files(self) -> tuple[SessionFile, ...]:
        """List the files in the workspace; see `Session.files`."""
        found: tuple[SessionFile, ...] = await self._does("files", "files", {})
        return found

    async def read_file(self, name: str) -> bytes:
        """Return the content of a file in the workspace; see `Session.read_file`."""
        return bytes(await self._does("read_file", "bytes", {"name": name}))

    async def reset(self) -> None:
        """Forget everything; see `Session.reset`."""
        await self._does("reset", "nothing", {})

    async def put_down(self) -> None:
        """Destroy the sandbox until the next script; see `Session.put_down`."""
        await self._does("put_down", "nothing", {})

    async def pause(self) -> bool:
        """Stop the sandbox's processes until the next script; see `Session.pause`."""
        return bool(await self._does("pause", "bool", {}))

    async def fork(self, name: str | None = None) -> ClientSession:
        """Return another open session with the same state; see `Session.fork`."""
        if not self._number:
            raise SessionError(f"session {self.id!r} is not open; use it as `async with client.session() as session:`")
        copy = ClientSession(self._client, self._arguments, self._tools, self._context)
        await copy._open_as("session.fork", {"session": self._number, "name": name}, self._home)
        return copy
