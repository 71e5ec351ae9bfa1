"""`SessionMeter`: what one script uses of the sandbox of its session.

What a sandbox has used counts from its start. A run counts from its own start, so the difference is what it sees.
"""

from __future__ import annotations

from dataclasses import replace

from toolcell.sandbox.backend import Exit, Meter, Sample, Sandbox


def since(before: Sample, now: Sample) -> Sample:
    """Return what was used between two measurements. Peaks of memory are those of the whole session."""
    is_new_peak = now.peak_processes > before.peak_processes
    return Sample(
        max(0.0, now.cpu_s - before.cpu_s),
        now.peak_memory_bytes,
        processes=now.processes,
        peak_processes=now.peak_processes if is_new_peak else now.processes,
        memory_kills=max(0, now.memory_kills - before.memory_kills),
        refused_processes=max(0, now.refused_processes - before.refused_processes),
    )


class SessionMeter(Meter):
    """Measures a sandbox from `begin_script` on."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._before = Sample()
        self._at_start_s = sandbox.sample().cpu_s
        self._of_runs_s = 0.0
        self._latest_s = self._at_start_s

    @property
    def answer_s(self) -> float:
        """Time past the deadline after which the sandbox is killed, if the event loop has not done so."""
        return max(self._sandbox.answer_s, 2 * self._sandbox.interrupted_s)

    def begin_script(self) -> None:
        """Count from here."""
        self._sandbox.measure_often(True)
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

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure what was used since the script began."""
        now = self._sandbox.sample(brief=brief, last=last)
        self._latest_s = now.cpu_s
        return since(self._before, now)

    def cpu_now(self) -> float | None:
        """Return the CPU seconds used since the script began."""
        used = self._sandbox.cpu_now()
        return None if used is None else max(0.0, used - self._before.cpu_s)

    async def ended(self) -> Exit:
        """Wait until its main process has ended; return how."""
        end = await self._sandbox.ended()
        return replace(end, cpu_s=max(0.0, end.cpu_s - self._before.cpu_s))
