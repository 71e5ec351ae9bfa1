"""Run notebook cells in a sandbox: `%load_ext toolcell.integrations.ipython`, then `%%toolcell`.

    %%toolcell --file sales.csv --inputs rates --outputs totals
    import csv
    totals = {row["region"]: float(row["amount"]) * rates[row["region"]] for row in csv.DictReader(open("sales.csv"))}

The cells of a notebook share one session, or one for each `--session NAME`: names and files stay between them.
`%toolcell NAME` makes the `SyncRuntime` in that variable the one that cells run in, with its tools and limits;
`%toolcell --packages pandas` makes one with packages; without either, cells run in a `SyncRuntime()`.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from toolcell.errors import ToolcellError, UsageError
from toolcell.integrations.base import SyncRuntimeOwner, missing_package
from toolcell.results import Array, ExecutionResult, Logs, Table
from toolcell.sessions import SyncSession
from toolcell.support.text import clean, for_terminal
from toolcell.sync import SyncRuntime
from toolcell_bridge.wire.frozen import replaced

try:
    from IPython.core.error import UsageError as MagicUsageError
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
    from IPython.display import display
except ModuleNotFoundError as exc:
    raise missing_package(exc, "ipython") from exc

BEGIN: Final = (
    "To begin, run a cell that starts with %%toolcell: it opens a session by itself. %toolcell --packages pandas,numpy "
    "lets its scripts import these. For tools and limits: runtime = SyncRuntime([...]); runtime.open(), and then "
    "%toolcell runtime"
)
STREAMS: Final = {"stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr}


class CellFailed(ToolcellError):
    """A cell did not end well. `result` is what is left of it."""

    def __init__(self, message: str, result: ExecutionResult) -> None:
        super().__init__(message)
        self.result = result

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: not the host's own frames. The script's are in the result above."""
        return [f"{type(self).__name__}: {self}"]


class _Options(argparse.ArgumentParser):
    """The options of a cell; a mistake is an error of the cell, not the end of the kernel."""

    @classmethod
    def parser(cls) -> _Options:
        parser = cls(prog="%%toolcell", add_help=False, allow_abbrev=False)
        parser.add_argument("--file", "-f", action="append", default=[], dest="files")
        parser.add_argument("--inputs", "-i", type=_names, default=())
        parser.add_argument("--outputs", type=_names, default=())
        parser.add_argument("--session", "-s", default="")
        parser.add_argument("--to", "-o", default="")
        parser.add_argument("--reset", action="store_true")
        parser.add_argument("--no-raise-error", action="store_true")
        return parser

    def parse(self, line: str) -> argparse.Namespace:
        try:
            options = self.parse_args(shlex.split(line))
        except ValueError as exc:  # a quotation mark that nothing closes
            self.error(f"{exc} in {line!r}")
        if options.to and not options.to.isidentifier():
            self.error(f"--to needs a variable's name, not {options.to!r}")
        return options

    def error(self, message: str) -> NoReturn:
        raise MagicUsageError(f"{message}; {self.format_usage().strip()}")


