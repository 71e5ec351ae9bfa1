"""`toolcell repl`: type Python into a session. Names stay, tools can be called, and Ctrl-C interrupts what runs."""

from __future__ import annotations

import ast
import builtins
import codeop
import keyword
import re
import signal
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from toolcell.cli.builtin import BuiltinFlags, opened_dependencies
from toolcell.cli.execution import Watch, showing_installation, showing_warnings
from toolcell.cli.flags import command
from toolcell.cli.places import output_folder, save_files
from toolcell.cli.run import RuntimeFlags, tool_error_listener
from toolcell.cli.terminal import safe, stderr, stdout, write_text
from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.results import Array, ExecutionResult, Outcome, Table
from toolcell.support.files import make_private_folder
from toolcell_bridge.guest.tools import GUEST_NAMES

if TYPE_CHECKING:
    from rich.console import Console

    from toolcell.runtime import Runtime
    from toolcell.sessions import Session


WORD = re.compile(r"[A-Za-z_][\w.]*")


def is_complete(text: str) -> bool:
    """Whether Enter runs this text, or begins another line of it."""
    lines = text.split("\n")
    if text.lstrip().startswith("?"):
        return True
    if len(lines) > 1 and lines[-1].strip() and lines[-1][0] in " \t":
        return False  # inside a block, which an empty line ends
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compiler(text, "<code>", "exec") is not None
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            return True  # the sandbox says what is wrong


def words(tools: Iterable[str]) -> list[str]:
    """Return what can be completed: tools, the sandbox's own functions, and Python's."""
    own = [f"tools.{name}" for name in tools]
    return [*own, *sorted({*tools, *GUEST_NAMES, *keyword.kwlist, *dir(builtins)})]


def completer(tools: Iterable[str]) -> Any:
    from prompt_toolkit.completion import WordCompleter

    return WordCompleter(words(tools), pattern=WORD)


def reader(tools: Iterable[str], history: Path | None, **terminal: Any) -> Callable[[], Awaitable[str]]:
    """Return a function that reads the next script. `terminal`: prompt_toolkit's `input` and `output`, for tests.

    Raises:
        UsageError: prompt_toolkit is missing, or the history cannot be kept.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError as exc:
        raise UsageError("toolcell repl needs prompt_toolkit: pip install 'toolcell[repl]'") from exc
    bindings = KeyBindings()
    session: Any = None

    def can_run() -> bool:
        return is_complete(session.default_buffer.text)

    def run(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    bindings.add("enter", filter=Condition(can_run))(run)
    session = PromptSession(
        ">>> ",
        history=_history(history),
        completer=completer(tools),
        complete_while_typing=False,
        multiline=True,
        key_bindings=bindings,
        prompt_continuation="... ",
        **terminal,
    )

    async def read() -> str:
        text: str = await session.prompt_async()
        return text

    return read


def _history(path: Path | None) -> Any:
    """Return the history of a file, by default one in the user's state directory. Nobody else may read it."""
    import platformdirs
    from prompt_toolkit.history import FileHistory

    chosen = path or platformdirs.user_state_path("toolcell") / "repl_history"
    try:
        make_private_folder(chosen.parent)
        chosen.touch(mode=0o600)
    except OSError as exc:
        raise UsageError(f"the history {chosen} cannot be written: {exc.strerror}; choose one with --history") from exc
    return FileHistory(str(chosen))


WELCOME = "?  lists the tools, ?NAME describes one; Ctrl-C interrupts, Ctrl-D or exit ends"

LEAVING = frozenset({"exit", "exit()", "quit", "quit()"})
"""What ends the session, as in Python. In a script inside it `exit()` ends that script."""

ReadScript = Callable[[], Awaitable[str]]
"""Returns the next script. Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C."""


