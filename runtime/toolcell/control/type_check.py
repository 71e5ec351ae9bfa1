"""Check the types of a script before it runs: its calls of tools, and what it does with their results.

The checker reads a stranger's text, so it runs in sandboxes of its own, whose only program is the checker. Nothing that
comes back decides what may run: a script without findings meets every later check as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import anyio

from toolcell.config import Limits, Policy, PoolConfig
from toolcell.control import in_type_check
from toolcell.control.identity import options_of
from toolcell.daemon_threads import run_sync
from toolcell.errors import SandboxUnavailable
from toolcell.results import ErrorInfo, ExecutionResult, Outcome
from toolcell.run.request import sendable
from toolcell.tools.call import CallableTools
from toolcell.tools.checks import check_kind
from toolcell.tools.options import Origin
from toolcell.tools.stub_types import is_identifier
from toolcell.tools.stubs import Described, checked_module
from toolcell_bridge.guest.tool_names import python_path
from toolcell_bridge.guest.tools import GUEST_NAMES

SCRIPT: Final = f"""{Path(in_type_check.__file__).read_text(encoding="utf-8")}
set_result(check(source, stubs, paths, version))
"""
"""Checks the script that it gets as its input `source`."""

MAX_FINDINGS: Final = 50
LIMITS: Final = Limits(wall_s=20.0)

NAMES: Final[Mapping[str, str]] = {
    "call_tool": "def call_tool(name: str, /, *args: Any, raw: bool = ..., **kwargs: Any) -> Any: ...",
    "call_tool_async": "async def call_tool_async(name: str, /, *args: Any, **kwargs: Any) -> Any: ...",
    "list_tools": "def list_tools() -> list[dict[str, Any]]: ...",
    "search_tools": "def search_tools(query: str) -> list[dict[str, Any]]: ...",
    "OUTPUT_DIR": "OUTPUT_DIR: str",
    "ToolError": "class ToolError(RuntimeError):\n    tool: str\n    code: str\n    retryable: bool\n    details: Any",
}
"""What a script finds besides its tools. Names of the guest that are not here are Any."""

_HELPERS: Final = """from typing import Any
class _Tools(type):
    def __getitem__(cls, name: str) -> Any: ...
async def _awaited[T](value: T) -> T: ...
def _values(value: Any) -> Any: ...
"""
_TYPES: Final[Mapping[type, str]] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    bytes: "bytes",
    list: "list[Any]",
    dict: "dict[str, Any]",
}


class Sandboxes(Protocol):
    """As much of a Runtime as a check needs."""

    async def open(self) -> None:
        """Start it."""

    async def close(self) -> None:
        """End it."""

    async def execute_code(self, source: str, *, inputs: Mapping[str, Any]) -> ExecutionResult:
        """Run a script."""


class TypeChecker:
    """Checks scripts, each in a sandbox of its own. The sandboxes are started with the first check."""

    def __init__(self, runtime: Callable[..., Sandboxes]) -> None:
        """`runtime` makes the Runtime of the sandboxes."""
        self._make = runtime
        self._runtime: Sandboxes | None = None
        self._lock: anyio.Lock | None = None

    async def close(self) -> None:
        """End the sandboxes."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.close()

    async def _open(self) -> Sandboxes:
        self._lock = self._lock or anyio.Lock()
        async with self._lock:
            if self._runtime is None:
                if sys.platform != "linux":
                    raise SandboxUnavailable(f"types are checked in a sandbox of Linux, and this is {sys.platform}")
                from toolcell.sandbox.process import type_checker
                from toolcell.sandbox.process.backend import ProcessBackend

                policy = Policy(shell=True)  # to execute the checker; the text that it reads is never executed
                backend = ProcessBackend(policy=policy, packages=await run_sync(type_checker.build))
                runtime = self._make(backend=backend, policy=policy, limits=LIMITS, pool=PoolConfig(warm=1, cap=4))
                await runtime.open()
                self._runtime = runtime
            return self._runtime

    async def refusal(
        self, run_id: str, source: str, tools: CallableTools, inputs: Mapping[str, Any] | None
    ) -> ExecutionResult | None:
        """Return the result of a script that is not run because of its types; None when nothing is wrong with them.

        Raises:
            UsageError: ty is not installed.
            SandboxUnavailable: the checker's sandbox could not be started on this machine.
        """
        check_kind("source", source, str)
        runtime = await self._open()
        shown = {
            "source": sendable(source), "stubs": stubs_of(tools, inputs), "version": f"3.{sys.version_info.minor}",
            "paths": {name: python_path(name) for name in tools.names(Origin.CODE)},
        }  # fmt: skip
        result = await runtime.execute_code(SCRIPT, inputs=shown)
        found = result.value if isinstance(result.value, dict) else {}
        if result.ok and not found.get("error"):
            findings = read_findings(found.get("findings"))
            return refused(run_id, findings) if findings else None
        said = found.get("error") or f"{result.outcome}: {result.error.message if result.error else ''}"
        message = f"the types of this script could not be checked: {said!s:.300}"
        return refused(run_id, ({"line": 1, "column": 0, "rule": "not-checked", "message": message},))


def stubs_of(tools: CallableTools, inputs: Mapping[str, Any] | None) -> str:
    """Return what a script finds, as the text of `__builtins__.pyi`."""
    described: list[Described] = [
        (definition, options_of(tools, definition.name).returns) for definition in tools.definitions(Origin.CODE)
    ]
    module = checked_module(described, "tools").replace("\nclass tools:\n", "\nclass tools(metaclass=_Tools):\n", 1)
    given = {name: f"{name}: {_type_of(value)}" for name, value in dict(inputs or {}).items() if is_identifier(name)}
    names = {name: NAMES.get(name, f"{name}: Any") for name in sorted(GUEST_NAMES - {"tools"})} | given
    if not described:
        module = "tools: Any"
    return "\n".join([_HELPERS, *names.values(), module, ""])


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value), "Any")


def read_findings(rows: Any) -> tuple[Mapping[str, Any], ...]:
    """Return findings as results have them. The guest is not trusted: what is not of their shape is left out."""
    found = []
    for row in rows[:MAX_FINDINGS] if isinstance(rows, list) else ():
        match row:
            case [int(line), str(rule), str(message)]:
                found.append({"line": line, "column": 0, "rule": rule[:64], "message": message[:300]})
    return tuple(found)


def refused(run_id: str, findings: tuple[Mapping[str, Any], ...]) -> ExecutionResult:
    """Return the result of a script that was not run, because its types are wrong."""
    said = "; ".join(f"line {each['line']}: {each['message']}" for each in findings[:5])
    more = f" (and {len(findings) - 5} more)" if len(findings) > 5 else ""
    error = ErrorInfo("Denied", f"{said}{more}; the script was not run", findings[0]["line"], findings=findings)
    return ExecutionResult(run_id, Outcome.DENIED, error=error)
