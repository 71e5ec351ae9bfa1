"""What the interpreter of a guest is given whoever starts it. Values only: how they get there is each backend's."""

from __future__ import annotations

from toolcell.config import GIB

ADDRESS_SLACK_BYTES = 2 * GIB
"""RLIMIT_AS beyond `memory_bytes`: threads and the allocator reserve far more addresses than they ever use. The
cgroup, or the watch, is what holds memory to its limit; this stops a single absurd allocation at once."""

ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
"""Environment while it preloads: libraries start as many threads as they think there are cores."""


def hashing(seed: int | None) -> dict[str, str]:
    """The environment that makes `hash()` repeatable, or none."""
    return {} if seed is None else {"PYTHONHASHSEED": str(seed)}
