"""Run scripts: take RunScript from the bridge, execute the source, and report with Done.

The script is its own compilation unit named `<code>`, so its line numbers, tracebacks and `__future__` imports are
native. Isolation is already applied when the runner is called.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from toolcell_bridge.guest import errors, files, rich, script_end, surroundings, tracebacks
from toolcell_bridge.guest.channel import Channel, ChannelClosed
from toolcell_bridge.guest.compiling import IS_COROUTINE, LAST, LAST_RESULT, Denied, parse, parse_in_two
from toolcell_bridge.guest.notebook_words import CELL
from toolcell_bridge.guest.output import Streams
from toolcell_bridge.guest.placeholder import DRY_RUN, LOOKS, GuestDryRun, Looks, with_looks
from toolcell_bridge.guest.refusals import has_cure
from toolcell_bridge.guest.rich import HTML
from toolcell_bridge.guest.script_end import ScriptFinalizer, write_out_files
from toolcell_bridge.guest.scripts import NOT_KEPT, SCRIPT, SCRIPTS
from toolcell_bridge.guest.source import plain_source
from toolcell_bridge.guest.tables import is_table, native
from toolcell_bridge.guest.tools import TOOLS_MODULE, Toolbox, ToolError, ToolNamespace
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.errors import ProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.frozen import frozen, replaced
from toolcell_bridge.wire.messages import (
    CLOUDPICKLE_FILE,
    STATE_FILE,
    Done,
    FilePart,
    FileProblem,
    Leftover,
    Message,
    PutFile,
    Result,
    RunScript,
    Stay,
)

if TYPE_CHECKING:
    from toolcell_bridge.guest.event_loop import SessionLoop
    from toolcell_bridge.guest.interrupts import Interrupts

LOG_LEVELS = ("debug", "info", "warning", "error")

TOO_LARGE = "; the limit is result_bytes: return a part or a sum, or a file: set_result(..., files=['result.json'])"
"""What to do about a result that is too large."""


@frozen
class ResultFiles:
    """The files of a result."""

    result: Result
    sent: dict[str, files.Version]
    """Each file that was sent, by its name."""


STATE_SENT = "state"
"""The state of a session is sent to the host as a returned file of this name."""

HELD_BYTES = 2048
"""A result up to this size may wait for Done: it can be sent, whatever the limits. A larger one is sent at once, so
that `set_result` raises in the script when it cannot be sent."""


class Runner:
    """Serves one sandbox's runs, one after the other; the namespace lives as long as the sandbox."""

    def __init__(self, channel: Channel, workspace: str) -> None:
        self._channel = channel
        self.streams = Streams(channel)
        self._workspace = workspace
        self._end = ScriptFinalizer(workspace)
        self._module = new_main()
        self._inputs: list[str] = []
        self._put_error: str | None = None
        self._writing = ""
        """The input file whose pieces are under way."""
        self._stay: Stay | None = None
        self._received: dict[str, list[bytes]] = {}
        """What the host has sent that is not a file of the workspace, in pieces."""
        self._found: tuple[dict[str, str], list[str]] = {}, []
        """`os.environ` and `sys.path` when the session began."""
        self._interrupts: Interrupts | None = None
        self._loop: SessionLoop | None = None
        self._ended_tasks: list[str] = []
        """What the script of a session has left running in it."""
        self._toolbox = Toolbox(channel)
        self._script: RunScript | None = None
        """The one that runs, or ran last."""
        self._names = self._made_names()
        """What every script finds. Made before a zygote forks, like all else here: it costs its children nothing."""
        self._own_names: dict[str, Any] = {}
        """What the sandbox has defined for the scripts so far."""
        self._result_set = False
        self._returned: ResultFiles | None = None
        """The files of the result that was set last."""
        self._files_left = self._bytes_left = 0
        """What is left of the files that may be returned."""
        self._display: rich.Display | None = None
        self._held: list[Message] = []
        self._is_last = False
        self._too_large: dict[str, Any] | None = None
        """Why the value of a script's last expression is not its result."""
        self._has_destructors = False
        """A script of the session has written one."""
        self._is_ending = False
        """Its session ends with this script."""
        self._is_serving = False
        """Its channel is the sandbox's own, and not that of a rehearsal."""

    def serve(self) -> None:
        """Answer requests until the host closes the bridge."""
        self.streams.capture()
        surroundings.enter(self._workspace)
        self._end.begin()
        self._module = new_main()  # what is older than that is not collected
        self._is_serving = True
        try:
            while True:
                request = self._channel.next_request()
                if self._interrupts is not None:
                    self._interrupts.has_come = True
                if isinstance(request, PutFile):
                    self._write_input(request)
                elif isinstance(request, Stay):
                    self._begin_session(request)
                else:
                    self.answer(request)
        except (ChannelClosed, ProtocolError):
            return

    def answer(self, run: RunScript) -> Done:
        """Execute one script, send Done and return it.

        Raises:
            ChannelClosed: the host is gone.
        """
        self._result_set, self._returned, self._display = False, None, None
        done = self._run(run)
        last: list[Message] = [*self._held, done]
        if self._stay is not None:
            from toolcell_bridge.guest.script_end import end_leftovers

            ended, stuck = end_leftovers(self._stay.end_ms / 1000)
            if self._interrupts is not None:
                self._interrupts.end()
            self._has_destructors = self._has_destructors or "__del__" in run.source
            hooks = self._has_destructors or self._end.has_hooks()
            ended, self._ended_tasks = self._ended_tasks + ended, []
            if ended or stuck or hooks:
                last.insert(-1, Leftover(ended, stuck, hooks))
            self._channel.forget_calls()
            self._put_error = None
        self._channel.send(*last)
        if self._interrupts is not None:
            self._interrupts.listen()
        self._held.clear()
        return done

    def _begin_session(self, stay: Stay) -> None:
        from toolcell_bridge.guest.interrupts import Interrupts  # only sessions pay for it

        self._end.note_hooks()
        self._stay, self._interrupts = stay, Interrupts(self._channel)
        self._interrupts.install()
        self._channel.wait_interruptibly()
        script_end.end_session = self._end_session
        script_end.keep_session, script_end.bring_session_back = self._keep_session, self._bring_session_back
        self._found = dict(os.environ), list(sys.path)

    def _end_session(self) -> None:
        """Have the session end as the interpreter ends. Called by the last script of it, which is the host's."""
        self._has_destructors = False
        self._is_ending = True

    def _take_main(self) -> types.ModuleType:
        """Return the script's module, and refer to another one from here on."""
        module, self._module = self._module, new_main()
        return module

    def _keep_session(self, room: int) -> None:
        """Send the state of the session. Called by a script that is the host's. `room`: bytes of memory for that."""
        from toolcell_bridge.guest import session_values  # only sessions that are kept pay for it

        set_result = self._names["set_result"]
        lost, parts = session_values.keep(self._place(), room)
        if (taken := sum(memoryview(part).nbytes for part in parts)) > self._bytes_left:
            raise ValueError(f"the state takes {taken} bytes, and {self._bytes_left} are the most")
        set_result({"lost": lost, "hooks": self._end.has_own_hooks()})
        size = min(files.CHUNK_BYTES, self._channel.frame_bytes // 2)
        for part in parts:
            for start in range(0, len(part), size):
                self._send_file(FilePart(STATE_SENT, "", bytes(memoryview(part)[start : start + size]), False))
        self._send_file(FilePart(STATE_SENT, "", b"", True))

    def _bring_session_back(self) -> None:
        from toolcell_bridge.guest import session_values

        session_values.bring_back(self._place(), self._received.pop(STATE_FILE))

    def _place(self) -> Any:
        from toolcell_bridge.guest.session_values import Place

        environ, path = self._found
        return Place(
            namespace=self._module.__dict__,
            own=self._own_names,
            inputs=self._inputs,
            workspace=self._workspace,
            environ=environ,
            path=path,
            cloudpickle=b"".join(self._received.pop(CLOUDPICKLE_FILE)),
        )

    def _run(self, run: RunScript) -> Done:
        """Execute a script; never raises for anything it does. Held messages must be sent before the Done."""
        if (source := plain_source(run.source)) is not run.source:
            run = replaced(run, source=source)
        done = self._executed(run)
        is_child = self._channel.fileno < 0 and self._is_serving
        if self._loop is not None and self._is_ending:
            self._loop.close()
        if self._stay is None or is_child or self._is_ending:
            self._end.run(self._take_main, self._own_names, self._wait_for)
        self._flush()
        self.streams.end()
        if is_child:  # of a fork that the script made: it ends here
            os._exit(_exit_code(done))  # no atexit hooks, no threads joined, nothing of the script's run again
        if self._returned is not None:
            self._send_changed_files(run)
        if self._display is not None and self._display.made:
            self._send_displayed(self._display.made)
        return done

    def _executed(self, run: RunScript) -> Done:
        """Execute a script. What it leaves may be destroyed when this has returned."""
        try:
            if self._put_error is not None:
                raise OSError(self._put_error)
            self._execute(run)
        except SystemExit as exc:
            return self._exited(exc, run)
        except Denied as exc:
            return Done(False, exc.error)
        except BaseException as exc:
            try:
                is_printed = tracebacks.call_excepthook(exc)
            except SystemExit as of_hook:
                return self._exited(of_hook, run)
            if self._channel.fileno < 0 and self._is_serving and not is_printed:
                sys.stderr.write(tracebacks.format_exception(exc))
            return Done(False, errors.describe(exc, run.source))
        return Done(True, self._too_large)

    def _exited(self, error: SystemExit, run: RunScript) -> Done:
        is_ok = error.code is None or error.code == 0
        return Done(is_ok, None if is_ok else errors.describe(error, run.source))

    def _wait_for(self, names: list[str]) -> None:
        """Send what has to be there if the wait never ends, and tell the host what is waited for."""
        held: list[Message] = [*self._held]
        if names:
            held.append(Leftover([], names, False))
        self._held.clear()
        if held and self._channel.fileno >= 0:
            self._channel.send(*held)

    def _write_input(self, message: PutFile) -> None:
        if message.path in (STATE_FILE, CLOUDPICKLE_FILE):
            self._received.setdefault(message.path, []).append(message.data)
            return
        is_first, self._writing = message.path != self._writing, "" if message.last else message.path
        try:
            files.write(message, self._workspace, is_first)
        except (OSError, ValueError) as exc:
            self._put_error = f"input file {message.path!r}: {exc}{errors.cure_of(exc, '')}"
        if message.last and message.path not in self._inputs:
            self._inputs.append(message.path)

    def _execute(self, run: RunScript) -> None:
        sys.modules["__main__"] = self._module
        namespace = self._module.__dict__
        self._begin_script(run)
        self._give_names(namespace, self._names)
        if run.seed is not None or run.clock is not None:
            make_repeatable(run)
        name = SCRIPTS.begin(run.source, run.run if self._stay is not None else 1, run.tools)
        surroundings.show_source(run.source, self._workspace, name)
        run_cell = SCRIPTS.run_cell if CELL in run.inputs else None
        # Inputs come last: a caller's name wins over ours.
        codes = self._compiled(run, name, namespace) if run_cell is None else ()
        namespace.update(native(run.inputs) if self._channel.inputs_have_tables else run.inputs)
        interrupts = self._interrupts
        namespace.pop(LAST, None)
        try:
            if interrupts is not None:
                interrupts.allow()
            if run_cell is not None:
                run_cell(run.source, namespace, self._own_names, namespace.pop(CELL), interrupts)
            else:
                *before, last = codes
                for code in before:
                    self._evaluate(code, namespace)
                value = self._evaluate(last, namespace)
                if before:
                    namespace[LAST] = value
            if not self._result_set and run_cell is None:
                self._set_trailing(namespace.get(LAST), run)
        finally:
            if interrupts is not None:
                interrupts.end()
                if run_cell is None:  # a notebook's own shell says which are closed
                    rich.close_figures()
            namespace.pop(LAST, None)
            namespace.pop(LAST_RESULT, None)

    def _evaluate(self, code: types.CodeType, namespace: dict[str, Any]) -> Any:
        value = eval(code, namespace)  # this is what a sandbox is for
        if not code.co_flags & IS_COROUTINE:
            return value

        async def main() -> Any:
            return await value

        if self._interrupts is None:
            import asyncio

            return asyncio.run(main())
        from toolcell_bridge.guest.event_loop import SessionLoop

        self._loop = self._loop or SessionLoop(self._interrupts)
        try:
            return self._loop.run(main())
        finally:
            self._ended_tasks = self._loop.end_tasks()

    def _compiled(self, run: RunScript, name: str, namespace: dict[str, Any]) -> tuple[types.CodeType, ...]:
        """Compile a script and give it the names that it needs; if in two parts, the second has the value that it ends
        with."""
        changed = with_looks if self._toolbox.dry_run is not None and "match" in run.source else None
        codes: tuple[types.CodeType, ...] | None = None
        if run.lint == "off" and changed is None:
            codes = parse_in_two(run.source, name)
        if codes is None:
            code, guards = parse(run, name, namespace, changed)
            namespace.update(guards if changed is None else {**guards, LOOKS: Looks})
            codes = (code,)
        if LAST_RESULT in codes[-1].co_names:
            namespace[LAST_RESULT] = self._set_last_result
        return codes

    def _give_names(self, namespace: dict[str, Any], names: dict[str, Any]) -> None:
        """Define the sandbox's names, but for those that an earlier script of the session has given a value."""
        own = self._own_names
        for name, value in names.items():
            if name not in own or name not in namespace or namespace[name] is own[name]:
                namespace[name] = own[name] = value

    def _begin_script(self, run: RunScript) -> None:
        """Prepare what the names of the sandbox refer to."""
        self._too_large = None
        self._script = run
        key = run.inputs.pop(DRY_RUN, None)
        dry_run = GuestDryRun(key) if isinstance(key, str) else None
        GuestDryRun.is_on = dry_run is not None
        self._toolbox.begin(dry_run)
        names = self._names
        names["input_files"], names["install_package"] = list(self._inputs), errors.install_package
        if run.egress:
            from toolcell_bridge.guest.egress.hooks import install  # only runs that may send requests pay for it

            SCRIPTS.may_send = True
            names["install_package"] = install(self._channel, dry_run)
        TOOLS_MODULE.namespace = names["tools"]
        if sys.modules.get("tools") is names["tools"]:
            del sys.modules["tools"]  # of the script before; the workspace may have one by now
        self._files_left, self._bytes_left = run.files, run.files_bytes
        self._display = rich.Display(self._prefix(run), run.files, run.files_bytes)
        builtins.__dict__["display"] = self._display

    def _made_names(self) -> dict[str, Any]:
        """Return the names that every script finds."""

        def set_result(data: Any = None, files: Any = None, **values: Any) -> None:
            """Make `data`, or the named values, the run's result; the last call wins. `files`: paths to return."""
            if values and data is not None:
                raise TypeError("set_result() takes one value or named values, not both: set_result({...})")
            assert self._script is not None
            self._set_result(values or data, files, self._script)

        def log(level: str, *values: object) -> None:
            """print() with a level in front."""
            if level not in LOG_LEVELS:
                raise ValueError(f"log level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
            print(f"[{level}]", *values, file=sys.stderr if level in ("warning", "error") else sys.stdout)

        for function in (set_result, log):
            function.__qualname__ = function.__name__  # error messages hold it
        toolbox = self._toolbox
        return {
            "call_tool": toolbox.call_tool,
            "call_tools_parallel": toolbox.call_tools_parallel,
            "call_tool_async": toolbox.call_tool_async,
            "list_tools": toolbox.list_tools,
            "search_tools": toolbox.search_tools,
            "progress": toolbox.progress,
            "tools": ToolNamespace(toolbox),
            "set_result": set_result,
            "log": log,
            "ToolError": ToolError,
            "OUTPUT_DIR": self._workspace,
            "__file__": os.path.join(self._workspace, SCRIPT),
        }

    def _set_result(self, data: Any, names: Any, run: RunScript) -> None:
        wanted = files.requested(names)
        packed = to_packed(data, "result")
        if (size := packed.size) > run.result_bytes:
            raise ValueTooLarge("result", size, run.result_bytes, cure=TOO_LARGE)
        message = Result(packed, wanted)
        self._flush()
        if self._is_last and not wanted and size <= HELD_BYTES:
            # No message of the script can follow. It is sent together with Done, which saves both ends a system call
            # and the host a wake-up.
            self._held[:] = [message]
        else:
            self._held.clear()
            self._channel.send(message)
        self._result_set = True
        self._returned = None
        if wanted:
            write_out_files()
            self._returned = ResultFiles(message, {})
            self._send_files(self._returned, run)

    def _send_files(self, returned: ResultFiles, run: RunScript) -> None:
        found = files.collect(returned.result.files, self._workspace, run.files, run.files_bytes, returned.sent)
        self._files_left, self._bytes_left = run.files, run.files_bytes  # the host has dropped those before
        for part in files.in_pieces(found, self._channel.frame_bytes):
            self._send_file(part)

    def _send_file(self, message: FilePart | FileProblem) -> None:
        self._channel.send(message)
        if isinstance(message, FilePart):
            self._files_left -= message.last
            self._bytes_left -= len(message.data)

    def _send_displayed(self, made: list[FilePart | FileProblem]) -> None:
        """Send what was displayed, as far as there is room beside the other files."""
        whole: dict[str, int] = {}
        for message in made:
            if isinstance(message, FilePart):
                whole[message.name] = whole.get(message.name, 0) + len(message.data)
        if self._held:  # a result drops the files before it
            self._channel.send(*self._held)
            self._held.clear()
        refused: dict[str, int] = {}
        for message in files.in_pieces(made, self._channel.frame_bytes):
            size = whole.pop(message.name, None)  # None: not its first piece
            if size is not None and (not self._files_left or size > self._bytes_left):
                refused[message.name] = size
            if message.name not in refused:
                self._send_file(message)
        if refused:
            name, others = next(iter(refused)), len(refused) - 1
            more = f", nor for {others} more" if others else ""
            self._channel.send(FileProblem(name, refused[name], f"there is no room beside the other files{more}"))

    def _send_changed_files(self, run: RunScript) -> None:
        """Send the result again if its files were changed after it was set. Files that are gone stay as they were."""
        assert self._returned is not None
        result, sent = self._returned.result, self._returned.sent
        try:
            write_out_files()
            now = files.find_versions(result.files, self._workspace)
            if now != sent and sent.keys() <= now.keys():
                self._channel.send(result)
                self._send_files(ResultFiles(result, {}), run)
        except (OSError, MemoryError):  # what was sent before stays
            return

    def _set_last_result(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up like in the script, which may have defined a set_result of its own.
        found = eval("set_result", self._module.__dict__)
        self._is_last = found is self._names["set_result"]
        try:
            return found(*args, **kwargs)
        finally:
            self._is_last = False

    def _set_trailing(self, value: Any, run: RunScript) -> None:
        problem: Exception | None = None
        has_pictures = run.files > 0 and rich.is_possible(value)
        if value is not None:
            self._is_last = not has_pictures
            try:
                self._set_result(value, None, run)
            except (UnsendableValue, ValueTooLarge) as exc:
                problem = exc
            finally:
                self._is_last = False
        shown = self._show(value, run) if has_pictures else frozenset()
        if problem is None:
            return
        # What is not data was never to be sent. A table was, and so was a query, whatever is shown of it.
        if shown and isinstance(problem, UnsendableValue) and not is_table(type(value)) and not has_cure(type(value)):
            if shown == {HTML} and (text := rich.text_of(value)):
                sys.stdout.write(text + "\n")
            return
        if isinstance(problem, ValueTooLarge):
            self._too_large = {"type": "ValueTooLarge", "message": str(problem)}
        try:
            sys.stderr.write(f"[toolcell] {NOT_KEPT}{problem}\n")
        except Exception:  # the script has replaced or closed it
            pass

    def _show(self, value: Any, run: RunScript) -> frozenset[str]:
        """Return pictures, HTML and open figures as files. The result is their media types."""
        made = list(rich.show(value, self._prefix(run), run.files, run.files_bytes))
        for message in files.in_pieces(made, self._channel.frame_bytes):
            self._send_file(message)
        return frozenset(message.media_type for message in made if isinstance(message, FilePart))

    def _prefix(self, run: RunScript) -> str:
        """What the names of the files begin with that are made of what a script of a session shows."""
        return f"script-{run.run}-" if self._stay is not None and run.run > 1 else ""

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # the script may have replaced or closed it
                pass


def new_main() -> types.ModuleType:
    """Return the module that a script is, with the names that the interpreter gives it."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    return module


def make_repeatable(run: RunScript) -> None:
    """Seed randomness and start the clock as recorded."""
    from toolcell_bridge.guest import determinism

    if run.seed is not None:
        determinism.seed(run.seed)
    if run.clock is not None:
        determinism.set_clock(run.clock)


def _exit_code(done: Done) -> int:
    code = 0 if done.ok or done.error is None else done.error.get("exit_code", 1)
    return code & 255 if isinstance(code, int) else 1
