"""`Cells`: the session in whose sandbox the cells of one notebook run, and what its shell there is asked.

Knows nothing of Jupyter's sockets: what a cell shows is handed on as messages of its protocol, by kind and content.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.to_thread

from toolcell.config import Limits
from toolcell.errors import ToolcellError, ToolError
from toolcell.kernel.folder import FolderCopy, NotebookFolder
from toolcell.kernel.mime_bundles import safe_bundle, safe_lines, safe_metadata
from toolcell.results import ExecutionResult, Outcome
from toolcell.runtime import Runtime
from toolcell.sessions import Session
from toolcell.support.call_text import arguments_text
from toolcell.support.text import clean, for_terminal
from toolcell.tools import Approve, Call, Deny, ToolRegistry, approval_hook
from toolcell_bridge.guest.notebook_words import CELL, NOTEBOOK_INPUT, NOTEBOOK_SHELL, SHOWN

DAY_S: Final = 86_400

LIMITS: Final = Limits(
    wall_s=DAY_S,
    cpu_s=3600,
    memory_bytes=2 << 30,
    disk_bytes=512 << 20,
    inodes=32_768,
    frame_bytes=64 << 20,
    message_elements=1 << 20,
    files=1000,
    files_bytes=256 << 20,
    host_work=4 << 30,
)
"""Limits of a cell, and of a notebook's sandbox, unless its kernel was installed with others."""

TOGETHER_S: Final = 0.05
"""What is printed in this time is one message."""

BEGINNING_S: Final = 0.01
"""How often an interrupt is tried again until the code of its cell has begun."""

PREPARING_S: Final = 60.0
ANSWERING_S: Final = 20.0
"""For what a front end asks while somebody types."""

MOST_COMPLETIONS: Final = 500
MOST_CHARACTERS: Final = 1000
"""Length of one completion."""
TYPES: Final = "_jupyter_types_experimental"

BEGIN: Final = f'__import__("{NOTEBOOK_SHELL}", fromlist=["x"]).begin({{!r}}, {{!r}}, {{!r}})'
"""A script that defines no name."""

NEW_SANDBOX: Final = (
    "The sandbox is gone, with all names and files of this notebook: run its cells again from the first."
)
OTHER_SANDBOX: Final = (
    "The sandbox was replaced: names and files stay. Settings are as at the start: those of IPython, such as %xmode, "
    "and of libraries, such as pd.set_option, and hooks that were registered."
)
OF_SHELL: Final = ("get_ipython", "exit", "quit", "exit hooks (atexit)")
"""What the shell of each sandbox brings."""

NO_FILES: Final = FolderCopy({})

ABOUT_INPUT: Final = "Ask the person at the notebook for a line of text, as input() and getpass() do."

Publish = Callable[[str, dict[str, Any]], object]
"""Takes the kind of a message and its content."""
Ask = Callable[[str, bool], Awaitable[str]]
"""Takes a prompt, and whether what is typed is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell that is to be executed."""

    source: str
    count: int
    """Its number in the notebook."""
    is_kept: bool = True
    """It counts in the history."""
    is_silent: bool = False
    may_ask: bool = False
    expressions: Mapping[str, str] = field(default_factory=dict)
    """To be evaluated after it."""

    def asked(self) -> dict[str, Any]:
        return {
            "kind": "execute",
            "count": self.count,
            "is_kept": self.is_kept,
            "is_silent": self.is_silent,
            "may_ask": self.may_ask,
            "expressions": dict(self.expressions),
        }


