"""Packages that scripts install."""

from __future__ import annotations

from pathlib import Path

import pytest

from egress.package_index import two_packages


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Two packages; see `two_packages`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    return two_packages(folder)
