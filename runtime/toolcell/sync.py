"""`SyncRuntime`: a blocking `Runtime` for scripts and notebooks. Its event loop runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from toolcell.errors import UsageError
from toolcell.results import ExecutionResult
from toolcell.runtime import Runtime
from toolcell.tools import ToolRegistry


class SyncRuntime:
    """A blocking `Runtime` with the same arguments. It also works inside a running event loop, as in a notebook."""

    def __init__(self, registry: ToolRegistry | None = None, **options: Any) -> None:
        self.runtime = Runtime(registry, **options)
        self._stack: ExitStack | None = None
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise UsageError("this SyncRuntime is already open; use one `with` block for each SyncRuntime")
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self.runtime))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        return stack.__exit__(kind, exc, trace)

    def execute_code(self, source: str, **options: Any) -> ExecutionResult:
        """Run a script and wait for it; see `Runtime.execute_code` for options and errors."""
        return self._open_portal().call(partial(self.runtime.execute_code, source, **options))

    def execute_plan(self, steps: Sequence[Mapping[str, Any]], **options: Any) -> list[dict[str, Any]]:
        """Run a plan and wait for it; see `Runtime.execute_plan`."""
        return self._open_portal().call(partial(self.runtime.execute_plan, steps, **options))

    def _open_portal(self) -> BlockingPortal:
        if self._portal is None or self._stack is None:
            raise UsageError("this SyncRuntime is not open; use it as `with SyncRuntime(...) as runtime:`")
        return self._portal