class Cells:
    """Runs the cells of one notebook, one after the other."""

    def __init__(
        self,
        options: dict[str, Any],
        folder: NotebookFolder | None = None,
        installed_by: str = "",
    ) -> None:
        """`options`: of `Runtime`. `installed_by`: the command that has installed the kernel."""
        self._folder = folder
        self._installed_by = installed_by
        self.limits: Limits = options.get("limits", LIMITS)
        self._options = options
        self._stack = AsyncExitStack()
        self._opening = anyio.Lock()
        self._session: Session | None = None
        self._is_closed = self._has_shell = False
        self._ask: Ask | None = None
        self._notes: list[str] = []
        """What the next cell says of its sandbox."""
        self.under_way: Cell | None = None
        self._is_executing = False
        """Its code may be running, and is not over."""
        self._is_interrupted = False
        """It was before its code ran."""

    # Opening and closing.

    async def open(self) -> Session:
        """Start the sandbox, unless it is there.

        Raises:
            ToolcellError: it cannot be started.
        """
        async with self._opening:
            if self._session is None:
                runtime = await self._stack.enter_async_context(Runtime(**self._runtime_options()))
                session = runtime.session(restore="empty", idle_s=7 * DAY_S, cpu_s=DAY_S, tool_calls=1_000_000_000)
                self._session = await self._stack.enter_async_context(session)
            return self._session

    def _chosen_by(self) -> str:
        """Return the command that chooses the packages of this kernel, with those that it has. A sandbox knows no more
        of it: it may name folders of the host."""
        words = ["toolcell", "kernel", "install"]
        for each in self._options.get("packages", ()):
            words += ["--packages", str(each)]
        return shlex.join(words)

    def _runtime_options(self) -> dict[str, Any]:
        registry = self._options.get("registry")
        registry = ToolRegistry() if registry is None else registry
        registry.add_hook(approval_hook(self._approve))
        registry.tool(name=NOTEBOOK_INPUT, description=ABOUT_INPUT, listed=False)(self._answer_input)
        packages = (*self._options.get("packages", ()), "ipython", "markdown-it-py", "mdit-py-plugins")
        preload = (NOTEBOOK_SHELL, *self._options.get("preload", ()))
        return self._options | {
            "registry": registry,
            "packages": packages,
            "preload": preload,
            "limits": self.limits,
        }

    async def close(self) -> None:
        """End the sandbox. May be called twice."""
        await self._stack.aclose()
        self._session, self._has_shell = None, False

    async def interrupt(self, cell: Cell | None) -> None:
        """Interrupt this cell if it is under way; None, what a front end asks. A cell that has no sandbox yet is not
        executed."""
        if cell is not self.under_way:
            return
        self._is_interrupted = cell is not None
        while self._session is not None and (cell is None or self._is_executing):
            if await self._session.interrupt() or cell is None or cell is not self.under_way:
                break
            await asyncio.sleep(BEGINNING_S)

    # Asking the person.

    async def _answer_input(self, prompt: str, is_hidden: bool = False) -> dict[str, str]:
        if self._ask is None:
            raise ToolError("nobody answers questions of this notebook")
        # The name keeps a password out of the audit log.
        return {"password" if is_hidden else "text": await self._ask(for_terminal(prompt), is_hidden)}

    async def _approve(self, call: Call) -> Approve | Deny:
        if self._ask is None:
            return Deny(f"{call.name} needs a person's approval, and nobody answers questions of this notebook")
        text = arguments_text(call.args)
        if not text.is_whole:
            return Deny(f"the arguments of {call.name} are too long to be shown to whoever would approve them")
        prompt = f"[toolcell] Make the call {call.name}({', '.join(text.parts)})? {call.approval_reason} [y/N] "
        answer = await self._ask(for_terminal(clean(prompt)), False)
        return Approve() if answer.strip().lower() in ("y", "yes") else Deny("the person at the notebook refused it")

    # Cells.

    async def execute(
        self, cell: Cell, publish: Publish, ask: Ask | None, *, is_interrupted: bool = False
    ) -> dict[str, Any]:
        """Execute a cell; return the content of its reply. `publish` takes what it shows, as it comes."""
        showing = _Showing(cell, publish, (self._chosen_by(), self._installed_by or self._chosen_by()))
        self.under_way, self._is_interrupted = cell, is_interrupted
        try:
            return await self._execute(cell, showing, ask)
        finally:
            self.under_way, self._is_executing = None, False
            showing.flush()

    async def _execute(self, cell: Cell, showing: _Showing, ask: Ask | None) -> dict[str, Any]:
        async def ask_after_output(prompt: str, is_hidden: bool) -> str:
            assert ask is not None
            showing.flush()
            return await ask(prompt, is_hidden)

        try:
            session = await self._prepared()
            self._say_notes(showing)
            if self._is_interrupted:
                return showing.fail(KeyboardInterrupt.__name__, "")
            self._ask = ask_after_output if cell.may_ask and ask is not None else None
            self._is_executing = True
            result = await session.execute_code(
                cell.source, inputs={CELL: cell.asked()}, on_log=showing.print, on_progress=showing.take
            )
        except ToolcellError as exc:
            return showing.fail(type(exc).__name__, str(exc))
        finally:
            self._ask, self._is_executing = None, False
        self._has_shell = not _is_lost(result)
        showing.say_what_ended(result)
        if not result.ok and self._has_shell and not showing.has_error:
            await self._ask_shell(showing, "", kind="finish")
        if self._folder is not None and self._folder.is_saved and self._has_shell:
            await self._save(self._folder, showing)
        return showing.reply(result)

    async def _save(self, folder: NotebookFolder, showing: _Showing) -> None:
        """Copy back what the cell has written."""
        result = await self._ask_shell(showing, "", kind="changed_files")
        for problem in folder.save(result.files, self.limits) if result is not None else ():
            showing.print("stderr", f"[toolcell] {problem}\n")

    async def complete(self, source: str, at: int) -> dict[str, Any]:
        found = await self._answer(source, kind="complete", at=at)
        start, end = (_number(found.get(name), at) for name in ("cursor_start", "cursor_end"))
        types = _list(_mapping(found.get("metadata")).get(TYPES))[:MOST_COMPLETIONS]
        kinds = [
            {name: _number(kind.get(name), at) for name in ("start", "end")}
            | {name: _short(kind.get(name, "")) for name in ("text", "type")}
            for kind in map(_mapping, types)
        ]
        return {
            "matches": [_short(each) for each in _list(found.get("matches"))[:MOST_COMPLETIONS]],
            "cursor_start": start,
            "cursor_end": end,
            "metadata": {TYPES: kinds},
        }

    async def inspect(self, source: str, at: int, detail: int, omit: list[str]) -> dict[str, Any]:
        found = await self._answer(source, kind="inspect", at=at, detail=detail, omit=omit)
        data = safe_bundle(_mapping(found.get("data")))
        return {"found": bool(data), "data": data, "metadata": {}}

    async def is_complete(self, source: str) -> dict[str, Any]:
        """Say whether a cell is whole, or how far its next line is indented."""
        found = await self._answer(source, kind="is_complete")
        match found.get("status"), found.get("indent"):
            case "complete" | "invalid" as status, _:
                return {"status": status}
            case "incomplete", indent:
                return {"status": "incomplete", "indent": " " * (len(indent) if isinstance(indent, str) else 0)}
        return {"status": "unknown"}

    async def _answer(self, source: str, **asked: Any) -> dict[str, Any]:
        """Ask the shell about some source; return nothing when it does not answer."""
        showing = _Showing(None, lambda _kind, _content: None)
        await self._ask_shell(showing, source, **asked)
        return showing.answer

    async def _ask_shell(self, showing: _Showing, source: str, **asked: Any) -> ExecutionResult | None:
        limits = self.limits.model_copy(update={"wall_s": min(ANSWERING_S, self.limits.wall_s)})
        try:
            session = await self._prepared()
            result = await session.execute_code(
                source, inputs={CELL: asked}, limits=limits, on_log=showing.print, on_progress=showing.take
            )
        except ToolcellError:
            return None
        self._has_shell = not _is_lost(result)
        if not self._has_shell:
            self._notes.append(NEW_SANDBOX)
        return result

    def _say_notes(self, showing: _Showing) -> None:
        for note in self._notes:
            showing.print("stderr", f"[toolcell] {note}\n")
        self._notes.clear()

    async def _prepared(self) -> Session:
        """Return the session, with a shell and the notebook's files in its sandbox.

        Raises:
            ToolcellError: there is none.
        """
        session = await self.open()
        while not (self._has_shell and session.is_live):
            is_back = self._has_shell  # in another sandbox, with names and files
            limits = self.limits.model_copy(update={"wall_s": max(PREPARING_S, self.limits.wall_s)})
            folder = None if is_back else self._folder
            copy = await anyio.to_thread.run_sync(folder.copied, self.limits) if folder is not None else NO_FILES
            tells_files = self._folder is not None and not self._folder.is_saved
            source = BEGIN.format(self._chosen_by(), is_back, tells_files)
            result = await session.execute_code(source, files=copy.files, limits=limits)
            if result.error is not None:
                raise ToolcellError(f"the sandbox has no shell for a notebook: {result.error.message}")
            self._has_shell = True
            if is_back and result.session is not None:
                self._has_shell = result.session.began != "empty"
                self._notes.append(OTHER_SANDBOX if self._has_shell else NEW_SANDBOX)
                gone = [each for each in result.session.forgotten if each.partition(":")[0] not in OF_SHELL]
                self._notes += [f"gone with the last sandbox: {clean(each)}" for each in gone]
            self._notes += copy.problems
        return session


