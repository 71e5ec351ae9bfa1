"""The nodes of a Ray cluster, for `toolcell doctor --ray`: which of them start sandboxes, and why others do not."""

from __future__ import annotations

from typing import Any

import anyio

from toolcell.cli.terminal import safe, stdout
from toolcell.config import Policy
from toolcell.errors import SandboxUnavailable


def examine(address: str, require: frozenset[str]) -> dict[str, Any]:
    """Start an actor on each node, and end it. Shape: {"ok", "problem", "nodes": [{"name", "live", "problem"}]}.

    Raises:
        MissingPackage: Ray is not installed.
    """
    return anyio.run(_examine, address, require)


async def _examine(address: str, require: frozenset[str]) -> dict[str, Any]:
    from toolcell.sandbox.ray import RayBackend

    backend = RayBackend(address, policy=Policy(require=require))  # type: ignore[arg-type]  # names of layers
    problem = ""
    try:
        await backend.open()
        usable = list(backend.nodes)
    except SandboxUnavailable as exc:
        problem, usable = str(exc), []
    finally:
        await backend.close()
    nodes = [{"name": name, "live": True, "problem": ""} for name in usable]
    nodes += [{"name": name, "live": False, "problem": why} for name, why in backend.unusable.items()]
    return {"ok": not problem, "problem": problem, "nodes": nodes}


def show(found: dict[str, Any]) -> None:
    """Print what was found."""
    for node in found["nodes"]:
        said = "starts sandboxes" if node["live"] else f"is not used: {node['problem']}"
        stdout().print(safe(f"{node['name']:32} {said}"), soft_wrap=True)
    count = sum(node["live"] for node in found["nodes"])
    said = f"{count} of {len(found['nodes'])} nodes start sandboxes" if found["nodes"] else found["problem"]
    stdout().print(safe(said), soft_wrap=True)
