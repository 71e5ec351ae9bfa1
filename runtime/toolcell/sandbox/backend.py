"""`Backend` and `Sandbox`: the two Protocols that a backend implements, and the data that crosses them.

A third party implements these two and gets pool, runs, runtime, limits reporting and audit with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from toolcell.config import MIB, Limits
from toolcell.errors import UsageError
from toolcell.results import Outcome

FROZEN_BYTES = 32 * MIB
"""Most memory that a sandbox may have used and still be frozen: the next run may need that memory."""


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """A limit that the host saw exceeded."""

    outcome: Outcome
    limit: str
    """Field of `Limits`."""
    value: float
    used: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What a sandbox has used so far, measured from outside."""

    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    processes: int = 1
    peak_processes: int = 1
    memory_kills: int = 0
    """Processes the kernel killed for memory since the sandbox was handed out."""
    refused_processes: int = 0
    """Forks the kernel refused for the process limit."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a sandbox's main process ended by itself."""

    signal: int | None = None
    code: int | None = None
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    problem: str = ""
    """What it was killed for; or, if neither signal nor code is known, what it depended on and was lost."""

    @property
    def is_lost(self) -> bool:
        """True when what it depended on went away, so that nobody knows how it ended."""
        return bool(self.problem) and self.signal is None and self.code is None


class ByteStream(Protocol):
    """Carries the bridge protocol; nothing the script prints touches it."""

    sent_bytes: int
    received_bytes: int

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the other end is gone."""
        ...

    async def send(self, data: bytes) -> None:
        """Write all of `data`; returns silently when the other end is gone: `receive` reports that."""
        ...


class Sandbox(Protocol):
    """One guest and the isolation around it. Used for one run, then destroyed."""

    @property
    def id(self) -> str:
        """Its name in logs and in the audit record."""
        ...

    @property
    def stream(self) -> ByteStream:
        """The bridge."""
        ...

    @property
    def layers(self) -> Mapping[str, str]:
        """Live isolation layers and their details, complete once it has said Hello."""
        ...

    @property
    def backend(self) -> str:
        """Name of the backend that made it."""
        ...

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers that the guest's Hello names. The guest sends it before it runs any foreign code.

        Raises:
            SandboxUnavailable: a required layer is not among them.
        """
        ...

    @property
    def limits(self) -> Limits:
        """What it was started with; a run may be given less, never more."""
        ...

    def is_alive(self) -> bool:
        """False once its end is known."""
        ...

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of the run it is handed to, from outside."""
        ...

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""
        ...

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it now. `brief`: CPU and memory are enough; `last`: the run failed, so measure everything."""
        ...

    def kill(self) -> None:
        """Kill every process inside at once. Does not wait; safe to call at any time."""
        ...

    def kill_now(self) -> None:
        """Kill every process inside from another thread, also while the event loop does not run.

        Called during a run, when its time is over. The event loop calls `kill` later. It must not wait long.
        """
        ...

    def cpu_now(self) -> float | None:
        """Return the CPU seconds used so far, read in another thread; None where only the event loop can learn them."""
        ...

    def freeze(self) -> bool:
        """Stop every process inside, at once and cheaply, until `destroy`; False when that is not certain.

        Called after a run, so that a burst of runs need not share the processors with the destruction of the sandboxes
        before. False is always safe: the sandbox is destroyed at once then.
        """
        ...

    async def ended(self) -> Exit:
        """Wait until its main process has ended, at most a few seconds, and return how it ended."""
        ...

    async def destroy(self) -> None:
        """Kill every process inside and free every resource. Safe to call twice.

        Cancellation: shielded. When this returns, nothing is left running.
        """
        ...


class Backend(Protocol):
    """A way to make sandboxes."""

    name: ClassVar[str]

    isolates: ClassVar[bool]
    """False only for a test double. A Runtime refuses it without `allow_unisolated`."""

    async def open(self) -> None:
        """Get ready to start sandboxes.

        Raises:
            SandboxUnavailable: this machine cannot, with the reason and what to do about it.
        """
        ...

    async def start(self, limits: Limits) -> Sandbox:
        """Start one sandbox, ready to send its Hello.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        ...

    async def close(self) -> None:
        """End everything it started. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file for the workspace, written before the run."""

    name: str
    """Relative path with forward slashes."""
    data: bytes = field(repr=False)


BACKENDS = ("process", "docker")
CLASSES = {"ray": "RayBackend()", "kubernetes": "KubernetesBackend()", "k8s": "KubernetesBackend()"}


def _meant(name: str) -> str:
    return f"; write {CLASSES[name.lower()]}" if name.lower() in CLASSES else ""


def check_choice(backend: object, python: object) -> None:
    """Check the arguments `backend=` and `python=`.

    Raises:
        UsageError: `backend` is neither a name nor a Backend, or `python` is no path.
    """
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise UsageError(f'backend must be "process", "docker" or a Backend, not {backend!r}{_meant(backend)}')
    elif isinstance(backend, type):
        raise UsageError(f"backend= takes a backend, not the class {backend.__name__}; write {backend.__name__}()")
    elif not callable(getattr(backend, "start", None)):
        raise UsageError(f'backend must be "process", "docker" or a Backend, not {type(backend).__name__}')
    if not isinstance(python, str | os.PathLike | None):
        raise UsageError(f"python= takes the path of an interpreter, not {type(python).__name__} {python!r:.80}")
