"""Shows a service with sandboxes, and a client that keeps its tools: scripts run there, and their calls are made here.

The service stands in for one that `toolcell serve` runs on another machine. Needs
`pip install '.[service]'`.
"""

import asyncio
import tempfile
from pathlib import Path

import uvicorn

from toolcell import ToolRegistry
from toolcell.service import Client, ServiceConfig, create_app
from toolcell.support.asgi import HttpServer, listening, url_of

registry = ToolRegistry()
STOCK = {"apple": 3, "pear": 0}


@registry.tool
def in_stock(fruit: str) -> int:
    """Return how many pieces of a fruit are in stock."""
    return STOCK[fruit]  # what is here stays here: the script gets the number


SCRIPT = """
found = {fruit: call_tool('in_stock', fruit=fruit) for fruit in fruits}
print('looked at', len(found), 'kinds')
set_result([fruit for fruit, pieces in found.items() if pieces])
"""


async def main() -> None:
    listener = listening("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as state:
        app = create_app(ServiceConfig(state=Path(state) / "service"))
        server = HttpServer(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        async with Client(url_of(listener), registry=registry) as client:
            result = await client.execute_code(SCRIPT, inputs={"fruits": ["apple", "pear"]})
            async with client.session() as session:
                await session.execute_code("x = 40")
                answer = await session.execute_code("x + 2")
        server.should_exit = True
        await serving
    print(result.outcome, result.value, result.logs.text.strip(), [call.name for call in result.calls])
    print("in a session:", answer.value)


asyncio.run(main())
