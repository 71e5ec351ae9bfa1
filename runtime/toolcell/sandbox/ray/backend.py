"""`RayBackend`: sandboxes on the nodes of a Ray cluster. Ray schedules the nodes' actors and notices dead nodes.

Ray carries no byte of a sandbox. Each sandbox has a connection of its own to its node; the key that both ends prove is
passed through Ray.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, ClassVar, Final, Literal

import anyio
import msgpack
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy, names_of
from toolcell.errors import MissingPackage, SandboxUnavailable, ToolcellError, UsageError
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.docker.hardening import GUEST_LAYERS, required_layers
from toolcell.sandbox.node.sandbox import NodeSandbox, Placement
from toolcell.sandbox.node.server import NodeAddress, NodeServer, NodeSettings
from toolcell.sandbox.node.stream import NodeStream, WrongKey, start
from toolcell.support import daemon_threads, event_loop
from toolcell.support.checks import check_count, check_kind
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.log import logger_of

logger = logger_of("toolcell.ray")

WATCH_S: Final = 2.0
"""How often Ray is asked which nodes there are."""

AGAIN_S: Final = 5.0
"""After how long a node is tried again whose actor did not start."""

TRIES: Final = 3
"""Nodes that are tried for one sandbox."""

AVOIDED_S: Final = 10.0
"""How long a node that could not start a sandbox is used only if there is no other: it has the most free places."""


@dataclass(slots=True)
class RayNode:
    """A node of the cluster on which sandboxes can start."""

    id: str
    name: str
    address: NodeAddress
    actor: Any
    busy: int = 0
    is_lost: bool = False
    avoided_until: float = -math.inf
    """In the time of the event loop."""


class RayBackend(Backend):
    """Starts sandboxes on the nodes of a cluster."""

    name: ClassVar[str] = "ray"
    isolates: ClassVar[bool] = True
    descriptors_per_sandbox: ClassVar[int] = 1

    def __init__(
        self,
        address: str | None = None,
        *,
        sandboxes_per_node: int = 64,
        packages: Sequence[str] = (),
        preload: Sequence[str] = (),
        policy: Policy | None = None,
        resources: Mapping[str, float] | None = None,
        tls: bool = False,
        sandboxes: Literal["process", "docker"] = "process",
        image: str | None = None,
    ) -> None:
        """`address`: of the cluster, as `ray.init` takes it; a program that is connected with one already needs none.
        `resources`: what an actor, one for each node, takes of its node; a node that has not got it is not used.
        `tls`: encrypt the connections to the nodes, with TLS 1.3 and a certificate that each node makes.
        `sandboxes`: "docker" makes each sandbox a container of its node's engine, of `image`, as `DockerBackend` does.

        Raises:
            UsageError: an argument is of another kind.
        """
        check_count("sandboxes_per_node=", sandboxes_per_node, 1)
        check_kind("address=", address, str, NoneType)
        check_kind("policy=", policy, Policy, NoneType)
        check_kind("resources=", resources, Mapping, NoneType)
        check_kind("tls=", tls, bool)
        self.policy: Policy = policy or Policy()
        if self.policy.profile != "full":
            raise UsageError('profile="container" is not built for nodes; use the full profile')
        if sandboxes not in ("process", "docker"):
            raise UsageError(f'sandboxes must be "process" or "docker", not {sandboxes!r}')
        if image is not None and sandboxes != "docker":
            raise UsageError('image= is what containers are made of; it goes with sandboxes="docker"')
        self._is_docker = sandboxes == "docker"
        self._required = required_layers(self.policy, None) if self._is_docker else self.policy.require
        self.packages, self.preload = tuple(names_of(packages, "packages")), tuple(names_of(preload, "preload"))
        fields = self.policy.model_dump(exclude_unset=True)
        settings = NodeSettings(fields, self.packages, self.preload, bool(tls), sandboxes, image)
        self._cluster = RayCluster(address, dict(resources or {}), settings)
        self._slots = sandboxes_per_node
        self._nodes: dict[str, RayNode] = {}
        self.unusable: dict[str, str] = {}
        """Nodes on which no sandbox can start, with the reason."""
        self._starting: set[str] = set()
        """Ids of nodes whose actors start."""
        self._again_at: dict[str, float] = {}
        """When to try a node again whose actor failed for a reason that may pass: it was killed as it began."""
        self._count = itertools.count(1)
        self._tasks: TaskGroup | None = None
        self._freed = ChangeEvent()

    @property
    def fixed(self) -> frozenset[str]:
        """Limits that cannot change after a sandbox was started: a run with other values gets a new one."""
        return frozenset({"open_files"}) if self._is_docker else frozenset()

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Limits that a node cannot hold, with the reason."""
        return {name: why for node in self._nodes.values() for name, why in node.address.unsupported.items()}

    @property
    def nodes(self) -> Mapping[str, int]:
        """Nodes on which sandboxes can start, and how many of this Runtime's are there."""
        return {node.name: node.busy for node in self._nodes.values()}

    async def open(self) -> None:
        """Start an actor on each node, and wait for them.

        Raises:
            SandboxUnavailable: there is no cluster, or no node that can start sandboxes; names each with its reason.
            MissingPackage: Ray is not installed.
        """
        try:
            await daemon_threads.run_sync(self._cluster.connect)
        except ImportError as exc:
            raise MissingPackage("the Ray backend needs Ray: pip install 'toolcell[ray]'") from exc
        try:
            await self._look()
            if not self._nodes:
                found = "; ".join(f"{name}: {why}" for name, why in self.unusable.items()) or "the cluster has no node"
                raise SandboxUnavailable(f"no node of the Ray cluster can start sandboxes: {found}")
        except BaseException:
            await self._disconnect()
            raise
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._watch)

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(WATCH_S)
            try:
                await self._look()
            except Exception as exc:  # the head restarts: what runs goes on, and the next look may succeed
                logger.warning("the nodes of the Ray cluster are not known just now: %s", exc)

    async def _look(self) -> None:
        """Use new nodes, and forget those that are gone or were lost."""
        alive = await daemon_threads.run_sync(self._cluster.alive, abandon_on_cancel=True)
        for ident in [each.id for each in self._nodes.values() if each.is_lost or each.id not in alive]:
            node = self._nodes.pop(ident)
            await daemon_threads.run_sync(self._cluster.kill, node.actor, abandon_on_cancel=True)
        self.unusable = {name: why for name, why in self.unusable.items() if name in alive.values()}
        self._again_at = {ident: at for ident, at in self._again_at.items() if ident in alive}
        new = {
            ident: name for ident, name in alive.items() if ident not in self._nodes and self._may_start(ident, name)
        }
        lacking = await daemon_threads.run_sync(self._cluster.lacking, new, abandon_on_cancel=True)
        self.unusable |= lacking
        new = {ident: name for ident, name in new.items() if name not in lacking}
        if self._tasks is None:
            await self._start_actors(new)
        else:
            for ident, name in new.items():  # each by itself: one that hangs holds up no other
                self._tasks.start_soon(self._start_later, {ident: name})
        self._freed.notify()

    def _may_start(self, ident: str, name: str) -> bool:
        if ident in self._starting:
            return False
        again_at = self._again_at.get(ident)
        return name not in self.unusable if again_at is None else anyio.current_time() >= again_at

    async def _start_later(self, nodes: Mapping[str, str]) -> None:
        try:
            await self._start_actors(nodes)
        except Exception as exc:
            logger.warning("no actor could be started on %s: %s", ", ".join(nodes.values()), exc)

    async def _start_actors(self, nodes: Mapping[str, str]) -> None:
        """Start an actor on each node, and wait for all of them."""
        self._starting |= nodes.keys()
        try:
            started = await daemon_threads.run_sync(self._cluster.start, nodes, abandon_on_cancel=True)
        finally:
            self._starting -= nodes.keys()
        for ident, name, actor, problem, may_pass, address in started:
            if not problem:
                self._nodes[ident] = RayNode(ident, name, address, actor)
                self.unusable.pop(name, None)
                self._again_at.pop(ident, None)
                continue
            self.unusable[name] = problem
            logger.warning("node %s is not used: %s", name, problem)
            if may_pass:
                self._again_at[ident] = anyio.current_time() + AGAIN_S
        self._freed.notify()

    async def start(self, limits: Limits) -> NodeSandbox:
        """Start a sandbox on the node with the most free places; wait for a place while there is none.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        packed, problems = msgpack.packb(limits.model_dump()), dict[str, str]()
        while len(problems) < TRIES:
            node = await self._place(problems)
            if node is None:
                break
            try:
                return await self._start_on(node, packed, limits)
            except (ConnectionRefusedError, WrongKey) as exc:  # its actor is gone
                node.is_lost = True
                problems[node.name] = f"it could not be reached: {exc}"
            except (OSError, SandboxUnavailable) as exc:  # it may be busy, or this process out of descriptors
                node.avoided_until = anyio.current_time() + AVOIDED_S
                is_away = isinstance(exc, OSError)
                problems[node.name] = f"{'it could not be reached: ' * is_away}{str(exc) or type(exc).__name__}"
        said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise SandboxUnavailable(f"no node of the Ray cluster started a sandbox; {said}")

    async def _place(self, tried: Collection[str]) -> RayNode | None:
        """Return the node with the most free places; wait for one. None when all that are left were tried.

        Raises:
            SandboxUnavailable: there is no node.
        """
        while True:
            if self._tasks is None:
                raise SandboxUnavailable("the Ray backend is not open")
            usable = [node for node in self._nodes.values() if not node.is_lost and node.name not in tried]
            if not usable:
                if tried:
                    return None
                raise SandboxUnavailable("no node of the Ray cluster is left that can start sandboxes")
            now = anyio.current_time()
            best = min(usable, key=lambda node: (node.avoided_until > now, node.busy))
            if best.busy < self._slots:
                return best
            await self._freed.wait()

    async def _start_on(self, node: RayNode, packed: bytes, limits: Limits) -> NodeSandbox:
        node.busy += 1
        try:
            stream = await NodeStream.connect(node.address)
            await start(stream, packed)
        except BaseException:
            await self._leave(node)
            raise
        ident = f"{node.name}:{stream.started}.{next(self._count)}"
        known_by_guest = GUEST_LAYERS if self._is_docker else None
        placement = Placement(self.name, self._required, partial(self._leave, node), known_by_guest)
        return NodeSandbox(stream, ident, limits, placement)

    async def _leave(self, node: RayNode) -> None:
        node.busy -= 1
        self._freed.notify()

    async def close(self) -> None:
        """End the actors, and every sandbox with them."""
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            self._freed.notify()
            await event_loop.end_tasks(tasks)
            await self._disconnect()

    async def _disconnect(self) -> None:
        self._nodes.clear()
        with anyio.CancelScope(shield=True):
            await daemon_threads.run_sync(self._cluster.close)


# `RayCluster`: everything that is asked of Ray. Its calls block, so they are made in threads.

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
        if closed := [actor.close.remote() for actor in actors]:
            ray.wait(closed, num_returns=len(closed), timeout=CLOSE_S)
        for actor in actors:
            self.kill(actor)
        if self._is_ours:
            self._is_ours = False
            ray.shutdown()
