"""A client for the conformance suite: adds the server at a URL and calls all of its tools."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import anyio

from toolcell.tools import ToolRegistry

ARGS = {"c.add_numbers": {"a": 1, "b": 2}}


def accept(message: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Accept with nothing filled in: the form's defaults hold."""
    return {}


async def main(url: str) -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("c", url=url, elicitation=accept, approve="none", timeout_s=60)
    for name in registry.list():
        result = await registry.dispatch(name, ARGS.get(name, {}))
        assert not result.is_error, result.text
    await registry.close()


if __name__ == "__main__":
    anyio.run(main, sys.argv[-1])
