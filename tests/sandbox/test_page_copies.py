"""`page_copies`: which pages a fork copies, and that others are given them in one call."""

from __future__ import annotations

import os
import re
import resource
import struct
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from toolcell import Limits, PoolConfig, Runtime, SandboxUnavailable
from toolcell_bridge.entry import page_copies

FORKS = """
import os, resource
from toolcell_bridge.entry import page_copies
page_bytes = resource.getpagesize()
memory = bytearray(400 * page_bytes)
def write():
    for place in range(0, len(memory), 2 * page_bytes):
        memory[place] = 1
proc = os.open("/proc", os.O_RDONLY)
pages = page_copies.find_copied(write, proc)
for given in (b"", pages):
    print(end="", flush=True)
    if not (pid := os.fork()):
        copied = page_copies.copy(given)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        write()
        print(copied // page_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


KERNEL = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]


@pytest.mark.skipif(KERNEL < [6, 13], reason="Linux before 6.13 cannot copy pages at once")
def test_a_fork_is_given_the_pages_that_the_fork_before_it_has_copied() -> None:
    run = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    (none, faults), (copied, left) = [map(int, line.split()) for line in run.stdout.splitlines()]
    assert none == 0
    assert faults >= 200
    assert copied >= 200
    assert left < 20


def test_what_cannot_be_copied_is_left_to_page_faults() -> None:
    assert page_copies.copy(struct.pack("NN", 4096, 4096)) == 0


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_zygote_that_may_not_fork_keeps_the_sandboxes_that_it_has() -> None:
    me = psutil.Process()
    before = me.children(recursive=True)
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        await session.execute_code("kept = 3")
        for _ in range(40):  # after which it has found the pages
            await runtime.execute_code("1")
        new = [each for each in me.children(recursive=True) if each not in before]
        (zygote,) = {each.parent() for each in new if not each.children()} - {me}
        resource.prlimit(zygote.pid, resource.RLIMIT_NPROC, (1, 1))
        for frame_bytes in (1 << 20, 2 << 20):  # settings that it has not had
            with suppress(SandboxUnavailable):
                await runtime.execute_code("1", limits=Limits(frame_bytes=frame_bytes))

        assert (await session.execute_code("kept")).value == 3
        assert zygote.is_running() and zygote.status() != psutil.STATUS_ZOMBIE
