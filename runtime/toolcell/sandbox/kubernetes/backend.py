"""`KubernetesBackend`: sandboxes in pods of a warm pool of agent-sandbox, which makes, keeps warm and deletes the pods.

A pod is claimed for one caller, who gets a connection to it through the API server for each sandbox.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, Final

import anyio
import msgpack
from anyio.abc import TaskGroup

from toolcell._version import __version__
from toolcell.config import MIB, Limits, Policy, names_of
from toolcell.errors import MissingPackage, SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.docker.hardening import GUEST_LAYERS
from toolcell.sandbox.kubernetes.cluster import ClaimedPod, Cluster
from toolcell.sandbox.kubernetes.pod_server import CURE, PodAddress, pack_settings
from toolcell.sandbox.kubernetes.pods import check_name, layers_of, memory_for, memory_of, weaknesses
from toolcell.sandbox.node.sandbox import NodeSandbox, Placement
from toolcell.sandbox.node.stream import NodeStream, start
from toolcell.support import daemon_threads, event_loop
from toolcell.support.checks import brief, check_count, check_kind, check_path
from toolcell.support.event_loop import ChangeEvent, start_task
from toolcell.support.log import logger_of
from toolcell.support.loop_thread import LoopThread

logger = logger_of("toolcell.kubernetes")

FEWEST_S: Final = 10.0


@dataclass(slots=True)
class UsedPod:
    """A pod that was claimed, and what is in it."""

    pod: ClaimedPod
    room_bytes: int
    busy: int = 0
    has_served: bool = False
    """A sandbox was started in it."""
    is_lost: bool = False
    """It is gone, cannot be reached, or started nothing: no more is started in it."""


@dataclass(slots=True)
class Claiming:
    """A pod that is being claimed for several sandboxes."""

    problem: str = ""
    """Why there will be none."""


class KubernetesBackend(Backend):
    """Starts sandboxes in the pods of a warm pool."""

    name: ClassVar[str] = "kubernetes"
    isolates: ClassVar[bool] = True
    descriptors_per_sandbox: ClassVar[int] = 3
    unsupported: ClassVar[Mapping[str, str]] = {
        "cpu_cores": "a pod bounds the processors of all that is in it: resources.limits.cpu of the pool's template"
    }

    lacks: ClassVar[Mapping[str, str]] = {
        "limits.disk": "the watch of a pod's files ends the run within a second; the volume's size bounds them",
        "limits.inodes": "the watch of a pod's files ends the run within a second",
        "single_use.tmp": "the pod's /tmp is not the script's; its TMPDIR is in its own directory",
        "single_use.state": "umask is refused: modes of the pod's files are nothing for a script",
    }
    """Cases of the backend contract (`toolcell.testing`) that a pod cannot meet, with the reasons."""

    def __init__(
        self,
        pool: str = "toolcell",
        *,
        namespace: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        sandboxes_per_pod: int = 1,
        preload: Sequence[str] = (),
        policy: Policy | None = None,
        ready_s: float = 180.0,
        lease_s: float = 300.0,
    ) -> None:
        """`pool`: a SandboxWarmPool, as `sandbox_images/kubernetes/sandboxes.yaml` describes it.
        `namespace`: None is that of the pod in which this runs, else of the context.
        `kubeconfig`, `context`: as of kubectl; without them the service account of the pod in which this runs is used.
        `sandboxes_per_pod`: at the same time. With 1 each sandbox gets a pod of its own, used once.
        `policy`: one with the profile "container".
        `ready_s`: how long a pod may take to be there. `lease_s`: after how long a caller's claims end that was killed.

        Raises:
            UsageError: an argument is of another kind.
        """
        check_count("sandboxes_per_pod=", sandboxes_per_pod, 1)
        check_name("pool=", pool)
        if namespace is not None:
            check_name("namespace=", namespace)
        if kubeconfig is not None:
            check_path("kubeconfig=", kubeconfig)
        check_kind("context=", context, str, NoneType)
        timeouts: dict[str, object] = {"ready_s": ready_s, "lease_s": lease_s}
        for what, seconds in timeouts.items():
            if not isinstance(seconds, int | float) or not FEWEST_S <= seconds < math.inf:
                raise UsageError(f"{what}= takes seconds, at least {FEWEST_S:g}, not {brief(seconds)}")
        check_kind("policy=", policy, Policy, NoneType)
        self.policy: Policy = policy or Policy(profile="container")
        if self.policy.profile != "container":
            raise UsageError('a pod has no namespaces to give: use Policy(profile="container")')
        if self.policy.shell:
            raise UsageError("shell=True is not built for pods: a program would see the files of the pod")
        if "landlock" not in self.policy.require and sandboxes_per_pod > 1:
            raise UsageError("sandboxes of one pod are kept apart by Landlock; require it, or use sandboxes_per_pod=1")
        self.preload = tuple(names_of(preload, "preload"))
        self._settings = pack_settings(self.policy, self.preload)
        self._cluster = Cluster(pool, namespace, kubeconfig, context)
        self._slots = sandboxes_per_pod
        self._ready_s, self._lease_s = float(ready_s), float(lease_s)
        self._loop: LoopThread | None = None
        self._tasks: TaskGroup | None = None
        self._pods: dict[str, UsedPod] = {}
        """By the name of the claim."""
        self._claiming: list[Claiming] = []
        self._waiting = 0
        """Starts that wait for a place."""
        self._changed = ChangeEvent()
        self._count = itertools.count(1)

    @property
    def pods(self) -> Mapping[str, int]:
        """Names of the pods that are claimed, and how many sandboxes each has."""
        return {used.pod.name: used.busy for used in self._pods.values()}

    async def open(self) -> None:
        """Connect with the cluster.

        Raises:
            SandboxUnavailable: there is no cluster, no pool, or no right to use it; says what to do.
            MissingPackage: the client of agent-sandbox is not installed.
        """
        loop = await daemon_threads.run_sync(LoopThread, "toolcell-kubernetes")
        try:
            await loop.await_call(self._cluster.connect)
        except BaseException as exc:
            await _stop(loop)
            if isinstance(exc, ImportError):
                raise MissingPackage(
                    "the Kubernetes backend needs k8s-agent-sandbox: pip install 'toolcell[kubernetes]'"
                ) from exc
            raise
        self._loop = loop
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._renew)

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(self._lease_s / 3)
            if self._loop is not None:
                for problem in await self._loop.await_call(self._cluster.renew, self._lease_s):
                    logger.warning("a claim could not be renewed: %s", problem)

    # Starting

    async def start(self, limits: Limits) -> NodeSandbox:
        """Start a sandbox: in a pod of its own, or in one that has room.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        while True:
            used = await self._place(limits)
            try:
                return await self._start_in(used, limits)
            except (OSError, SandboxUnavailable) as exc:
                if used.has_served:
                    continue  # in another pod
                if isinstance(exc, OSError):
                    raise SandboxUnavailable(f"the pod {used.pod.name} cannot be reached: {exc}") from exc
                raise

    async def _start_in(self, used: UsedPod, limits: Limits) -> NodeSandbox:
        """Start a sandbox in a pod whose place was taken for it; gives the place back if that fails.

        Raises:
            OSError, SandboxUnavailable: none was started, and the pod is used no more.
        """
        try:
            stream = await self._connect(used)
            await start(stream, msgpack.packb(limits.model_dump()), self._settings)
        except BaseException as exc:
            used.is_lost = used.is_lost or isinstance(exc, OSError | SandboxUnavailable)
            with anyio.CancelScope(shield=True):
                await self._leave(used)
            raise
        used.has_served = True

        async def leave() -> None:
            used.is_lost = used.is_lost or stream.exit is None
            await self._leave(used)

        placement = Placement(self.name, self.policy.require, leave, GUEST_LAYERS, layers_of(used.pod.body))
        return NodeSandbox(stream, f"{used.pod.name}:{stream.started}.{next(self._count)}", limits, placement)

    async def _place(self, limits: Limits) -> UsedPod:
        """Return a pod with a place, which is taken."""
        if self._slots == 1:
            used = await self._claim()
            used.busy += 1
            if problem := self._too_small(used, limits):
                with anyio.CancelScope(shield=True):
                    await self._leave(used)
                raise SandboxUnavailable(problem)
            return used
        self._waiting += 1
        try:
            used = await self._shared(limits)
            used.busy += 1
            return used
        finally:
            self._waiting -= 1

    async def _shared(self, limits: Limits) -> UsedPod:
        """Return a pod with a free place; wait for one, and claim as many pods as those who wait need."""
        watched: tuple[Claiming, ...] = ()
        while True:
            if self._tasks is None:
                raise SandboxUnavailable("the Kubernetes backend is not open")
            for used in [used for used in self._pods.values() if not used.is_lost]:
                if problem := self._too_small(used, limits):
                    raise SandboxUnavailable(problem)
                if used.busy < self._slots:
                    return used
            if failed := [each.problem for each in watched if each.problem]:
                raise SandboxUnavailable(failed[0])
            if len(self._claiming) * self._slots < self._waiting:
                claiming = Claiming()
                self._claiming.append(claiming)
                self._tasks.start_soon(self._claim_for_all, claiming)
            watched = tuple(self._claiming)
            await self._changed.wait()

    async def _claim_for_all(self, claiming: Claiming) -> None:
        """Claim a pod, for whoever waits for a place then."""
        try:
            await self._claim()
        except Exception as exc:
            claiming.problem = str(exc) if isinstance(exc, SandboxUnavailable) else f"{type(exc).__name__}: {exc}"
        finally:
            self._claiming.remove(claiming)
            self._changed.notify()
        await self._keep_one_empty()

    async def _claim(self) -> UsedPod:
        loop = self._loop
        if loop is None:
            raise SandboxUnavailable("the Kubernetes backend is not open")
        pod = await loop.await_call(self._cluster.claim, self._ready_s, self._lease_s)
        used = UsedPod(pod, memory_of(pod.body))
        if found := weaknesses(pod.body):
            with anyio.CancelScope(shield=True):
                await self._give_up(used)
            said = "; ".join(found)
            raise SandboxUnavailable(
                f"the pods of the pool {self._cluster.pool!r} are not isolated as they must be: {said}"
            )
        self._pods[pod.claim] = used
        return used

    def _too_small(self, used: UsedPod, limits: Limits) -> str:
        """Say why no sandbox with these limits may start in this pod, nor in another of its pool."""
        if (needed := memory_for(limits, self._slots)) <= used.room_bytes:
            return ""
        return (
            f"the pods of the pool {self._cluster.pool!r} have {used.room_bytes // MIB} MiB of memory, and "
            f"{self._slots} sandboxes with memory_bytes={limits.memory_bytes} and disk_bytes={limits.disk_bytes} need "
            f"{needed // MIB}; lower these limits, or raise resources.limits.memory in the pool's template"
        )

    async def _connect(self, used: UsedPod) -> NodeStream:
        """Return a connection with the server of a pod.

        Raises:
            SandboxUnavailable, OSError: there is none.
        """
        loop, pod = self._loop, used.pod
        if loop is None:
            raise SandboxUnavailable("the Kubernetes backend is not open")
        ours, address = await loop.await_call(self._executed, pod.name)
        try:
            if address.version != __version__:
                raise SandboxUnavailable(
                    f"the pod {pod.name} has toolcell {address.version}, and this is {__version__}: {CURE}"
                )
            return await NodeStream.over(ours, f"the pod {pod.name}", address.key)
        except BaseException:
            ours.close()
            raise

    async def _executed(self, pod: str) -> tuple[socket.socket, PodAddress]:
        """Start a relay; runs in the cluster's event loop. Shape: (our end of its bytes, what the pod told)."""
        program = await self._cluster.execute(pod)
        try:
            address = await program.address()
            ours, theirs = socket.socketpair()
        except BaseException:
            await program.aclose()
            raise
        ours.setblocking(False)
        start_task(program.carry(theirs))
        return ours, address

    # Ending

    async def _leave(self, used: UsedPod) -> None:
        """Take a sandbox's place back. A pod that was for one sandbox ends; of the others, one empty pod is kept."""
        used.busy -= 1
        self._changed.notify()
        if not used.busy and (self._slots == 1 or used.is_lost):
            await self._give_up(used)
        await self._keep_one_empty()

    async def _keep_one_empty(self) -> None:
        empty = [each for each in self._pods.values() if not each.busy and not each.is_lost]
        surplus = [] if self._waiting else empty[1:]
        for used in surplus:  # before anything is waited for: nobody gets a place in them any more
            del self._pods[used.pod.claim]
        for used in surplus:
            await self._give_up(used)

    async def _give_up(self, used: UsedPod) -> None:
        self._pods.pop(used.pod.claim, None)
        if self._loop is not None:
            try:
                await self._loop.await_call(self._cluster.release, used.pod.claim)
            except SandboxUnavailable as exc:  # tried again when this closes; else the claim's lease ends it
                logger.warning("the claim %s could not be deleted: %s", used.pod.claim, exc)

    async def close(self) -> None:
        """Delete every claim, and with them the pods. Safe to call twice."""
        loop, self._loop = self._loop, None
        tasks, self._tasks = self._tasks, None
        await event_loop.end_tasks(tasks)
        self._changed.notify()  # who waits for a place sees that it is closed
        if loop is not None:
            self._pods.clear()
            with anyio.CancelScope(shield=True):
                await loop.await_call(self._cluster.aclose)
                await _stop(loop)


async def _stop(loop: LoopThread) -> None:
    """Cancel what runs in the loop, and end it."""
    with anyio.CancelScope(shield=True):
        await daemon_threads.run_sync(loop.stop)
