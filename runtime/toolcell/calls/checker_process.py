"""Check strangers' schemas and large values in child processes, which can be killed; never in the host's own.

A process serves one request at a time, within a bound of processor time and memory that the kernel keeps. What runs in
it is `checker_program`. At most `MAX_PROCESSES` are at work for one event loop; an idle one is used again, and ends by
itself after a minute.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.lowlevel
import msgpack

from toolcell.calls.schema_walk import check_of
from toolcell.calls.values import ValueProblem
from toolcell.support import daemon_threads
from toolcell.support.event_loop import TimeSlice
from toolcell.support.host_work import ELEMENT_WORK, HostWork

MAX_PROCESSES: Final = 3
CPU_S: Final = 2.0
"""Processor time of one request. Mending and checking the most that arguments may hold takes about one second."""
WALL_S: Final = 30.0
"""The same in real time, for a busy machine: the processes have a low priority."""
MEMORY_BYTES: Final = 1 << 30
IDLE_S: Final = 60.0
"""After which nobody is expected to ask for a process again."""
STEPS_PER_S: Final = 150_000
"""What a run is charged for a second of a process, in values that were looked at."""
BATCH: Final = 64
"""Schemas that are compiled in one request."""
MAX_STOPS: Final = 3
"""Schemas of one list that may exceed their bound, or take as much together. After them, no other schema of the list is
compiled."""

NO_MEMORY: Final = 70
"""Exit status of a process that found no memory."""

READ_BYTES: Final = 1 << 16
_START: Final = (
    "import sys; sys.path[:] = sys.argv[4:]; from toolcell.calls.checker_program import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))"
)
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "LANG")


class CheckStopped(Exception):
    """A check did not end within its bounds; the message says which."""


class _Process:
    """One checker process, and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        bounds = map(str, (os.getpid(), MEMORY_BYTES, IDLE_S))
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _START, *bounds, *sys.path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,
                )
            except OSError as exc:
                ours.close()
                raise CheckStopped(f"no process could be started for it ({exc.strerror})") from exc
        ours.setblocking(False)
        self._socket = ours
        self.was_used = self.is_killed = False
        self.cpu_s = CPU_S
        """What the latest request took; of one that was not answered, the most that it may."""
        try:
            daemon_threads.start(self._await_end, name="toolcell checker")
        except (MemoryError, RuntimeError) as exc:
            self.kill()
            self.wait()
            raise CheckStopped(f"no thread could be started for it ({exc})") from exc

    def _await_end(self) -> None:
        """Reap it, and close our end if nobody uses it."""
        self.wait()
        with _lock:
            if self in _kept:
                _kept.remove(self)
                self.kill()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, kind: str, spec: str, body: bytes) -> Any:
        """Return the answer to a request.

        Raises:
            CheckStopped: the process has ended before.
        """
        self.cpu_s, found, turn = CPU_S, unpacker(), TimeSlice()
        try:
            await self._send(msgpack.packb([kind, CPU_S, spec, body]))
            while True:
                found.feed(await self._receive())
                await turn.give_way()  # what has come is there without waiting
                for took_s, answer in found:
                    self.cpu_s = took_s
                    return answer
        except (OSError, EOFError):
            while not self.has_ended:  # noqa: ASYNC110 - it is about to say by its status why
                await anyio.sleep(0.001)
            raise CheckStopped(self.why_ended) from None

    @property
    def was_killed(self) -> bool:
        """Nobody but us or chance has ended it."""
        return self._process.returncode in (0, -signal.SIGKILL)

    @property
    def why_ended(self) -> str:
        status = self._process.returncode
        if status in (-signal.SIGPROF, -signal.SIGXCPU):
            return f"took more than {CPU_S:g} s of processor time"
        if status in (NO_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
            return f"took more than {MEMORY_BYTES >> 20} MB of memory"
        return f"ended its process (status {status})"

    def kill(self) -> None:
        """End it, without waiting until it has freed its memory."""
        self._socket.close()
        self._process.kill()
        self.is_killed = True

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def forget(self) -> None:
        """Close our end, in a fork: the process is another one's."""
        self._socket.close()
        self._process.returncode = 0  # or its object would be kept, to be reaped

    async def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)

    async def _receive(self) -> bytes:
        while True:
            try:
                if piece := self._socket.recv(READ_BYTES):
                    return piece
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
            else:
                raise EOFError


_kept: list[_Process] = []
"""Those that nobody uses, and those that were killed, until they have ended."""
_lock = threading.Lock()


def end_idle() -> None:
    """End the processes that nobody uses now."""
    with _lock:
        ended, _kept[:] = [*_kept], []
    for process in ended:
        process.kill()
    for process in ended:
        process.wait()


def _forget_all() -> None:
    global _lock
    _lock = threading.Lock()
    for process in _kept:
        process.forget()
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
atexit.register(end_idle)


def _take() -> _Process:
    with _lock:
        for process in [*reversed(_kept)]:
            if not process.is_killed:
                _kept.remove(process)
                if not process.has_ended:
                    return process
                process.kill()
    return _Process()


def _give_back(process: _Process, *, is_usable: bool) -> None:
    with _lock:
        has_ended = process.has_ended  # one that ends after this is removed by its thread, which needs the lock
        if has_ended or not is_usable or sum(not each.is_killed for each in _kept) >= MAX_PROCESSES:
            process.kill()
        if not has_ended:
            _kept.append(process)


