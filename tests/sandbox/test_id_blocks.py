"""The zygotes of one machine have ids of their own, also those of processes that were forked from one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from toolcell.sandbox.process.backend import SLOTS, id_block, next_slot

pytestmark = pytest.mark.quick

FORKED = """
import os
from toolcell.sandbox.process.backend import next_slot

def child():
    reads, writes = os.pipe()
    if not os.fork():
        os.write(writes, f"{next_slot()} {next_slot()}".encode())
        os._exit(0)
    os.wait()
    return os.read(reads, 100).decode()

print(child(), child(), next_slot(), child(), next_slot(), next_slot())
"""
"""Two children of a process that had no zygote, and one of a process that had."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_takes_no_block_of_its_parent_or_of_another_child() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    slots = list(map(int, done.stdout.split()))

    assert len(set(slots)) == len(slots) == 9


def test_one_process_has_as_many_slots_as_there_are() -> None:
    assert len({next_slot() for _ in range(SLOTS)}) == SLOTS


def test_each_slot_is_a_block_of_its_own() -> None:
    blocks = [id_block(slot) for slot in range(3)]
    if blocks[0] is None:
        pytest.skip("an ordinary user has one id")
    if blocks[0].first < 0x70000000:
        pytest.skip("this user namespace has too few ids")
    assert len({block.first for block in blocks if block is not None}) == 3
