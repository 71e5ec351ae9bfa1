"""`Backend` and `Sandbox`: the two classes that a backend inherits from, and the data that crosses them.

A third party implements these two and gets pool, runs, runtime, limits reporting and audit with them. The host asks for
nothing that they do not declare. What a backend need not do has a default.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from mmap import mmap
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from toolcell.config import AUTO_FLOOR, DEFAULT_LAYERS, Limits, Policy
from toolcell.errors import UsageError
from toolcell_bridge.wire.frozen import frozen

if TYPE_CHECKING:
    from toolcell.results import Outcome  # the probing process reads this module, and has no msgpack

ANSWER_S = 0.03
"""How long to wait for a script that was asked for its line; it answers in a fraction of a millisecond."""

INTERRUPTED_S = 1.0
"""How long to wait for the end of a script that was interrupted. Most take less than a millisecond, but functions
written in C return first, and a session that waits for less loses its state on a busy machine."""

BELOW = 0.9
"""A sandbox that the kernel killed below this part of its limit was killed for somebody else's limit."""


@frozen
class LimitExceeded:
    """A limit that the host saw exceeded."""

    outcome: Outcome
    limit: str
    """Field of `Limits`."""
    value: float
    used: float


@frozen
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


@frozen
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

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`; returns silently when the other end is gone: `receive` reports that."""


class Meter(ABC):
    """What a run measures, and how long it waits: its sandbox, or of a session's sandbox the part of one script."""

    @abstractmethod
    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it now. `brief`: CPU, memory and refusals do; `last`: the run failed, so measure everything."""

    @abstractmethod
    def cpu_now(self) -> float | None:
        """Return the CPU seconds used so far, read in another thread; None where only the event loop can learn them."""

    @abstractmethod
    async def ended(self) -> Exit:
        """Wait until its main process has ended, at most a few seconds, and return how it ended."""

    @property
    def answer_s(self) -> float:
        """How long a script may take to say which line it is at."""
        return ANSWER_S


class Sandbox(Meter):
    """One guest and the isolation around it. Used for one run, then destroyed."""

    id: str
    """Its name in logs and in the audit record."""
    stream: ByteStream
    """The bridge."""
    layers: Mapping[str, str]
    """Live isolation layers and their details, complete once it has said Hello."""
    backend: str
    """Name of the backend that made it."""
    limits: Limits
    """What it was started with; a run may be given less, never more."""

    @abstractmethod
    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers that the guest's Hello names. The guest sends it before it runs any foreign code.

        Raises:
            SandboxUnavailable: a required layer is not among them.
        """

    @abstractmethod
    def is_alive(self) -> bool:
        """False once its end is known."""

    @abstractmethod
    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of the run it is handed to, from outside."""

    @abstractmethod
    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""

    @abstractmethod
    def kill(self) -> None:
        """Kill every process inside at once. Does not wait; safe to call at any time."""

    @abstractmethod
    def kill_now(self) -> None:
        """Kill every process inside from another thread, also while the event loop does not run.

        Called during a run, when its time is over. The event loop calls `kill` later. It must not wait long.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Kill every process inside and free every resource. Safe to call twice.

        Cancellation: shielded. When this returns, nothing is left running.
        """

    # What a sandbox need not do.

    @property
    def outside_layers(self) -> Mapping[str, str]:
        """Layers that it has from outside, of which its guest does not tell."""
        return {}

    def ask_line(self) -> bool:
        """Have the script's main thread write which line it is at to descriptor 2; False when it cannot be asked."""
        return False

    async def read_on(self) -> None:
        """Read what the script writes, also when nobody receives from the bridge. Runs until it is cancelled.

        Returns at once where raw output can be read at any time.
        """

    @property
    def interrupted_s(self) -> float:
        """How long an interrupted script may take to end; 0 where a script cannot be interrupted."""
        return 0.0

    def interrupt(self) -> None:
        """Interrupt the script of a session, which may go on with another one. Only where `interrupted_s` is not 0."""

    async def interrupts_passed_on(self) -> None:
        """Wait until no interrupt is on its way: it would meet the next script."""

    async def pause(self) -> bool:
        """Stop everything inside; False when something may go on. It may be called twice.

        A paused sandbox can be killed and destroyed, and none outlives its host.
        """
        return False

    async def unpause(self) -> None:
        """Let everything inside run again. Only called after `pause` returned True."""

    def freeze(self) -> bool:
        """Stop everything inside until `destroy`, where that takes less time than an end; False when it goes on.

        Called after the last run. While a burst of runs lasts, what was used is frozen and ended a little later.
        """
        return False

    def measure_often(self, is_often: bool) -> None:
        """Scripts follow one another, each with a measurement: make these cheaper, until `pause`."""


def profile_of(sandbox: Sandbox) -> dict[str, Any]:
    """Return which profile of the process backend a sandbox has, and which layers of the strongest it lacks."""
    return _profile_of(frozenset(sandbox.layers)) if sandbox.backend == "process" else {}


@functools.lru_cache(maxsize=16)
def _profile_of(live: frozenset[str]) -> dict[str, Any]:
    profile = next((name for name, layers in AUTO_FLOOR.items() if layers <= live), "")
    return {"profile": profile, "missing": tuple(sorted(DEFAULT_LAYERS - live))}


class Backend(ABC):
    """Starts sandboxes."""

    name: ClassVar[str]

    isolates: ClassVar[bool]
    """False only for a test double. A Runtime refuses it without `allow_unisolated`."""

    policy: Policy | None = None
    packages: Sequence[str] = ()
    preload: Sequence[str] = ()
    python: str | None = None
    """What it was made with. A Runtime cannot change it, and refuses arguments of its own that say something else."""

    start_s: float = 30.0
    """Seconds in which a start must succeed. A Runtime sets its `PoolConfig.start_s` before it opens the backend."""

    @abstractmethod
    async def open(self) -> None:
        """Get ready to start sandboxes.

        Raises:
            SandboxUnavailable: this machine cannot, with the reason and what to do about it.
        """

    @abstractmethod
    async def start(self, limits: Limits) -> Sandbox:
        """Start one sandbox, ready to send its Hello.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """

    @abstractmethod
    async def close(self) -> None:
        """End everything it started. Safe to call twice."""

    # What a backend need not say.

    @property
    def fixed(self) -> Collection[str]:
        """Limits that it cannot lower once a sandbox has started. A run with another value gets a new sandbox."""
        return ()

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Limits that it cannot hold at all, each with the reason and what to do. Only `cpu_cores` may be one."""
        return {"cpu_cores": f"the backend {self.name!r} does not bound processors"}

    @property
    def descriptors_per_sandbox(self) -> int:
        """How many open files of this process each sandbox takes; 0 where that is not known."""
        return 0

    @property
    def lacks(self) -> Mapping[str, str]:
        """Cases of the contract (`toolcell.testing`) that it cannot meet, each with the reason."""
        return {}


def check_kind_of(given: object, kind: type) -> None:
    """Check that an object is a `Backend`, or that one has started a `Sandbox`.

    Raises:
        UsageError: it does not inherit from `kind`, or has not set its data.
    """
    name = type(given).__name__
    if not isinstance(given, kind):
        raise UsageError(f"{name} must inherit from toolcell.sandbox.{kind.__name__}, and does not")
    if missing := [each for each in kind.__annotations__ if not hasattr(given, each)]:
        raise UsageError(f"{name} has no {', '.join(missing)}; set what toolcell.sandbox.{kind.__name__} declares")


@frozen
class GuestFile:
    """A file for the workspace, written before the run."""

    name: str
    """Relative path with forward slashes."""
    data: bytes | mmap = field(repr=False)
