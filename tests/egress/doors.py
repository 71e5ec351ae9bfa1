"""Requests of a script without its sandbox: what a guest could send by itself is sent to the tools of an `Egress`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from toolcell import Limits, RunContext, ToolRegistry, ToolResult
from toolcell.calls.options import Origin
from toolcell.calls.uploads import OpenRequests
from toolcell.egress import Allow, Egress

TOKEN = "tok-51fa0c9d7e/+Z"

SEND = """
def send(url, method="GET", headers=(), body=b"", **more):
    try:
        return call_tool("http", method=method, url=url, headers=[*headers], body=body, **more)
    except ToolError as exc:
        return {"failed": exc.code, "message": str(exc)}
"""
"""The beginning of scripts that send requests without a library."""


class Door:
    """One run that sends requests."""

    def __init__(self, registry: ToolRegistry) -> None:
        self.registry = registry
        self.requests = OpenRequests(64 << 20)
        self.context = RunContext(run_id="run").within(requests=self.requests)

    async def call(self, name: str, args: dict[str, Any], origin: Origin = Origin.CODE) -> ToolResult:
        return await self.registry.dispatch(name, args, origin=origin, context=self.context)

    async def send(
        self, url: str, method: str = "GET", headers: list[list[str]] | None = None, body: bytes = b"", **more: Any
    ) -> ToolResult:
        args = {"method": method, "url": url, "headers": headers or [], "body": body, **more}
        return await self.call("http", args)

    def upload(self, body: bytes) -> dict[str, Any]:
        """Send a body ahead; return the arguments that stand for it."""
        name = None
        for start in range(0, len(body), 200_000):
            name = self.requests.uploads.add(name, body[start : start + 200_000])
        return {**self.requests.uploads.whole(self.requests.uploads.taken({"upload": name}))}


@asynccontextmanager
async def door(*rules: Allow, limits: Limits | None = None, **options: Any) -> AsyncIterator[Door]:
    """Open the tools of an `Egress` for one run."""
    egress = Egress(*rules, **options)
    tools = egress.tools_for(limits or Limits())
    made = Door(ToolRegistry().with_tools(tools.tools))
    try:
        async with made.requests.until_end():
            yield made
    finally:
        await tools.aclose()


def code_of(result: ToolResult) -> str:
    return str(result.error.code) if result.error is not None else "sent"
