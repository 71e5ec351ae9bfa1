"""Run a recorded script again for a tenant, within what the tenant may use. No tool is called; it is recorded as a run.

A record may have been written by whoever can write to the log: it never gets more than the tenant's scripts do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

import anyio

from toolcell.audit import Trust
from toolcell.config import Limits, PoolConfig
from toolcell.control import Replay, replay
from toolcell.errors import UsageError
from toolcell.runtime import Runtime

if TYPE_CHECKING:
    from toolcell.audit import AuditLog, RecordedRun
    from toolcell.calls.call import RunContext
    from toolcell.service.config import TenantConfig

AT_ONCE: Final = 2
"""Replays of one tenant: each has a runtime of its own."""


class Replays:
    def __init__(
        self, runtime: Runtime, config: TenantConfig, log: AuditLog, on_open: Callable[[Runtime], object]
    ) -> None:
        """`log`: where they are recorded. `on_open`: is told of their runtimes, which count for the tenant."""
        self._runtime, self._config, self._log, self._on_open = runtime, config, log, on_open
        self._places = anyio.CapacityLimiter(AT_ONCE)

    async def make(
        self, run: RecordedRun, trust: str, context: RunContext, *, source: str | None = None, until: int | None = None
    ) -> Replay:
        """Run it again, for the user of `context`; `source` and `until` as of `replay`.

        Raises:
            UsageError: the run cannot be run again here.
            QuotaExceeded: the user has used up the quota.
            SandboxUnavailable: no sandbox could be started.
        """
        config = self._config
        run = bounded(run, trust, config.limits, config.packages)
        recorded = run.runtime_options()
        runtime = Runtime(
            backend=config.backend,
            python=config.python,
            limits=recorded["limits"],
            packages=recorded["packages"],
            preload=recorded["preload"],
            pool=PoolConfig(warm=0),
            policy=config.policy.model_copy(update={"hash_seed": recorded["policy"].hash_seed}),
            record=self._log,
            quotas=self._runtime.quotas,
        )
        self._on_open(runtime)
        async with self._places, runtime:
            return await replay(runtime, run, source=source, until=until, context=context)


def bounded(run: RecordedRun, trust: str, most: Limits, packages: Collection[str] = ()) -> RecordedRun:
    """Return a run with limits of at most these. `packages`: those that scripts here have anyway.

    Raises:
        UsageError: the run needs packages, and its record is not verified.
    """
    if trust != Trust.VERIFIED and not set(run.runtime_options()["packages"]) <= set(packages):
        raise UsageError(f"the run needs packages, and its record is {trust}: only of verified runs are they installed")
    known = {name: value for name, value in run.limits.items() if name in Limits.model_fields}
    limits = {name: _lower(value, getattr(most, name)) for name, value in known.items()}
    return dataclasses.replace(run, settings={**run.settings, "limits": limits})


def _lower(recorded: object, most: object) -> object:
    if isinstance(recorded, int | float) and isinstance(most, int | float):
        return min(recorded, most)
    return most if recorded is None else recorded
