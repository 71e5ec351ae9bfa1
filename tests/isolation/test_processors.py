"""The processors of sandboxes: their common share, `cpu_cores`, and what is said where neither can be had."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Literal

import pytest

from toolcell import Limits, Outcome, Policy, PoolConfig, Runtime, SandboxUnavailable, SyncRuntime
from toolcell.sandbox import interpreter
from toolcell.sandbox.docker.hardening import Blueprint, resources
from toolcell.sandbox.process import cgroup_manager
from toolcell.sandbox.process.cgroup import CgroupFiles
from toolcell.sandbox.process.cgroup_manager import CgroupManager, NoLocation, V1Location, V2Location, discover
from toolcell.testing import FakeBackend
from toolcell_bridge.isolation import rlimits

pytestmark = pytest.mark.quick

MINE = len(os.sched_getaffinity(0))
SPIN = "while True:\n    pass"


class CpuFiles(CgroupFiles):
    """A tree of plain files in which each new directory has the cpu controller's files."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def make(self, directory: Path | str) -> None:
        super().make(directory)
        for name in (*self._names, "memory.max", "memory.oom.group", "pids.max", "cgroup.subtree_control"):
            Path(directory, name).write_text("")
        for name in ("pids.max", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            Path(directory, name).write_text("")


@pytest.fixture
def manager() -> CgroupManager:
    found = discover()
    if isinstance(found, NoLocation):
        pytest.skip(f"no cgroup here: {found.reason}; {found.fix}")
    if found.processors is None:
        found.close()
        pytest.skip("no cpu controller here")
    return found


@pytest.mark.isolation
@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
def test_libraries_see_no_more_processors_than_their_threads_may_use(
    profile: Literal["full", "container"], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\n[len(os.sched_getaffinity(0)), os.cpu_count()]"
    for most in range(1, MINE + 1):
        monkeypatch.setattr(interpreter, "processors_within", lambda processes, most=most: most)
        with SyncRuntime(policy=Policy(profile=profile), pool=PoolConfig(warm=0)) as runtime:
            result = runtime.execute_code(source)
        assert result.value == [most, most], result.error


def test_threads_of_threads_stay_below_the_limit_of_processes() -> None:
    for processes in (64, 256, 4096):
        most = interpreter.processors_within(processes)
        pool = most + 3  # joblib starts three threads beside its workers
        assert 1 + pool + most * pool + 10 * most <= processes
    assert interpreter.processors_within(1) == interpreter.FEWEST_PROCESSORS


def test_a_sandbox_gets_processors_of_those_that_the_host_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3, 8, 9, 11})
    seen = {rlimits.choose_processors(3) for _ in range(200)}
    assert all(len({*each}) == 3 and {*each} <= {1, 2, 3, 8, 9, 11} for each in seen)
    assert len(seen) == 6
    assert rlimits.choose_processors(6) == rlimits.choose_processors(None) == ()


def test_all_sandboxes_of_a_runtime_leave_the_host_a_share(manager: CgroupManager) -> None:
    group = manager.create("one", 64 << 20, 8)
    assert group.processors is not None
    home = Path(group.processors).parent
    try:
        quota, period = (
            (home / "cpu.max").read_text().split()
            if (home / "cpu.max").exists()
            else [(home / f"cpu.cfs_{each}_us").read_text() for each in ("quota", "period")]
        )
        assert manager.processors is not None
        assert int(quota) / int(period) == pytest.approx(manager.processors, rel=0.01)
        assert manager.processors <= cgroup_manager.SHARE * MINE
    finally:
        assert manager.close()


@pytest.mark.parametrize(("quotas", "expected"), [((), MINE), (("50000 100000", "max 100000"), min(MINE, 0.5))])
def test_what_the_host_itself_may_use_bounds_the_share(
    tmp_path: Path, quotas: tuple[str, ...], expected: float
) -> None:
    directory = tmp_path
    for quota in quotas:
        directory /= "below"
        directory.mkdir()
        (directory / "cpu.max").write_text(f"{quota}\n")

    assert cgroup_manager.available_processors(directory, CgroupFiles()) == expected


