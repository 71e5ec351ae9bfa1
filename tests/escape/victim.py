"""The host under attack, in its own process: so a test can measure it, bound its time and put secrets into it.

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
from contextlib import suppress
from typing import Any, BinaryIO

import anyio
import psutil

from toolcell import Limits, Policy, PoolConfig, Runtime, ToolRegistry
from toolcell.calls import checker_process

SECRET = os.environ.get("VICTIM_SECRET", "")
HEAP = [f"{SECRET} on the heap {number}" for number in range(100)]
"""Found by a guest that was forked from this process, or handed any of its memory."""

BACKEND = os.environ.get("TOOLCELL_ESCAPE_BACKEND", "process")
"""process, docker, or ray: a node of the cluster at TOOLCELL_ESCAPE_RAY."""

IN_CONTAINERS = BACKEND == "docker"
WARM = 2 if BACKEND == "docker" else 1
"""Two containers, because one takes longer to start than most attacks take to fail."""
LAUNCHER_AND_ZYGOTE = 2
SETTLE_S = float(os.environ.get("TOOLCELL_SETTLE_S") or (30.0 if IN_CONTAINERS else 15.0))
LOOK_S = 0.02 if IN_CONTAINERS else 0.005
CALM = 3
"""Looks in a row at which nothing may be out of place."""
MEETING_S = 60.0


def policy(options: dict[str, Any]) -> Policy:
    """What the test asks for, in the profile that is attacked."""
    return Policy(**{"profile": os.environ.get("TOOLCELL_ESCAPE_PROFILE", "full"), **options.get("policy", {})})


def backend(options: dict[str, Any]) -> Any:
    """What the sandboxes are to be made by."""
    if BACKEND in ("process", "docker"):
        return BACKEND
    given = {name: options[name] for name in ("packages", "preload") if name in options}
    given["policy"] = policy(options)
    from toolcell import RayBackend

    made = RayBackend(os.environ["TOOLCELL_ESCAPE_RAY"], tls=True, **given)
    NODES.append(made)
    return made


NODES: list[Any] = []
"""A Ray backend, whose actors are nobody's children on the host's side."""


def node_actors() -> list[int]:
    """Processes that listen where this victim's nodes do."""
    ports = {node.address.port for made in NODES for node in made._nodes.values()}
    listening = psutil.net_connections("tcp") if ports else []
    return [
        each.pid for each in listening if each.status == psutil.CONN_LISTEN and each.laddr.port in ports and each.pid
    ]


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


class Containers:
    """What the daemon says this process has there: containers are nobody's children on the host's side."""

    def __init__(self) -> None:
        self._client: Any = None
        self._inits: dict[str, int] = {}

    def inits(self) -> dict[str, int]:
        """Ids of all there are, dying ones too, and the host's number for each one's first process; 0 is unknown."""
        from toolcell.sandbox.docker.client import EngineClient, NotFound, call_api, list_labelled
        from toolcell.sandbox.docker.reaper import LABEL_HOST, own_identity

        if self._client is None:
            self._client = EngineClient.connect_now()
        found = {}
        for container in list_labelled(self._client.api, {LABEL_HOST: str(own_identity())}):
            ident = container["Id"]
            pid = self._inits.get(ident, 0)
            if not pid:
                with suppress(NotFound):
                    pid = call_api(self._client.api.inspect_container, ident)["State"]["Pid"]
            found[ident] = pid
        self._inits = found
        return found


CONTAINERS = Containers()


def family() -> list[int]:
    """Processes that this one is to answer for: those below it, and those of its containers."""
    found = below(os.getpid())
    for init in CONTAINERS.inits().values() if IN_CONTAINERS else ():
        if init:
            found += [init, *below(init)]
    return found + [pid for actor in node_actors() for pid in below(actor)]


def named(name: str) -> list[int]:
    """Those of its family with this name."""
    return [pid for pid in family() if name_of(pid) == name]


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
        "processes": len(below(os.getpid())) + sum(len(below(actor)) for actor in node_actors()),
    }


def peak_bytes() -> int:
    """Most memory held since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")


async def settle(runtime: Runtime, expected: dict[str, int]) -> dict[str, int]:
    """Vitals once the pool is full and nothing else is left, or after `SETTLE_S` whatever they are then.

    `expected`: empty at first, when the pool has yet to say what it needs.
    """
    calm = 0
    gc.collect()
    checker_process.end_idle()  # a bounded number, which stay for a minute
    now = vitals()
    with anyio.move_on_after(SETTLE_S):
        while calm < CALM:
            await anyio.sleep(LOOK_S)
            now = await vitals_of_all() if IN_CONTAINERS else vitals()
            # A used sandbox may not be gone while its successor is not there yet, and the sum be right all the same.
            calm = calm + 1 if is_calm(runtime, now, expected) else 0
    return now


def is_calm(runtime: Runtime, now: dict[str, int], expected: dict[str, int]) -> bool:
    has_closed = now["descriptors"] <= expected.get("descriptors", now["descriptors"])
    if not IN_CONTAINERS:
        return has_closed and now["processes"] == LAUNCHER_AND_ZYGOTE + WARM
    if not expected:
        return runtime.pool is not None and len(runtime.pool.idle) == WARM
    # A successor that is still being made is not waited for; a used one that is still there is.
    return has_closed and all(now[name] <= expected[name] for name in ("containers", "processes"))


async def vitals_of_all() -> dict[str, int]:
    """With what is in containers."""
    inits = await anyio.to_thread.run_sync(CONTAINERS.inits)
    inside = sum(1 + len(below(pid)) for pid in inits.values() if pid)
    now = vitals()
    return {**now, "containers": len(inits), "processes": now["processes"] + inside}


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
        backend=backend(options),
        pool=PoolConfig(warm=WARM),
        policy=policy(options),
        packages=options.get("packages", ()),
        preload=options.get("preload", ()),
        record=options.get("record"),
    ) as runtime:
        await runtime.execute_code("call_tool('echo', {'text': 'warm'})")
        write(answers, "ready")
        while (request := await anyio.to_thread.run_sync(read, requests, abandon_on_cancel=True)) is not None:
            match request["op"]:
                case "run":
                    write(answers, await run(runtime, host, request["runs"]))
                case "settle":
                    write(answers, await settle(runtime, request["expected"]))
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
