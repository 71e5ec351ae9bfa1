"""Quotas of runs: shared by the Runtimes of a process, for scripts, plans, resumed runs and scripts of a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from control.conftest import Effects
from toolcell import PoolConfig, Quota, QuotaExceeded, Quotas, RunContext, Runtime, UsageError

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


def test_runtimes_share_a_quota_on_every_route(effects: Effects) -> None:
    now = [0.0]
    quotas = Quotas(Quota(runs=3, calls=3, per_s=60), clock=lambda: now[0])
    registry = effects.registry

    async def main() -> Any:
        pool, ada = PoolConfig(warm=1), RunContext(user_id="ada")
        async with (
            Runtime(registry, pool=pool, quotas=quotas) as one,
            Runtime(registry, pool=pool, quotas=quotas) as two,
        ):
            registry.enable_code_execution(two)
            await one.execute_code("call_tool('write', text='a')", context=ada)
            await two.execute_plan([{"tool": "write", "args": {"text": "b"}}], context=ada)
            waiting = await one.execute_code("call_tool('pay', to='x')", context=ada, on_approval="suspend")
            run = RunContext(user_id="ada").having(quotas)
            inner = await registry.dispatch("execute_code", {"code": "call_tool('write', text='c')"}, context=run)
            assert "calls=3 in 60 s" in inner.text  # of four: write, write, pay, execute_code
            for refused in (
                one.execute_code("1", context=ada),
                two.execute_plan([{"tool": "read", "args": {"name": "b"}}], context=ada),
                one.resume(waiting.suspension, context=ada),
            ):
                with pytest.raises(QuotaExceeded, match="runs=3") as caught:
                    await refused
            assert (await two.execute_code("2", context=RunContext(user_id="bob"))).value == 2
            now[0] += caught.value.retry_after_s
            assert (await one.execute_code("3", context=ada)).value == 3

    with pytest.raises(UsageError, match="quotas="):
        Runtime(quotas=3)  # type: ignore[arg-type, unused-ignore]
    anyio.run(main)
    assert effects.made == [["write", "a"], ["write", "b"]]


WRITES = "call_tool('write', text='a')"


async def _in_a_session(runtime: Runtime, context: RunContext, *, streamed: bool) -> None:
    async with runtime.session(context=context) as session:
        if streamed:
            _ = [event async for event in session.stream(WRITES)]
        else:
            await session.execute_code(WRITES)


async def _as_a_stream(runtime: Runtime, context: RunContext) -> None:
    _ = [event async for event in runtime.stream(WRITES, context=context)]


async def _as_a_map(runtime: Runtime, context: RunContext) -> None:
    _ = [each async for each in runtime.map(WRITES, [{}, {}], options={"context": context})]


USES: dict[str, tuple[Callable[[Runtime, RunContext], Awaitable[Any]], tuple[int, int]]] = {
    "code": (lambda runtime, context: runtime.execute_code(WRITES, context=context), (1, 1)),
    "stream": (_as_a_stream, (1, 1)),
    "plan": (
        lambda runtime, context: runtime.execute_plan([{"tool": "write", "args": {"text": "a"}}] * 3, context=context),
        (1, 3),
    ),
    "map": (_as_a_map, (2, 2)),
    "session": (lambda runtime, context: _in_a_session(runtime, context, streamed=False), (1, 1)),
    "stream of a session": (lambda runtime, context: _in_a_session(runtime, context, streamed=True), (1, 1)),
    "saved script": (lambda runtime, context: runtime.execute_code("tools.saved()", context=context), (2, 2)),
}
"""For each route: what it runs, and how many runs and calls that is."""


def test_each_run_and_each_call_counts_once_whoever_gave_the_quota(effects: Effects) -> None:
    """The Runtime, the context, or both: then it is the same quota, and not used up twice as fast."""
    effects.registry.save_script("saved", WRITES)
    used = {}

    async def main() -> None:
        for given in ("runtime", "context", "both"):
            quotas = Quotas(Quota(runs=1000, calls=1000))
            of_context = () if given == "runtime" else (quotas,)
            async with Runtime(
                effects.registry, pool=PoolConfig(warm=1), quotas=None if given == "context" else quotas
            ) as runtime:
                for route, (use, _) in USES.items():
                    await use(runtime, RunContext(user_id=route).having(*of_context))
                    used[given, route] = quotas.used(route)

    anyio.run(main)
    expected = {route: {"runs": runs, "calls": count} for route, (_, (runs, count)) in USES.items()}
    assert used == {(given, route): expected[route] for given in ("runtime", "context", "both") for route in USES}
