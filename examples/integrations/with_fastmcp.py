"""FastMCP's CodeMode in toolcell's sandboxes. The client stands for a model: it searches, then runs one script.

pip install '.[fastmcp]'
"""

import asyncio

from fastmcp import Client, FastMCP
from fastmcp.experimental.transforms.code_mode import CodeMode

from toolcell import Limits
from toolcell.integrations.fastmcp import ToolcellSandboxProvider

provider = ToolcellSandboxProvider(limits=Limits(wall_s=30))
mcp = FastMCP("shop", lifespan=provider.lifespan, transforms=[CodeMode(sandbox_provider=provider)])


@mcp.tool
def items() -> list[str]:
    """List what is for sale."""
    return ["apple", "pear", "plum"]


@mcp.tool
def price(item: str) -> float:
    """Return what an item costs."""
    return {"apple": 0.5, "pear": 0.75, "plum": 2.25}[item]


SCRIPT = """
import asyncio

names = (await call_tool("items", {}))["result"]
prices = await asyncio.gather(*(call_tool("price", {"item": name}) for name in names))
return {"items": len(names), "total": sum(each["result"] for each in prices)}
"""


async def main() -> None:
    async with Client(mcp) as client:
        print("tools that the model sees:", [tool.name for tool in await client.list_tools()])
        print((await client.call_tool("search", {"query": "what things cost"})).data)
        print((await client.call_tool("execute", {"code": SCRIPT})).data)


asyncio.run(main())
