"""For every batch, each call has exactly one result, at its own place, and one start and end event."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcell.errors import ToolAbort
from toolcell.tools import Block, Call, RunContext, ToolRegistry, ToolResult
from tools.toolkit import PATIENCE_S, recorded

BACKENDS: list[Any] = [("asyncio", {}), ("trio", {})]

behaviours = st.sampled_from(
    ["returns", "yields", "raises", "exits", "hangs", "blocked", "invalid", "unknown", "swallows", "terminates"]
)


def registry_of(hang_s: float) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(timeout_s=hang_s, name="stall")
    @registry.tool(timeout_s=PATIENCE_S)
    async def act(number: int, what: str) -> Any:
        """Act as the test wants; what is to end by its timeout is asked of the hasty one."""
        match what:
            case "yields":
                for _ in range(number % 4):
                    await anyio.lowlevel.checkpoint()
            case "raises":
                raise ValueError(what)
            case "exits":
                raise SystemExit(1)
            case "hangs":
                await anyio.sleep_forever()
            case "swallows":
                try:
                    await anyio.sleep_forever()
                finally:
                    return number  # noqa: B012  a tool that ignores being cancelled
            case "terminates":
                return ToolResult.of(number, terminate=True)
        return number

    registry.add_hook(before=lambda call: Block("no") if call.args["what"] == "blocked" else None)
    return registry


def request(number: int, what: str) -> tuple[str, dict[str, Any]]:
    if what == "unknown":
        return "nowhere", {}
    return "stall" if what in ("hangs", "swallows") else "act", {
        "number": "x" if what == "invalid" else number,
        "what": what,
    }


def check(results: list[ToolResult], log: list[Any], whats: list[str]) -> None:
    assert len(results) == len(whats)
    assert [result.meta.call_id for result in results] == [f"call_{number}" for number in range(len(whats))]
    for kind in ("start", "end"):
        told = [str(event.call_id) for event in log if event.type == f"tool_execution_{kind}"]
        assert sorted(told) == sorted(f"call_{number}" for number in range(len(whats)))


@pytest.mark.conforms("J-b3", "F5", "F8", "F12", "H5")
@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "trio"])
@settings(max_examples=40, deadline=None)
@given(
    whats=st.lists(behaviours, max_size=8),
    sequential=st.booleans(),
    workers=st.integers(1, 4),
)
def test_any_mixture_of_outcomes_gives_one_result_per_call_in_order(
    backend: Any, whats: list[str], sequential: bool, workers: int
) -> None:
    async def main() -> None:
        registry = registry_of(hang_s=0.002)
        run = registry.new_run()
        run.state.max_workers = workers
        log = recorded(run.events)
        with anyio.fail_after(PATIENCE_S):
            results = await registry.execute_batch(
                [request(number, what) for number, what in enumerate(whats)], context=run, sequential=sequential
            )
        check(results, log, whats)
        for number, (what, result) in enumerate(zip(whats, results, strict=True)):
            if what in ("returns", "yields", "terminates", "swallows"):
                assert result.value == number
            else:
                assert result.is_error
        assert run.state.scopes == {}

    anyio.run(main, backend=backend[0], backend_options=backend[1])


@pytest.mark.conforms("J-b3", "F10", "F11", "F-b5")
@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "trio"])
@settings(max_examples=40, deadline=None)
@given(
    whats=st.lists(behaviours, max_size=8),
    after=st.integers(0, 30),
    sequential=st.booleans(),
    outside=st.booleans(),
)
def test_cancelling_at_any_moment_gives_one_result_per_call_in_order(
    backend: Any, whats: list[str], after: int, sequential: bool, outside: bool
) -> None:
    async def main() -> None:
        registry = registry_of(hang_s=PATIENCE_S)
        run = RunContext()
        log, made = recorded(run.events), list[Call]()
        results: list[ToolResult] = []
        registry.add_hook(before=lambda call: made.append(call))

        async def batch() -> None:
            results.extend(
                await registry.execute_batch(
                    [request(number, what) for number, what in enumerate(whats)], context=run, sequential=sequential
                )
            )

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as group:
                group.start_soon(batch)
                for _ in range(after):
                    await anyio.lowlevel.checkpoint()
                if outside:
                    group.cancel_scope.cancel()
                else:
                    run.cancel("stop")

        if results or not outside:
            check(results, log, whats)
        elif log:
            started = [str(event.call_id) for event in log if event.type == "tool_execution_start"]
            ended = [str(event.call_id) for event in log if event.type == "tool_execution_end"]
            assert sorted(started) == sorted(ended) == [f"call_{number}" for number in range(len(whats))]
            assert all(call.result is not None for call in made)
        assert run.state.scopes == {}

    anyio.run(main, backend=backend[0], backend_options=backend[1])


@pytest.mark.conforms("J-b3", "J-b1")
@pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "trio"])
@settings(max_examples=20, deadline=None)
@given(whats=st.lists(behaviours, max_size=5), place=st.integers(0, 5), sequential=st.booleans())
def test_a_tool_that_ends_the_run_leaves_every_call_with_an_end(
    backend: Any, whats: list[str], place: int, sequential: bool
) -> None:
    async def main() -> None:
        registry = registry_of(hang_s=0.002)

        @registry.tool
        async def stop(number: int = 0, what: str = "") -> str:
            """End the whole run."""
            raise ToolAbort("enough")

        batch = [request(number, what) for number, what in enumerate(whats)]
        batch.insert(min(place, len(batch)), ("stop", {}))
        run = RunContext()
        log = recorded(run.events)

        with pytest.raises(ToolAbort, match="enough"), anyio.fail_after(PATIENCE_S):
            await registry.execute_batch(batch, context=run, sequential=sequential)

        for kind in ("start", "end"):
            told = [str(event.call_id) for event in log if event.type == f"tool_execution_{kind}"]
            assert sorted(told) == sorted(f"call_{number}" for number in range(len(batch)))

    anyio.run(main, backend=backend[0], backend_options=backend[1])
