"""The functions that a script may call: tools on the host, and its progress.

Values are converted and packed here; the host checks them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolcell_bridge.guest.channel import Channel, ChannelClosed, PendingReply
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.messages import Progress, ToolFail, ToolReturn

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

# asyncio, json and difflib are imported where they are used: loading them would double a sandbox's cold start.

SCRIPT = "<code>"
"""File name of the script's code object, as tracebacks show it."""

LIST_TOOLS = "toolcell.list_tools"
"""Answered by the session itself; a dot cannot occur in a tool's name."""


WINDOW = 512
"""Calls that one call_tools_parallel keeps outstanding; the host executes as many at once as its limit says."""


class ToolError(RuntimeError):
    """A tool call failed. The message is for reading; the attributes are for deciding."""

    def __init__(
        self, message: str, *, tool: str, code: str = "exception", retryable: bool = False, details: Any = None
    ) -> None:
        super().__init__(message)
        self.tool = tool
        self.code = code
        self.retryable = retryable
        self.details = details


def _line() -> int | None:
    """Line of the script that is calling, or None when the call comes from elsewhere."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == SCRIPT:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _arguments(name: object, args: object, kwargs: Mapping[str, object]) -> Any:
    """Merge and pack the arguments of one call."""
    if not isinstance(name, str):
        raise TypeError(f"call_tool() takes the tool's name first, a str, not {type(name).__name__}")
    if args is None:
        merged: dict[str, object] = dict(kwargs)
    elif isinstance(args, Mapping):
        merged = {**args, **kwargs}
    else:
        raise TypeError(f"arguments of {name!r} must be a dict, not {type(args).__name__}")
    return to_packed(merged, f"{name} arguments")


def _value(name: str, answer: ToolReturn | ToolFail, raw: bool = False) -> Any:
    if isinstance(answer, ToolReturn):
        if raw and not isinstance(answer.value, str):
            import json

            return json.dumps(answer.value, ensure_ascii=False, default=repr)
        return answer.value
    raise ToolError(
        f"Tool '{name}' failed: {answer.message}",
        tool=name,
        code=answer.code,
        retryable=answer.retryable,
        details=answer.details,
    )


def _request(entry: object) -> tuple[str, Any]:
    """One entry of call_tools_parallel: ("name", {...}), "name", or {"tool": ..., "args": ...}."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping):
        name: Any = entry.get("tool", entry.get("name"))
        return name, _arguments(name, entry.get("args", entry.get("arguments")), {})
    if isinstance(entry, Sequence) and 1 <= len(entry) <= 2:
        return entry[0], _arguments(entry[0], entry[1] if len(entry) == 2 else None, {})
    raise TypeError(f'a call is ("tool", {{...}}) or {{"tool": ..., "args": {{...}}}}, not {entry!r:.80}')


class Toolbox:
    """The calling half of a script's namespace, bound to one channel."""

    def __init__(self, channel: Channel, names: Sequence[str]) -> None:
        self._channel = channel
        self.names = tuple(names)

    def call_tool(
        self, name: str, args: Mapping[str, Any] | None = None, /, *, raw: bool = False, **kwargs: Any
    ) -> Any:
        """Call a tool of the host and return its value.

        `raw=True` gives text: a str unchanged, anything else as JSON.

        Raises:
            ToolError: the tool failed, is unknown, or was refused.
        """
        ((_, reply),) = self._channel.call([(name, _arguments(name, args, kwargs), _line())])
        try:
            return _value(name, self._channel.wait(reply), raw)
        except ChannelClosed as exc:
            raise ToolError(str(exc), tool=name, code="unavailable") from None

    def call_tools_parallel(
        self, calls: Iterable[Any], return_exceptions: bool = False, max_workers: int | None = None
    ) -> list[Any]:
        """Call several tools at once; values come back in the order of `calls`.

        The first failure is raised after all have finished, or with `return_exceptions=True` each failure
        is a ToolError in its place. `max_workers` keeps fewer than the run's own limit in flight.
        """
        requests = [(*_request(entry), _line()) for entry in calls]
        window = max(1, min(max_workers or WINDOW, WINDOW))
        replies = [reply for _, reply in self._channel.call(requests[:window])]
        answers: list[Any] = []
        for request in requests:
            answers.append(self._answer(request[0], replies[len(answers)]))
            if len(replies) < len(requests):
                replies += [reply for _, reply in self._channel.call([requests[len(replies)]])]
        if not return_exceptions:
            for answer in answers:
                if isinstance(answer, ToolError):
                    raise answer
        return answers

    def _answer(self, name: str, reply: PendingReply) -> Any:
        try:
            return _value(name, self._channel.wait(reply))
        except ToolError as exc:
            return exc
        except ChannelClosed as exc:
            return ToolError(str(exc), tool=name, code="unavailable")

    async def call_tool_async(self, name: str, args: Mapping[str, Any] | None = None, /, **kwargs: Any) -> Any:
        """`call_tool` for asyncio code; cancelling the task cancels the call on the host.

        Raises:
            ToolError: the tool failed, is unknown, or was refused.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        ((call_id, reply),) = self._channel.call_with(
            [(name, _arguments(name, args, kwargs), _line())], lambda: loop.call_soon_threadsafe(done.set)
        )
        _watch(loop, self._channel)
        try:
            await done.wait()
        except asyncio.CancelledError:
            self._channel.cancel(call_id)
            raise
        finally:
            _unwatch(loop, self._channel)
        assert reply.answer is not None
        return _value(name, reply.answer)

    def list_tools(self) -> list[dict[str, Any]]:
        """Name, description and parameters (a JSON Schema) of every tool this script may call."""
        ((_, reply),) = self._channel.call([(LIST_TOOLS, {}, None)])
        listed: list[dict[str, Any]] = _value(LIST_TOOLS, self._channel.wait(reply))
        return listed

    def search_tools(self, query: str) -> list[dict[str, Any]]:
        """The tools whose name or description has every word of `query`, best first."""
        words = query.lower().split()
        ranked = [
            (sum(word in tool["name"].lower() for word in words), tool)
            for tool in self.list_tools()
            if all(word in f"{tool['name']} {tool['description']}".lower() for word in words)
        ]
        return [tool for _, tool in sorted(ranked, key=lambda pair: -pair[0])]

    def progress(self, value: Any = None, /, **fields: Any) -> None:
        """Report progress to the host while the script runs; any plain value."""
        self._channel.send(Progress(to_packed(fields if value is None and fields else value, "progress")))


_watched: dict[int, int] = {}


def _watch(loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
    count = _watched.get(id(loop), 0)
    if not count:
        loop.add_reader(channel.fileno, channel.read_ready)
    _watched[id(loop)] = count + 1


def _unwatch(loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
    _watched[id(loop)] -= 1
    if not _watched[id(loop)]:
        del _watched[id(loop)]
        loop.remove_reader(channel.fileno)


class ToolNamespace:
    """`tools.<name>(**arguments)`: each tool as a method."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.__toolbox = toolbox

    def __getattr__(self, name: str) -> Callable[..., Any]:
        toolbox = self.__toolbox
        if name.startswith("__") or name not in toolbox.names:
            import difflib

            near = difflib.get_close_matches(name, toolbox.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(toolbox.names) or 'none'}"
            raise AttributeError(f"no tool named {name!r}{hint}")

        def call(args: Mapping[str, Any] | None = None, /, **kwargs: Any) -> Any:
            return toolbox.call_tool(name, args, **kwargs)

        call.__name__ = name
        return call

    def __dir__(self) -> list[str]:
        return list(self.__toolbox.names)
