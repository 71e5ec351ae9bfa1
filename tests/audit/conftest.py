"""Every test writes its own log, signs with its own key, and leaves nothing in the home of whoever runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit.ledger import Ledger


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("TOOLCELL_AUDIT_KEY", "TOOLCELL_AUDIT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A place for a log, a key to it, and ways to fill and to read it."""
    return Ledger(tmp_path / "log")