def repl(
    *,
    history: Annotated[
        Path | None, typer.Option("--history", metavar="FILE", help="Where to save the input history.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Where to save the files scripts return.")
    ] = None,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    limits: Limits,
) -> None:
    """Type Python into a sandbox that keeps its state, with the tools as its only way out.

    Limits apply to each script; memory, disk and processes to the sandbox as a whole.
    """
    if not sys.stdin.isatty():
        raise UsageError("toolcell repl needs a terminal; for a script from a file or a pipe there is toolcell run")

    async def converse() -> None:
        from toolcell.runtime import Runtime

        async with opened_dependencies(), Runtime(**options) as runtime:
            with showing_installation(Watch()):
                await run_repl(runtime, reader(tool_names(runtime), history), stdout(), stderr(), output_dir)

    with output_folder(output_dir):
        options = settings.options(builtins) | {"limits": limits}
        with showing_warnings():
            anyio.run(converse)


async def run_repl(
    runtime: Runtime, read: ReadScript, out: Console, err: Console, output_dir: Path | None = None
) -> None:
    """Run what `read` returns in one session until it ends. Returned files are saved in `output_dir`."""
    from toolcell.calls.call import RunContext

    context = RunContext()
    context.events.subscribe(tool_error_listener())
    async with runtime.session(context=context) as session:
        err.print(safe(WELCOME, "dim"))
        while True:
            try:
                source = await read()
            except KeyboardInterrupt:
                err.print("KeyboardInterrupt")
                continue
            except EOFError:
                return
            if source.strip() in LEAVING:
                return
            if source.strip().startswith("?"):
                show_help(source.strip().strip("?").strip(), runtime, out)
            elif source.strip():
                result = await run_interruptibly(session, source, out, err)
                show(result, out, err)
                if output_dir is not None:
                    save(result, output_dir, err)


async def run_interruptibly(session: Session, source: str, out: Console, err: Console) -> ExecutionResult:
    """Run a script, and interrupt it at Ctrl-C. What it prints is shown at once."""

    def print_log(stream: str, text: str) -> None:
        (out if stream == "stdout" else err).print(safe(text), end="")

    if sys.platform == "win32":
        return await session.execute_code(source, on_log=print_log)
    results: list[ExecutionResult] = []
    async with anyio.create_task_group() as tasks:
        ready = anyio.Event()
        tasks.start_soon(_interrupt_at_signal, session, ready)
        await ready.wait()
        results.append(await session.execute_code(source, on_log=print_log))
        tasks.cancel_scope.cancel()
    return results[0]


async def _interrupt_at_signal(session: Session, ready: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGINT) as signals:
        ready.set()
        async for _ in signals:
            await session.interrupt()


def show(result: ExecutionResult, out: Console, err: Console) -> None:
    """Show a script's value as Python does, its files, and its error."""
    if result.has_value and result.value is not None:
        write_text(out, str(result.value) if isinstance(result.value, Array | Table) else repr(result.value))
    for file in result.files:
        err.print(safe(f"file {file.name} ({file.problem or f'{file.media_type}, {file.size} bytes'})", "dim"))
    error, session = result.error, result.session
    if error is not None:
        text = error.traceback if result.outcome in (Outcome.ERROR, Outcome.DENIED) else ""
        if result.outcome is Outcome.CANCELLED:
            where = f" (line {error.line})" if error.line else ""
            text = f"KeyboardInterrupt{where}"
        err.print(safe((text or f"{error.type}: {error.message}").rstrip("\n"), "red"))
    if session is not None and session.ended:
        err.print(safe(f"ended: {', '.join(session.ended)}", "dim"))
    if session is not None and session.lost:
        err.print(safe(f"the sandbox was lost: {session.lost}; the next line begins with the state before", "bold red"))


def save(result: ExecutionResult, folder: Path, err: Console) -> None:
    """Save a script's files and name the paths. What cannot be saved is reported."""
    saved, problems = save_files(result.files, folder)
    for path in saved.values():
        err.print(safe(f"saved {path}", "dim"))
    for problem in problems:
        err.print(safe(problem, "red"))


def tool_names(runtime: Runtime) -> list[str]:
    from toolcell.calls.options import Origin

    return [tool.name for tool in runtime.registry.definitions(Origin.CODE)]


def show_help(name: str, runtime: Runtime, out: Console) -> None:
    wanted, detail = ([name.removeprefix("tools.")], "full") if name else (None, "signatures")
    try:
        write_text(out, runtime.registry.describe_tools(wanted, detail=detail) or "no tools; --tools FILE adds some")
    except UsageError as exc:
        write_text(out, str(exc))


register = command(repl)
