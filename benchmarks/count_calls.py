"""`python -m benchmarks.count_calls`: count the function calls that one run and one tool call make in the host.

Calls are counted with `sys.setprofile` in the event loop's thread, from the call of `execute_code` to its result. What
depends on how busy the machine is stays out: measurements of a run that takes long, and pauses of one that keeps the
event loop. The host either looks again until the guest has answered (only the look that finds something counts), or
sleeps in the event loop meanwhile; real runs do some of both. `--profile N` lists the functions that are called most.
"""

from __future__ import annotations

import argparse
import collections
import gc
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio

from toolcell import PoolConfig, Runtime, ToolRegistry
from toolcell.run import conversation
from toolcell.sandbox import pool, stream
from toolcell.support import event_loop

ROUNDS = 31
WARM_UP = 5
WARM = 2
AGES_S = 60.0
"""Longer than anything here takes."""

PACKAGES = {"toolcell", "toolcell_bridge"}
CALLS_OF_A_LOOK = 3
"""Receive, look at the clock, yield the processor: what is repeated until the guest has answered."""

EMPTY = "set_result(1)"
CALLS = 20


@dataclass(frozen=True, slots=True)
class Calls:
    """How many Python and C functions were called."""

    python: float
    c: float
    own_python: float = 0
    """Calls of toolcell's own functions; the others are those of asyncio, anyio and the standard library."""
    own_c: float = 0
    """From toolcell's own functions."""


class CallCounter:
    """Counts calls of Python and of C functions while it is on. Counting is cheap, so that it changes little."""

    def __init__(self) -> None:
        self.python: collections.Counter[CodeType] = collections.Counter()
        self.c: collections.Counter[tuple[str, CodeType]] = collections.Counter()

    def start(self) -> None:
        """Begin to count. No garbage is collected meanwhile: what other programs have called then would be counted."""
        gc.disable()
        sys.setprofile(self._event)

    def stop(self) -> Calls:
        """Stop counting; return what was called, without this call itself and without looks in vain."""
        sys.setprofile(None)
        gc.enable()
        in_vain = CALLS_OF_A_LOOK * sum(number for (name, _), number in self.c.items() if name == "sched_yield")
        own_python = sum(number for code, number in self.python.items() if _is_own(code))
        own_c = sum(number for (_, code), number in self.c.items() if _is_own(code))
        return Calls(self.python.total() - 1, self.c.total() - 1 - in_vain, own_python, own_c - in_vain)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.python[frame.f_code] += 1
        elif event == "c_call":
            self.c[arg.__qualname__, frame.f_code] += 1

    def names(self) -> list[tuple[int, str]]:
        """Every function that was called, most often first: Python functions, then C functions."""
        python = [(number, _name(code)) for code, number in self.python.most_common()]
        return python + [(number, f"{name} from {_name(code)}") for (name, code), number in self.c.most_common()]


def _is_own(code: CodeType) -> bool:
    return not PACKAGES.isdisjoint(Path(code.co_filename).parts)


def _name(code: CodeType) -> str:
    parts = Path(code.co_filename).with_suffix("").parts
    home = next((index for index, part in enumerate(parts) if part in PACKAGES), len(parts) - 1)
    return f"{'.'.join(parts[home:])}:{code.co_qualname}"


async def count(runtime: Runtime, source: str) -> tuple[Calls, CallCounter]:
    """Run `source` once and count what is called."""
    counter = CallCounter()
    counter.start()
    result = await runtime.execute_code(source)
    calls = counter.stop()
    assert result.ok, result.error
    await full(runtime)
    return calls, counter


async def full(runtime: Runtime) -> None:
    """Wait until what a run leaves to do is done, so that it is not counted with the next."""
    warm = runtime.pool
    assert warm is not None
    while warm.busy or warm.starting or len(warm.idle) < WARM:  # noqa: ASYNC110 - a pool sets no event
        await anyio.sleep(0.005)


@asynccontextmanager
async def steady_runtime(made: ToolRegistry, looks: bool) -> AsyncIterator[Runtime]:
    """A runtime that does nothing because time has passed. `looks`: it does not sleep while the guest works."""
    patches = [
        (event_loop, "SLICE_S", AGES_S),
        (conversation, "TICK_S", AGES_S),
        (pool, "LONG_RUN_S", AGES_S),
        (stream, "SPIN_S", AGES_S if looks else 0.0),
    ]
    before = [getattr(module, name) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        async with Runtime(made, pool=PoolConfig(warm=WARM)) as runtime:
            await full(runtime)
            yield runtime
    finally:
        for (module, name, _), value in zip(patches, before, strict=True):
            setattr(module, name, value)


def script(calls: int) -> str:
    """A script that makes this many tool calls, one after the other."""
    return f"for number in range({calls}): call_tool('add', {{'a': number, 'b': 1}})\nset_result(1)"


def registry() -> ToolRegistry:
    """One small tool."""
    made = ToolRegistry()

    @made.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return made


async def measure(rounds: int = ROUNDS, looks: bool = True) -> dict[str, Calls]:
    """Count a run without tool calls, and one tool call in the middle of a run that makes many. Medians.

    From the function of a tool to that of the next call: how a run begins depends on which of both ends is quicker.
    """
    made, counters = ToolRegistry(), list[CallCounter]()
    empty, calls = list[Calls](), list[Calls]()

    @made.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        if a == CALLS:
            counters.append(CallCounter())
            counters[-1].start()
        elif a == 2 * CALLS:
            calls.append(counters[-1].stop())
        return a + b

    async with steady_runtime(made, looks) as runtime:
        for _ in range(WARM_UP + rounds):
            empty.append((await count(runtime, EMPTY))[0])
            assert (await runtime.execute_code(script(2 * CALLS + 1))).ok
            await full(runtime)
    each = Calls(*(figure / CALLS for figure in astuple(_median(calls[WARM_UP:]))))
    return {"run without calls": _median(empty[WARM_UP:]), "one more tool call": each}


def _median(samples: list[Calls]) -> Calls:
    return Calls(*map(statistics.median, zip(*map(astuple, samples), strict=True)))


async def profile(calls: int) -> None:
    """Print what is called in one run with this many tool calls, most often first."""
    async with steady_runtime(registry(), looks=True) as runtime:
        for _ in range(WARM_UP):
            await count(runtime, script(calls))
        total, counter = await count(runtime, script(calls))
    print(f"{total.python:g} Python, {total.c:g} C")
    for number, name in counter.names():
        print(f"{number:5} {name}")


def main() -> None:
    """Print the counts, or with `--profile N` the functions of a run with N tool calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=int, metavar="N", help="list the functions of one run with N tool calls")
    options = parser.parse_args()
    if options.profile is not None:
        anyio.run(profile, options.profile)
        return
    print(f"{'':36} {'Python':>8} {'own':>8} {'C':>8} {'own':>8}")
    for looks, how in ((True, "looks again"), (False, "sleeps")):
        for name, calls in anyio.run(measure, ROUNDS, looks).items():
            figures = (calls.python, calls.own_python, calls.c, calls.own_c)
            print(f"{f'{name}, host {how}':36} " + " ".join(f"{figure:8.0f}" for figure in figures))


if __name__ == "__main__":
    main()
