"""One sandbox on a node, as its caller sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgpack

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import INTERRUPTED_S, Exit, Sample, Sandbox
from toolcell.sandbox.node import connection
from toolcell.sandbox.node.stream import NodeStream

END_S: Final = 15.0
"""How long a node may take to say that nothing is left of a sandbox. Then it counts as lost."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a backend knows of the place of a sandbox."""

    backend: str
    """The name of the backend."""
    required: frozenset[str]
    """Layers without which no code runs."""
    leave: Callable[[], Awaitable[None]]
    """Gives the place back. Called once, when nothing of the sandbox is left."""
    known_by_guest: frozenset[str] | None = None
    """Layers that only its guest can know to be live; None is all."""
    layers: Mapping[str, str] = field(default_factory=dict)
    """Layers that everything in this place has from outside."""


class NodeSandbox(Sandbox):
    """A sandbox whose processes are on a node."""

    def __init__(self, stream: NodeStream, ident: str, limits: Limits, placement: Placement) -> None:
        self.id = ident
        self.stream: NodeStream = stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = placement.backend
        self._placement = placement
        self._has_left = False
        self._is_given_up = False
        """Its node did not say in time how it ended."""

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        place = self._placement
        believed = layers.keys() if place.known_by_guest is None else layers.keys() & place.known_by_guest
        live = {name: layers[name] for name in layers if name in believed} | self.stream.outside_layers
        live = {**place.layers, **live}
        if missing := sorted(place.required - live.keys()):
            raise SandboxUnavailable(f"required isolation is not live on the node of {self.id}: {', '.join(missing)}")
        self.layers = live
        self.stream.post(connection.ACCEPT, msgpack.packb(dict(layers)))

    def is_alive(self) -> bool:
        self.stream.look()
        return not self.stream.is_over

    async def prepare(self, limits: Limits) -> None:
        if limits is self.limits:
            return
        stream, stream_prepared = self.stream, connection.PREPARE
        stream.prepared = None
        await stream.send_frame(stream_prepared, msgpack.packb(limits.model_dump()))
        await stream.wait(lambda: stream.prepared is not None)
        if stream.prepared:
            raise OSError(stream.prepared)

    def read_output(self) -> tuple[bytes, bytes]:
        """Take the raw output that the node has sent."""
        self.stream.look()
        out, err = self.stream.raw
        taken = bytes(out), bytes(err)
        out.clear()
        err.clear()
        return taken

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Return the last measurement of the node; `last`: one that it makes now."""
        if last and not self.stream.is_over:
            return self.stream.ask()
        self.stream.look()
        return self.stream.last

    def kill(self) -> None:
        self.stream.end()

    kill_now = kill

    def cpu_now(self) -> float | None:
        """Return the CPU seconds by the last measurement of the node."""
        return self.stream.last.cpu_s

    def ask_line(self) -> bool:
        """Have the main thread of the script write its frames to descriptor 2."""
        self.stream.was_asked = self.stream.post(connection.SIGNAL, b"ask_line")
        return True

    interrupted_s = INTERRUPTED_S

    def interrupt(self) -> None:
        self.stream.post(connection.SIGNAL, b"interrupt")

    async def ended(self) -> Exit:
        """Wait until nothing is left of it, or its node is lost; returns how it ended."""
        stream = self.stream
        if stream.exit is None and not self._is_given_up:
            with anyio.move_on_after(END_S, shield=True):
                await stream.wait(lambda: stream.exit is not None)
            self._is_given_up = stream.exit is None
        return stream.exit or Exit(problem=stream.lost())

    async def destroy(self) -> None:
        """End it, wait until its node has said that nothing is left, and give its place back. Safe to call twice."""
        self.kill()
        self.stream.expect_nothing()
        await self.ended()
        self.stream.close()
        if not self._has_left:
            self._has_left = True
            with anyio.CancelScope(shield=True):
                await self._placement.leave()