def _is_lost(result: ExecutionResult) -> bool:
    return result.session is not None and bool(result.session.lost)


class _Showing:
    """What one cell shows, until its reply. A guest has made it: nothing of it is trusted to have a shape."""

    def __init__(self, cell: Cell | None, publish: Publish, commands: tuple[str, str] = ("", "")) -> None:
        """`commands`: that chooses packages, as the sandbox knows it and in whole."""
        self._cell, self._send, self._commands = cell, publish, commands
        self._stream = ""
        self._texts: list[str] = []
        """Printed to one stream, and not yet sent."""
        self._sending: asyncio.TimerHandle | None = None
        self._error: dict[str, Any] = {}
        """The last error that was shown."""
        self.answer: dict[str, Any] = {}

    def print(self, stream: str, text: str) -> None:
        """Pass on what was printed. Front ends drop output of more than about 1000 messages a second."""
        if stream != self._stream:
            self.flush()
        self._stream = stream
        self._texts.append(text)
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_later(TOGETHER_S, self.flush)

    def flush(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if self._texts:
            text, self._texts = "".join(self._texts), []
            self._send("stream", {"name": self._stream, "text": text})

    def _publish(self, kind: str, content: dict[str, Any]) -> None:
        self.flush()
        self._send(kind, content)

    def say_what_ended(self, result: ExecutionResult) -> None:
        """Say which threads ended with the cell, and whether the sandbox did although the cell had its way."""
        session = result.session
        if session is not None and session.ended:
            self.print("stderr", f"[toolcell] ended with the cell: {', '.join(session.ended)}\n")
        if session is not None and session.lost and result.outcome in (Outcome.OK, Outcome.ERROR):
            self.print("stderr", f"[toolcell] The cell is over, but {clean(session.lost)}. {NEW_SANDBOX}\n")

    def take(self, value: object) -> None:
        """Pass on what the shell reports."""
        if not isinstance(value, dict):
            return
        match value.get(SHOWN):
            case "execute_result" | "display_data" | "update_display_data" as kind:
                self._show(kind, value)
            case "clear_output":
                self._publish("clear_output", {"wait": bool(value.get("wait"))})
            case "error":
                said, traceback = str(value.get("evalue")), "\n".join(map(str, _list(value.get("traceback"))))
                said, traceback = (text.replace(*self._commands) for text in (said, traceback))
                self._error = _error(value.get("ename"), said, [traceback])
                self._publish("error", self._error)
            case "reply":
                self.answer = _mapping(_plain(value.get("content")))

    def _show(self, kind: str, value: dict[str, Any]) -> None:
        content: dict[str, Any] = {
            "data": safe_bundle(_mapping(_plain(value.get("data")))),
            "metadata": safe_metadata(value.get("metadata")),
        }
        if kind == "execute_result":
            content["execution_count"] = self._cell.count if self._cell is not None else 0
        else:
            ident = _mapping(value.get("transient")).get("display_id")
            content["transient"] = {"display_id": ident} if isinstance(ident, str) else {}
        self._publish(kind, content)

    @property
    def has_error(self) -> bool:
        """The shell has shown an error."""
        return bool(self._error)

    def reply(self, result: ExecutionResult) -> dict[str, Any]:
        """Return the reply to a cell, and show how it ended where its shell could not."""
        error, is_lost = result.error, _is_lost(result)
        if result.ok:
            if not self.answer:  # the sandbox was gone before the cell, and there is another one
                return self.fail("SandboxLost", NEW_SANDBOX)
            for each in result.warnings:
                self.print("stderr", f"warning: {each}\n")
            if self.answer.get("is_error") and self._error:  # as `raise SystemExit`, which ends a script well
                return {"status": "error", **self._error}
            orders = [_order(_mapping(each)) for each in _list(self.answer.get("payload"))]
            values = _mapping(self.answer.get("user_expressions"))
            return {
                "status": "ok",
                "payload": [each for each in orders if each is not None],
                "user_expressions": {name: _value(_mapping(value)) for name, value in values.items()},
            }
        if result.outcome is Outcome.ERROR and error is not None:
            return {"status": "error", **(self._error or _error(error.type, error.message, []))}
        if result.outcome is Outcome.CANCELLED and not is_lost:
            return {"status": "error", **self._error} if self._error else self.fail("KeyboardInterrupt", "")
        said = error.message if error is not None else str(result.outcome)
        return self.fail(str(result.outcome), f"{said}; {NEW_SANDBOX}" if is_lost else said)

    def fail(self, name: str, said: str) -> dict[str, Any]:
        """Show an error in words of ours, and return the reply."""
        error = _error(name, said, [f"\x1b[31m{name}\x1b[39m: {for_terminal(said)}"])
        self._publish("error", error)
        return {"status": "error", **error}


def _error(name: object, said: object, traceback: object) -> dict[str, Any]:
    lines = safe_lines("\n".join(map(str, _list(traceback))))
    return {"ename": safe_lines(str(name)), "evalue": safe_lines(str(said)), "traceback": lines.split("\n")}


def _order(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a cell asks of the front end beside its output; None for what no front end may be asked."""
    match given:
        case {"source": "page"}:
            start = _number(given.get("start"), 0)
            return {"source": "page", "data": safe_bundle(_mapping(given.get("data"))), "start": start}
        case {"source": "set_next_input", "text": str(text)}:
            return {"source": "set_next_input", "text": text, "replace": bool(given.get("replace"))}
        case {"source": "ask_exit"}:
            return {"source": "ask_exit", "keepkernel": bool(given.get("keepkernel"))}
    return None


def _value(given: dict[str, Any]) -> dict[str, Any]:
    """Return the value of an expression, or its error."""
    if given.get("status") == "ok":
        data, metadata = safe_bundle(_mapping(given.get("data"))), safe_metadata(given.get("metadata"))
        return {"status": "ok", "data": data, "metadata": metadata}
    return {"status": "error", **_error(given.get("ename"), given.get("evalue"), given.get("traceback"))}


def _short(text: object) -> str:
    return safe_lines(str(text)[:MOST_CHARACTERS])


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object, default: int) -> int:
    return value if type(value) is int and value >= 0 else default


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(value: object) -> Any:
    """Return a value as JSON has it. The wire also has bytes, arrays and tables."""
    match value:
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list():
            return [_plain(each) for each in value]
        case str() | int() | float() | None:
            return value
        case _:
            return str(value)
