"""The processors that sandboxes may use: a share for all of one runtime, so that their host always has some left.

A quota, because no weight holds: the host waits for seconds while processes that wake each other hand the processor
around, or the sandboxes get nothing while the machine is busy with something else (measured on Linux 6.18).

Source: Linux Documentation/scheduler/sched-bwc.rst, and cgroup-v2.rst, "CPU".
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from toolcell.sandbox.process.cgroup import CgroupFiles

SHARE = 0.9
"""Share of the processors that the host may use: what all sandboxes of one runtime get together."""

SHARE_PERIOD_US = 20_000
"""Sandboxes that use up their share stand still for a tenth of this at a time, and so may whoever waits for them."""

PROCESS_SHARES, PROCESS_WEIGHT, MAX_WEIGHT = 1024, 100, 10_000
"""What an ordinary process weighs, in `cpu.shares` of v1 and in `cpu.weight` of v2, and the most that v2 takes."""

PERIOD_US = 100_000
"""For `cpu_cores`, as Docker has it: short work at full speed, and no more than so much in a tenth of a second."""


def available(directory: Path, files: CgroupFiles) -> float:
    """Return how many processors this process may use: by its affinity, and by the quotas of its cgroups."""
    quotas = (_quota(each, files) for each in (directory, *directory.parents))
    return min([float(len(os.sched_getaffinity(0))), *(quota for quota in quotas if quota is not None)])


def _quota(directory: Path, files: CgroupFiles) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = files.read(directory / "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int(files.read(directory / "cpu.cfs_quota_us"))
        return None if quota_us < 0 else quota_us / int(files.read(directory / "cpu.cfs_period_us"))
    return None


def set_quota(directory: Path | str, cores: float | None, period_us: int, files: CgroupFiles) -> None:
    """Bound a cgroup to so many processors; None lifts the bound.

    Raises:
        OSError: ENOENT, there is no cpu controller; EINVAL, a cgroup above has less (v1).
    """
    quota_us = None if cores is None else int(cores * period_us)
    try:
        files.write(f"{directory}/cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}")
    except FileNotFoundError:
        files.write(f"{directory}/cpu.cfs_period_us", str(period_us))
        files.write(f"{directory}/cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))


def share(base: Path, directory: Path, files: CgroupFiles) -> float | None:
    """Give `directory`, below `base`, the share of all sandboxes; return it, or None where it cannot be had."""
    cores = SHARE * available(base, files)
    try:
        set_quota(directory, cores, SHARE_PERIOD_US, files)
    except OSError:
        return None
    _set_weight(directory, math.ceil(cores), files)
    return cores


def _set_weight(directory: Path, processors: int, files: CgroupFiles) -> None:
    """Let all sandboxes together weigh as much as one process on each processor. The default is one process in all:
    on a busy machine with two processors, runs then took half as long again (measured)."""
    in_v1, in_v2 = PROCESS_SHARES * processors, min(MAX_WEIGHT, PROCESS_WEIGHT * processors)
    for name, weight in (("cpu.shares", in_v1), ("cpu.weight", in_v2)):
        with suppress(OSError):
            files.write(f"{directory}/{name}", str(weight))
