"""`RayBackend`: sandboxes on the nodes of a Ray cluster. Ray schedules the nodes' actors and notices dead nodes.

Ray carries no byte of a sandbox. Each sandbox has a connection of its own to its node; the key that both ends prove is
passed through Ray.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Final, Literal

import anyio
import msgpack
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy, names_of
from toolcell.errors import MissingPackage, SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.docker.hardening import GUEST_LAYERS, required_layers
from toolcell.sandbox.node.sandbox import NodeSandbox, Placement
from toolcell.sandbox.node.server import NodeAddress, NodeSettings
from toolcell.sandbox.node.stream import NodeStream, WrongKey, start
from toolcell.sandbox.ray.cluster import RayCluster
from toolcell.support import daemon_threads
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
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
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
            self._leave(node)
            raise
        ident = f"{node.name}:{stream.started}.{next(self._count)}"

        async def leave() -> None:
            self._leave(node)

        known_by_guest = GUEST_LAYERS if self._is_docker else None
        return NodeSandbox(stream, ident, limits, Placement(self.name, self._required, leave, known_by_guest))

    def _leave(self, node: RayNode) -> None:
        node.busy -= 1
        self._freed.notify()

    async def close(self) -> None:
        """End the actors, and every sandbox with them."""
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            self._freed.notify()
            tasks.cancel_scope.cancel()
            await tasks.__aexit__(None, None, None)
            await self._disconnect()

    async def _disconnect(self) -> None:
        self._nodes.clear()
        with anyio.CancelScope(shield=True):
            await daemon_threads.run_sync(self._cluster.close)
