"""The clock of a repeatable run, and classes of C code that take `datetime.datetime` for the one that C knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")

SCRIPT = """
import datetime, gc
from toolcell_bridge.guest import determinism
determinism.set_clock(1_700_000_000.0)
import pandas
gc.collect()
now = datetime.datetime.now(datetime.UTC)
print(now.isoformat(), type(pandas.NaT).__mro__.count(datetime.datetime), isinstance(pandas.Timestamp(0), datetime.datetime))
"""


def test_packages_that_inherit_from_datetime_are_imported_after_the_clock_is_set() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2023-11-14T22:13:20+00:00 0 True\n"), done.stderr
