"""A script runs while a model still writes it: most of its slow calls are over when the last token comes."""

import json
import time

import anyio

from toolcell import ArgumentText, Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool(read_only=True)
async def read_page(number: int) -> str:
    """Read one page of a slow archive."""
    await anyio.sleep(0.2)
    return f"page {number}"


SCRIPT = "".join(f"p{n} = tools.read_page(number={n})\n" for n in range(1, 6)) + "[p1, p2, p3, p4, p5]"


async def main() -> None:
    arguments = json.dumps({"code": SCRIPT})
    async with Runtime(registry) as runtime, runtime.feed(speculate=True) as run:
        code = ArgumentText("code")
        for at in range(0, len(arguments), 4):  # as a provider streams them: about 50 tokens a second
            await anyio.sleep(0.02)
            await run.write(code.feed(arguments[at : at + 4]))
        last_token = time.perf_counter()
        result = await run.finish()
    print(result.value)
    print(
        f"{(time.perf_counter() - last_token) * 1000:.0f} ms after the last token, {result.eager.saved_s:.1f} s saved"
    )
    print(f"{result.eager.early_calls} early calls, {result.eager.hits} used, {result.eager.wasted} wasted")


anyio.run(main)
