"""The common base of the built-in packages: tools that are methods of one object, registered with one `add`.

class Remember(ToolPackage):
    package = "remember"
    needs = ("Store", "EmbeddingProvider")

    @offered(idempotent=True)
    async def remember(self, content: str, ctx: ToolContext) -> ToolResult:
        '''What the model reads. The parameters below `Args:` get their descriptions.'''
        return ToolResult.ok("prose for the model", value={"typed": "for code"})

registry.add(Remember(store, embeddings))
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from toolcell.calls.call import RunScope
from toolcell.calls.options import DEFAULT_TOOL_OPTIONS
from toolcell.errors import EmbeddingError, SandboxUnavailable, StoreError, ToolError
from toolcell.results import ExecutionResult
from toolcell.support import daemon_threads
from toolcell.tools import (
    ErrorCode,
    RunContext,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolResult,
    ToolSpec,
)

F = TypeVar("F", bound=Callable[..., Awaitable[ToolResult]])


def offered(**options: Any) -> Callable[[F], F]:
    """Mark an async method as a tool. Its name, docstring and signature are the definition.

    `options` are those of `ToolOptions`. `returns=` is the JSON Schema of the value.
    """

    def mark(function: F) -> F:
        function.__offered__ = DEFAULT_TOOL_OPTIONS.changed(options)  # type: ignore[attr-defined]
        return function

    return mark


class ToolPackage:
    """A built-in package. Each method under `@offered()` is one tool."""

    package: ClassVar[str]
    """The name in `toolcell tools builtin` and `toolcell run --builtin`."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What the constructor takes, for people."""
    extra: ClassVar[str] = ""
    """The extra to install, when the package cannot do without."""

    def definitions(self) -> list[ToolDefinition]:
        """What a model knows of the tools."""
        return [spec.definition for spec in self.to_specs()]

    def to_specs(self) -> list[ToolSpec]:
        """Return one spec for each tool, in the order of the methods."""
        return [self._spec(name, options) for name, options in offered_by(type(self))]

    def _spec(self, name: str, options: ToolOptions) -> ToolSpec:
        return replace(ToolSpec.of_function(_translated(getattr(self, name)), options=options), source=self)


def required_text(what: str, text: str, most: int, cure: str = "send less of it") -> str:
    """Return an argument that must be there.

    Raises:
        ToolError: it is empty, or longer than `most` characters; `cure` says what to do then.
    """
    if not text:
        raise ToolError(f"{what} is required", code=ErrorCode.INVALID_ARGUMENTS)
    if len(text) > most:
        said = f"{what} has {len(text)} characters, and may have {most}; {cure}"
        raise ToolError(said, code=ErrorCode.INVALID_ARGUMENTS)
    return text


async def run_script(runtime: Any, what: str, source: str, ctx: ToolContext, **options: Any) -> ExecutionResult:
    """Run a script of ours in a sandbox, without tools, as a part of the call `ctx`. `runtime`: a Runtime of any kind.

    Raises:
        ToolError: there is no sandbox for `what`.
    """
    context = RunContext(user_id=ctx.user_id, thread_id=ctx.thread_id, scope=RunScope(parent_call_id=ctx.call_id))
    execute = functools.partial(
        runtime.execute_code, source, tools=(), lint="off", check_types=False, context=context, **options
    )
    try:
        is_async = inspect.iscoroutinefunction(runtime.execute_code)
        result: ExecutionResult = await (execute() if is_async else daemon_threads.run_sync(execute))
    except SandboxUnavailable as exc:
        raise ToolError(f"no sandbox for the {what}: {exc}", code=ErrorCode.UNAVAILABLE, retryable=True) from exc
    return result


def offered_by(package: type[ToolPackage]) -> Iterator[tuple[str, ToolOptions]]:
    """Yield name and options of each tool of a package, without making one."""
    names = dict.fromkeys(name for each in reversed(package.__mro__) for name in vars(each))
    for name in names:
        options = getattr(getattr(package, name, None), "__offered__", None)
        if isinstance(options, ToolOptions):
            yield name, options


def _translated(method: Callable[..., Awaitable[ToolResult]]) -> Callable[..., Awaitable[ToolResult]]:
    """Say to a model why a store or a provider failed, without the paths and addresses of the host."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> ToolResult:
        try:
            return await method(*args, **kwargs)
        except (StoreError, EmbeddingError) as exc:
            raise ToolError(exc.reason, code=ErrorCode.UNAVAILABLE, retryable=exc.retryable) from exc

    return call
