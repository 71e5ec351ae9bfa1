"""The clock of a recorded run is close to a real one, so the audit log changes no script's behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from audit.ledger import Ledger
from toolcell import PoolConfig, SyncRuntime

pytestmark = pytest.mark.isolation


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncRuntime]:
    home = tmp_path_factory.mktemp("clock")
    ledger = Ledger(home / "log")
    with SyncRuntime(record=ledger.log(heads=home / "heads"), pool=PoolConfig(warm=1)) as runtime:
        yield runtime


def value(runtime: SyncRuntime, script: str) -> Any:
    result = runtime.execute_code(script)
    assert result.ok, result.error
    return result.value


def test_a_loop_that_waits_for_a_moment_ends(runtime: SyncRuntime) -> None:
    script = "import time\nend = time.time() + 3\nn = 0\nwhile time.time() < end:\n    n += 1\nset_result(n)"

    assert value(runtime, script) > 1000


def test_sleeping_moves_the_clock(runtime: SyncRuntime) -> None:
    script = "import time\nbegan = time.time()\ntime.sleep(0.02)\nset_result(time.time() - began)"

    assert value(runtime, script) == pytest.approx(0.02, abs=1e-6)  # a float of today is known to 0.24 us


def test_moments_are_still_dates_and_datetimes(runtime: SyncRuntime) -> None:
    script = """
import datetime, pickle, time
now = datetime.datetime.now()
set_result([isinstance(now, datetime.date), isinstance(now, datetime.datetime), type(now) is datetime.datetime,
            isinstance(datetime.date.today(), datetime.date), isinstance(now - datetime.timedelta(1), datetime.datetime),
            pickle.loads(pickle.dumps(now)) == now, repr(now).startswith("datetime.datetime("),
            now.date() == datetime.date.today(), abs(now.timestamp() - time.time()) < 1,
            datetime.datetime.strptime("2020", "%Y") == datetime.datetime(2020, 1, 1)])
"""
    assert value(runtime, script) == [True] * 10


def test_every_way_to_ask_gives_the_same_time(runtime: SyncRuntime) -> None:
    script = """
import datetime, time
utc = datetime.timezone.utc
set_result([time.time_ns() // 1000, round(time.clock_gettime(time.CLOCK_REALTIME) * 1e6),
            round(datetime.datetime.now(utc).timestamp() * 1e6), round(datetime.datetime.today().timestamp() * 1e6),
            round(time.time() * 1e6)])
"""
    assert len(set(value(runtime, script))) == 1
    assert value(
        runtime, "import time\nset_result(time.ctime() == time.asctime() == time.strftime('%a %b %e %H:%M:%S %Y'))"
    )
