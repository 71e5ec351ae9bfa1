"""Runs an attack in a host of its own, beside a heartbeat and an innocent run, and returns what was seen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hostile.attacks import Attack

PROPERTY = "attack on the host"
"""Name under which a test hands its row to the summary."""

COLUMNS = "| attack | loop silent | worked meanwhile | neighbour | before the attack | past wall_s | past cpu_s | sent | memory | ended |"

HOST = Path(__file__).with_name("measured_host.py")
PATIENCE_S = 60.0
MANY_DENTRIES = 100_000


@dataclass(frozen=True)
class Report:
    """What one guest, or several of the same kind, did to a host."""

    name: str
    silence_s: float
    """Longest time in which the host's event loop did not run another task."""
    worked_s: float
    """Most processor time that the loop used for one thing: its silence on a machine that does nothing else."""
    delay_s: float
    """Longest time that an innocent run took."""
    calm_silence_s: float
    """The same before the attack began: what the machine does to the measurement."""
    calm_delay_s: float
    failures: list[str]
    """How innocent runs failed."""
    outcomes: list[str]
    errors: list[str]
    wall_over_s: float
    """Longest time that a guest ran past `wall_s`. Negative: it ended before."""
    cpu_over_s: float
    sent_bytes: int
    growth_bytes: int
    """Most that the host held beyond what it held before."""
    dentries: int
    bodies: int
    """Bodies of a synchronous tool that ran at once."""

    def row(self, attack: str) -> str:
        """One line of a table."""
        cells = (
            f"{attack}: {self.name}" if self.name else attack,
            f"{1000 * self.silence_s:.0f} ms",
            f"{1000 * self.worked_s:.0f} ms",
            f"{1000 * self.delay_s:.0f} ms",
            f"{1000 * self.calm_silence_s:.0f}, {1000 * self.calm_delay_s:.0f} ms",
            *("-" if over < -0.005 else f"{over:.2f} s" for over in (self.wall_over_s, self.cpu_over_s)),
            f"{self.sent_bytes / 1e6:.1f} MB",
            f"{max(0, self.growth_bytes) / 1e6:.0f} MB",
            ", ".join(self.outcomes) + self._remarks(),
        )
        return f"| {' | '.join(cells)} |"

    def _remarks(self) -> str:
        failed = f"; {len(self.failures)} innocent runs failed: {self.failures[0]}" if self.failures else ""
        bodies = f"; {self.bodies} bodies at once" if self.bodies else ""
        dentries = f"; {self.dentries} negative dentries" if self.dentries > MANY_DENTRIES else ""
        return failed + bodies + dentries


class HostLost(AssertionError):
    """The host hung or died."""


def measure(attack: Attack, backend: str = "process", environment: Mapping[str, str] | None = None) -> list[Report]:
    """Measure an attack; one report for each of its sources.

    Raises:
        HostLost: the host did not get to the end.
    """
    patience_s = PATIENCE_S + 10 * len(attack.sources)
    request = json.dumps(asdict(attack) | {"backend": backend})
    try:
        done = subprocess.run(
            [sys.executable, str(HOST)],
            input=request,
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as exc:
        raise HostLost(f"the host did not answer within {patience_s:g} s: {exc.stdout!r}") from exc
    reports = [Report(**json.loads(line)) for line in done.stdout.splitlines()]
    if done.returncode or len(reports) < len(attack.sources):
        raise HostLost(
            f"the host ended with {done.returncode} after {len(reports)} reports: {done.stderr.strip()[-300:]}"
        )
    return reports
