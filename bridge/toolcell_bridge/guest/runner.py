"""Runs scripts: takes Run from the bridge, executes the source, and reports with Done.

The script is its own compilation unit named `<code>`, so its line numbers, tracebacks and `__future__` imports are
native. Knows nothing of isolation; by the time it is called the walls are up.
"""

from __future__ import annotations

import _ast
import os
import sys
import time
import types
from typing import Any

from toolcell_bridge import codec
from toolcell_bridge.errors import ProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.guest import failures, files
from toolcell_bridge.guest.channel import Channel, ChannelClosed
from toolcell_bridge.guest.refusals import install_package
from toolcell_bridge.guest.tools import SCRIPT, Toolbox, ToolError, ToolNamespace
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.messages import Done, Plain, PutFile, Result, Run

ONLY_AST = 0x400
TOP_LEVEL_AWAIT = 0x2000
IS_COROUTINE = 0x80

LOG_LEVELS = ("debug", "info", "warning", "error")


class Runner:
    """Serves one sandbox's runs, one after the other; the namespace lives as long as the sandbox."""

    def __init__(self, channel: Channel, workspace: str) -> None:
        self._channel = channel
        self._workspace = workspace
        self._module = types.ModuleType("__main__")
        self._inputs: list[str] = []
        self._put_error: str | None = None
        self._result_set = False

    def serve(self) -> None:
        """Answer requests until the host closes the bridge."""
        try:
            while True:
                request = self._channel.next_request()
                if isinstance(request, PutFile):
                    self._put(request)
                else:
                    self._channel.send(self.run(request))
        except (ChannelClosed, ProtocolError):
            return

    def run(self, run: Run) -> Done:
        """Execute one script and return its last word; never raises for anything the script does."""
        self._result_set = False
        try:
            if self._put_error is not None:
                raise OSError(self._put_error)
            self._execute(run)
            self._flush()
        except SystemExit as exc:
            self._flush()
            if exc.code is None or exc.code == 0:
                return Done(True, None)
            return Done(False, failures.describe(exc, run.source))
        except Denied as exc:
            return Done(False, exc.error)
        except BaseException as exc:
            self._flush()
            return Done(False, failures.describe(exc, run.source))
        return Done(True, None)

    def _put(self, message: PutFile) -> None:
        try:
            files.write(message, self._workspace)
        except (OSError, ValueError) as exc:
            self._put_error = f"input file {message.path!r}: {exc}"
        if message.last:
            self._inputs.append(message.path)

    def _execute(self, run: Run) -> None:
        sys.modules["__main__"] = self._module
        namespace = self._module.__dict__
        namespace.update(self._names(run))
        if run.seed is not None:
            seed(run.seed)
        if run.clock is not None:
            freeze_clock(run.clock)
        body, last, guards = parse(run)
        namespace.update(guards)
        # Inputs come last: a caller's name wins over ours.
        namespace.update(run.inputs)
        value = _evaluate(body, namespace)
        if last is not None:
            value = _evaluate(last, namespace)
            if value is not None and not self._result_set:
                self._set_trailing(value, run)

    def _names(self, run: Run) -> dict[str, Any]:
        toolbox = Toolbox(self._channel, run.tools)

        def set_result(data: Any = None, files: Any = None) -> None:
            """Make `data` the run's result; the last call wins. `files`: workspace paths to return."""
            self._set_result(data, files, run)

        def log(level: str, *values: object) -> None:
            """print() with a level in front."""
            if level not in LOG_LEVELS:
                raise ValueError(f"log level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
            print(f"[{level}]", *values, file=sys.stderr if level in ("warning", "error") else sys.stdout)

        return {
            "call_tool": toolbox.call_tool,
            "call_tools_parallel": toolbox.call_tools_parallel,
            "call_tool_async": toolbox.call_tool_async,
            "list_tools": toolbox.list_tools,
            "search_tools": toolbox.search_tools,
            "progress": toolbox.progress,
            "install_package": install_package,
            "tools": ToolNamespace(toolbox),
            "set_result": set_result,
            "log": log,
            "ToolError": ToolError,
            "input_files": list(self._inputs),
            "OUTPUT_DIR": self._workspace,
        }

    def _set_result(self, data: Any, names: Any, run: Run) -> None:
        wanted = files.requested(names)
        message = Result(to_plain(data, "result"), wanted)
        size = codec.packed_size(message.value, "result")
        if size > run.result_bytes:
            raise ValueTooLarge("result", size, run.result_bytes)
        self._flush()
        self._channel.send(message)
        self._result_set = True
        for part in files.collect(wanted, self._workspace, run.files, run.files_bytes):
            self._channel.send(part)

    def _set_trailing(self, value: Any, run: Run) -> None:
        try:
            self._set_result(value, None, run)
        except (UnsendableValue, ValueTooLarge) as exc:
            sys.stderr.write(f"[toolcell] the last expression's value was not kept as the result: {exc}\n")

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # the script may have replaced or closed it
                pass


class Denied(Exception):
    """The lint profile refused the script."""

    def __init__(self, error: dict[str, Plain]) -> None:
        super().__init__(error["message"])
        self.error = error


def parse(run: Run) -> tuple[types.CodeType, types.CodeType | None, dict[str, Any]]:
    """Compile a script into its body, the expression it ends with (or None), and names it needs.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as compile() does.
        Denied: the lint profile found something.
    """
    guards: dict[str, Any] = {}
    if run.lint == "off":
        tree = compile(run.source, SCRIPT, "exec", ONLY_AST | TOP_LEVEL_AWAIT, dont_inherit=True)
    else:
        from toolcell_bridge.guest.lint import check

        checked = check(run.source, run.lint)  # type: ignore[arg-type]
        if checked.findings:
            raise Denied(_denied(checked.findings))
        tree, guards = checked.tree, checked.guards
    last = None
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        expression = _ast.Expression(tree.body.pop().value)
        flags = TOP_LEVEL_AWAIT | _future_flags(tree)
        last = compile(expression, SCRIPT, "eval", flags, dont_inherit=True)
    return compile(tree, SCRIPT, "exec", TOP_LEVEL_AWAIT, dont_inherit=True), last, guards


def _future_flags(tree: Any) -> int:
    """Compiler flags that the script's own `from __future__` lines ask for; they hold for its last line too."""
    import __future__

    flags = 0
    for node in tree.body:
        if isinstance(node, _ast.ImportFrom) and node.module == "__future__":
            flags |= sum(getattr(__future__, alias.name).compiler_flag for alias in node.names)
    return flags


def _denied(findings: Any) -> dict[str, Plain]:
    first = findings[0]
    plain = [
        {"line": each.line, "column": each.column, "rule": each.rule, "message": each.message} for each in findings[:50]
    ]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return {
        "type": "Denied",
        "message": f"{first.message}{more}",
        "line": first.line,
        "column": first.column,
        "traceback": "\n".join(f"line {each['line']}, column {each['column']}: {each['message']}" for each in plain),
        "findings": plain,
        "denied": True,
    }


def _evaluate(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    value = eval(code, namespace)  # this is what a sandbox is for
    if code.co_flags & IS_COROUTINE:
        import asyncio

        async def main() -> Any:
            return await value

        return asyncio.run(main())
    return value


def seed(number: int) -> None:
    """Make `random` and numpy's legacy generator repeatable."""
    import random

    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


def freeze_clock(now: float) -> None:
    """Make `time.time()` and what builds on it answer `now`. Monotonic clocks go on."""
    time.time = lambda: now
    time.time_ns = lambda: int(now * 1e9)
    frozen = time.gmtime(now)
    gmtime, localtime = time.gmtime, time.localtime
    time.gmtime = lambda seconds=None: gmtime(now if seconds is None else seconds)
    time.localtime = lambda seconds=None: localtime(now if seconds is None else seconds)
    import datetime

    class FrozenDatetime(datetime.datetime):
        """datetime.datetime whose now() is the recorded one."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(now, tz)

        @classmethod
        def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime(*frozen[:6], int(now % 1 * 1e6))

        @classmethod
        def today(cls) -> datetime.datetime:  # type: ignore[override]
            return datetime.datetime.fromtimestamp(now)

    class FrozenDate(datetime.date):
        """datetime.date whose today() is the recorded one."""

        @classmethod
        def today(cls) -> datetime.date:  # type: ignore[override]
            return datetime.date.fromtimestamp(now)

    datetime.datetime, datetime.date = FrozenDatetime, FrozenDate  # type: ignore[misc]


def exit_process(code: int = 0) -> None:
    """Leave at once: no atexit hooks, no threads joined, nothing of the script's run again."""
    os._exit(code)
