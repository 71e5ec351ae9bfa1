"""Measure what a container has used: from its cgroup where that is visible here, else from the daemon's answers.

Either way `UsageReader.read` returns at once; of the daemon's answers it returns the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolcell.sandbox.backend import Sample
from toolcell.sandbox.process.cgroup import Cgroup, CgroupFiles, CgroupUsage, V1Cgroup, V2Cgroup

CGROUPS = Path("/sys/fs/cgroup")


def find_cgroup(pid: int, container: str) -> Cgroup | None:
    """Find the cgroup of a container whose first process is `pid`; None when it is not visible here.

    The container's id must be in the path: with a remote daemon, `pid` is another process of this machine.
    """
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as table:
            rows = [line.rstrip("\n").split(":", 2) for line in table]
    except OSError:
        return None
    named = {names: path for _, names, path in rows if container in path}
    if "" in named and (CGROUPS / "cgroup.controllers").exists():
        directory = Path(f"{CGROUPS}{_container_part(named[''], container)}")
        return V2Cgroup(container, str(directory), CgroupFiles()) if (directory / "pids.current").exists() else None
    found: dict[str, str] = {}
    for names, path in named.items():
        for controller in names.split(","):
            directory = Path(f"{CGROUPS}/{controller}{_container_part(path, container)}")
            if controller in ("memory", "pids", "cpuacct") and directory.is_dir():
                found[controller] = str(directory)
    return V1Cgroup(container, found, CgroupFiles()) if {"memory", "pids"} <= found.keys() else None


def _container_part(path: str, container: str) -> str:
    """Cut a path after the part that names the container: below it may be cgroups that the container made."""
    parts = path.split("/")
    named = next(number for number, part in enumerate(parts) if container in part)
    return "/".join(parts[: named + 1])


class UsageReader:
    """Measures one container. Usage before its guest said Hello does not count as the script's."""

    def __init__(self, cgroup: Cgroup | None, own_processes: int | None) -> None:
        """`own_processes`: number of processes that are not the script's; None where a count means nothing."""
        self._cgroup = cgroup
        self._own = own_processes
        self._cpu_before_s = 0.0
        self._refused_before = 0
        self._kills_before = 0
        self._sample = Sample()

    @property
    def is_local(self) -> bool:
        """The container can be measured without the daemon."""
        return self._cgroup is not None

    def pids(self) -> set[int]:
        """Return the processes inside, where they are visible here."""
        return self._cgroup.pids() if self._cgroup is not None else set()

    def kill(self) -> bool:
        """Kill everything inside, if this process may. It works at once, and also when the daemon is gone."""
        if self._cgroup is not None:
            with suppress(OSError):
                self._cgroup.kill()
                return True
        return False

    def held(self) -> int:
        """Return how many bytes everything inside holds now; 0 where that is not visible here."""
        if self._cgroup is not None:
            with suppress(OSError, ValueError):
                return self._cgroup.held()
        return 0

    def set_baseline(self) -> None:
        """Take what has been used so far as the cost of starting, which does not count as the script's."""
        if self._cgroup is None:
            return
        try:
            usage = self._cgroup.usage()
        except (OSError, ValueError):
            return
        self._cpu_before_s = usage.cpu_s or 0.0
        self._refused_before, self._kills_before = usage.processes_refused, usage.oom_kills

    def read(self, *, brief: bool = False) -> Sample:
        """Return what is known now."""
        if self._cgroup is None:
            return self._sample
        try:
            if brief:
                cpu_s, peak_bytes = self._cgroup.consumed()
                sample = self._with(cpu_s or 0.0, peak_bytes or 0, None)
                self._sample = replace(sample, refused_processes=self._refused(self._cgroup.count_refused()))
            else:
                self._record(self._cgroup.usage())
        except (OSError, ValueError):  # the cgroup is gone: keep what was read last
            pass
        return self._sample

    def _record(self, usage: CgroupUsage) -> None:
        sample = self._with(usage.cpu_s or 0.0, usage.peak_memory_bytes or 0, usage.current_processes)
        self._sample = Sample(
            sample.cpu_s,
            sample.peak_memory_bytes,
            processes=sample.processes,
            peak_processes=sample.peak_processes,
            memory_kills=max(0, usage.oom_kills - self._kills_before),
            refused_processes=self._refused(usage.processes_refused),
        )

    def _refused(self, in_all: int) -> int:
        return max(0, in_all - self._refused_before) if self._own is not None else 0

    def _with(self, cpu_s: float, peak_bytes: int, processes: int | None) -> Sample:
        before = self._sample
        count = before.processes
        if processes is not None and self._own is not None:
            count = max(1, processes - self._own)
        return Sample(
            max(before.cpu_s, cpu_s - self._cpu_before_s),
            max(before.peak_memory_bytes, peak_bytes),
            processes=count,
            peak_processes=max(before.peak_processes, count),
            memory_kills=before.memory_kills,
            refused_processes=before.refused_processes,
        )

    def record_stats(self, stats: Mapping[str, Any], *, is_first: bool) -> None:
        """Record the daemon's answer to GET /containers/{id}/stats."""
        cpu_s = _number(stats, "cpu_stats", "cpu_usage", "total_usage") / 1e9
        if is_first:
            self._cpu_before_s = cpu_s
        memory = stats.get("memory_stats") or {}
        peak = int(memory.get("max_usage") or memory.get("usage") or 0)
        current = int(_number(stats, "pids_stats", "current"))
        self._sample = self._with(cpu_s, peak, current or None)


def _number(stats: Mapping[str, Any], *keys: str) -> float:
    found: Any = stats
    for key in keys:
        found = (found or {}).get(key)
    return float(found or 0)
