"""The host under attack, in a process of its own, so that a test can measure it, time it out and plant secrets in it.

Started by `attack.Victim`. Reads pickled requests on stdin and answers on stdout; uses toolcell as any program would.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import struct
import sys
import warnings
from collections import defaultdict
from typing import Any, BinaryIO

import anyio
import psutil

from toolcell import Limits, Policy, PoolConfig, Runtime, ToolRegistry

SECRET = os.environ.get("VICTIM_SECRET", "")
HEAP = [f"{SECRET} on the heap {number}" for number in range(100)]
"""Found by a guest that was forked from this process, or handed any of its memory."""

WARM = 1
LAUNCHER_AND_ZYGOTE = 2
SETTLE_S = 5.0
CALM = 3
"""Looks in a row at which nothing may be out of place."""
MEETING_S = 10.0


class Host:
    """Tools, and a tally of what they really did."""

    def __init__(self, is_mortal: bool) -> None:
        self._is_mortal = is_mortal
        self.registry = ToolRegistry()
        self.effects: list[str] = []
        self._meetings: dict[str, list[Any]] = defaultdict(list)
        self._changed = anyio.Event()
        for tool in (
            self.echo,
            self.big,
            self.wait_forever,
            self.meet,
            self.seen,
            self.fails,
            self.touch,
            self.typed,
            self.die,
        ):
            self.registry.tool(tool)

    async def echo(self, text: str) -> str:
        """Give back the text it was called with."""
        return text

    async def big(self, size: int) -> str:
        """Give back a text of `size` characters."""
        return "x" * size

    async def wait_forever(self) -> str:
        """Wait for something that never comes."""
        self.effects.append("waiting")
        await anyio.sleep_forever()
        return ""

    async def touch(self, tag: str) -> str:
        """Do something that a test can see afterwards."""
        self.effects.append(tag)
        return tag

    async def typed(self, count: int, ratio: float, numbers: list[int], table: dict[str, float], flag: bool) -> str:
        """Take one argument of every kind that a schema may mend."""
        self.effects.append("typed")
        return f"{count} {ratio} {len(numbers)} {len(table)} {flag}"[:1000]

    async def die(self) -> str:
        """Kill the host, where it was started to be killed."""
        if self._is_mortal:
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    async def meet(self, place: str, count: int, word: str = "") -> list[str]:
        """Wait until `count` callers are at `place`; all get all their words."""
        self._meetings[place].append(word)
        self._changed.set()
        self._changed = anyio.Event()
        with anyio.fail_after(MEETING_S):
            while len(self._meetings[place]) < count:
                await self._changed.wait()
        return sorted(self._meetings[place])

    async def seen(self, name: str) -> list[int]:
        """Process ids, as the host has them, of the processes below it that go by this name."""
        return named(name)

    async def fails(self, how: str) -> str:
        """Fail with secrets in every corner of the exception."""
        local = SECRET  # noqa: F841 - a traceback that shows locals would show it
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            failure = RuntimeError(SECRET if how == "message" else "could not connect")
            failure.add_note(SECRET)
            failure.password = SECRET  # type: ignore[attr-defined]
            raise failure from cause


def named(name: str) -> list[int]:
    """Processes below this one with this name."""
    return [pid for pid in below(os.getpid()) if name_of(pid) == name]


def name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().rstrip("\n")
    except OSError:
        return ""


def below(pid: int) -> list[int]:
    """Children of a process, and theirs: by the kernel's own lists, which is far quicker than looking at everybody."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as children:
                found += [int(each) for each in children.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):  # a kernel without these lists
            return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return found + [each for child in found for each in below(child)]


def vitals() -> dict[str, int]:
    """What must stay flat."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * 4096
    return {
        "resident_bytes": resident,
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "threads": len(os.listdir("/proc/self/task")),
        "processes": len(below(os.getpid())),
    }


def peak_bytes() -> int:
    """Most memory held since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")


async def settle(processes: int, descriptors: int) -> dict[str, int]:
    """Vitals once the pool is full and nothing else is left, or after `SETTLE_S` whatever they are then."""
    calm = 0
    gc.collect()
    now = vitals()
    with anyio.move_on_after(SETTLE_S):
        while calm < CALM:
            await anyio.sleep(0.005)
            now = vitals()
            # A used sandbox may not be gone while its successor is not there yet, and the sum be right all the same.
            calm = calm + 1 if now["processes"] == processes and now["descriptors"] <= descriptors else 0
    return now


async def run(runtime: Runtime, host: Host, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Carry out several runs at once."""
    answers: list[Any] = [None] * len(requests)
    host.effects.clear()
    host._meetings.clear()
    forget_peak()
    before = vitals()

    async def one(index: int, request: dict[str, Any]) -> None:
        limits = Limits(**{**runtime.limits.model_dump(), **request["limits"]})
        try:
            answers[index] = await runtime.execute_code(request["source"], inputs=request["inputs"], limits=limits)
        except Exception as exc:
            answers[index] = RuntimeError(f"{type(exc).__name__}: {exc}")  # not every exception can be pickled

    async with anyio.create_task_group() as tasks:
        for index, request in enumerate(requests):
            tasks.start_soon(one, index, request)
    return {"results": answers, "before": before, "peak_bytes": peak_bytes(), "effects": list(host.effects)}


def read(stream: BinaryIO) -> Any:
    """Next request, or None at the end."""
    head = stream.read(4)
    return pickle.loads(stream.read(struct.unpack(">I", head)[0])) if len(head) == 4 else None


def write(stream: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


async def serve(options: dict[str, Any], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until stdin closes."""
    host = Host(options.get("mortal", False))
    async with Runtime(
        host.registry,
        pool=PoolConfig(warm=WARM),
        policy=Policy(**options.get("policy", {})),
        packages=options.get("packages", ()),
        preload=options.get("preload", ()),
        audit=options.get("audit"),
    ) as runtime:
        await runtime.execute_code("call_tool('echo', {'text': 'warm'})")
        write(answers, "ready")
        while (request := await anyio.to_thread.run_sync(read, requests, abandon_on_cancel=True)) is not None:
            match request["op"]:
                case "run":
                    write(answers, await run(runtime, host, request["runs"]))
                case "settle":
                    write(answers, await settle(LAUNCHER_AND_ZYGOTE + WARM, request["descriptors"]))
                case "named":
                    write(answers, named(request["name"]))


def main() -> None:
    warnings.simplefilter("ignore")
    options = pickle.loads(bytes.fromhex(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    anyio.run(serve, options, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
