"""The clock of a repeatable run: the class `datetime.datetime` stays the one that C code makes objects of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toolcell import SyncRuntime

PANDAS = """
import datetime, gc
from toolcell_bridge.guest import determinism
determinism.set_clock(1_700_000_000.0)
import pandas
gc.collect()
now = datetime.datetime.now(datetime.UTC)
print(now.isoformat(), datetime.datetime in type(pandas.NaT).__mro__, isinstance(pandas.Timestamp(0), datetime.datetime))
print(pandas.Timestamp.now("UTC").isoformat())
"""


def test_packages_that_inherit_from_datetime_are_imported_after_the_clock_is_set() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", PANDAS], capture_output=True, text=True, check=False)
    now = "2023-11-14T22:13:20+00:00"
    assert (done.returncode, done.stdout) == (0, f"{now} True True\n{now}\n"), done.stderr


USES = """
import datetime, pickle, sqlite3, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from datetime import datetime as imported
UTC = datetime.timezone.utc
given = pickle.loads({pickled!r})  # by C code
class Own(datetime.datetime): pass
table = sqlite3.connect(":memory:")
table.execute("create table t (at)")
table.executemany("insert into t values (?)", [[given], [datetime.datetime.now()]])
[
    type(given) is datetime.datetime is imported, type(datetime.datetime).__name__,
    pickle.loads(pickle.dumps(given)) == given, pickle.loads(pickle.dumps(datetime.datetime)) is imported,
    table.execute("select count(*) from t").fetchone()[0],
    datetime.datetime.now(UTC).isoformat(), Own.now(UTC).isoformat(), type(Own.now()).__name__,
    datetime.datetime.now(tz=UTC).timestamp(), datetime.datetime.today() == datetime.datetime.now(),
    datetime.date.today().isoformat(), datetime.datetime.utcnow().isoformat(),
]
"""
GIVEN = b"\x80\x04\x95*\x00\x00\x00\x00\x00\x00\x00\x8c\x08datetime\x94\x8c\x08datetime\x94\x93\x94C\n\x07\xe8\x01\x02\x03\x04\x05\x00\x00\x00\x94\x85\x94R\x94."
SAME = [True, "type", True, True, 2]
AT = "2023-11-14T22:13:20+00:00"


@pytest.mark.isolation
def test_the_class_of_dates_is_the_same_for_all_in_a_run_and_a_session_with_a_clock() -> None:
    source = USES.format(pickled=GIVEN)
    with SyncRuntime() as runtime, runtime.session() as session:
        run, script = runtime.execute_code(source, clock=1_700_000_000.0), session.execute_code(source)
        free = runtime.execute_code(
            "import datetime, time\nabs(datetime.datetime.now().timestamp() - time.time()) < 60"
        )

    assert run.value == [*SAME, AT, AT, "Own", 1_700_000_000, True, AT[:10], AT[:19]], run.error
    assert isinstance(script.value, list) and script.value[: len(SAME)] == SAME, script.error
    assert free.value is True
