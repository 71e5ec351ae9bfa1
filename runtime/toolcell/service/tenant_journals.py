"""What the journals of one tenant say of its runs. A thread looks, one request at a time: it may be very much."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import anyio

from toolcell.results import Suspension
from toolcell.runtime import Runtime
from toolcell.support import daemon_threads

if TYPE_CHECKING:
    from toolcell.control import Draft

Found = TypeVar("Found")


class TenantJournals:
    """Reads the journals of a tenant."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._turn = anyio.CapacityLimiter(1)

    async def suspended(self) -> list[Suspension]:
        """Return the runs that wait for a decision."""
        return await self._look(self._runtime.suspended_runs)

    async def interrupted(self) -> list[str]:
        """Return the ids of the runs whose host ended in their middle."""
        return await self._look(self._runtime.interrupted_runs)

    async def drafts(self) -> list[Draft]:
        """Return the drafts that can be committed."""
        return await self._look(self._runtime.waiting_drafts)

    async def session_of(self, run_id: str) -> str:
        """Return the name of the session whose script a run is; empty if it is of none."""
        return await self._look(lambda: self._runtime.session_of(run_id))

    async def script_of(self, run_id: str) -> str:
        """Return the script of a suspended run; empty if it cannot be read now."""
        return await self._look(lambda: self._runtime.journals.script_of(run_id))

    async def _look(self, look: Callable[[], Found]) -> Found:
        async with self._turn:
            return await daemon_threads.run_sync(look)
