"""Attacks on the names of logs, by somebody who has the log's directory and not the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audit.ledger import Ledger
from toolcell.audit.format import LOG_FILE
from toolcell.audit.signatures import default_heads_dir
from toolcell.errors import AuditError


@pytest.mark.parametrize(
    "name", ["../../../elsewhere", "/elsewhere", "", "0" * 31, "0" * 33, "A" * 32, "\ud800" * 32, 7, None]
)
def test_a_log_cannot_choose_where_its_heads_are_written(ledger: Ledger, tmp_path: Path, name: object) -> None:
    ledger.fill(1)
    if isinstance(name, str) and name.endswith("elsewhere"):
        name = f"{'../' * 20 if name.startswith('..') else '/'}{tmp_path / 'elsewhere'}"
    file = ledger.directory / LOG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "log": name}))
    with pytest.raises(AuditError, match="is damaged"):
        ledger.fill(1)
    with pytest.raises(AuditError, match="is damaged"):
        ledger.verify()

    assert not (tmp_path / "elsewhere").exists()
    assert len([*default_heads_dir().iterdir()]) == 1
