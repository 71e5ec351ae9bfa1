"""The simulation of a cluster gives what can be calculated by hand, and no more than its parts can do."""

from __future__ import annotations

import pytest
from benchmarks.cluster_simulation import Cluster, Costs, Program, runs_per_second, saturation

COSTS = Costs(caller_run_s=0.002, caller_call_s=0.001, node_run_s=0.01)
WAITING = Program(calls=2, tool_s=1.0)


def test_one_sandbox_makes_its_runs_one_after_the_other() -> None:
    cycle_s = 0.002 + 0.01 + 2 * (0.001 + 1.0)

    assert runs_per_second(Cluster(1, 1), WAITING, COSTS) == pytest.approx(1 / cycle_s)


def test_scripts_that_wait_grow_with_the_nodes_until_the_caller_is_full() -> None:
    rates = [runs_per_second(Cluster(nodes, 10), WAITING, COSTS) for nodes in (1, 2, 4, 200)]

    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)
    assert rates[2] == pytest.approx(4 * rates[0], rel=0.05)
    assert saturation(WAITING, COSTS) == pytest.approx(250)
    assert 200 < rates[3] <= 250


def test_more_callers_help_only_where_the_caller_was_full() -> None:
    full = [runs_per_second(Cluster(200, 10, callers=callers), WAITING, COSTS) for callers in (1, 2, 4)]
    idle = [runs_per_second(Cluster(4, 10, callers=callers), WAITING, COSTS) for callers in (1, 4)]

    assert full[0] < 250 < full[1] < 500 < full[2]
    assert idle[1] == pytest.approx(idle[0], rel=0.05)


def test_processors_bound_scripts_that_work() -> None:
    busy = Program(calls=0, tool_s=0.0)

    assert runs_per_second(Cluster(1, 50), busy, COSTS) == pytest.approx(2 / 0.01, rel=0.1)
    assert runs_per_second(Cluster(1, 50, processors=8), busy, COSTS) == pytest.approx(1 / 0.002, rel=0.1)
    # Four nodes and the caller on one machine with two processors: 12 ms of them for each run. The caller waits for one
    # of them and for itself, so neither is always busy.
    shared = runs_per_second(Cluster(4, 50, is_one_machine=True), busy, COSTS)
    assert 0.8 * 2 / 0.012 < shared <= 2 / 0.012