def test_a_quota_is_written_as_each_version_has_it(tmp_path: Path) -> None:
    one = CpuFiles("cpu.max", "cpu.weight")
    two = CpuFiles("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares")
    for name, files in (("v2", one), ("v1", two)):
        files.make(tmp_path / name)
        assert cgroup_manager.share_processors(tmp_path, tmp_path / name, files) == cgroup_manager.SHARE * MINE
    share_us = int(cgroup_manager.SHARE * MINE * 20_000)

    assert (tmp_path / "v2" / "cpu.max").read_text() == f"{share_us} 20000"
    assert (tmp_path / "v1" / "cpu.cfs_quota_us").read_text() == str(share_us)
    weight = math.ceil(cgroup_manager.SHARE * MINE)  # as much as a process on each processor
    assert (tmp_path / "v2" / "cpu.weight").read_text() == str(min(10_000, 100 * weight))
    assert (tmp_path / "v1" / "cpu.shares").read_text() == str(1024 * weight)


def test_controllers_that_are_mounted_together_are_one_directory(tmp_path: Path) -> None:
    files = CpuFiles("cpu.cfs_quota_us", "cpu.cfs_period_us")
    location = V1Location(tuple((name, tmp_path) for name in ("memory", "pids", "cpuacct", "cpu")))
    made = CgroupManager(location, files)

    group = made.create("one", 64 << 20, 8, cpu_cores=0.5)

    assert len(group.entries) == 1
    assert group.processors is not None
    assert Path(group.processors, "cpu.cfs_quota_us").read_text() == "50000"


def test_v2_hands_the_cpu_controller_on(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    made = CgroupManager(V2Location(tmp_path), CpuFiles("cpu.max"))
    assert made.description == f"v2 memory+pids+cpu, {cgroup_manager.SHARE * MINE:.3g} processors for all"


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_script_is_held_to_its_processors() -> None:
    """As limits of the runtime and of one run; where no cpu controller is to be had, the run is refused."""
    slow, wall_s = 0.2, 2.0
    found = discover()
    has_controller = isinstance(found, CgroupManager) and found.processors is not None
    if isinstance(found, CgroupManager):
        found.close()
    async with Runtime(limits=Limits(wall_s=wall_s), pool=PoolConfig(warm=1)) as runtime:
        for _ in range(2):
            if not has_controller:
                with pytest.raises(SandboxUnavailable, match=r"cpu_cores=0\.2 cannot be held: "):
                    await runtime.execute_code(SPIN, limits=Limits(cpu_cores=slow))
                return
            began = time.perf_counter()
            result = await runtime.execute_code(SPIN, limits=Limits(wall_s=wall_s, cpu_cores=slow))
            elapsed_s = time.perf_counter() - began
            assert result.outcome is Outcome.TIMEOUT
            assert result.usage.cpu_s <= slow * elapsed_s + 0.2, "the start and one period more"


@pytest.mark.anyio
async def test_a_backend_that_cannot_hold_cpu_cores_refuses_it() -> None:
    backend = FakeBackend()
    with pytest.raises(SandboxUnavailable, match="cpu_cores=2 cannot be held: the backend 'fake' does not bound"):
        async with Runtime(backend=backend, limits=Limits(cpu_cores=2), allow_unisolated=True):
            pass
    async with Runtime(backend=backend, allow_unisolated=True) as runtime:
        with pytest.raises(SandboxUnavailable, match="cannot be held"):
            await runtime.execute_code("1", limits=Limits(cpu_cores=2))


def test_a_container_has_the_lower_of_cpus_and_cpu_cores() -> None:
    blueprint = Blueprint("image", cpus=1.0)
    assert [resources(blueprint, Limits(cpu_cores=cores))["NanoCpus"] for cores in (None, 0.25, 4)] == [
        1_000_000_000,
        250_000_000,
        1_000_000_000,
    ]
