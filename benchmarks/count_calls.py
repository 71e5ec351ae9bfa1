"""`python -m benchmarks.count_calls`: count the function calls that one run and one tool call make in the host.

Counts do not depend on how fast or how busy the machine is. Calls are counted with `sys.setprofile` in the event loop's
thread, from the call of `execute_code` to its result. `--profile` lists the functions that are called most.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio

from toolcell import PoolConfig, Runtime, ToolRegistry

ROUNDS = 21
PAUSE_S = 0.02
"""Between two runs, so that what one leaves to do is not counted with the next."""
PACKAGES = {"toolcell", "toolcell_bridge"}
EMPTY = "set_result(1)"
CALLS = 20


class CallCounter:
    """Counts calls of Python and of C functions while it is on."""

    def __init__(self) -> None:
        self.python: collections.Counter[str] = collections.Counter()
        self.c: collections.Counter[str] = collections.Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is called inside the block."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            parts = Path(code.co_filename).with_suffix("").parts
            home = next((index for index, part in enumerate(parts) if part in PACKAGES), len(parts) - 1)
            self.python[f"{'.'.join(parts[home:])}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self.c[f"{getattr(arg, '__qualname__', arg)} from {frame.f_code.co_qualname}"] += 1


async def count(runtime: Runtime, source: str) -> tuple[int, int, CallCounter]:
    """Run `source` once; calls of Python functions, of C functions, and the counter that has the names."""
    counter = CallCounter()
    with counter.counting():
        result = await runtime.execute_code(source)
    assert result.ok, result.error
    await anyio.sleep(PAUSE_S)
    return counter.python.total(), counter.c.total(), counter


def script(calls: int) -> str:
    """A script that makes this many tool calls, one after the other."""
    return f"for number in range({calls}): call_tool('add', {{'a': number, 'b': 1}})\nset_result(1)"


async def measure() -> dict[str, tuple[float, float]]:
    """Median calls of Python and of C functions: of a run without tool calls, and of each further tool call."""
    registry = ToolRegistry()

    @registry.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    sources = (EMPTY, script(1), script(1 + CALLS))
    async with Runtime(registry, pool=PoolConfig(warm=2)) as runtime:
        for _ in range(3):
            await count(runtime, script(2))
        rounds = [[(await count(runtime, source))[:2] for source in sources] for _ in range(ROUNDS)]
    empty, one, many = ([sample[which] for sample in rounds] for which in range(3))

    def median(samples: list[tuple[int, int]], which: int) -> float:
        return statistics.median(sample[which] for sample in samples)

    return {
        "run without calls": (median(empty, 0), median(empty, 1)),
        "one more tool call": (
            (median(many, 0) - median(one, 0)) / CALLS,
            (median(many, 1) - median(one, 1)) / CALLS,
        ),
    }


async def profile(calls: int) -> None:
    """Print what is called in one run with this many tool calls, most often first."""
    registry = ToolRegistry()

    @registry.tool
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with Runtime(registry, pool=PoolConfig(warm=2)) as runtime:
        for _ in range(3):
            await count(runtime, script(2))
        python, c, counter = await count(runtime, script(calls))
    print(f"{python} Python, {c} C")
    for names in (counter.python, counter.c):
        for name, number in names.most_common():
            print(f"{number:5} {name}")
        print()


def main() -> None:
    """Print the counts, or with `--profile N` the functions of a run with N tool calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=int, metavar="N", help="list the functions of one run with N tool calls")
    options = parser.parse_args()
    if options.profile is not None:
        anyio.run(profile, options.profile)
        return
    print(f"{'':20} {'Python':>8} {'C':>8}")
    for name, (python, c) in anyio.run(measure).items():
        print(f"{name:20} {python:8.0f} {c:8.0f}")


if __name__ == "__main__":
    main()
