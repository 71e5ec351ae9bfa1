"""`python -m benchmarks.count_modules`: count the modules that one run with one tool call loads and enters in the host.

Loaded: our modules in a fresh interpreter after the run, with their lines. Entered: the modules and functions of the
host package in which the run is, from the call of `execute_code` to its result; the pool's own work is left out, and
so is what a run enters only now and then. `--list` prints their names.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import anyio

from benchmarks.count_calls import full, registry
from toolcell import PoolConfig, Runtime

SCRIPT = "set_result(call_tool('add', a=1, b=2))"
ROUNDS = 5

LOADED = """
import sys, anyio
from benchmarks.count_modules import once
anyio.run(once)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in ("toolcell", "toolcell_bridge"):
        print(name, module.__file__)
"""


async def once() -> None:
    """Run the script once, in a runtime of its own."""
    async with Runtime(registry(), pool=PoolConfig(warm=1)) as runtime:
        result = await runtime.execute_code(SCRIPT)
        assert result.ok, result.error


def loaded() -> dict[str, int]:
    """Return the modules that one run loads, with their lines."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        name, _, path = line.partition(" ")
        found[name] = Path(path).read_text(encoding="utf-8").count("\n")
    return found


@contextmanager
def entries() -> Iterator[set[tuple[str, str]]]:
    """Note the functions of the host package that are entered inside the block."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        parts = Path(frame.f_code.co_filename).with_suffix("").parts
        if event == "call" and "toolcell" in parts and not _is_of_the_pool():
            home = len(parts) - 1 - parts[::-1].index("toolcell")
            found.add((".".join(parts[home:]), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _is_of_the_pool() -> bool:
    task = asyncio.current_task()
    return task is not None and ".Pool." in task.get_name()


async def entered() -> set[tuple[str, str]]:
    """Return the modules and functions that every one of a few runs has entered."""
    runs = []
    async with Runtime(registry(), pool=PoolConfig(warm=2)) as runtime:
        for _ in range(ROUNDS + 1):
            await full(runtime)
            with entries() as found:
                result = await runtime.execute_code(SCRIPT)
            assert result.ok, result.error
            runs.append(found)
    return set.intersection(*runs[1:])


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names, too")
    options = parser.parse_args()
    modules, functions = loaded(), anyio.run(entered)
    print(f"loaded:  {len(modules)} modules, {sum(modules.values())} lines")
    print(f"entered: {len({module for module, _ in functions})} modules, {len(functions)} functions")
    if options.list:
        print(*sorted(modules), sep="\n")
        print()
        print(*(f"{module}:{function}" for module, function in sorted(functions)), sep="\n")


if __name__ == "__main__":
    main()
