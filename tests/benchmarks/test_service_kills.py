"""The service is killed under load: no script runs twice, and no call is made that nobody is told of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.isolation, pytest.mark.slow]


def test_requests_with_keys_are_answered_once_although_the_service_is_killed() -> None:
    command = [sys.executable, "-m", "benchmarks.service_kills", "--kills", "1", "--seed", "5"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)

    assert found.returncode == 0, found.stdout + found.stderr
    assert "no script ran twice, no call was made without being told" in found.stdout
    assert "0 of them twice" in found.stdout
