"""`RayCluster`: everything that is asked of Ray. Its calls block, so they are made in threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from toolcell.errors import SandboxUnavailable, ToolcellError
from toolcell.sandbox.node.server import NodeAddress, NodeServer, NodeSettings

# `NodeActor`: the process of one node, as Ray starts it. It ends with its caller, and its sandboxes with it.


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


OPEN_S: Final = 300.0
"""How long the actors may take to start: packages are installed once on each node."""

CLOSE_S: Final = 30.0
CONNECT_S: Final = 10.0
HEAD_S: Final = 2.0

Started = tuple[str, str, Any, str, bool, NodeAddress]
"""Id and name of a node, its actor, what is wrong, whether that may pass, where it listens."""


class RayCluster:
    """The connection with one cluster, and the actors on its nodes."""

    def __init__(self, address: str | None, resources: Mapping[str, float], settings: NodeSettings) -> None:
        self._address, self._resources, self._settings = address, dict(resources), settings
        self._is_ours = False
        """This connected, so this disconnects."""
        self._actors: set[Any] = set()
        self._is_closed = False
        self._changing = threading.Lock()
        """Held while an actor is made: a start that nobody waits for any more makes none after `close`."""

    def connect(self) -> None:
        """Connect, unless this process is connected.

        Raises:
            ImportError: Ray is not installed.
            SandboxUnavailable: there is no cluster.
        """
        import ray

        self._is_closed = False
        if ray.is_initialized():
            return
        self._check_address()
        try:
            ray.init(address=self._address or "auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as exc:
            where = self._address or "auto"
            raise SandboxUnavailable(
                f"no Ray cluster answers at {where}: {exc}. `ray status` has to work here; the cluster's "
                "token (RAY_AUTH_TOKEN, or ~/.ray/auth_token) has to be known here too, if it has one"
            ) from exc
        self._is_ours = True

    def _check_address(self) -> None:
        """Ray itself looks for minutes for a cluster that is not there."""
        host, _, port = (self._address or "").rpartition(":")
        if "/" in host or not (host and port.isdecimal()):  # found by Ray, or of its client
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as exc:
            raise SandboxUnavailable(f"no Ray cluster answers at {self._address}: {exc}") from exc

    def alive(self) -> dict[str, str]:
        """Return the nodes that Ray takes for alive: id to name."""
        import ray

        found = [each for each in ray.nodes() if each["Alive"]]
        return {each["NodeID"]: f"{each['NodeManagerAddress']}/{each['NodeID'][:8]}" for each in found}

    def lacking(self, nodes: Mapping[str, str]) -> dict[str, str]:
        """Return the nodes that do not have the wanted resources: name to reason. No actor could ever start there."""
        import ray

        found = {}
        for each in ray.nodes():
            missing = [name for name, amount in self._resources.items() if each["Resources"].get(name, 0) < amount]
            if each["NodeID"] in nodes and missing:
                found[nodes[each["NodeID"]]] = f"it does not have the resources: {', '.join(missing)}"
        return found

    def start(self, nodes: Mapping[str, str]) -> list[Started]:
        """Start an actor on each of these nodes, and wait until each listens or says what is wrong."""
        import ray

        began = []
        for ident, name in nodes.items():
            actor = self._actor(ident)
            began.append((ident, name, actor, actor.open.remote(self._settings)))
        done = []
        for ident, name, actor, opened in began:
            may_pass = False
            try:
                problem, address = ray.get(opened, timeout=OPEN_S)
            except Exception as exc:  # the actor was killed, or its node is gone, and Ray has not noticed that yet
                problem, address, may_pass = f"{type(exc).__name__}: {exc}".splitlines()[0], None, True
            if problem:
                self.kill(actor)
            done.append((ident, name, actor, problem, may_pass, address))
        return done

    def _actor(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._changing:
            if self._is_closed:
                raise SandboxUnavailable("the Ray backend is closed")
            options = {
                "num_cpus": 0,
                "resources": self._resources,
                "max_restarts": 0,
                "max_concurrency": 2,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            actor = ray.remote(NodeActor).options(**options).remote()
            self._actors.add(actor)
            return actor

    def kill(self, actor: Any) -> None:
        """End an actor at once. Its sandboxes die with it."""
        import ray

        self._actors.discard(actor)
        with suppress(Exception):
            ray.kill(actor)

    def _has_head(self) -> bool:
        """Return whether the head of the cluster takes connections."""
        import ray

        try:
            host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), HEAD_S).close()
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """End the actors in order, and disconnect if this connected. Without the head, Ray ends the actors itself."""
        import ray

        with self._changing:
            self._is_closed, actors = True, list(self._actors)
        if not self._has_head():  # every call would wait for it, until Ray ends this process
            self._actors.clear()
            actors = []
        closed = [actor.close.remote() for actor in actors]
        if closed:
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_S)
        for actor in actors:
            self.kill(actor)
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()
