"""A script that is saved by name: other scripts, plans and models call it like any tool.

The second version has another source; the first one stays callable.
"""

import anyio

from toolcell import Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool(read_only=True)
def orders(since: str) -> list[dict[str, float]]:
    """List the orders since a day."""
    return [{"id": 1, "euros": 20.0}, {"id": 2, "euros": 5.0}, {"id": 3, "euros": 80.0}]


INPUTS = {
    "type": "object",
    "properties": {"since": {"type": "string"}, "least": {"type": "number", "default": 10}},
    "required": ["since"],
}
ABOUT = "Return the ids of large orders since a day."


async def main() -> None:
    source = "[row['id'] for row in tools.orders(since=since) if row['euros'] >= least]"
    registry.save_script("big_orders", source, inputs=INPUTS, description=ABOUT)
    sum_up = "sum(row['euros'] for row in tools.orders(since=since) if row['euros'] >= least)"
    latest = registry.save_script("big_orders", sum_up, inputs=INPUTS, description="Sum up large orders since a day.")
    print("version", latest.version)

    async with Runtime(registry) as runtime:
        result = await runtime.execute_code("tools.big_orders(since='2026-01-01', least=50)")
        print("sum of large orders:", result.value)
        result = await runtime.execute_code("tools.big_orders_v1(since='2026-01-01')")
        print("their ids:", result.value)


anyio.run(main)
