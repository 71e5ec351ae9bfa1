"""No guest keeps the host's event loop, delays another run or overruns its limits by much: every attack of the table.

The bounds are promises with room for a busy machine: what the same host saw before the attack counts as the machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hostile.attacks import ATTACKS, Attack
from hostile.harness import PROPERTY, Report, measure

pytestmark = [pytest.mark.isolation]

BUSY = 4
"""Times the processor time that is promised: caches are shared with whatever else the machine does."""
SILENCE_S = 2.0
DELAY_S = 3.0
OVERRUN_S = 2.0
"""Promised is half a second, or a tenth of the limit. The clock of a busy machine says more than the host does."""
OVERRUN = 0.1
TIMES_SENT = 10
GROWTH_BYTES = 128 << 20

Note = Callable[[str, Any], None]


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if "process" in attack.backends])
def test_the_host_stays_live(name: str, record_property: Note) -> None:
    attack_and_check(name, "process", record_property)


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "name",
    [name for name, attack in ATTACKS.items() if "docker" in attack.backends],
)
def test_the_host_stays_live_beside_containers(name: str, record_property: Note) -> None:
    attack_and_check(name, "docker", record_property)


def attack_and_check(name: str, backend: str, note: Note) -> None:
    attack = ATTACKS[name]
    reports = measure(attack, backend)
    note(PROPERTY, max(reports, key=lambda report: report.worked_s).row(f"{name} ({backend})"))
    for report in reports:
        check(attack, report)


def check(attack: Attack, report: Report) -> None:
    assert report.worked_s <= BUSY * attack.worked_s
    assert report.silence_s <= SILENCE_S * attack.starves + BUSY * attack.worked_s + 5 * report.calm_silence_s
    assert (
        report.delay_s <= DELAY_S * attack.patience * attack.starves + BUSY * attack.worked_s + 5 * report.calm_delay_s
    )
    assert (
        report.wall_over_s <= OVERRUN_S * attack.starves + OVERRUN * attack.limits["wall_s"] + 5 * report.calm_silence_s
    )
    assert report.cpu_over_s <= OVERRUN_S * attack.starves + OVERRUN * attack.limits.get("cpu_s", 30.0)
    assert report.growth_bytes <= GROWTH_BYTES + TIMES_SENT * report.sent_bytes
    assert report.bodies <= attack.limits.get("concurrent_calls", 10)
    assert not report.failures
