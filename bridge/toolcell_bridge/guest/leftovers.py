"""End what a script of a session left running: its processes at once, its threads at their next line.

Nothing here isolates: a script can evade all of it, and what it gains is a thread that shares its own sandbox. The
point is that one script's remains do not disturb the next one unnoticed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

MOST = 20
NAME_CHARS = 100
"""Most characters of what is named in a report."""

RETRY_S = 0.005

REAP_S = 0.5
"""How long the kernel may take to end killed processes."""


def end_leftovers(end_s: float) -> tuple[list[str], list[str]]:
    """End processes and threads; return what was ended, and what does not end. Threads have `end_s` seconds."""
    count = _end_processes()
    threads = _threads()
    if not count and not threads:
        return [], []
    until = time.perf_counter() + end_s
    alive = _ended_threads(threads, until)
    ended = [threads[ident] for ident in threads if ident not in alive]
    if count:
        ended.append(f"{count} process{'es' if count > 1 else ''}")
    return ended[:MOST], [threads[ident] for ident in alive][:MOST]


def _threads() -> dict[int, str]:
    """Return the threads besides this one that run Python code, with their names."""
    idents = sys._current_frames().keys() - {threading.get_ident()}
    names = {thread.ident: thread.name for thread in threading.enumerate()} if idents else {}
    return {ident: f"thread {str(names.get(ident, ident))[:NAME_CHARS]!r}" for ident in sorted(idents)}


def _ended_threads(threads: dict[int, str], until: float) -> list[int]:
    """Tell threads to end until they have, or until the time is over. Return those that go on."""
    alive = list(threads)
    pools = sys.modules.get("concurrent.futures.thread")
    with nullcontext() if pools is None else _closed_executors(pools):
        for ident in (alive := _running(alive)):
            _raise_in(ident)
        while alive and time.perf_counter() < until:
            time.sleep(RETRY_S)
            alive = _running(alive)
    return alive


def _running(idents: list[int]) -> list[int]:
    return [ident for ident in idents if ident in sys._current_frames()] if idents else []


@contextmanager
def _closed_executors(pools: Any) -> Iterator[None]:
    """Let the idle threads of thread pools end: they wait for work, and notice nothing else.

    One that is slow to wake is told to end as well, and must not report that as a fault of its pool.
    """
    for thread in threading.enumerate():
        arguments = getattr(thread, "_args", ())
        executor = arguments[0]() if getattr(thread, "_target", None) is pools._worker and arguments else None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
    time.sleep(RETRY_S)
    logger = pools._base.LOGGER
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _raise_in(ident: int) -> None:
    """Raise SystemExit in a thread, at its next line of Python."""
    with suppress(Exception):
        import ctypes

        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))


def _end_processes() -> int:
    """Kill every process of this sandbox but this one; return how many still ran."""
    count, is_killing = 0, False
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        for process in multiprocessing.active_children():
            with suppress(Exception):
                process.kill()
                process.join(1)
                count += 1
    for pid in [-1] if _may_kill_all() else _children():  # -1: every process that this one may signal
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            is_killing = True
    until = time.perf_counter() + REAP_S
    while time.perf_counter() < until:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except OSError:
            break
        if pid:
            count += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        elif is_killing:
            time.sleep(RETRY_S)
        else:
            break
    return count


def _may_kill_all() -> bool:
    """Whether a signal to all stays in this sandbox: in a pid namespace of its own, or where Landlock keeps it in."""
    if os.getpid() == 1:
        return True
    parent = os.getppid()
    try:
        os.kill(parent, 0)
    except PermissionError:
        return parent > 1
    except OSError:
        pass
    return False


def _children() -> list[int]:
    """Return the processes below this one, where /proc tells."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    waiting += (below := [int(each) for each in file.read().split()])
                    found += below
    return found
