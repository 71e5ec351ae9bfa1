"""`python -m benchmarks.type_check`: what it costs to check the types of a script of 40 lines before it runs.

Beside it: a bare `ty check` of the script, which nothing isolates, and the run without a check. All have their turn
in each round, and each round's script is another one. `new inputs`: the script has inputs that the one before had not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ty import find_ty_bin

from benchmarks import machine
from toolcell import Runtime, ToolRegistry
from toolcell.control.type_check import described, stubs_of

ROUNDS = 60
WARM_UP = 5
TARGET_MS = 60.0

HIT = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}

SCRIPT = r"""import json
import re
from collections import Counter

queries = ["alpha", "beta", "gamma NUMBER"]
found = {}
for query in queries:
    hits = tools.web.search(query=query, limit=5)
    found[query] = [hit["title"] for hit in hits]

counts = Counter()
for query, titles in found.items():
    for title in titles:
        for word in re.findall(r"\w+", title.lower()):
            counts[word] += 1

top = counts.most_common(5)
lines = []
for word, number in top:
    share = number / max(1, sum(counts.values()))
    lines.append(f"{word}: {number} ({share:.0%})")


def summary(rows):
    result = {}
    for row in rows:
        key, _, value = row.partition(": ")
        result[key] = value
    return result


report = summary(lines)
text = json.dumps(report, indent=2, sort_keys=True)
more = call_tool("web.search", {"query": text[:20], "limit": 3})
titles = sorted({hit["title"] for hit in more})
longest = max(titles, key=len, default="")
print(longest)
print(len(text))
total = sum(len(each) for each in titles)
set_result({"report": report, "titles": titles, "total": total})
"""
"""40 lines."""


def registry() -> ToolRegistry:
    """Return the tools of the script."""
    tools = ToolRegistry()

    @tools.tool(name="web.search", returns={"type": "array", "items": HIT})
    def search(query: str, limit: int = 10) -> Any:
        """Search the web for pages."""
        return [{"title": query}] * limit

    return tools


async def measure(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each way, round by round."""
    tools, numbers = registry(), itertools.count()
    times: dict[str, list[float]] = {}

    async def timed(name: str, turn: Callable[[str], Awaitable[object]]) -> None:
        source = SCRIPT.replace("NUMBER", str(next(numbers)))
        start = time.perf_counter()
        await turn(source)
        times.setdefault(name, []).append((time.perf_counter() - start) * 1000)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "__builtins__.pyi").write_text(stubs_of(described(tools.snapshot())))

        async def bare(source: str) -> None:
            (Path(folder) / "script.py").write_text(source)
            await asyncio.to_thread(
                subprocess.run, [find_ty_bin(), "check", "script.py"], cwd=folder, capture_output=True, check=False
            )

        async with Runtime(tools) as runtime:

            async def check(source: str, **inputs: int) -> None:
                assert await runtime.checks.type_checker.findings(source, tools.snapshot(), inputs) == ()

            async def run(source: str, **options: Any) -> None:
                result = await runtime.execute_code(source, **options)
                assert result.ok, result.error

            for _ in range(rounds):
                await timed("check", check)
                await timed("check, new inputs", lambda source: check(source, **{f"input_{next(numbers)}": 1}))
                await timed("run", run)
                await timed("run with check_types=True", lambda source: run(source, check_types=True))
                await timed("bare ty check", bare)
    return times


def main() -> int:
    """Print the medians; the exit code is 1 when the check misses its target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.type_check", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    rounds: int = parser.parse_args().rounds
    assert len(SCRIPT.splitlines()) == 40
    load = machine.load_average()
    times = asyncio.run(measure(rounds + WARM_UP))
    print(f"load average {load} before, {machine.load_average()} after; {rounds} rounds, in ms")
    for name, taken in times.items():
        kept = sorted(taken[WARM_UP:])
        worst = kept[min(len(kept) - 1, int(len(kept) * 0.95))]
        print(f"{name:28} p50 {statistics.median(kept):7.1f}   p95 {worst:7.1f}   first {taken[0]:7.1f}")
    return int(statistics.median(times["check"][WARM_UP:]) >= TARGET_MS)


if __name__ == "__main__":
    raise SystemExit(main())
