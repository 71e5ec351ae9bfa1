"""Settings that every backend gives to a guest's interpreter, and what its zygote imports ahead of scripts."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isqrt
from pathlib import Path
from typing import Final

from toolcell.config import GIB, Limits
from toolcell_bridge.isolation.rlimits import NO_PIPED_CORE, RlimitPlan

FILE_SLACK_BYTES = 1 << 20
"""How far RLIMIT_FSIZE is above `disk_bytes`, so that a write past it finds the disk full, as it would anywhere."""

ADDRESS_SLACK_BYTES = 64 * GIB
"""RLIMIT_AS beyond `memory_bytes` where a cgroup counts the memory that is used. Data libraries reserve far more than
they use: pyarrow a gigabyte, each thread a stack and a part of the heap. This limit refuses absurd requests at once."""

UNCOUNTED_FACTOR = 4
UNCOUNTED_SLACK_BYTES = 4 * GIB
"""RLIMIT_AS is `memory_bytes` times the factor and this much more where no cgroup counts: between two measurements of
the watch it is what bounds a process."""

ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
"""Environment while it preloads: libraries start as many threads as they think there are cores."""

FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""Environment of the interpreter: glibc keeps a heap of up to 64 MB for each of many threads, eight times the cores."""


OWN_FOLDERS: Final = 3
"""First folders of a module path: the standard library, its extensions and the guest. Packages come after them."""


def start(sys_path: Sequence[str]) -> str:
    """Return what the interpreter of a zygote executes first. It imports nothing from packages.

    It disables the collector, which a zygote that is ready enables for its children: imports leave no garbage, and a
    tenth of their time would go into looking for it. It has the handlers of forks collected before there are any.
    """
    return (
        f"import gc, sys; gc.disable(); sys.path[:] = {list(sys_path[:OWN_FOLDERS])!r}; "
        "from toolcell_bridge.entry.fork_handlers import HANDLERS; HANDLERS.collect()"
    )


def hashing(seed: int | None) -> dict[str, str]:
    """Return the environment that makes `hash()` repeatable, or an empty one."""
    return {} if seed is None else {"PYTHONHASHSEED": str(seed)}


FEWEST_PROCESSORS = 2
"""Fewer would keep sandboxes waiting for each other on a machine that has idle processors."""


def processors_within(processes: int) -> int:
    """Return how many processors a sandbox may use at most, so that its threads stay below `processes`.

    About half of the square root: joblib starts a thread for each processor, and the library in each of these as many
    again. For each processor polars, duckdb, OpenBLAS and others keep a dozen more in a session (measured).
    """
    return max(FEWEST_PROCESSORS, isqrt(processes) // 2 - 1)


def plan_rlimits(limits: Limits, processes: int, *, is_counted: bool, executes: bool = False) -> RlimitPlan:
    """Choose the per-process limits that enforce `limits` as far as rlimits can. `processes`: RLIMIT_NPROC.

    `is_counted`: a cgroup counts the sandbox's memory. `executes`: scripts may execute programs.
    """
    if is_counted:
        address_space = limits.memory_bytes + ADDRESS_SLACK_BYTES
    else:
        address_space = limits.memory_bytes * UNCOUNTED_FACTOR + UNCOUNTED_SLACK_BYTES
    return RlimitPlan(
        cpu_s=ceil(limits.cpu_s) + 1,
        address_space_bytes=address_space,
        processes=processes,
        open_files=limits.open_files,
        file_size_bytes=limits.disk_bytes + FILE_SLACK_BYTES,
        core_bytes=NO_PIPED_CORE if executes else 0,
        processors=processors_within(limits.processes),
    )


AHEAD: dict[str, tuple[str, ...]] = {
    "numpy": ("numpy", "numpy.random"),
    "pandas": ("pandas",),
    # The font manager looks through every font of the machine, once here instead of in each script.
    "matplotlib": ("matplotlib.pyplot", "matplotlib.font_manager"),
    "PIL": ("PIL.Image",),
    "requests": ("requests",),
    "yaml": ("yaml",),
    "bs4": ("bs4",),
    "lxml": ("lxml.etree",),
    "openpyxl": ("openpyxl",),
    "dateutil": ("dateutil.parser",),
}
"""What is often used, takes long to import, and starts no thread: a thread of the zygote would be in no sandbox."""


def imported_ahead(packages: Path | None) -> tuple[str, ...]:
    """Return the modules to import ahead from an environment; one that cannot be imported is left to the script."""
    if packages is None:
        return ()
    return tuple(each for top, modules in AHEAD.items() if (packages / top).is_dir() for each in modules)
