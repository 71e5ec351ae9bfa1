"""`toolcell run` with files of tables: what it prints of a frame, and what it writes as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolcell.cli import build

pytest.importorskip("pandas")

pytestmark = pytest.mark.isolation

SALES = "region,amount\nnorth,1.5\nsouth,2\nnorth,3\n"
SCRIPT = "import pandas as pd\npd.read_csv('sales.csv').groupby('region').sum()"


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(words), list(words))
    return result.exit_code, result.stdout, result.stderr


def test_a_frame_of_a_file_is_printed_with_its_labels_and_is_text_in_json(tmp_path: Path) -> None:
    (tmp_path / "sales.csv").write_text(SALES)
    (tmp_path / "sums.py").write_text(SCRIPT)
    words = ("run", str(tmp_path / "sums.py"), "--file", str(tmp_path / "sales.csv"), "--packages", "numpy,pandas")

    status, out, err = invoke(*words)
    assert (status, err) == (0, "") or "result.html" in err
    assert out.startswith("DataFrame, 2 rows x 1 columns (region text, amount float64)")
    assert ["north", "4.5"] in [line.split() for line in out.splitlines()]
    status, out, _ = invoke(*words, "--json")
    value = json.loads(out)["value"]
    assert status == 0
    assert "DataFrame, 2 rows x 1 columns" in str(value)


def test_a_long_frame_is_printed_in_short(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import pandas as pd\npd.DataFrame({'v': range(100_000)})")

    status, out, _ = invoke("run", str(tmp_path / "long.py"), "--packages", "numpy,pandas")
    assert status == 0
    assert out.startswith("DataFrame, 100000 rows x 1 columns (v int64)")
    assert len(out) < 2_000