def _names(text: str) -> tuple[str, ...]:
    """Return the names of `a,b`."""
    names = tuple(name for each in text.split(",") if (name := each.strip()))
    if wrong := [name for name in names if not name.isidentifier()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not the name of a variable")
    return names


@magics_class
class ToolcellMagics(Magics):
    """`%toolcell NAME` chooses a runtime; `%%toolcell` runs a cell.

    Options of a cell: `--file PATH` puts a file into the workspace, `--inputs a,b` gives it variables of the notebook,
    `--outputs c,d` makes its variables ones of the notebook, `--session NAME` names the session that it runs in,
    `--to NAME` puts its `ExecutionResult` into a variable, `--reset` forgets what earlier cells left,
    `--no-raise-error` goes on with the next cell when this one fails.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._owner = SyncRuntimeOwner(None, {})
        self._sessions: dict[str, SyncSession] = {}

    @line_magic("toolcell")
    def choose(self, line: str) -> None:
        """`%toolcell NAME`: the `SyncRuntime` in variable NAME runs the cells from now on, in new sessions.

        `%toolcell --packages pandas,numpy`: a new runtime whose scripts may import these.
        """
        words = shlex.split(line)
        if len(words) > 1 and words[0] == "--packages":
            packages = [name for word in words[1:] for each in word.split(",") if (name := each.strip())]
            owner = SyncRuntimeOwner(None, {"packages": packages})
            with _as_usage_errors():
                owner.open()
        else:
            owner = SyncRuntimeOwner(self._runtime(line.strip()), {})
        self.close()
        self._owner = owner

    def _runtime(self, name: str) -> SyncRuntime:
        value = self.shell.user_ns.get(name)
        if isinstance(value, SyncRuntime) and value.is_open:
            return value
        if not name:
            given = "no variable was named"
        elif name not in self.shell.user_ns:
            given = f"there is no variable {name!r} in this notebook"
        else:
            given = f"{name} is {'not open' if isinstance(value, SyncRuntime) else f'of type {type(value).__name__}'}"
        raise MagicUsageError(
            f"%toolcell needs the name of a variable that holds an open SyncRuntime; {given}. {BEGIN}"
        )

    @cell_magic("toolcell")
    def run(self, line: str, cell: str) -> None:
        """`%%toolcell [OPTIONS]`: run the cell and show its result."""
        options = _Options.parser().parse(line)
        inputs = {name: self._variable(name) for name in options.inputs}
        files = [os.path.expanduser(path) for path in options.files]
        with _as_usage_errors():
            session = self._opened(options.session)
            if options.reset:
                session.reset()
            result = _run(session, cell, inputs, files)
        if options.to:
            self.shell.user_ns[options.to] = result
        shown = replaced(result, logs=Logs())  # what was printed stands above already
        display({"text/plain": str(shown), "text/html": shown._repr_html_()}, raw=True)
        if result.ok and options.outputs:
            self._bring_back(session, options.outputs)
        elif not result.ok and not options.no_raise_error:
            raise CellFailed(f"the cell ended with {_problem(result)}", result)

    def _bring_back(self, session: SyncSession, names: tuple[str, ...]) -> None:
        """Make variables of the session variables of the notebook, all or none."""
        pairs = ", ".join(f"{name!r}: {name}" for name in names)
        result = session.execute_code(f"set_result({{{pairs}}})")
        if not result.ok:
            raise CellFailed(f"--outputs {','.join(names)}: {_problem(result)}", result)
        self.shell.user_ns.update({name: _native(value) for name, value in result.value.items()})

    def close(self) -> None:
        """End the sessions, and the runtime if it was made here."""
        sessions, self._sessions = self._sessions, {}
        owner, self._owner = self._owner, SyncRuntimeOwner(None, {})
        try:
            for session in sessions.values():
                session.close()
        finally:
            owner.close()

    def _opened(self, name: str) -> SyncSession:
        if name not in self._sessions:
            self._sessions[name] = self._owner.open().session(name or None).__enter__()
        return self._sessions[name]

    def _variable(self, name: str) -> Any:
        if name not in self.shell.user_ns:
            raise MagicUsageError(f"there is no variable {name!r} in this notebook")
        return self.shell.user_ns[name]


@contextmanager
def _as_usage_errors() -> Iterator[None]:
    """Show a mistake in an option as that, without frames of the host."""
    try:
        yield
    except UsageError as exc:
        raise MagicUsageError(str(exc)) from exc


def _native(value: Any) -> Any:
    """Return a frame or an array in its own package, or as it is where that is not installed."""
    if isinstance(value, Array | Table):
        with suppress(ImportError):
            return value.native()
    return value


def _problem(result: ExecutionResult) -> str:
    """Return the outcome and the error of a run that failed."""
    return result.outcome + (clean(f": {result.error.type}: {result.error.message}") if result.error else "")


def _run(session: SyncSession, source: str, inputs: dict[str, Any], files: list[str]) -> ExecutionResult:
    """Run a script and print what it prints, from this thread: a front end shows that below this cell.

    An interrupt of the notebook interrupts the script; its state is kept.
    """
    seen: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
    ended: list[ExecutionResult | BaseException] = []

    def run() -> None:
        try:
            on_log = lambda *text: seen.put(text)  # noqa: E731
            ended.append(session.execute_code(source, inputs=inputs, files=files, on_log=on_log))
        except BaseException as exc:
            ended.append(exc)
        finally:
            seen.put(None)

    thread = threading.Thread(target=run, name="toolcell-cell", daemon=True)
    thread.start()
    going = True
    while going:
        try:
            while (text := seen.get()) is not None:
                print(for_terminal(text[1]), end="", file=STREAMS[text[0]](), flush=True)
            going = False
        except KeyboardInterrupt:
            session.interrupt()
    thread.join()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics. IPython calls it for `%load_ext toolcell.integrations.ipython`."""
    shell.register_magics(ToolcellMagics(shell))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the notebook's sandbox and take the magics away. IPython calls it for `%unload_ext`."""
    shell.magics_manager.registry["ToolcellMagics"].close()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("toolcell", None)
