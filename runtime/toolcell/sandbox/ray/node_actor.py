"""`NodeActor`: the process of one node, as Ray starts it. It ends with its caller, and its sandboxes with it."""

from __future__ import annotations

from typing import Any

from toolcell.errors import ToolcellError
from toolcell.sandbox.node.server import NodeServer, NodeSettings


class NodeActor:
    """A `NodeServer` as a Ray actor."""

    def __init__(self) -> None:
        self._server: NodeServer | None = None

    def open(self, settings: NodeSettings) -> tuple[str, Any]:
        """Start to listen. Shape: ("", the address), or (what is wrong, None): an exception would name Ray's lines."""
        import ray

        self._server = NodeServer(ray.util.get_node_ip_address(), settings)
        try:
            return "", self._server.start()
        except (ToolcellError, OSError) as exc:
            return str(exc) or type(exc).__name__, None

    def close(self) -> None:
        """End every sandbox."""
        if self._server is not None:
            self._server.stop()
