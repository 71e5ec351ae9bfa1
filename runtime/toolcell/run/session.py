"""One sandbox for as long as somebody talks to it: its Hello, then a run, then perhaps another.

Knows who it talks to and whether that can go on; what is said in a run is the conversation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable
from toolcell.results import ExecutionResult
from toolcell.run.calls import Dispatch
from toolcell.run.connection import RunObserver
from toolcell.run.run import Run
from toolcell.sandbox.backend import GuestFile, Sandbox
from toolcell_bridge.wire.connection import Connection, State
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import Hello, RunScript

HELLO_S = 30.0
"""From fork to Hello. Rehearsal takes milliseconds; a machine this slow has something else wrong with it."""


class Session:
    """A sandbox that has said Hello. `execute` may be called again only while `is_usable`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._connection = Connection.host(max_frame_bytes=sandbox.limits.frame_bytes)
        self._runs = 0

    @property
    def is_usable(self) -> bool:
        """True while another run may be sent."""
        return self._connection.state is State.IDLE and self.sandbox.is_alive()

    async def greet(self) -> None:
        """Wait for the guest's Hello.

        Raises:
            SandboxUnavailable: it died or said something else; the sandbox has been destroyed.
        """
        problem = f"it said nothing within {HELLO_S:g} s"
        try:
            with anyio.move_on_after(HELLO_S):
                while (message := self._connection.next_message()) is None:
                    data = await self.sandbox.stream.receive()
                    if not data:
                        problem = await self._last_words()
                        break
                    self._connection.receive_data(data)
                if isinstance(message, Hello):
                    self.sandbox.accept(message.layers)
                    return
        except RemoteProtocolError as exc:
            problem = str(exc)
        except BaseException:
            await self.sandbox.destroy()
            raise
        await self.sandbox.destroy()
        raise SandboxUnavailable(f"a sandbox did not come up: {problem}")

    async def _last_words(self) -> str:
        end = await self.sandbox.ended()
        text = self.sandbox.read_output()[1].decode("utf-8", "replace").strip()
        return text or f"it ended with signal {end.signal}, exit code {end.code}"

    async def execute(
        self,
        run: RunScript,
        limits: Limits,
        dispatch: Dispatch,
        *,
        files: Iterable[GuestFile] = (),
        watch: Callable[[Run], Callable[[], None]] | None = None,
        cancel: anyio.Event | None = None,
        on_log: Callable[[str, str], None] | None = None,
        on_progress: Callable[[object], None] | None = None,
        witness: RunObserver | None = None,
        start_s: float = 0.0,
        run_id: str = "",
    ) -> ExecutionResult:
        """Send one script, answer its calls, and report how it ended.

        Raises:
            UsageError: the script does not fit into a frame.
            AuditError: `witness` could not note that the script was sent; nothing it asked for was done.

        Cancellation: the exception goes on; no further run can be sent, and whoever has the sandbox must destroy it.
        """
        self._runs += 1
        execution = Run(self.sandbox, self._connection, limits, dispatch, on_log, on_progress, witness, start_s, run_id)
        unwatch = watch(execution) if watch is not None else None
        try:
            return await execution.carry_out(run, files, cancel)
        finally:
            if unwatch is not None:
                unwatch()
