"""The short version of soak.py."""

from __future__ import annotations

import anyio
import pytest

from .soak import grown, soak

pytestmark = pytest.mark.isolation


def test_hundreds_of_runs_leave_nothing_behind() -> None:
    footprints = anyio.run(soak, 200)

    assert grown(footprints, memory_mib=6) == [], footprints
