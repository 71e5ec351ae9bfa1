"""The backend of `Policy(profile="auto")`: the strongest profile that runs on this machine, found by trying."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolcell.config import AUTO_FLOOR, Limits, Policy, Profile
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Backend, Sandbox
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.sandbox.shortages import IsolationRefused
from toolcell.support.log import logger_of

if TYPE_CHECKING:
    from toolcell.sandbox.process.contained_backend import ContainedBackend

logger = logger_of(__name__)


class AutoBackend(Backend):
    """Opens the backend of one profile after the other, and is the first that this machine does not refuse.

    A shortage, such as one of memory, is no reason for a weaker profile: it is raised. The log warns of a weaker one.
    """

    name: ClassVar[str] = "process"
    isolates: ClassVar[bool] = True

    def __init__(
        self,
        *,
        policy: Policy,
        packages: Path | None = None,
        preload: Sequence[str] = (),
        python: str | None = None,
        frame_bytes: int | None = None,
    ) -> None:
        """`frame_bytes`: of the first runs; None: the default of `Limits`."""
        self._frame_bytes = frame_bytes
        self._given: dict[str, Any] = {"packages": packages, "preload": preload, "python": python}
        self.policy: Policy = policy
        self.preload, self.python = preload, python
        self._full = ProcessBackend(policy=self._policy_of("full"), **self._given)
        self._chosen: ProcessBackend | ContainedBackend = self._full

    def _policy_of(self, profile: Profile) -> Policy:
        wanted = self.policy.require | AUTO_FLOOR[profile]
        return self.policy.model_copy(update={"profile": profile, "require": wanted})

    def spawn(self) -> None:
        """Start the zygote of the profile `full` and do not wait for it.

        Raises:
            OSError: the machine is short of something; nothing was started.
            SandboxUnavailable: there is no interpreter for guests.
        """
        self._full.spawn()

    def kill_spawned(self) -> None:
        """Kill the zygote of `spawn`, instead of `open`."""
        self._full.kill_spawned()

    async def open(self) -> None:
        """Get ready to start sandboxes.

        Raises:
            IsolationRefused: no profile runs here; says why for each.
        """
        self._full.start_s = self.start_s
        try:
            await self._full.open()
        except IsolationRefused as refused:
            if self.policy.shell:  # see environment.NO_SHELL
                raise
            from toolcell.sandbox.process.contained_backend import ContainedBackend  # where it is needed

            self._chosen = ContainedBackend(
                policy=self._policy_of("container"), **self._given, frame_bytes=self._frame_bytes
            )
            self._chosen.start_s = self.start_s
            try:
                await self._chosen.open()
            except SandboxUnavailable as exc:
                raise IsolationRefused(f"no profile runs here. full: {refused}. container: {exc}") from exc
            logger.warning("scripts run in the profile container, not full: %s", refused)
        else:
            self._chosen = self._full
            for layer, why in self._full.absent.items():
                logger.warning("scripts run without the layer %s: %s", layer, why)

    async def start(self, limits: Limits) -> Sandbox:
        """Start one sandbox.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        return await self._chosen.start(limits)

    @property
    def fixed(self) -> Collection[str]:
        return self._chosen.fixed

    @property
    def unsupported(self) -> Mapping[str, str]:
        return self._chosen.unsupported

    @property
    def descriptors_per_sandbox(self) -> int:
        return self._chosen.descriptors_per_sandbox

    async def close(self) -> None:
        await self._chosen.close()
