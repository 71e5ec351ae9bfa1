"""A server on the official SDK, for the tests of the client: `python honest_server.py` or `... PORT`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import anyio
from mcp.server.elicitation import ElicitationResult
from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve
from mcp.server.mcpserver.utilities.types import Image
from mcp_types import ToolAnnotations
from pydantic import BaseModel

server = MCPServer("honest", log_level="ERROR")


class Weather(BaseModel):
    """What the sky does."""

    place: str
    celsius: float


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def weather(place: str, celsius: float = 20.5) -> Weather:
    """Return the weather of a place."""
    return Weather(place=place, celsius=celsius)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(annotations=ToolAnnotations(destructive_hint=True))
def delete_all() -> str:
    """Delete what there is."""
    return "deleted"


@server.tool(structured_output=False)
def hello(name: str) -> str:
    """Greet somebody."""
    return f"hello {name}"


@server.tool(structured_output=False)
def picture() -> Image:
    """Draw a picture."""
    return Image(data=b"\x89PNG\r\n\x1a\n...", format="png")


@server.tool(structured_output=False)
def album() -> list[Any]:
    """Draw a picture with a caption."""
    return ["a caption", Image(data=b"\x89PNG\r\n\x1a\n...", format="png")]


@server.tool()
def fail(text: str) -> str:
    """Fail with these words."""
    raise ValueError(text)


@server.tool(structured_output=False)
def environment(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "")


@server.tool(structured_output=False)
def pid() -> str:
    """Return the number of the server's process."""
    return str(os.getpid())


@server.tool(structured_output=False)
def header(name: str, ctx: Context[Any, Any]) -> str:
    """Return a header of the request."""
    return str((ctx.headers or {}).get(name, ""))


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool(structured_output=False)
async def wait(ctx: Context[Any, Any]) -> str:
    """Report progress, and wait until the call is cancelled."""
    await ctx.report_progress(1, 2, "half way")
    await anyio.sleep_forever()
    return ""


class Answer(BaseModel):
    """What a person says."""

    name: str


async def who() -> Elicit[Answer]:
    """Ask for a name, in the way of the protocol that the client speaks."""
    return Elicit("who are you?", Answer)


@server.tool(structured_output=False)
async def ask(answer: Annotated[ElicitationResult[Answer], Resolve(who)]) -> str:
    """Ask the user for a name."""
    return f"{answer.action} {getattr(answer, 'data', None)}"


def late() -> str:
    """Answer, although it was not there at first."""
    return "late"


@server.tool(structured_output=False)
async def grow(ctx: Context[Any, Any]) -> str:
    """Add a tool and say so."""
    server.add_tool(late, structured_output=False)
    server.remove_tool("hello")
    await ctx.notify_tools_changed()
    return "grown"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
