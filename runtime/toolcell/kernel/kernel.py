"""`SandboxKernel`: Jupyter's protocol on the host, for cells that run in a sandbox.

ipykernel's own base class speaks the protocol. What is executed, completed or inspected is so in the sandbox, by
`Cells`; history is kept here.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from toolcell.errors import MissingPackage, ToolcellError, UsageError
from toolcell_bridge import __version__

try:
    from ipykernel import kernel_protocol_version
    from ipykernel.jsonutil import json_clean
    from ipykernel.kernelapp import IPKernelApp
    from ipykernel.kernelbase import Kernel
    from zmq import ZMQError
except ModuleNotFoundError as exc:
    raise MissingPackage(f"a kernel needs {exc.name}, which is not installed: pip install 'toolcell[jupyter]'") from exc

if TYPE_CHECKING:
    from toolcell.kernel.cells import Ask, Cell, Cells

ANSWER_S: Final = 0.02
"""How often stdin is looked at while somebody is asked."""

MOST_CHARACTERS: Final = 1000
"""Length of a pattern for cells of the history. The host's loop waits for the search."""

OF_MAIN_THREAD: Final = ("execute_request", "complete_request", "inspect_request", "is_complete_request")
"""What the sandbox answers."""
NOT_OFFERED: Final = ("debug_request", "create_subshell_request", "delete_subshell_request", "list_subshell_request")

Handler = Callable[[Any, Any, dict[str, Any]], Awaitable[None]]
"""Takes the socket for the reply, who asks, and the request."""


def start(connection_file: str, make_cells: Callable[[], Cells]) -> None:
    """Serve a notebook until its front end ends it.

    Front ends connect while the cells are made, with all that this imports. One that asks before it has every
    connection waits in vain for a while, and asks again.

    Raises:
        UsageError: another process has one of the ports.
    """
    app = KernelApp.instance()
    try:
        app.initialize(["-f", connection_file])
    except ZMQError as exc:
        if app.context is not None:
            app.context.destroy(linger=0)  # or this process waits at its end for sockets that nobody closes
        raise UsageError(f"{connection_file} names a place where this kernel cannot listen: {exc}") from exc
    app.kernel.cells = make_cells()
    app.start()


