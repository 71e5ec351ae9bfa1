"""The pool of a Runtime against a model of it: whatever runs at once, in whatever order, and whatever dies or is given up.

Invariants: no sandbox serves two runs; never more than `cap` are alive; all are destroyed at the end; each run gets an
answer; and whatever happened, the next run works.
"""

from __future__ import annotations

from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, Runtime, SandboxUnavailable, ToolRegistry
from toolcell.testing import Die, FakeBackend, Hang, ScriptedCall

EXPECTED = {
    "ok": Outcome.OK,
    "calls": Outcome.OK,
    "dies": Outcome.KILLED,
    "hangs": Outcome.TIMEOUT,
    "cancelled": Outcome.CANCELLED,
    "given up": None,
}
"""What becomes of a run of each kind; None: its caller does not wait for it."""


class CountingBackend(FakeBackend):
    """Notes how many sandboxes are alive whenever one starts, and fails to start some."""

    def __init__(self, failures: set[int]) -> None:
        super().__init__(_play)
        self.alive_at_most = 0
        self.failures, self._starts = failures, 0
        """Numbers of the starts that fail."""

    async def start(self, limits: Limits) -> Any:
        self._starts += 1
        number = self._starts
        await anyio.lowlevel.checkpoint()
        if number in self.failures:
            raise SandboxUnavailable("this start was to fail")
        sandbox = await super().start(limits)
        self.alive_at_most = max(self.alive_at_most, sum(each.is_alive() for each in self.played))
        return sandbox


def _play(run: Any) -> list[Any]:
    """Return what the guest does with a run: what its script says."""
    steps: dict[str, list[Any]] = {"ok": [], "dies": [Die()], "calls": [ScriptedCall("rest")]}
    return steps.get(run.source, [Hang()])


async def live(backend: CountingBackend, pool: PoolConfig, order: list[tuple[str, int]]) -> list[tuple[str, Any]]:
    """Carry all of it out at once; return what became of each."""
    registry, came = ToolRegistry(), list[tuple[str, Any]]()

    @registry.tool
    async def rest() -> None:
        """Give way to everything else that can run."""
        for _ in range(3):
            await anyio.lowlevel.checkpoint()

    async def one(fate: str, turns: int) -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        result: ExecutionResult | None = None
        cancel = anyio.Event()
        try:
            if fate == "cancelled":
                cancel.set()
            with anyio.CancelScope() as scope:
                if fate == "given up":
                    scope.cancel()
                limits = Limits(wall_s=0.02) if fate == "hangs" else None
                result = await runtime.execute_code(fate, cancel=cancel, limits=limits)
            came.append((fate, result.outcome if result is not None else None))
        except SandboxUnavailable:
            came.append((fate, "unavailable"))

    async with Runtime(registry, backend=backend, pool=pool, allow_unisolated=True) as runtime:
        async with anyio.create_task_group() as tasks:
            for fate, turns in order:
                tasks.start_soon(one, fate, turns)
        backend.failures.clear()
        assert (await runtime.execute_code("ok")).outcome is Outcome.OK
    return came


@settings(max_examples=50)
@given(
    order=st.lists(st.tuples(st.sampled_from(sorted(EXPECTED)), st.integers(0, 4)), min_size=1, max_size=12),
    cap=st.integers(1, 4),
    warm=st.integers(0, 3),
    failures=st.frozensets(st.integers(1, 6), max_size=2),
)
def test_the_pool_keeps_its_promises(
    order: list[tuple[str, int]], cap: int, warm: int, failures: frozenset[int]
) -> None:
    backend = CountingBackend({*failures})
    pool = PoolConfig(warm=min(warm, cap), cap=cap)

    came = anyio.run(live, backend, pool, order)

    assert sorted(fate for fate, _ in came) == sorted(fate for fate, _ in order)
    wrong = [(fate, outcome) for fate, outcome in came if outcome not in (EXPECTED[fate], "unavailable")]
    assert not wrong
    assert sum(outcome == "unavailable" for _, outcome in came) <= len(failures)
    assert backend.alive_at_most <= cap
    assert all(len(sandbox.runs) <= 1 for sandbox in backend.played)
    assert not [sandbox for sandbox in backend.played if sandbox.is_alive()]
