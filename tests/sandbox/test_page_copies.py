"""`page_copies`: which pages a fork copies, and that others are given them in one call."""

from __future__ import annotations

import os
import re
import resource
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from toolcell import Limits, PoolConfig, Runtime, SandboxUnavailable, SyncRuntime
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
pages = page_copies.find_pages(write, proc)
for given in ({}, pages):
    print(end="", flush=True)
    if not (pid := os.fork()):
        copied = page_copies.populate(given)
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


MAPPED = """
import mmap, os, sys, tracemalloc
from toolcell_bridge.entry import page_copies
with open(sys.argv[1], "w+b") as file:
    file.truncate(1 << 30)
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
tracemalloc.start()
page_copies.find_pages(lambda: None, os.open("/proc", os.O_RDONLY))
print(tracemalloc.get_traced_memory()[1])
"""


def test_pages_are_found_among_large_mapped_files_without_an_object_for_each(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAPPED, str(tmp_path / "file")]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak < (8 << 20), "a GiB has 256 Ki pages, whose entries have 2 MiB"


def test_what_cannot_be_copied_is_left_to_page_faults() -> None:
    assert page_copies.populate({page_copies.MADV_POPULATE_WRITE: struct.pack("NN", 4096, 4096)}) == 0


GUESTS = """
import os, resource, socket, sys
from functools import partial
from toolcell_bridge.entry import page_copies
from toolcell_bridge.entry.forked_guest import ForkedGuest
guest = ForkedGuest(socket.socket(socket.AF_UNIX), 1 << 20)
guest.pack_hello({})
guest.warm_up()
work = partial(guest.try_out, is_repeatable=False)
pages = page_copies.find_pages(work, os.open("/proc", os.O_RDONLY))
answer = guest._runner.answer
for given in ({}, {page_copies.MADV_POPULATE_WRITE: pages[page_copies.MADV_POPULATE_WRITE]}, pages):
    if not (pid := os.fork()):
        page_copies.populate(given)
        out, guest._runner.answer = os.dup(1), lambda run: ends.append(answer(run).ok)
        ends, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        work()
        os.write(out, b"%d %d\\n" % (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, all(ends) and len(ends)))
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(KERNEL < [6, 13], reason="Linux before 6.13 cannot copy pages at once")
def test_a_guest_that_has_the_pages_of_the_one_before_it_runs_a_script_with_few_page_faults() -> None:
    """Both kinds of pages count: those that are written to, and those of files."""
    run = subprocess.run([sys.executable, "-c", GUESTS], capture_output=True, text=True, check=True)
    faults, scripts = zip(*[map(int, line.split()) for line in run.stdout.splitlines()], strict=True)

    assert scripts == (1, 1, 1)
    assert faults[0] > 100
    assert faults[2] + 10 < faults[1] < faults[0] / 2


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


@pytest.mark.isolation
def test_modules_are_loaded_ahead_only_once_there_is_a_second_sandbox() -> None:
    looks = "import sys, time; time.sleep(0.1); 'asyncio' in sys.modules"
    with SyncRuntime(pool=PoolConfig(warm=0)) as runtime:
        found = [runtime.execute_code(looks).value for _ in range(2)]
        while not found[-1] and len(found) < 60:
            found.append(runtime.execute_code(looks).value)
    assert found[:2] == [False, False] and found[-1]
