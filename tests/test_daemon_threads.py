"""Where there is no memory for another thread, its start is an error and not a wait without end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import anyio
import anyio.to_thread
import pytest

from toolcell.support import loop_thread
from toolcell.support.loop_thread import LoopThread

SHORT = """
import resource, threading
from pathlib import Path
import anyio
from toolcell.support import daemon_threads

def end_threads():
    threads = [threading.Thread(target=bool) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()  # their stacks are kept for the next ones, so that these do start

async def main():
    end_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped, hard))
    try:
        START
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        print("no memory")
    print(await daemon_threads.run_sync(lambda: "works on"))

anyio.run(main)
"""


@pytest.mark.isolation
@pytest.mark.parametrize(
    "start",
    ["await daemon_threads.run_sync(bool)", "daemon_threads.start(bool, name='one')"],
    ids=["run_sync", "start"],
)
def test_a_thread_without_memory_is_an_error(start: str) -> None:
    host = [sys.executable, "-c", SHORT.replace("START", start)]
    done = subprocess.run(host, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split("\n") == ["no memory", "works on", ""]


def test_an_interrupt_while_a_loop_starts_stays_one_when_the_loop_has_ended_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted, before = threading.Event(), {*threading.enumerate()}

    class Started(Future[Any]):
        def set_result(self, result: Any) -> None:
            assert interrupted.wait(60)
            super().set_result(result)

        def result(self, timeout: float | None = None) -> Any:
            if not interrupted.is_set():
                raise KeyboardInterrupt
            return super().result(timeout)

        def done(self) -> bool:
            interrupted.set()
            for thread in {*threading.enumerate()} - before - {threading.current_thread()}:
                thread.join(60)
            return super().done()

    monkeypatch.setattr(loop_thread, "Future", Started)
    with pytest.raises(KeyboardInterrupt):
        LoopThread()


@pytest.mark.anyio
@pytest.mark.every_loop
async def test_who_calls_into_a_busy_loop_or_gives_up_such_a_call_has_its_own_loop_go_on() -> None:
    loop = await anyio.to_thread.run_sync(LoopThread, "busy")
    is_busy, may_end = threading.Event(), threading.Event()

    async def keep_busy() -> bool:
        is_busy.set()
        return may_end.wait(60)

    try:
        async with anyio.create_task_group() as tasks:
            kept = list[bool]()

            async def call() -> None:
                kept.append(await loop.await_call(keep_busy))

            tasks.start_soon(call)
            assert await anyio.to_thread.run_sync(is_busy.wait, 60)
            with anyio.move_on_after(0.01) as scope:
                await loop.await_call(anyio.sleep, 0)
            may_end.set()
        assert scope.cancelled_caught and kept == [True]
        await loop.await_call(anyio.sleep, 0)
    finally:
        await anyio.to_thread.run_sync(loop.stop)
