"""Make the calls of HTTP connections over the bridge: blocking, or in asyncio."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from toolcell_bridge.guest.channel import Channel, ChannelClosed, Request
from toolcell_bridge.guest.egress.connection import CAUSES, Cause, EgressFailed, HostCall, Steps
from toolcell_bridge.guest.placeholder import GuestDryRun
from toolcell_bridge.guest.tools import line_here, replied
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.messages import ToolFail, ToolReturn

NO_BRIDGE: Final = (
    "only the process that runs the script makes requests: a process that it forked, as multiprocessing does, cannot; "
    "use threads"
)

T = TypeVar("T")


class HostCalls:
    """Makes the calls of one sandbox's libraries."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.dry_run: GuestDryRun | None = None
        """The dry run of the script that runs, if it is one."""
        self._dropped: list[HostCall] = []

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

    def drop(self, rest: HostCall | None) -> None:
        """Have the host drop the rest of an answer, with the next call: this one may come from a destructor, which may
        run while another message is being made."""
        if rest is not None:
            self._dropped.append(rest)

    def _request(self, call: HostCall) -> Request:
        if self.dry_run is not None:
            self.dry_run.check()
        while self._dropped:
            rest = self._dropped.pop()
            self._channel.call([(rest.tool, to_packed(rest.args, rest.tool), None)])
        return call.tool, to_packed(call.args, f"{call.tool} arguments"), line_here()

    def _value(self, call: HostCall, answer: ToolReturn | ToolFail) -> Any:
        if self.dry_run is not None:
            answer = self.dry_run.answer(call.tool, answer)
        if isinstance(answer, ToolFail):
            raise EgressFailed(CAUSES.get(answer.code, Cause.CONNECT), answer.message)
        return answer.value
