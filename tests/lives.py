"""A host that is killed at a given moment, and lives again until it has come to its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

MOST_LIVES = 8
AGAIN = 10
"""Status of a life after which there is another one."""

BEGINNING = """
import os, signal
from toolcell import SyncRuntime, PoolConfig, ToolRegistry
from toolcell.tools import AlreadyMade, Approve

def noting(ledger, moment):
    def note(text):
        if moment == f'before {text}': os.kill(os.getpid(), signal.SIGKILL)
        with ledger.open('a') as file: file.write(text + chr(10))
        if moment == f'after {text}': os.kill(os.getpid(), signal.SIGKILL)
    return note
"""
# Each life is a fork: to import toolcell takes longer than to live.
LIVES = f"""
import sys
from pathlib import Path
folder, moment = Path(sys.argv[1]), sys.argv[2]
for _ in range({MOST_LIVES}):
    if not os.fork():
        signal.alarm(100)
        sys.exit(live(folder, moment))
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print('status', status, flush=True)
    if status not in ({AGAIN}, -signal.SIGKILL): break
    if status == -signal.SIGKILL: moment = ''
"""


def printed_by_lives(program: str, folder: Path, moment: str) -> str:
    """Run a program that defines `live(folder, moment)`; return what its lives printed. `noting` kills one at that moment."""
    command = [sys.executable, "-c", BEGINNING + program + LIVES, str(folder), moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    statuses = [line.split()[1] for line in lines if line.startswith("status ")]
    assert statuses[-1:] == ["0"], (statuses, done.stderr)
    assert statuses.count(str(-signal.SIGKILL)) == 1, statuses
    return "\n".join(line for line in lines if not line.startswith("status "))
