"""What `verify` and a page of the viewer's list of runs cost, at its beginning and end, with 100,000 runs in the log.

python -m benchmarks.viewer --runs 100000
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from toolcell.audit import records
from toolcell.audit.config import RecordConfig
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.audit.query import Index
from toolcell.audit.verification import verify
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer.figures import run_figures
from toolcell.service.viewer.runs_pages import PAGE, page_before, wanted_of

TOOLS = ("search", "fetch", "book", "refund")
OUTCOMES = ("ok",) * 8 + ("error", "timeout")
REPEATS = 20


def fill(log: AuditLog, runs: int) -> None:
    """Write so many runs with a call each, as a recorder would, a second apart."""
    now_ns = time.time_ns() - runs * 10**9
    for number in range(runs):
        at_ns = now_ns + number * 10**9
        who = {"user": f"user-{number % 50}", "thread": f"thread-{number // 20}"}
        source = f"# report {number}\nset_result(call_tool('search', query='{number}'))"
        files: list[object] = []
        started: tuple[Any, ...] = (
            f"{number:032x}", "code", source, f"{number:064x}", {}, None, files, None, None,
            "off", 1, 1.0, None, who, {},
        )  # fmt: skip
        run = log.append(records.RUN_STARTED, 0, started, at_ns=at_ns)
        call: tuple[Any, ...] = (1, "call_1", None, TOOLS[number % 4], "code", 2, {"query": str(number)}, {})
        log.append(records.CALL_STARTED, run, call, at_ns=at_ns + 10**6)
        log.append(records.CALL_ENDED, run, (1, "ok", 900 + number % 100, [1], None, {}), at_ns=at_ns + 2 * 10**6)
        usage = {"wall_s": 0.01 + number % 7 / 100, "cpu_s": 0.01, "start_s": 0.001, "peak_memory_bytes": 5 << 20}
        printed = [0, 0, False]
        ended: tuple[Any, ...] = (OUTCOMES[number % 10], 1, True, None, [], printed, files, None, usage, [1, 0], {})
        log.append(records.RUN_ENDED, run, ended, at_ns=at_ns + 10**7)


def timed(reader: LogReader, params: dict[str, str], page: int) -> float:
    """Return the median time of one page of the list, in milliseconds; pages count from 1."""
    wanted, _ = wanted_of(params)

    def place(index: Index) -> tuple[int, int, str] | None:
        if page == 1:
            return None
        rows = index.select(
            "SELECT started, n, writer FROM run ORDER BY started DESC, n DESC, writer DESC LIMIT 1 OFFSET ?",
            [(page - 1) * PAGE - 1],
        )
        return rows[0][0], rows[0][1], rows[0][2]

    async def measure() -> float:
        before = await reader.read(place)
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            await reader.read(lambda index: page_before(index, wanted, before))
            times.append(time.perf_counter() - begun)
        return statistics.median(times) * 1000

    return asyncio.run(measure())


def main() -> None:
    """Write a log, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        path, key = Path(folder) / "runs.db", HmacKey.generate()
        with AuditLog(path, key=key, config=RecordConfig(fsync="never"), heads=Path(folder) / "heads") as log:
            fill(log, runs)
        begun = time.perf_counter()
        assert verify(path, [key]).ok
        print(f"{runs:,} runs; {runs * 4 / (time.perf_counter() - begun):,.0f} events verified a second")
        reader = LogReader(path, [key])
        last = max(1, runs // PAGE)
        for name, params in {
            "all": {},
            "outcome=timeout": {"outcome": "timeout"},
            "tool=refund": {"tool": "refund"},
            "trust=verified": {"trust": "verified"},
            "q=report 77": {"q": "report 77"},
            "q, nothing is found": {"q": "no such text"},
            "tool, nothing is found": {"tool": "no such tool"},
        }.items():
            pages = {page: timed(reader, params, page) for page in (1, last // 2, last)}
            print(f"{name:<24}" + "   ".join(f"page {page:,}: {ms:7.2f} ms" for page, ms in pages.items()))
        begun = time.perf_counter()
        asyncio.run(reader.read(lambda index: run_figures(index, "all")))
        print(f"overview of all: {(time.perf_counter() - begun) * 1000:.0f} ms, and then kept until the log changes")
        reader.close_now()


if __name__ == "__main__":
    main()
