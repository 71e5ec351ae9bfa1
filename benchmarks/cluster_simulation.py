"""A cluster simulated event by event: where one caller is full, and how far nodes help.

A closed system: each sandbox begins its next run when its last has ended. A caller is one process and does one thing at
a time; a node has processors; a call waits for its tool and needs neither meanwhile. Queues are first come, first
served. The costs of a run and of a call are measured by `python -m benchmarks.ray_growth`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Generator
from dataclasses import dataclass

ROUNDS = 4
"""Runs of each sandbox."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds."""

    caller_run_s: float
    """Seconds of the caller, for a run without its calls."""
    caller_call_s: float
    """Seconds of the caller, for a call."""
    node_run_s: float
    """Seconds of the node, for a sandbox from start to end, with its script."""


@dataclass(frozen=True, slots=True)
class Program:
    """What each run does: it makes its calls one after the other, and each takes `tool_s` to be answered."""

    calls: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines and who uses them."""

    nodes: int
    places: int
    """Sandboxes of a node."""
    processors: int = 2
    """Number of processors of a node."""
    callers: int = 1
    is_one_machine: bool = False
    """Callers and nodes share the processors of one node, as in a test on one machine."""


class Processors:
    """Machines that serve one after the other what comes, each on the processor that is free first."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count

    def serve(self, now: float, seconds: float) -> float:
        """Return when this work, which came now, is done."""
        begins = max(now, self._free[0])
        heapq.heapreplace(self._free, begins + seconds)
        return begins + seconds


class Caller:
    """One process: it does one thing at a time, on some processor."""

    def __init__(self, processors: Processors) -> None:
        self._processors, self._free = processors, 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Return when this work, which came now, is done."""
        self._free = self._processors.serve(max(now, self._free), seconds)
        return self._free


def runs_per_second(cluster: Cluster, program: Program, costs: Costs, rounds: int = ROUNDS) -> float:
    """Return the runs in a second, from the first to the last, when each sandbox has `rounds` of them."""
    shared = Processors(cluster.processors) if cluster.is_one_machine else None
    callers = [Caller(shared or Processors(1)) for _ in range(cluster.callers)]
    nodes = [shared or Processors(cluster.processors) for _ in range(cluster.nodes)]
    places = cluster.nodes * cluster.places
    order = itertools.count()
    events: list[tuple[float, int, Generator[float, float, None]]] = []
    for each in range(places):
        place = _place(callers[each % len(callers)], nodes[each % len(nodes)], program, costs, rounds)
        next(place)
        events.append((0.0, next(order), place))
    now = 0.0
    while events:
        now, _, place = events[0]
        try:
            heapq.heapreplace(events, (place.send(now), next(order), place))
        except StopIteration:
            heapq.heappop(events)
    return places * rounds / now


def _place(
    caller: Caller, node: Processors, program: Program, costs: Costs, rounds: int
) -> Generator[float, float, None]:
    """Be one sandbox after the other. Yields when it goes on, and gets the time when it does."""
    now = yield 0.0
    for _ in range(rounds):
        now = yield caller.serve(now, costs.caller_run_s)
        now = yield node.serve(now, costs.node_run_s)
        for _ in range(program.calls):
            now = yield caller.serve(now, costs.caller_call_s)
            now = yield now + program.tool_s


def saturation(program: Program, costs: Costs) -> float:
    """Return the runs in a second at which one caller is full, whatever there is behind it."""
    return 1 / (costs.caller_run_s + program.calls * costs.caller_call_s)
