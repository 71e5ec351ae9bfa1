"""Make the calls of HTTP connections over the bridge: blocking, in asyncio, or without waiting."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from toolcell_bridge.guest.channel import Channel, ChannelClosed
from toolcell_bridge.guest.egress.connection import CAUSES, Cause, EgressFailed, HostCall, Steps
from toolcell_bridge.guest.placeholder import GuestDryRun, Placeholder
from toolcell_bridge.guest.tools import line_here, replied
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.messages import ToolFail, ToolReturn

NO_BRIDGE: Final = (
    "only the process that runs the script makes requests: a process that it forked, as multiprocessing does, cannot; "
    "use threads"
)

COLLECTED: Final = {"status": 202, "reason": "Accepted", "version": "1.1", "headers": [["Content-Length", "0"]]}
"""What a dry run answers to a request that it collects: a library has to have a status."""

T = TypeVar("T")


class HostCalls:
    """Makes the calls of one script's libraries."""

    def __init__(self, channel: Channel, dry_run: GuestDryRun | None) -> None:
        self._channel, self._dry_run = channel, dry_run

    def run(self, steps: Steps[T]) -> T:
        """Make the calls of an operation, and wait for each answer; return the operation's result.

        Raises:
            EgressFailed: the operation failed.
        """
        try:
            call = next(steps)
            while True:
                try:
                    ((_, reply),) = self._channel.call([self._request(call)])
                    value = self._value(call, self._channel.wait(reply))
                except EgressFailed as exc:
                    call = steps.throw(exc)
                except ChannelClosed:
                    call = steps.throw(EgressFailed(Cause.CONNECT, NO_BRIDGE))
                else:
                    call = steps.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    async def run_async(self, steps: Steps[T]) -> T:
        """Do what `run` does in an event loop of asyncio. Cancelling that cancels the call on the host.

        Raises:
            EgressFailed: the operation failed.
        """
        try:
            call = next(steps)
            while True:
                try:
                    reply = await replied(self._channel, self._request(call))
                    value = self._value(call, self._channel.wait(reply))
                except EgressFailed as exc:
                    call = steps.throw(exc)
                except ChannelClosed:
                    call = steps.throw(EgressFailed(Cause.CONNECT, NO_BRIDGE))
                else:
                    call = steps.send(value)
        except StopIteration as end:
            result: T = end.value
            return result

    def send(self, call: HostCall | None) -> None:
        """Make a call whose answer nobody waits for. A destructor may do that; it must not wait."""
        if call is not None:
            try:
                self._channel.call([self._request(call)])
            except ChannelClosed:
                pass

    def _request(self, call: HostCall) -> Any:
        if self._dry_run is not None:
            self._dry_run.check()
        return call.tool, to_packed(call.args, f"{call.tool} arguments"), line_here()

    def _value(self, call: HostCall, answer: ToolReturn | ToolFail) -> Any:
        if self._dry_run is not None:
            answer = self._dry_run.answer(call.tool, answer)
        if isinstance(answer, ToolFail):
            raise EgressFailed(CAUSES.get(answer.code, Cause.CONNECT), answer.message)
        value: Any = answer.value
        return COLLECTED | {"body": b"", "rest": None} if type(value) is Placeholder else value
