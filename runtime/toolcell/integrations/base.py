"""What every adapter needs: a framework's tools as ours, a run's result as text for its model, and a runtime to run in.

A framework's tools are called through a registry, so arguments are checked, and hooks, rules and the audit log see
every call. Imports no framework.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Self

import anyio

from toolcell.errors import MissingPackage, ToolError, UsageError
from toolcell.results import ExecutionResult
from toolcell.runtime import Runtime
from toolcell.sync import SyncRuntime
from toolcell.tools.adapters import is_async, positional_spec, with_options
from toolcell.tools.checks import text_of
from toolcell.tools.code import code_result
from toolcell.tools.compat import message_text
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.options import ToolOptions
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.spec import ToolSpec

FrameworkCall = Callable[[dict[str, Any]], Any | Awaitable[Any]]
"""Calls a framework's tool with arguments by name. May be async."""


def missing_package(exc: ModuleNotFoundError, extra: str) -> MissingPackage:
    """Return the error of an adapter whose framework is not installed.

    `from toolcell.integrations.X import ...` raises it: `raise missing_package(exc, "X") from exc`.
    """
    module = f"toolcell.integrations.{extra.replace('-', '_')}"
    return MissingPackage(f"{module} needs {exc.name}, which is not installed: pip install 'toolcell[{extra}]'")


def framework_tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, Any] | None,
    call: FrameworkCall,
    *,
    shows: tuple[type[Exception], ...] = (),
    source: Any = None,
    **options: Any,
) -> ToolSpec:
    """Return a framework's tool as one of ours, for `tools_with`.

    `parameters` is the JSON Schema of its arguments; None takes any. `call` gets them checked; a synchronous one runs
    in a worker thread. `shows`: exceptions whose text the framework means for the model; of others a script sees only
    the class. `source`: the framework's tool itself. `options` are those of `ToolOptions`.

    Raises:
        RegistrationError: the name, the schema or an option cannot be used.
    """
    schema = None if parameters is None else {"type": "object", **parameters}
    said = (description or "").strip() or f"{name}: nothing is said about what it does."
    definition, known = ToolDefinition(name, said, schema), with_options(ToolOptions(), options)
    return positional_spec(definition, _showing(call, shows), known, source or call)


def _showing(call: FrameworkCall, shows: tuple[type[Exception], ...]) -> FrameworkCall:
    if not shows:
        return call
    if is_async(call):

        async def awaited(args: dict[str, Any]) -> Any:
            try:
                return await call(args)
            except shows as exc:
                raise ToolError(text_of(exc)) from exc

        return awaited

    def called(args: dict[str, Any]) -> Any:
        try:
            return call(args)
        except shows as exc:
            raise ToolError(text_of(exc)) from exc

    return called


def tools_with(registry: ToolRegistry, tools: Iterable[Any]) -> ToolRegistry:
    """Return a registry with the tools of `registry` and a framework's, under the hooks and rules of `registry`.

    Raises:
        RegistrationError: a name is taken, or a tool is wrong.
    """
    return registry.merged(ToolRegistry(tools, settings=registry.state.settings))


def text_for_model(result: ExecutionResult, *, with_logs: bool = True) -> str:
    """Return a run's result as a model reads it: the value or the error, then what was printed; long ones are cut."""
    return message_text(code_result(result, with_logs=with_logs))


class RuntimeOwner:
    """The runtime of an adapter: one that the program opened and closes, or one of the adapter's own.

    One of its own is open while anybody uses the adapter, and takes the arguments of `Runtime` as options.
    """

    def __init__(self, runtime: Runtime | None, options: Mapping[str, Any]) -> None:
        _check_runtime(runtime, Runtime, options)
        self.runtime = Runtime(**options) if runtime is None else runtime
        self._is_own = runtime is None
        self._users = 0
        self._lock = anyio.Lock()

    async def open(self) -> Runtime:
        """Return the runtime, open. Each `open` needs a `close`.

        Raises:
            SandboxUnavailable: this machine cannot start sandboxes.
            UsageError: the program's own runtime is not open here.
        """
        async with self._lock:
            if self._is_own and not self._users:
                await self.runtime.open()
            self.runtime.check_open()
            self._users += 1
        return self.runtime

    async def close(self) -> None:
        """End the runtime after its last user, if it is the adapter's own. Cancellation: shielded."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                self._users = max(0, self._users - 1)
                if self._is_own and not self._users:
                    await self.runtime.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class SyncRuntimeOwner:
    """The same for frameworks that do not await. A runtime of its own opens when it is first asked for."""

    def __init__(self, runtime: SyncRuntime | None, options: Mapping[str, Any]) -> None:
        _check_runtime(runtime, SyncRuntime, options)
        self.runtime = SyncRuntime(**options) if runtime is None else runtime
        self._is_own = runtime is None
        self._is_open = not self._is_own
        self._lock = threading.Lock()

    @property
    def registry(self) -> ToolRegistry:
        """The runtime's own tools, hooks and rules."""
        registry: ToolRegistry = self.runtime.runtime.registry
        return registry

    def open(self) -> SyncRuntime:
        """Return the runtime, open. May be called any number of times.

        Raises:
            SandboxUnavailable: this machine cannot start sandboxes.
        """
        with self._lock:
            if not self._is_open:
                self.runtime.open()
                self._is_open = True
        return self.runtime

    def close(self) -> None:
        """End the runtime, if it is the adapter's own. Safe to call twice."""
        with self._lock:
            if self._is_own and self._is_open:
                self._is_open = False
                self.runtime.close()


def _check_runtime(runtime: object, kind: type[Any], options: Mapping[str, Any]) -> None:
    if runtime is None:
        return
    if not isinstance(runtime, kind):
        raise UsageError(f"runtime= takes a {kind.__name__}, not {type(runtime).__name__}; write {kind.__name__}(...)")
    if options:
        named = ", ".join(options)
        raise UsageError(f"runtime= has its own settings; give {named} to that {kind.__name__}, or leave out runtime=")
