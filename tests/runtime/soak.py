"""Many runs in one process: descriptors, memory, threads, processes, mounts, cgroups and temporary files stay flat.

Run as a script for the long version: `python tests/runtime/soak.py --runs 100000`. The short one is test_soak.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import psutil

from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry

SCRIPTS = (
    ("set_result(call_tool('echo', q=1))", Outcome.OK),
    ("print('x' * 1000)\nopen('f', 'w').write('y' * 1000)\nset_result(1, files=['f'])", Outcome.OK),
    ("call_tools_parallel([('echo', {'q': i}) for i in range(5)])", Outcome.OK),
    ("1 / 0", Outcome.ERROR),
    ("import os\nos._exit(3)", Outcome.KILLED),
    ("import os\nif os.fork() == 0:\n    import time; time.sleep(60)\nset_result(2)", Outcome.OK),
    ("import threading\nthreading.Thread(target=lambda: None).start()\nset_result(3)", Outcome.OK),
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process and its children hold."""

    descriptors: int
    resident_mib: float
    threads: int
    processes: int
    mounts: int
    cgroups: int
    temporary: int


def count_mounts() -> int:
    """Without those that engines make for themselves, this machine's and one that another test starts."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return len([line for line in lines if "docker" not in line and "toolcell-daemon-" not in line])


def count_cgroups() -> int:
    """Cgroups below this process's own folders; counted again when others changed the tree meanwhile."""
    while True:
        try:
            return sum(
                1 for base in Path("/sys/fs/cgroup").glob("*") for _ in base.rglob(f"toolcell-{os.getpid()}-*/*/")
            )
        except OSError:
            continue


def measure() -> Footprint:
    gc.collect()
    me = psutil.Process()
    return Footprint(
        descriptors=len(os.listdir("/proc/self/fd")),
        resident_mib=round(me.memory_info().rss / (1 << 20), 1),
        threads=threading.active_count(),
        processes=len(me.children(recursive=True)),
        mounts=count_mounts(),
        cgroups=count_cgroups(),
        temporary=len(os.listdir(tempfile.gettempdir())),
    )


async def soak(runs: int, at_once: int = 4, report: Callable[[str], None] = lambda text: None) -> list[Footprint]:
    """Run so many scripts and measure ten times on the way, always with an idle runtime."""
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: int) -> int:
        """Return the argument unchanged."""
        return q

    with tempfile.TemporaryDirectory() as own:  # the machine's own belongs to everybody
        tempfile.tempdir = own
        try:
            return await _soak(registry, runs, at_once, report)
        finally:
            tempfile.tempdir = None


async def _soak(registry: ToolRegistry, runs: int, at_once: int, report: Callable[[str], None]) -> list[Footprint]:
    footprints: list[Footprint] = []
    done = 0
    async with Runtime(registry, pool=PoolConfig(warm=2, cap=8), limits=Limits(wall_s=20)) as runtime:

        async def some(count: int) -> None:
            nonlocal done
            for _ in range(count):
                done += 1
                script, expected = SCRIPTS[done % len(SCRIPTS)]
                result = await runtime.execute_code(script)
                assert result.outcome is expected, (script, result.outcome, result.error)

        began = time.perf_counter()
        for _ in range(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(at_once):
                    tasks.start_soon(some, runs // 10 // at_once)
            with anyio.fail_after(60):
                while repr(runtime.pool) != "<Pool idle=2 busy=0 starting=0 cap=8>":
                    await anyio.sleep(0.01)
            footprints.append(measure())
            report(f"{done:>7} runs, {done / (time.perf_counter() - began):.0f}/s: {asdict(footprints[-1])}")
    return footprints


def grown(footprints: list[Footprint], memory_mib: float) -> list[str]:
    """Names of what the last three tenths have more of, each of them, than any of the first three: a leak goes on.

    One measurement alone may see a look of the watching thread, with its open file.
    """
    first, last = ([asdict(each) for each in part] for part in (footprints[:3], footprints[-3:]))
    allowed = {"resident_mib": memory_mib, "temporary": 3, "threads": 2}
    return [
        name
        for name in first[0]
        if min(each[name] for each in last) > max(each[name] for each in first) + allowed.get(name, 0)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    arguments = parser.parse_args()
    result = anyio.run(lambda: soak(arguments.runs, report=lambda text: print(text, flush=True)))
    bad = grown(result, memory_mib=8)
    print("grown:", bad or "nothing")
    sys.exit(bool(bad))
