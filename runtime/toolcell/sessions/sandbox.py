"""`SessionSandbox`: the sandbox of a session as the run of one of its scripts sees it.

What a sandbox has used counts from its start. A run counts from its own start, so the difference is what it sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolcell.config import Limits
from toolcell.run.interruption import INTERRUPTED_S
from toolcell.sandbox.backend import Exit, Sample, Sandbox


def since(before: Sample, now: Sample) -> Sample:
    """Return what was used between two measurements. Peaks of memory are those of the whole session."""
    is_new_peak = now.peak_processes > before.peak_processes
    return Sample(
        max(0.0, now.cpu_s - before.cpu_s),
        now.peak_memory_bytes,
        now.processes,
        now.peak_processes if is_new_peak else now.processes,
        max(0, now.memory_kills - before.memory_kills),
        max(0, now.refused_processes - before.refused_processes),
    )


class SessionSandbox:
    """Passes everything on to a sandbox, and counts from `begin_script`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._measure_often = getattr(sandbox, "measure_often", None)
        self.is_alive, self.read_output = sandbox.is_alive, sandbox.read_output
        self._before = Sample()
        self._at_start_s = sandbox.sample().cpu_s
        self._of_runs_s = 0.0
        self._latest_s = self._at_start_s
        self.answer_s = 2 * getattr(sandbox, "interrupted_s", INTERRUPTED_S)
        """Time past the deadline after which the sandbox is killed, if the event loop has not done so."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    def begin_script(self) -> None:
        """Count from here."""
        if self._measure_often is not None:
            self._measure_often(True)
        self._before = self._sandbox.sample()

    @property
    def used_before_s(self) -> float:
        """CPU seconds until the latest script began, measured when it did."""
        return max(self._of_runs_s, self._before.cpu_s - self._at_start_s)

    @property
    def used_cpu_s(self) -> float:
        """CPU seconds so far: of scripts, and of what goes on between them."""
        return max(self._of_runs_s, self._sandbox.sample().cpu_s - self._at_start_s)

    @property
    def latest_cpu_s(self) -> float:
        """The same without a measurement: as of the end of the latest script."""
        return max(self._of_runs_s, self._latest_s - self._at_start_s)

    def end_script(self, cpu_s: float) -> None:
        """Take note of what a run has used: of a sandbox that has ended, more may be known than can be measured now."""
        self._of_runs_s += cpu_s

    async def prepare(self, limits: Limits) -> None:
        """Do nothing: a session's sandbox was prepared at its start."""

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure what was used since the script began."""
        now = self._sandbox.sample(brief=brief, last=last)
        self._latest_s = now.cpu_s
        return since(self._before, now)

    def cpu_now(self) -> float | None:
        """Return the CPU seconds used since the script began."""
        used = self._sandbox.cpu_now()
        return None if used is None else max(0.0, used - self._before.cpu_s)

    async def pause(self) -> bool:
        """Stop every process inside; False when this backend cannot, or something goes on."""
        pause = getattr(self._sandbox, "pause", None)
        return bool(pause is not None and await pause())

    async def unpause(self) -> None:
        """Let the processes inside run again. Only called after `pause`."""
        await self._sandbox.unpause()  # type: ignore[attr-defined]  # what can pause can do this

    async def ended(self) -> Exit:
        """Wait until its main process has ended; return how."""
        end = await self._sandbox.ended()
        return replace(end, cpu_s=max(0.0, end.cpu_s - self._before.cpu_s))
