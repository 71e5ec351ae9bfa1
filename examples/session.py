"""A session: three scripts share names, imports and files, as the cells of a notebook do.

A script that takes too long is interrupted, and the next one still finds everything.
"""

import anyio

from toolcell import Limits, Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool
async def orders(customer: int) -> list[dict[str, float]]:
    """Return the orders of a customer."""
    return [{"customer": customer, "euros": euros} for euros in (12.5, 80.0, 7.5)]


async def main() -> None:
    async with Runtime(registry) as runtime, runtime.session("customer-42") as session:
        await session.execute_code("import statistics\nrows = call_tool('orders', customer=42)")
        await session.execute_code("def euros():\n    return [row['euros'] for row in rows]")
        result = await session.execute_code("statistics.mean(euros())")
        print("mean:", result.value)

        late = await session.execute_code("while True: pass", limits=Limits(wall_s=0.2))
        print(late.outcome, "- lost:", bool(late.session and late.session.lost))
        result = await session.execute_code("len(rows)")
        print("rows:", result.value)


anyio.run(main)
