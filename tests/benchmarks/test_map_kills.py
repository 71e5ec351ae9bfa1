"""The program that kills the caller of a map, with few inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.map_kills import check, kill_and_carry_on

pytestmark = [pytest.mark.isolation, pytest.mark.slow]


def test_a_caller_that_is_killed_twice_makes_every_effect_once_and_completes_the_map(tmp_path: Path) -> None:
    counted = kill_and_carry_on(tmp_path, 60)

    assert counted["from the record"] >= 15


def test_a_ledger_with_an_effect_too_many_or_too_few_is_noticed(tmp_path: Path) -> None:
    for entered, said in (("0\n1\n1\n", "entered twice"), ("0\n", "1 of 2 were not entered")):
        (tmp_path / "ledger").write_text(entered)
        with pytest.raises(AssertionError, match=said):
            check(tmp_path, 2)
