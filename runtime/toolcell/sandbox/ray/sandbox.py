"""One sandbox on a node, as its caller sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import anyio
import msgpack

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit, Sample
from toolcell.sandbox.ray import frames
from toolcell.sandbox.ray.node_stream import NodeStream

END_S: Final = 15.0
"""How long a node may take to say that nothing is left of a sandbox. Then it counts as lost."""


class RaySandbox:
    """A sandbox whose processes are on a node."""

    backend = "ray"

    def __init__(
        self,
        stream: NodeStream,
        ident: str,
        limits: Limits,
        required: frozenset[str],
        told_by_guest: frozenset[str] | None,
    ) -> None:
        """`told_by_guest`: layers that only its guest can know to be live; None is all."""
        self.id = ident
        self.stream = stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self._required, self._told_by_guest = required, told_by_guest

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        believed = layers.keys() if self._told_by_guest is None else layers.keys() & self._told_by_guest
        live = {name: layers[name] for name in layers if name in believed} | self.stream.outside_layers
        if missing := sorted(self._required - live.keys()):
            raise SandboxUnavailable(f"required isolation is not live on the node of {self.id}: {', '.join(missing)}")
        self.layers = live
        self.stream.post(frames.ACCEPT, msgpack.packb(dict(layers)))

    def is_alive(self) -> bool:
        """Whether it still runs, as far as the node has told."""
        self.stream.look()
        return not self.stream.is_over

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of its run, from outside."""
        if limits is self.limits:
            return
        stream, stream_prepared = self.stream, frames.PREPARE
        stream.prepared = None
        await stream.tell(stream_prepared, msgpack.packb(limits.model_dump()))
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
        """Have the node kill every process inside."""
        self.stream.end()

    kill_now = kill

    def cpu_now(self) -> float | None:
        """Return the CPU seconds by the last measurement of the node."""
        return self.stream.last.cpu_s

    def ask_line(self) -> None:
        """Have the main thread of the script write its frames to descriptor 2."""
        self.stream.was_asked = self.stream.post(frames.SIGNAL, b"ask_line")

    def interrupt(self) -> None:
        """Interrupt the script of a session."""
        self.stream.post(frames.SIGNAL, b"interrupt")

    def freeze(self) -> bool:
        """Return False: the node destroys it at once."""
        return False

    async def ended(self) -> Exit:
        """Wait until nothing is left of it, or its node is lost; returns how it ended."""
        stream = self.stream
        if stream.exit is None:
            with anyio.move_on_after(END_S, shield=True):
                await stream.wait(lambda: stream.exit is not None)
        return stream.exit or Exit(problem=stream.lost())

    async def destroy(self) -> None:
        """End it, and wait until its node has said that nothing is left. Safe to call twice."""
        self.kill()
        self.stream.rest()
        await self.ended()
        self.stream.close()
