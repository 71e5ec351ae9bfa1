"""Every test writes its own record, signs with its own key, and leaves nothing in the user's home directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from audit.ledger import Ledger


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo what it patched itself
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        for name in ("TOOLCELL_AUDIT_KEY", "TOOLCELL_AUDIT"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A place for a log, a key to it, and ways to fill and to read it."""
    return Ledger(tmp_path / "log" / "runs.db")
