"""A record of many events: how long `list`, `show`, `grep` and `verify` take.

    python -m benchmarks.record_size --events 1000000

The record is made first, with runs of 100 calls. Each number is wall time and CPU time of this process.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolcell.audit import AuditLog, Filter, HmacKey, Index, records, text_search, verify

CALLS = 100
Fields = tuple[Any, ...]
KEY = HmacKey(bytes(32))


def fill(path: Path, events: int) -> None:
    """Write so many events."""
    with AuditLog(path, key=KEY) as log:
        for number in range(events // (2 * CALLS + 2)):
            source = f"rows = tools.find(word='word_{number}x')\nset_result(len(rows))"
            who = {"run": f"r{number}", "user": f"user{number % 50}"}
            start: Fields = (
                f"r{number}",
                "code",
                source,
                "0" * 64,
                {},
                None,
                [],
                None,
                None,
                None,
                None,
                None,
                None,
                who,
                {},
            )
            run = log.append(records.RUN_STARTED, 0, start)
            for call in range(1, CALLS + 1):
                started: Fields = (
                    call,
                    f"call_{call}",
                    None,
                    "find",
                    "code",
                    1,
                    {"word": f"word_{number}x", "page": call},
                    {},
                )
                ended: Fields = (call, "ok", 120, {"found": [call, number], "text": "a line of an answer"}, None, {})
                log.append_later(records.CALL_STARTED, run, started, log.redactor, time.time_ns())
                log.append_later(records.CALL_ENDED, run, ended, log.redactor, time.time_ns())
            usage = {"wall_s": 0.1, "cpu_s": 0.01, "start_s": 0.0, "peak_memory_bytes": 1 << 24}
            end: Fields = ("ok", number, True, None, [], [0, 0, False], [], None, usage, [CALLS, 0], {})
            log.append(records.RUN_ENDED, run, end)


def measured(name: str, work: Callable[[], object]) -> float:
    """Print how long something takes, and return the CPU seconds."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = work()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    print(f"{name:32} {wall_s:9.3f} s wall {cpu_s:9.3f} s CPU  {found}")
    return cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--record", type=Path, help="an existing record, made by this program")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.record or Path(folder) / "runs.db"
        if not path.exists():
            measured("made", lambda: fill(path, given.events))
        measured("list (the newest 20)", lambda: _with(path, lambda index: len(index.runs(Filter(limit=20)))))
        measured("show last", lambda: _with(path, lambda index: len(index.load(index.find("last")).calls)))
        middle = f"r{given.events // (2 * CALLS + 2) // 2}"
        measured(
            "show (one in the middle)", lambda: _with(path, lambda index: len(index.load(index.find(middle)).calls))
        )
        measured("grep (a word of one run)", lambda: _with(path, lambda index: _grep(index, "word_77x")))
        took = measured("verify", lambda: verify(path, [KEY], heads=[]).ok)
        print(f"verify: {given.events / took:,.0f} events per second of CPU")


def _with(path: Path, look: Callable[[Index], object]) -> object:
    with Index(path, [KEY]) as index:
        return look(index)


def _grep(index: Index, word: str) -> int:
    return sum(1 for _ in text_search.Search().search(index, Filter(limit=None), re.compile(re.escape(word))))


if __name__ == "__main__":
    main()
