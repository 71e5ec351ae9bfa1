"""One competitor in a process of its own: each line of stdin asks for a turn, each line of stdout answers it.

What a competitor uses is what this process and those below it use. A competitor of another tree or another Python is
this program with another PYTHONPATH or interpreter.
"""

from __future__ import annotations

import json
import sys

import anyio

import toolcell
from benchmarks import memory
from benchmarks.competitors import COMPETITORS
from benchmarks.competitors.competitor import Competitor, NotAvailable
from benchmarks.measurements import MEASUREMENTS, Workload

MAX_TURN_S = 90.0
"""A turn that takes longer is a failure."""

PAUSE_S = 0.15
"""Before each turn. Every pool replaces the workers that were used."""

TURNS = {each.key: each.turn for each in MEASUREMENTS}


async def serve(name: str) -> None:
    """Open the competitor, and take a turn for each line."""
    try:
        async with COMPETITORS[name]() as competitor:
            python = "{}.{}".format(*sys.version_info)
            answer({"layers": dict(competitor.layers), "python": python, "toolcell": toolcell.__file__})
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                answer(await turn(competitor, *json.loads(line)))
    except Exception as exc:
        answer({"problem": describe_error(exc)})


async def turn(competitor: Competitor, key: str, workload: dict[str, int]) -> dict[str, object]:
    """Take one turn; return its samples or the problem."""
    try:
        if competitor.measures is not None and key not in competitor.measures:
            raise NotAvailable("another one shows this")
        await anyio.sleep(PAUSE_S)
        with anyio.fail_after(MAX_TURN_S):
            return {"samples": await TURNS[key](competitor, Workload(**workload))}
    except Exception as exc:
        return {"problem": describe_error(exc)}


def answer(message: dict[str, object]) -> None:
    """Write one line."""
    print(json.dumps(message), flush=True)


def describe_error(exc: BaseException) -> str:
    """Describe an exception in one line. Of a group, describe the first member."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    line = " ".join(str(exc).split())[:200]
    return line if isinstance(exc, NotAvailable) else f"{type(exc).__name__}: {line}"


if __name__ == "__main__":
    memory.raise_descriptor_limit()
    anyio.run(serve, sys.argv[1], backend_options={"use_uvloop": "--uvloop" in sys.argv})