class SandboxKernel(Kernel):
    """Passes on what front ends ask, and what cells show."""

    cells: Cells

    implementation = "toolcell"
    implementation_version = __version__
    banner = f"Python {sys.version.split()[0]} in a toolcell sandbox"
    language_info: dict[str, object] = {  # noqa: RUF012
        "name": "python",
        "version": sys.version.split()[0],
        "mimetype": "text/x-python",
        "codemirror_mode": {"name": "ipython", "version": sys.version_info[0]},
        "pygments_lexer": "ipython3",
        "nbconvert_exporter": "python",
        "file_extension": ".py",
    }

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._next = 1
        self._history: list[tuple[int, int, str]] = []
        self._tasks = set[asyncio.Task[object]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asking = asyncio.Lock()
        self._header: dict[str, Any] = {}
        """Of the request for the last cell."""
        self._interrupt_before: tuple[str, datetime] | None = None
        """Who has interrupted when nothing ran, and when. A cell that was sent before that may come yet."""
        for name in OF_MAIN_THREAD:  # the control channel has a thread of its own
            self.control_handlers[name] = partial(_refuse, "it is answered on the shell channel only")
        for name in NOT_OFFERED:
            self.control_handlers[name] = partial(_refuse, "this kernel has no debugger and no subshells")
        for handlers in (self.shell_handlers, self.control_handlers):
            handlers |= {name: partial(self._answer, handler) for name, handler in handlers.items()}
        for name in ("comm_open", "comm_msg", "comm_close"):
            self.shell_handlers[name] = self._refuse_comm

    # Numbers of cells: the base class counts by itself, also cells that are not to be counted.

    @property
    def execution_count(self) -> int:
        return self._next

    @execution_count.setter
    def execution_count(self, value: int) -> None:
        pass

    @property
    def kernel_info(self) -> dict[str, Any]:
        """What front ends are told. The base class would load its debugger, which looks into the host, and offer it."""
        return {
            "protocol_version": kernel_protocol_version,
            "implementation": self.implementation,
            "implementation_version": self.implementation_version,
            "language_info": self.language_info,
            "banner": self.banner,
            "help_links": [],
            "supported_features": [],
        }

    # Beginning and end.

    def start(self) -> None:
        super().start()
        self._loop = self.io_loop.asyncio_loop
        signal.signal(signal.SIGINT, self._on_signal)  # at once: a handler of the loop runs turns later
        self.io_loop.add_callback(self._open)

    async def _open(self) -> None:
        try:
            await self.cells.open()
        except ToolcellError as exc:  # the first cell says it to the person
            self.log.error("%s", exc)

    def pre_handler_hook(self) -> None:
        """Keep the handler of SIGINT: it interrupts the cell, and not the host."""

    def post_handler_hook(self) -> None:
        """See `pre_handler_hook`."""

    def _interrupt(self, cell: Cell | None, sender: str, at: datetime) -> None:
        """Interrupt the cell that ran when somebody asked for it; without one, what that front end had sent by then."""
        running = self.cells.under_way
        if running is None and cell is None and sender:
            self._interrupt_before = sender, at
        if running is cell or (running is not None and cell is None):
            is_meant = self._is_earlier(at) if sender == self._header.get("session") else running is cell
            if running is None or is_meant:
                self._begin(self.cells.interrupt(running))

    def _on_signal(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._interrupt, self.cells.under_way, "", datetime.now(UTC))

    def _is_earlier(self, at: datetime) -> bool:
        """Whether the request for the last cell was sent by then. Clocks of different senders differ."""
        sent = self._header.get("date")
        return isinstance(sent, datetime) and sent <= at

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_interrupt_children(self) -> None:
        """Called in the thread of the control channel, perhaps before there is an event loop."""
        header = self.get_parent("control").get("header", {})
        asked = header.get("session", ""), header.get("date", datetime.now(UTC))
        if self._loop is None:
            self._interrupt_before = asked
        else:
            self._loop.call_soon_threadsafe(self._interrupt, self.cells.under_way, *asked)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End the sandbox. Runs in the thread of the control channel."""
        assert self._loop is not None
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        if asyncio.get_running_loop() is not self._loop:
            await asyncio.wrap_future(closing)
        return {"status": "ok", "restart": restart}

    async def _close(self) -> None:
        try:
            await self.cells.close()
        except Exception:
            self.log.exception("the sandbox could not be ended in an orderly way")

    async def _answer(self, handler: Handler, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Handle a request. The base class would not answer one that is malformed, and its front end would wait."""
        try:
            await handler(stream, ident, parent)
        except Exception as exc:
            kind = parent["header"]["msg_type"]
            self.log.warning("%s is refused", kind, exc_info=True)
            refusal = _refusal(f"the {kind} cannot be answered: {type(exc).__name__}: {exc}")
            self.session.send(stream, kind.removesuffix("request") + "reply", refusal, parent, ident)

    # Cells.

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Execute a cell, unless its request is malformed."""
        match parent:
            case {"metadata": dict(), "content": {"code": str()} as content} if isinstance(
                content.get("user_expressions"), dict | None
            ):
                # A lone surrogate cannot be sent on. Its escape is the same in a text; elsewhere the error shows it.
                content["code"] = content["code"].encode("utf-8", "backslashreplace").decode()
                await super().execute_request(stream, ident, parent)
            case _:
                raise UsageError("it has a text as its code, and an object as its user_expressions")

    async def do_execute(
        self,
        code: str,
        silent: object,
        store_history: object = True,
        user_expressions: dict[str, object] | None = None,
        allow_stdin: object = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> dict[str, Any]:
        from toolcell.kernel.cells import Cell

        count, is_kept = self._next, bool(store_history and not silent)
        if is_kept:
            self._next += 1
            self._history.append((1, count, code))
        cell = Cell(
            source=code,
            count=count,
            is_kept=is_kept,
            is_silent=bool(silent),
            may_ask=bool(allow_stdin),
            expressions={name: str(source) for name, source in (user_expressions or {}).items()},
        )
        self._header = self.get_parent("shell").get("header", {})
        before, self._interrupt_before = self._interrupt_before, None
        is_late = before is not None and before[0] == self._header.get("session") and self._is_earlier(before[1])
        reply = await self.cells.execute(cell, self._publisher(cell.is_silent), self._asker(), is_interrupted=is_late)
        return {"execution_count": count, "payload": [], "user_expressions": {}, **reply}

    def _abort_queues(self, subshell_id: str | None = None) -> None:
        """Abort every cell that has arrived. The base class would abort one: the others already wait for its lock."""
        self._aborting = True
        self.shell_stream.flush()
        self._begin(self._stop_aborting())

    async def _stop_aborting(self) -> None:
        async with self._main_asyncio_lock:  # which is given in the order in which it was asked for
            self._aborting = False

    def _publisher(self, is_silent: bool) -> Callable[[str, dict[str, Any]], None]:
        parent = self.get_parent("shell")  # other tasks publish, too, and know no parent

        def publish(kind: str, content: dict[str, Any]) -> None:
            if not is_silent or kind == "stream":
                self.session.send(self.iopub_socket, kind, json_clean(content), parent, ident=self._address(kind))

        return publish

    def _address(self, kind: str) -> bytes:
        """Return what front ends that want only some kinds of messages go by."""
        return f"kernel.{self.ident}.{kind}".encode()

    def _asker(self) -> Ask:
        parent, ident = self.get_parent("shell"), self._get_shell_context_var(self._shell_parent_ident)
        return partial(self._ask, parent, ident)

    async def _ask(self, parent: Any, ident: Any, prompt: str, is_password: bool) -> str:
        """Ask the person at the notebook. One question at a time: `y` to one must not approve another."""
        async with self._asking:
            while self._received_on_stdin() is not None:
                pass  # an answer for which nobody waits any more
            content = {"prompt": prompt, "password": is_password}
            question = self.session.send(self.stdin_socket, "input_request", content, parent, ident=ident)["msg_id"]
            of_cell = parent.get("header", {}).get("msg_id")
            while True:
                match self._received_on_stdin():
                    case None:
                        await asyncio.sleep(ANSWER_S)
                    case {"msg_type": "input_reply", "parent_header": dict(about), "content": dict(content)}:
                        # Some front ends do not say what they answer, or name the cell.
                        if about.get("msg_id", question) in (question, of_cell):
                            return str(content.get("value", ""))

    def _received_on_stdin(self) -> dict[str, Any] | None:
        """Return the next message of the stdin channel, or None; {} for one that is malformed or not signed."""
        try:
            message: dict[str, Any] | None = self.session.recv(self.stdin_socket)[1]
        except (ValueError, TypeError, LookupError) as exc:
            self.log.warning("a message of the stdin channel was dropped: %s", exc)
            return {}
        return message

    # What front ends ask beside that.

    async def do_complete(self, code: object, cursor_pos: object) -> dict[str, Any]:
        source = _text(code)
        return {"status": "ok", **await self.cells.complete(source, _place(source, cursor_pos))}

    async def do_inspect(
        self, code: object, cursor_pos: object, detail_level: object = 0, omit_sections: object = ()
    ) -> dict[str, Any]:
        source = _text(code)
        omit = sorted(map(str, omit_sections)) if isinstance(omit_sections, (list, set, tuple)) else []
        found = await self.cells.inspect(source, _place(source, cursor_pos), int(detail_level == 1), omit)
        return {"status": "ok", **found}

    async def do_is_complete(self, code: object) -> dict[str, Any]:
        """Say whether a cell is whole. The sandbox parses it."""
        return await self.cells.is_complete(_text(code))

    async def do_history(
        self,
        hist_access_type: str,
        output: bool,
        raw: bool,
        session: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        n: int | None = None,
        pattern: str | None = None,
        unique: bool = False,
    ) -> dict[str, Any]:
        """Return cells of this kernel. Nothing is kept of others, and no outputs."""
        from fnmatch import fnmatchcase

        if hist_access_type not in ("range", "tail", "search") or len(pattern or "") > MOST_CHARACTERS:
            raise UsageError(
                f"hist_access_type is range, tail or search, and a pattern has at most {MOST_CHARACTERS} characters"
            )
        found = list(self._history)
        if hist_access_type == "range":
            found = [each for each in found if (start or 0) <= each[1] and (stop is None or each[1] < stop)]
        elif hist_access_type == "search":
            found = [each for each in found if fnmatchcase(each[2], pattern or "*")]
            if unique:
                found = list({each[2]: each for each in found}.values())
        if hist_access_type != "range" and n is not None:
            found = found[-n:] if n > 0 else []
        rows: list[Any] = [(*each[:2], (each[2], None)) for each in found] if output else list(found)
        return {"status": "ok", "history": rows}

    async def _refuse_comm(self, _stream: Any, _ident: Any, parent: dict[str, Any]) -> None:
        """Close what a front end opens: code in a browser does not talk to a sandbox."""
        if parent["header"]["msg_type"] == "comm_open":
            content = {"comm_id": parent["content"].get("comm_id", ""), "data": {}}
            self.session.send(self.iopub_socket, "comm_close", content, parent, ident=self._address("comm_close"))


def _refusal(said: str) -> dict[str, Any]:
    return {"status": "error", "ename": "UsageError", "evalue": said, "traceback": [said]}


async def _refuse(said: str, _stream: Any, _ident: Any, _parent: Any) -> None:
    raise UsageError(said)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError("code is not a text")
    return value


def _place(source: str, value: object) -> int:
    """Return a place in some source: its end when there is no such place."""
    return value if type(value) is int and 0 <= value <= len(source) else len(source)


class KernelApp(IPKernelApp):
    """ipykernel's program, without its subshells, and without the host's output in the notebook."""

    name = "toolcell-kernel"
    kernel_class = SandboxKernel
    outstream_class = None

    def init_path(self) -> None:
        """Leave out the notebook's folder: modules in it are for the sandbox alone."""

    def init_control(self, context: Any) -> None:
        """Leave out the thread of subshells: a sandbox runs one cell at a time."""
        super().init_control(context)
        self.shell_channel_thread = None
