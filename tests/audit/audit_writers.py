"""Processes that write audit logs, for tests that count, fork and kill them. Run as a script, with task and directory.

write DIR RUNS     so many runs, then the end
fork DIR           what a forked child of a writer gets to hear
load DIR...        one forked child per directory: runs without end, in three threads, until it is killed
full DIR           in a file system of 400 KiB on DIR: calls until there is no room, and when there is; then read-only
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from audit.ledger import Ledger
from toolcell.audit.config import RecordConfig
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.audit.recorder import Recorder
from toolcell.audit.verification import verify
from toolcell.errors import AuditError
from toolcell.journal.database import JournalDatabase

KEY = HmacKey(bytes(range(32)))
EFFECTS = "effects"
"""A file beside the log: each tool call leaves its name there, and nothing else tells that it happened."""


def opened(directory: str) -> tuple[Ledger, AuditLog]:
    ledger = Ledger(Path(directory) / "log")
    # Frequent checkpoints, so that a kill meets every kind of moment.
    config = RecordConfig(fsync="never", checkpoint_s=0.01)
    return ledger, AuditLog(ledger.path, key=KEY, heads=Path(directory) / "heads", config=config)


def write(directory: str, runs: str) -> None:
    ledger, log = opened(directory)
    with log:
        for _ in range(int(runs)):
            ledger.run(Recorder(log))


def fork(directory: str) -> None:
    ledger, log = opened(directory)
    with log, closing(JournalDatabase(log)) as read, closing(JournalDatabase(log)) as closed:
        recorder = Recorder(log)
        ledger.run(recorder)
        with read.reading() as read_by_parent, closed.reading() as left_open:
            pass
        if os.fork() == 0:
            try:
                ledger.run(recorder)
            except AuditError as exc:
                print(exc, flush=True)
            closed.close()
            with read.reading() as own:
                runs = own.execute("SELECT count(*) FROM run").fetchone()
            assert left_open.in_transaction is False  # raises, where it is closed
            print("read", *runs, own is read_by_parent, flush=True)
            os._exit(0)
        os.wait()
        ledger.run(recorder)


def load(*directories: str) -> None:
    """Forks before there is any thread or log; says "pid directory" for each child and waits for their deaths."""
    for directory in directories:
        pid = os.fork()
        if pid == 0:
            try:
                _work_until_killed(directory)
            finally:
                os._exit(1)
        print(pid, directory, flush=True)
        os.waitpid(pid, 0)


def _work_until_killed(directory: str) -> None:
    ledger, log = opened(directory)
    effects = os.open(Path(directory) / EFFECTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @ledger.registry.tool
    async def act(name: str) -> str:
        """Leave something behind that cannot be taken back."""
        os.write(effects, f"{name}\n".encode())
        return name * 50

    log.open()
    recorder = Recorder(log)

    def work(worker: int) -> None:
        for run in range(1_000_000):
            ledger.run(recorder, calls=[("act", {"name": f"{os.getpid()}-{worker}-{run}-{call}"}) for call in range(3)])

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def full(directory: str) -> None:
    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], check=True)

    mount("size=400k,mode=700")
    made: list[str] = []
    ledger, log = opened(directory)

    @ledger.registry.tool
    async def act(name: str) -> str:
        """Do something that can be seen afterwards."""
        made.append(name)
        return name

    def refusal(number: int) -> str:
        try:
            ledger.call(record, "act", {"name": f"{number} {os.urandom(1000).hex()}"}, number)
        except AuditError as exc:
            return str(exc)
        return ""

    with log:
        record = ledger.begin(Recorder(log))
        next(number for number in range(1000) if refusal(number))  # of a start, or of an end: then the tool was called
        count = len(made)
        print(refusal(1001), len(made) - count)
        mount("remount,size=20m")
        print(refusal(1002), len(made) - count)
    mount("remount,ro")
    calls = ledger.the_run().calls
    print(verify(ledger.path, [KEY]).findings, made == [call.args["name"] for call in calls if call.is_finished])
    try:
        opened(directory)[1].open()
    except AuditError as exc:
        print(exc)


if __name__ == "__main__":
    {"full": full, "write": write, "fork": fork, "load": load}[sys.argv[1]](*sys.argv[2:])
