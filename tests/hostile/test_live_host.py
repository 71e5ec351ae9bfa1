"""No guest keeps the host's event loop, delays another run or overruns its limits by much: every attack of the table.

The bounds are promises with room for a busy machine: what the same host saw before the attack counts as the machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def together(backend: str) -> list[Any]:
    """Return the attacks of the table, those with the same settings as one: its guests run in one host, one after the other."""
    groups: dict[str, dict[str, str]] = {}
    settings: dict[str, Attack] = {}
    for name, attack in ATTACKS.items():
        if backend in attack.backends:
            key = repr(replace(attack, sources={}, backends=()))
            guests = {f"{name}: {guest}" if guest else name: source for guest, source in attack.sources.items()}
            groups.setdefault(key, {}).update(guests)
            settings[key] = attack
    return [
        pytest.param(replace(settings[key], sources=sources), id=next(iter(sources))) for key, sources in groups.items()
    ]


@pytest.mark.parametrize("attack", together("process"))
def test_the_host_stays_live(attack: Attack, record_property: Note) -> None:
    attack_and_check(attack, "process", record_property)


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("attack", together("docker"))
def test_the_host_stays_live_beside_containers(attack: Attack, record_property: Note) -> None:
    attack_and_check(attack, "docker", record_property)


def attack_and_check(attack: Attack, backend: str, note: Note) -> None:
    for report in measure(attack, backend):
        note(PROPERTY, report.row(backend))
        check(attack, report)


def check(attack: Attack, report: Report) -> None:
    assert report.worked_s <= BUSY * attack.worked_s, report
    assert report.silence_s <= SILENCE_S * attack.starves + BUSY * attack.worked_s + 5 * report.calm_silence_s
    assert (
        report.delay_s <= DELAY_S * attack.patience * attack.starves + BUSY * attack.worked_s + 5 * report.calm_delay_s
    )
    assert (
        report.wall_over_s
        <= OVERRUN_S * attack.starves * attack.patience + OVERRUN * attack.limits["wall_s"] + 5 * report.calm_silence_s
    )
    assert report.cpu_over_s <= OVERRUN_S * attack.starves + OVERRUN * attack.limits.get("cpu_s", 30.0)
    assert report.growth_bytes <= GROWTH_BYTES + TIMES_SENT * report.sent_bytes
    assert report.bodies <= attack.limits.get("concurrent_calls", 10)
    assert not report.failures, report
