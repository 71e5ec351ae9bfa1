"""Processes that write audit logs, for tests that count, fork and kill them. Run as a script, with task and directory.

write DIR RUNS     so many runs, then the end
fork DIR           what a forked child of a writer gets to hear
load DIR...        one forked child per directory: runs without end, in three threads, until it is killed
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from audit.ledger import Ledger
from toolcell.audit.config import AuditConfig
from toolcell.audit.keys import HmacKey
from toolcell.audit.log import AuditLog
from toolcell.audit.recorder import Recorder
from toolcell.errors import AuditError

KEY = HmacKey(bytes(range(32)))
EFFECTS = "effects"
"""A file beside the log: each tool call leaves its name there, and nothing else tells that it happened."""


def opened(directory: str) -> tuple[Ledger, AuditLog]:
    ledger = Ledger(Path(directory) / "log")
    # Frequent checkpoints, so that a kill meets every kind of moment.
    config = AuditConfig(fsync="never", checkpoint_s=0.01)
    return ledger, AuditLog(ledger.path, key=KEY, heads=Path(directory) / "heads", config=config)


def write(directory: str, runs: str) -> None:
    ledger, log = opened(directory)
    with log:
        for _ in range(int(runs)):
            ledger.run(Recorder(log))


def fork(directory: str) -> None:
    ledger, log = opened(directory)
    with log:
        recorder = Recorder(log)
        ledger.run(recorder)
        if os.fork() == 0:
            try:
                ledger.run(recorder)
            except AuditError as exc:
                print(exc, flush=True)
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
            ledger.run(recorder, calls=[("act", {"name": f"{worker}-{run}-{call}"}) for call in range(3)])

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    {"write": write, "fork": fork, "load": load}[sys.argv[1]](*sys.argv[2:])