class Turns:
    """Lets as many checks in as there are places: first of the run that has fewest inside and made the host do least.

    A run leaves one place to others. Whoever sends much waits behind whoever sends little.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._inside = Counter[int]()
        self._waiting: list[tuple[HostWork | None, anyio.Event]] = []

    async def enter(self, work: HostWork | None) -> None:
        """Wait for a place. `work`: of the run."""
        if not self._waiting and self._may_enter(work):
            self._count(work, 1)
            return
        entry = work, anyio.Event()
        self._waiting.append(entry)
        self._let_in()
        try:
            await entry[1].wait()
        except BaseException:
            if entry[1].is_set():  # it was let in in the same moment
                self.leave(work)
            else:
                self._waiting.remove(entry)
            raise

    def leave(self, work: HostWork | None) -> None:
        """Give the place to whoever waits."""
        self._count(work, -1)
        self._let_in()

    @asynccontextmanager
    async def taken(self, work: HostWork | None) -> AsyncIterator[None]:
        """Have a place inside the block."""
        await self.enter(work)
        try:
            yield
        finally:
            self.leave(work)

    def _let_in(self) -> None:
        while may := [entry for entry in self._waiting if self._may_enter(entry[0])]:
            chosen = min(may, key=lambda entry: (self._inside[id(entry[0])], entry[0].used if entry[0] else 0))
            self._waiting.remove(chosen)
            self._count(chosen[0], 1)
            chosen[1].set()

    def _may_enter(self, work: HostWork | None) -> bool:
        return self._free > (1 if self._inside[id(work)] else 0)

    def _count(self, work: HostWork | None, change: int) -> None:
        self._free -= change
        self._inside[id(work)] += change
        if not self._inside[id(work)]:
            del self._inside[id(work)]


_turns: anyio.lowlevel.RunVar[Turns] = anyio.lowlevel.RunVar("toolcell_checks")


def turns() -> Turns:
    """Return the turns of this event loop."""
    try:
        return _turns.get()
    except LookupError:
        _turns.set(made := Turns(MAX_PROCESSES))
        return made


async def ask(kind: str, spec: str, body: bytes = b"", work: HostWork | None = None) -> Any:
    """Return the answer of a checker process to a request. The caller has a turn, and `work` is charged.

    `kind`: a row of `checker_program.ANSWERS`. `spec`: JSON text that is compiled once for as long as it is asked for.

    Raises:
        CheckStopped: it did not end within its bounds, or there is no process.

    Cancellation: the process is killed.
    """
    while True:
        process, began = _take(), time.monotonic()
        try:
            with anyio.fail_after(WALL_S):
                answer = await process.ask(kind, spec, body)
        except BaseException as exc:
            _give_back(process, is_usable=False)
            if isinstance(exc, CheckStopped) and process.was_used and process.was_killed:
                continue  # it ended while nobody used it
            if isinstance(exc, TimeoutError):
                raise CheckStopped(f"took more than {WALL_S:g} s") from None
            raise
        finally:
            if work is not None:
                work.used += ELEMENT_WORK * int(STEPS_PER_S * min(time.monotonic() - began, process.cpu_s))
        process.was_used = True
        _give_back(process, is_usable=True)
        return answer


def unpacker(stream: io.RawIOBase | None = None) -> Any:
    """Return what iterates over what one end sends to the other. `stream`: of the socket; None: it is fed."""
    known: dict[str, Any] = {"unicode_errors": "surrogatepass", "strict_map_key": False}
    return msgpack.Unpacker(stream, read_size=READ_BYTES, max_buffer_size=MEMORY_BYTES, **known)


def unpack(data: bytes) -> Any:
    """Return plain data that one end has packed for the other."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def pack(value: object) -> bytes:
    """Encode plain data for the other end.

    Raises:
        TypeError, ValueError, OverflowError: it is not plain.
    """
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass", strict_types=True, default=_tuple)
    return packed


def _tuple(value: object) -> Any:
    if type(value) is tuple:
        return [*value]
    raise TypeError(f"{type(value).__name__} is not plain data")


# Values and schemas


async def find_problem(
    schema: Mapping[str, Any], value: Any, *, is_foreign: bool, work: HostWork | None = None
) -> ValueProblem | None:
    """Return what is wrong first with a value; None when it fits, or nothing in the schema can be checked."""
    try:
        said = json.dumps(schema, default=str)
        check = check_of(said, is_foreign)
        if check is not None and check.fits_here(value):
            problem = check.problem(value)
            if problem is None or not is_foreign:
                return problem
        async with turns().taken(work):
            answer = await ask("value", said, pack(value), work)
    except CheckStopped as exc:
        return ValueProblem((), f"cannot be checked against its schema: the check {exc}; send less")
    except (TypeError, ValueError, OverflowError) as exc:
        return ValueProblem((), f"cannot be checked: {type(exc).__name__}")
    return None if answer is None else ValueProblem(tuple(answer[0]), answer[1])


async def refused_schemas(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each schema of a stranger why it cannot be used; empty when it can."""
    nonempty, found, stops = [each for each in schemas if each], list[str](), 0
    taken = HostWork(MAX_STOPS * ELEMENT_WORK * int(STEPS_PER_S * CPU_S))
    left = [nonempty[start : start + BATCH] for start in range(0, len(nonempty), BATCH)]
    while left:
        some, before = left.pop(0), taken.used
        if stops == MAX_STOPS or taken.used >= taken.limit:
            said = "invalid schema: it was not compiled, because others of the same list took too long"
            found += [said] * len(some)
            continue
        try:
            async with turns().taken(None):
                found += await ask("schemas", "", pack([json.dumps(each) for each in some]), taken)
        except CheckStopped as exc:
            if len(some) > 1:  # compile each alone, to find which one
                left[:0], taken.used = [[each] for each in some], before
            else:
                found.append(f"invalid schema: compiling it {exc}; write it more simply")
                stops += 1
    answers = iter(found)
    return [next(answers) if each else "" for each in schemas]
