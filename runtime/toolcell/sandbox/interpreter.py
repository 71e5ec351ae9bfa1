"""Settings that every backend gives to a guest's interpreter."""

from __future__ import annotations

from toolcell.config import GIB

ADDRESS_SLACK_BYTES = 2 * GIB
"""RLIMIT_AS beyond `memory_bytes`: threads and the allocator reserve far more addresses than they ever use. The
cgroup, or the monitor, holds memory to its limit; this one stops a single absurd allocation at once."""

ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
"""Environment while it preloads: libraries start as many threads as they think there are cores."""


def hashing(seed: int | None) -> dict[str, str]:
    """Return the environment that makes `hash()` repeatable, or an empty one."""
    return {} if seed is None else {"PYTHONHASHSEED": str(seed)}
