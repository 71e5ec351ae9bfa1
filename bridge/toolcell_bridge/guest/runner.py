"""Run scripts: take RunScript from the bridge, execute the source, and report with Done.

The script is its own compilation unit named `<code>`, so its line numbers, tracebacks and `__future__` imports are
native. Isolation is already applied when the runner is called.
"""

from __future__ import annotations

import _ast
import os
import sys
import types
from typing import Any

from toolcell_bridge.guest import errors, files
from toolcell_bridge.guest.channel import Channel, ChannelClosed
from toolcell_bridge.guest.tools import SCRIPT, Toolbox, ToolError, ToolNamespace
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.errors import ProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import Done, Message, Plain, PutFile, Result, RunScript

LAST = "<last>"
"""Name in the script's namespace for the value of the expression it ends with. No source can contain this name."""

LAST_RESULT = "<set_result>"
"""What a script calls when its last statement is a call of set_result."""

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
        self._held: list[Message] = []
        self._is_last = False
        self._own_set_result: object = None

    def serve(self) -> None:
        """Answer requests until the host closes the bridge."""
        try:
            while True:
                request = self._channel.next_request()
                if isinstance(request, PutFile):
                    self._put(request)
                else:
                    self.answer(request)
        except (ChannelClosed, ProtocolError):
            return

    def answer(self, run: RunScript) -> Done:
        """Execute one script, send Done and return it.

        Raises:
            ChannelClosed: the host is gone.
        """
        done = self._run(run)
        self._channel.send(*self._held, done)
        self._held.clear()
        return done

    def _run(self, run: RunScript) -> Done:
        """Execute a script; never raises for anything it does. Held messages must be sent before the Done."""
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
            return Done(False, errors.describe(exc, run.source))
        except Denied as exc:
            return Done(False, exc.error)
        except BaseException as exc:
            self._flush()
            return Done(False, errors.describe(exc, run.source))
        return Done(True, None)

    def _put(self, message: PutFile) -> None:
        try:
            files.write(message, self._workspace)
        except (OSError, ValueError) as exc:
            self._put_error = f"input file {message.path!r}: {exc}"
        if message.last:
            self._inputs.append(message.path)

    def _execute(self, run: RunScript) -> None:
        sys.modules["__main__"] = self._module
        namespace = self._module.__dict__
        namespace.update(self._names(run))
        if run.seed is not None or run.clock is not None:
            make_repeatable(run)
        code, guards = parse(run)
        namespace.update(guards)
        # Inputs come last: a caller's name wins over ours.
        namespace.update(run.inputs)
        if LAST_RESULT in code.co_names:
            namespace[LAST_RESULT] = self._set_last_result
        try:
            _evaluate(code, namespace)
        finally:
            value = namespace.pop(LAST, None)
            namespace.pop(LAST_RESULT, None)
        if value is not None and not self._result_set:
            self._set_trailing(value, run)

    def _names(self, run: RunScript) -> dict[str, Any]:
        toolbox = Toolbox(self._channel, run.tools)

        def set_result(data: Any = None, files: Any = None) -> None:
            """Make `data` the run's result; the last call wins. `files`: workspace paths to return."""
            self._set_result(data, files, run)

        def log(level: str, *values: object) -> None:
            """print() with a level in front."""
            if level not in LOG_LEVELS:
                raise ValueError(f"log level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
            print(f"[{level}]", *values, file=sys.stderr if level in ("warning", "error") else sys.stdout)

        self._own_set_result = set_result
        return {
            "call_tool": toolbox.call_tool,
            "call_tools_parallel": toolbox.call_tools_parallel,
            "call_tool_async": toolbox.call_tool_async,
            "list_tools": toolbox.list_tools,
            "search_tools": toolbox.search_tools,
            "progress": toolbox.progress,
            "install_package": errors.install_package,
            "tools": ToolNamespace(toolbox),
            "set_result": set_result,
            "log": log,
            "ToolError": ToolError,
            "input_files": list(self._inputs),
            "OUTPUT_DIR": self._workspace,
        }

    def _set_result(self, data: Any, names: Any, run: RunScript) -> None:
        wanted = files.requested(names)
        packed = to_packed(data, "result")
        if len(packed.data) > run.result_bytes:
            raise ValueTooLarge("result", len(packed.data), run.result_bytes)
        message = Result(packed, wanted)
        self._flush()
        if self._is_last and not wanted:
            # No message of the script can follow. It is sent together with Done, which saves both ends a system call
            # and the host a wake-up.
            self._held[:] = [message]
        else:
            self._channel.send(message)
        self._result_set = True
        for part in files.collect(wanted, self._workspace, run.files, run.files_bytes):
            self._channel.send(part)

    def _set_last_result(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up like in the script, which may have defined a set_result of its own.
        found = eval("set_result", self._module.__dict__)
        self._is_last = found is self._own_set_result
        try:
            return found(*args, **kwargs)
        finally:
            self._is_last = False

    def _set_trailing(self, value: Any, run: RunScript) -> None:
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


def parse(run: RunScript) -> tuple[types.CodeType, dict[str, Any]]:
    """Compile a script; returns it with the names it needs. The value it ends with will be under `LAST`.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as compile() does.
        Denied: the lint profile found something.
    """
    if run.lint == "off":
        tree = compile(run.source, SCRIPT, "exec", ONLY_AST | TOP_LEVEL_AWAIT, dont_inherit=True)
        return compile(_keep_last_value(tree), SCRIPT, "exec", TOP_LEVEL_AWAIT, dont_inherit=True), {}
    from toolcell_bridge.guest.lint import check, compile_tree

    checked = check(run.source, run.lint)  # type: ignore[arg-type]
    if checked.tree is None:
        raise Denied(_denied(checked.findings))
    return compile_tree(_keep_last_value(checked.tree), "exec", flags=TOP_LEVEL_AWAIT), checked.guards


def _keep_last_value(tree: Any) -> Any:
    """Keep the value of the expression that a script ends with under `LAST`."""
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        tree.body[-1] = _kept(tree.body[-1])
    return tree


def _kept(last: _ast.Expr) -> _ast.Assign:
    """Turn the statement `last` into an assignment to `LAST`."""
    called = last.value.func if isinstance(last.value, _ast.Call) else None
    if isinstance(called, _ast.Name) and called.id == "set_result":
        called.id = LAST_RESULT
    name, kept = _ast.Name(LAST, _ast.Store()), _ast.Assign([], last.value)
    kept.targets.append(name)
    for node in (name, kept):
        node.lineno, node.col_offset = last.lineno, last.col_offset
        node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset
    return kept


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


def make_repeatable(run: RunScript) -> None:
    """Seed randomness and start the clock as recorded."""
    from toolcell_bridge.guest import determinism

    if run.seed is not None:
        determinism.seed(run.seed)
    if run.clock is not None:
        determinism.set_clock(run.clock)


def exit_process(code: int = 0) -> None:
    """Exit at once: no atexit hooks, no threads joined, no code of the script run again."""
    os._exit(code)
