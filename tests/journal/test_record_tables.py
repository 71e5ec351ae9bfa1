"""One table says what each record of a file does: whatever else stands in the file is damage, and nothing of it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolcell.control.kept_drafts import DRAFT_RECORDS
from toolcell.control.map_file import MAP_RECORDS
from toolcell.journal.file import Damaged, JournalFile, Table, apply_record
from toolcell.journal.records import RUN_RECORDS
from toolcell.sessions.journal import SESSION_RECORDS

TABLES = {"run": RUN_RECORDS, "session": SESSION_RECORDS, "draft": DRAFT_RECORDS, "map": MAP_RECORDS}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_record_of_an_unknown_kind_or_with_other_fields_is_refused(table: Table) -> None:
    strange: list[list[Any]] = [["strange"], [7], [["run"]], *([name, *[None] * 9] for name in table)]
    for record in strange:
        with pytest.raises(ValueError, match="a record"):
            apply_record(table, None, record)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_file_with_a_strange_record_is_damaged(tmp_path: Path, table: Table) -> None:
    file = JournalFile(tmp_path / "x.journal")
    file.write("strange", 1)
    with pytest.raises(Damaged, match="a record of an unknown kind: 'strange'"):
        file.load(table, None)
    file.close()
