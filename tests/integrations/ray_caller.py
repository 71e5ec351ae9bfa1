"""A caller that has scripts on every node, and then waits until somebody kills it. `ray_caller.py ADDRESS`."""

from __future__ import annotations

import sys

import anyio

from toolcell import PoolConfig, Runtime
from toolcell.sandbox.ray.backend import RayBackend

RUNS = 6


async def main() -> None:
    async with (
        Runtime(backend=RayBackend(sys.argv[1]), pool=PoolConfig(warm=3)) as runtime,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(RUNS):
            tasks.start_soon(lambda: runtime.execute_code("print('on')\nimport time\ntime.sleep(300)", on_log=say))


def say(stream: str, text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    anyio.run(main)
