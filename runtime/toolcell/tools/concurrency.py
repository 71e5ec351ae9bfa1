"""Who must wait for whom: the run's workers, a tool's own limit, groups that never overlap.

A call never waits for something one of its own callers holds; that is what keeps nested calls free of deadlock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

from toolcell.tools.call import Call
from toolcell.tools.hook_runner import in_hook
from toolcell.tools.options import Origin
from toolcell.tools.spec import RegisteredTool, ToolIdentity


class _LoopGates:
    """Locks and limiters of one event loop; they cannot be shared between loops."""

    def __init__(self) -> None:
        self.groups: dict[str, anyio.Lock] = {}
        self.tools: WeakKeyDictionary[ToolIdentity, anyio.CapacityLimiter] = WeakKeyDictionary()


_gates: anyio.lowlevel.RunVar[_LoopGates] = anyio.lowlevel.RunVar("toolcell_gates")


def _loop_gates() -> _LoopGates:
    try:
        return _gates.get()
    except LookupError:
        _gates.set(gates := _LoopGates())
        return gates


def has_own_gates(tool: RegisteredTool) -> bool:
    """True for the few tools that wait for more than a worker."""
    options = tool.options
    return options.exclusive_group is not None or options.max_concurrency is not None


@asynccontextmanager
async def own_gates(call: Call, tool: RegisteredTool) -> AsyncIterator[None]:
    """Wait for the tool's own turn, before any worker is taken: waiting for a group keeps no worker from others."""
    async with AsyncExitStack() as held:
        group = tool.options.exclusive_group
        if group is not None and group not in call.held_groups:
            await held.enter_async_context(_loop_gates().groups.setdefault(group, anyio.Lock()))
        if tool.options.max_concurrency is not None and all(
            _gate(above) is not tool.identity for above in call.callers
        ):
            await held.enter_async_context(_own_limiter(tool, tool.options.max_concurrency))
        yield


async def take_worker(call: Call, limiter: anyio.CapacityLimiter) -> None:
    """Wait for one of the run's workers; costs next to nothing when one is free."""
    try:
        limiter.acquire_on_behalf_of_nowait(call)
    except anyio.WouldBlock:
        await limiter.acquire_on_behalf_of(call)
    call.holds_worker = not call.options.orchestrates


def _gate(call: Call) -> ToolIdentity | None:
    return call.tool.identity if call.tool is not None else None


def _own_limiter(tool: RegisteredTool, tokens: int) -> anyio.CapacityLimiter:
    limiters = _loop_gates().tools
    if (limiter := limiters.get(tool.identity)) is None:
        limiters[tool.identity] = limiter = anyio.CapacityLimiter(tokens)
    return limiter


def worker_limiter(call: Call) -> anyio.CapacityLimiter | None:
    """Whose worker the call needs: of those that do work, of those that wait for others, or none."""
    run = call.run
    if run.is_shared:
        return None
    workers = call.registry.settings.max_workers
    if call.options.orchestrates:
        return run.state.orchestrators(run.level, call.origin is Origin.PLAN, workers)
    if in_hook.get():  # calls that hold all workers may be waiting for this hook to end
        return None
    return call.borrowed_worker or run.state.leaves(workers)
