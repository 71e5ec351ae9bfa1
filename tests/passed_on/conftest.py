"""What the tests of this folder share: an office, and an order for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from passed_on import processes
from passed_on.office import Office, Order


@pytest.fixture
def office() -> Office:
    return Office()


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return Order(folder=tmp_path / "journals")


@pytest.fixture(autouse=True)
def processes_of_others() -> None:
    processes.begin()
