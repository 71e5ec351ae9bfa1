"""Run notebook cells in a sandbox: `%load_ext toolcell.integrations.ipython`, then `%%toolcell`.

    %%toolcell --inputs rows --to result
    sum(row["amount"] for row in rows)

The cells of a notebook share one session: names and files stay between them. `%toolcell NAME` makes the `SyncRuntime`
in that variable the one that cells run in, with its tools and limits; without it, cells run in a `SyncRuntime()`.
"""

from __future__ import annotations

import argparse
import queue
import shlex
import sys
import threading
from typing import Any, Final, NoReturn

from toolcell.errors import ToolcellError
from toolcell.integrations.base import SyncRuntimeOwner, missing_package
from toolcell.results import ExecutionResult, Logs
from toolcell.support import changed, clean, for_terminal
from toolcell.sync import SyncRuntime, SyncSession

try:
    from IPython.core.error import UsageError as MagicUsageError
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
    from IPython.display import display
except ModuleNotFoundError as exc:
    raise missing_package(exc, "ipython") from exc

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
        parser.add_argument("--inputs", "-i", default="")
        parser.add_argument("--to", "-o", default="")
        parser.add_argument("--reset", action="store_true")
        parser.add_argument("--no-raise-error", action="store_true")
        return parser

    def parse(self, line: str) -> argparse.Namespace:
        """Return the options that follow `%%toolcell`."""
        try:
            options = self.parse_args(shlex.split(line))
        except ValueError as exc:  # a quotation mark that nothing closes
            self.error(f"{exc} in {line!r}")
        if options.to and not options.to.isidentifier():
            self.error(f"--to needs a variable's name, not {options.to!r}")
        return options

    def error(self, message: str) -> NoReturn:
        raise MagicUsageError(f"{message}; {self.format_usage().strip()}")


@magics_class
class ToolcellMagics(Magics):
    """`%toolcell NAME` chooses a runtime; `%%toolcell` runs a cell.

    Options of a cell: `--inputs a,b` gives it variables of the notebook, `--to NAME` puts its `ExecutionResult` into
    one, `--reset` forgets what earlier cells left, `--no-raise-error` goes on with the next cell when this one fails.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._owner = SyncRuntimeOwner(None, {})
        self._session: SyncSession | None = None

    @line_magic("toolcell")
    def choose(self, line: str) -> None:
        """`%toolcell NAME`: the `SyncRuntime` in variable NAME runs the cells from now on, in a new session."""
        name = line.strip()
        runtime = self._variable(name) if name else None
        is_open = isinstance(runtime, SyncRuntime) and runtime.is_open
        if not isinstance(runtime, SyncRuntime) or not is_open:
            kind = "not open" if isinstance(runtime, SyncRuntime) else _kind(runtime)
            given = f"{name} is {kind}" if name else "no variable was named"
            raise MagicUsageError(f"%toolcell needs the name of a variable that holds an open SyncRuntime; {given}")
        self.close()
        self._owner = SyncRuntimeOwner(runtime, {})

    @cell_magic("toolcell")
    def run(self, line: str, cell: str) -> None:
        """`%%toolcell [--inputs NAMES] [--to NAME] [--reset] [--no-raise-error]`: run the cell and show its result."""
        options = _Options.parser().parse(line)
        inputs = {name: self._variable(name) for each in options.inputs.split(",") if (name := each.strip())}
        session = self._opened()
        if options.reset:
            session.reset()
        result = _run(session, cell, inputs)
        if options.to:
            self.shell.user_ns[options.to] = result
        shown = changed(result, logs=Logs())  # what was printed stands above already
        display({"text/plain": str(shown), "text/html": shown._repr_html_()}, raw=True)
        if not result.ok and not options.no_raise_error:
            problem = clean(f": {result.error.type}: {result.error.message}") if result.error else ""
            raise CellFailed(f"the cell ended with {result.outcome}{problem}", result)

    def close(self) -> None:
        """End the session, and the runtime if it was made here."""
        session, self._session = self._session, None
        owner, self._owner = self._owner, SyncRuntimeOwner(None, {})
        owner.close(session)

    def _opened(self) -> SyncSession:
        if self._session is None:
            self._session = self._owner.open().session().__enter__()
        return self._session

    def _variable(self, name: str) -> Any:
        if name not in self.shell.user_ns:
            raise MagicUsageError(f"there is no variable {name!r} in this notebook")
        return self.shell.user_ns[name]


def _run(session: SyncSession, source: str, inputs: dict[str, Any]) -> ExecutionResult:
    """Run a script and print what it prints, from this thread: a front end shows that below this cell.

    An interrupt of the notebook interrupts the script; its state is kept.
    """
    seen: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
    ended: list[ExecutionResult | BaseException] = []

    def run() -> None:
        try:
            ended.append(session.execute_code(source, inputs=inputs, on_log=lambda *text: seen.put(text)))
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


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics. IPython calls it for `%load_ext toolcell.integrations.ipython`."""
    shell.register_magics(ToolcellMagics(shell))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the notebook's sandbox and take the magics away. IPython calls it for `%unload_ext`."""
    shell.magics_manager.registry["ToolcellMagics"].close()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("toolcell", None)
