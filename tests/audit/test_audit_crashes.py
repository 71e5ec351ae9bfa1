"""A writer is killed at any moment: what was written verifies, and no effect lacks the record of its start."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from audit import audit_writers
from audit.audit_writers import EFFECTS, KEY
from audit.ledger import Ledger
from toolcell.audit import records
from toolcell.audit.databases import database_of
from toolcell.audit.signatures import Head
from toolcell.audit.verification import verify
from toolcell.errors import BadInput

KILLS = int(os.environ.get("AUDIT_KILLS", "20"))
WRITERS = int(os.environ.get("AUDIT_WRITERS", "2"))
MOST_S = 0.06
"""A child is killed at a random moment up to here after it has begun; every other one not before it had an effect."""


@contextmanager
def writers(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = Path(audit_writers.__file__)
    with subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.wait(60) == 0


def killed(directories: list[Path]) -> None:
    """Let one child after another write into a directory of its own, and kill each at a random moment."""
    with writers("load", *map(str, directories)) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            pid = int(line.split()[0])
            assert pid > 1
            deadline = time.monotonic() + 20
            while number % 2 and not has_effect(directories[number]) and time.monotonic() < deadline:
                threading.Event().wait(0.002)
            threading.Event().wait(random.uniform(0, MOST_S))
            os.kill(pid, signal.SIGKILL)


def has_effect(directory: Path) -> bool:
    """Its child has done something that leaves a trace."""
    effects = directory / EFFECTS
    return effects.exists() and effects.stat().st_size > 0


@pytest.mark.slow
def test_killed_at_a_random_moment_the_log_verifies_and_every_effect_has_its_start(tmp_path: Path) -> None:
    directories = [tmp_path / str(number) for number in range(KILLS)]
    for directory in directories:
        directory.mkdir()
    killed(directories)
    effects = 0
    for directory in directories:
        log = directory / "log"
        try:
            database_of(log).id()
        except BadInput:  # killed before there was a record; then there cannot be an effect either
            assert not has_effect(directory)
            continue
        report = verify(log, [KEY], heads=saved_heads_of(directory))
        assert report.ok, (directory, report.findings)
        started = {found.fields["args"]["name"] for found in Ledger(log).found() if found.kind == records.CALL_STARTED}
        happened = (directory / EFFECTS).read_text().split() if (directory / EFFECTS).exists() else []
        assert set(happened) <= started
        # At most what each of three threads was just doing has a start and left no trace.
        assert len(started) - len(happened) <= 3
        effects += len(happened)

    assert effects >= KILLS // 2  # the children were at work when they were killed


def saved_heads_of(directory: Path) -> list[Head]:
    return Head.saved(database_of(directory / "log").id(), directory / "heads")


def test_after_a_kill_the_next_writer_goes_on(tmp_path: Path) -> None:
    killed([tmp_path] * 3)
    with writers("write", str(tmp_path), "2"):
        pass
    report = verify(tmp_path / "log", [KEY], heads=saved_heads_of(tmp_path))

    assert report.ok, report.findings
    assert any(chain.is_closed for chain in report.chains)


def test_several_processes_write_one_record(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(WRITERS):
            stack.enter_context(writers("write", str(tmp_path), "10"))
    ledger = Ledger(tmp_path / "log")

    assert ledger.kinds().count(records.RUN_ENDED) == WRITERS * 10
    assert verify(ledger.path, [KEY]).ok


@pytest.mark.isolation
def test_without_room_no_tool_is_called_with_room_it_goes_on_and_a_read_only_file_system_can_be_read(
    tmp_path: Path,
) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, audit_writers.__file__, "full"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    full, after, recorded, read_only = done.stdout.splitlines()
    assert full.endswith("the disk is full 0")
    assert (after, recorded) == (" 1", "[] True")
    assert read_only.endswith("log: its file system is read-only")


def test_a_forked_child_cannot_write_its_parents_chain_and_reads_with_a_connection_of_its_own(tmp_path: Path) -> None:
    with writers("fork", str(tmp_path)) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    ledger = Ledger(tmp_path / "log")

    assert "opened by the parent" in said and "read 1 False" in said
    assert ledger.kinds().count(records.RUN_STARTED) == 2
    assert verify(ledger.path, [KEY]).ok
