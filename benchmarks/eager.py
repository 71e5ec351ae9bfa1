"""Time from a model's last token to the result: a script of ten slow reads, streamed at 50 tokens a second.

python -m benchmarks.eager
"""

from __future__ import annotations

import time

import anyio

from toolcell import Limits, Runtime, ToolRegistry

READS, READ_S, TOKEN_S, TOKEN_CHARS = 10, 0.3, 0.02, 4

SCRIPT = "".join(f"p{n} = tools.read_page(number={n})\n" for n in range(READS)) + "[p0, p9]"

registry = ToolRegistry()


@registry.tool(read_only=True)
async def read_page(number: int) -> str:
    """Read one page of a slow archive."""
    await anyio.sleep(READ_S)
    return f"page {number}"


async def whole(runtime: Runtime) -> float:
    """Run the script when it is whole."""
    started = time.perf_counter()
    await runtime.execute_code(SCRIPT)
    return time.perf_counter() - started


async def fed(runtime: Runtime, *, speculate: bool) -> float:
    """Run the script while it is streamed."""
    async with runtime.feed(speculate=speculate) as run:
        for at in range(0, len(SCRIPT), TOKEN_CHARS):
            await anyio.sleep(TOKEN_S)
            await run.write(SCRIPT[at : at + TOKEN_CHARS])
        last_token = time.perf_counter()
        await run.finish()
    return time.perf_counter() - last_token


async def main() -> None:
    """Print one line for each way to run it."""
    async with Runtime(registry, limits=Limits(concurrent_calls=READS)) as runtime:
        print(f"execute_code            {await whole(runtime):.2f} s")
        print(f"feed                    {await fed(runtime, speculate=False):.2f} s")
        print(f"feed, speculate=True    {await fed(runtime, speculate=True):.2f} s")


if __name__ == "__main__":
    anyio.run(main)
