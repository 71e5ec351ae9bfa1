"""The functions that a script may call: tools on the host, and its progress.

Values are converted and packed here; the host checks them again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from threading import main_thread as _main_thread
from typing import TYPE_CHECKING, Any

from toolcell_bridge.guest.channel import Channel, ChannelClosed, PendingReply, Request
from toolcell_bridge.guest.pictures import with_pictures
from toolcell_bridge.guest.placeholder import GuestDryRun
from toolcell_bridge.guest.scripts import SCRIPTS
from toolcell_bridge.guest.tables import native
from toolcell_bridge.guest.values import to_packed
from toolcell_bridge.wire.frozen import replaced
from toolcell_bridge.wire.messages import Progress, ToolFail, ToolReturn
from toolcell_bridge.wire.tables import TABLES

if TYPE_CHECKING:
    import asyncio
    import inspect
    from types import FrameType

    from toolcell_bridge.guest.tool_help import ToolDescription

# asyncio, json and difflib are imported where they are used: loading them would double a sandbox's cold start.

LIST_TOOLS = "toolcell.list_tools"
"""Answered by the session itself; no tool can be in this namespace."""


GUEST_NAMES = frozenset({
    "call_tool", "call_tools_parallel", "call_tool_async", "list_tools", "search_tools", "progress", "install_package",
    "tools", "set_result", "log", "ToolError", "input_files", "OUTPUT_DIR",
})  # fmt: skip
"""Names that every script finds. Inputs of a run must have others."""


WINDOW = 512
"""Calls that one call_tools_parallel keeps outstanding; the host executes as many at once as its limit says."""


_MAY_HOLD_PICTURES = frozenset({bytes, list, dict})


_ARGUMENT_KEYS = {"args", "arguments", "input"}
_CALL_KEYS = {"tool", "name", "id", "type", *_ARGUMENT_KEYS}
"""Keys of a call in `call_tools_parallel`. With any other the call is refused: what it holds would be lost."""


class ToolError(RuntimeError):
    """A tool call failed. The message is for reading; the attributes are for deciding."""

    def __init__(
        self, message: str, *, tool: str = "", code: str = "exception", retryable: bool = False, details: Any = None
    ) -> None:  # copies and pickles are made from the message alone
        super().__init__(message)
        self.tool = tool
        self.code = code
        self.retryable = retryable
        self.details = details


def line_here() -> int | None:
    """Line of the script that is calling. Of a thread that runs none of its lines, the line that the main one is at."""
    return _line_of(sys._getframe(2)) or _line_of(sys._current_frames().get(_main_thread().ident or 0))


def _line_of(frame: FrameType | None) -> int | None:
    while frame is not None:
        if frame.f_code.co_filename == SCRIPTS.current:
            return frame.f_lineno
        frame = frame.f_back
    return None


def _merged(name: object, values: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object] | None:
    """Return the arguments of one call by name; None when it takes the tool's parameters to tell."""
    if not isinstance(name, str):
        raise TypeError(f"call_tool() takes the tool's name first, a str, not {type(name).__name__}")
    if not values or (len(values) == 1 and values[0] is None):
        return dict(kwargs)
    if len(values) == 1 and issubclass(type(values[0]), Mapping):
        return {**values[0], **kwargs}  # type: ignore[dict-item]
    return None


def parameter_names(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of a tool's parameters in the order in which values are given: the required ones come first."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    return [*(each for each in required if each in properties), *(each for each in properties if each not in required)]


def bind_arguments(
    name: str, parameters: Mapping[str, Any], values: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call like those of a Python function: the required parameters come first.

    Raises:
        TypeError: there are more values than parameters, or one is given twice.
    """
    names = parameter_names(parameters)
    if len(values) > len(names):
        has = ", ".join(names) or "none"
        raise TypeError(f"{name}() was given {len(values)} values, and its parameters are: {has}")
    given = dict(zip(names, values, strict=False))
    if twice := [each for each in given if each in kwargs]:
        raise TypeError(f"{name}() got multiple values for argument {twice[0]!r}")
    return {**given, **kwargs}


def _text_of(value: object) -> str:
    return str(value) if type(value) in TABLES else repr(value)


def _value(name: str, answer: ToolReturn | ToolFail, raw: bool = False) -> Any:
    if isinstance(answer, ToolReturn):
        if raw and not isinstance(answer.value, str):
            import json

            return json.dumps(answer.value, ensure_ascii=False, default=_text_of)
        return with_pictures(answer.value) if type(answer.value) in _MAY_HOLD_PICTURES else answer.value
    raise ToolError(
        f"Tool '{name}' failed: {answer.message}",
        tool=name,
        code=answer.code,
        retryable=answer.retryable,
        details=answer.details,
    )


class Toolbox:
    """The calling half of a script's namespace, bound to one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.dry_run: GuestDryRun | None = None
        self._listed: dict[str, Mapping[str, Any]] = {}
        self._described: dict[str, ToolDescription] = {}

    def begin(self, dry_run: GuestDryRun | None) -> None:
        """Begin a script: it may call other tools than the one before."""
        self.dry_run = dry_run
        self._listed.clear()
        self._described.clear()
        self.__dict__.pop("names", None)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tools that the script may call."""
        return tuple(SCRIPTS.tools.split())

    def call_tool(self, name: Any = None, /, *args: Any, raw: bool = False, **kwargs: Any) -> Any:
        """Call a tool of the host and return its value. The arguments are one dict, keywords, or values in order.

        `raw=True` gives text: a str unchanged, anything else as JSON.

        Raises:
            ToolError: the tool failed, is unknown, or was refused.
        """
        return self.call(name, args, kwargs, raw)

    def call(
        self, name: str, values: Sequence[Any], kwargs: Mapping[str, Any], raw: bool = False, line: int | None = None
    ) -> Any:
        """Call a tool with these values and keywords; see `call_tool`. `line`: where the script named the tool."""
        name = self._registered_name(name)
        line = _line_of(sys._getframe(1)) or line or line_here()
        ((_, reply),) = self._channel.call([(name, self._arguments(name, values, kwargs), line)])
        try:
            return self._value(name, self._answered(reply, raw), raw)
        except ChannelClosed as exc:
            raise ToolError(str(exc), tool=name, code="unavailable") from None

    def _registered_name(self, name: Any) -> Any:
        """Return the name of the tool that `github__search` stands for. Anything else is returned as it is."""
        if not isinstance(name, str) or not (name.startswith("_") or "__" in name):
            return name
        from toolcell_bridge.guest.tool_names import name_meant

        return name_meant(name, self.names)

    def _answered(self, reply: PendingReply, raw: bool = False) -> ToolReturn | ToolFail:
        """Wait for an answer. Its arrays and tables are made by their own packages, where these are in the sandbox."""
        answer = self._channel.wait(reply)
        if reply.has_tables and not raw and isinstance(answer, ToolReturn):
            answer = replaced(answer, value=native(answer.value, or_plain=True))
        return answer

    def _value(self, name: str, answer: ToolReturn | ToolFail, raw: bool = False) -> Any:
        if self.dry_run is not None:
            answer = self.dry_run.answer(name, answer)
        return _value(name, answer, raw)

    def _arguments(self, name: Any, values: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        if self.dry_run is not None:
            self.dry_run.check()
        merged = _merged(name, values, kwargs)
        if merged is None and name not in self.names:
            merged = {}  # the host says what is wrong with the name
        elif merged is None:
            merged = bind_arguments(name, self._parameters(name), values, kwargs)
        packed = to_packed(merged, f"{name} arguments")
        if self.dry_run is not None:
            self.dry_run.check_arguments(packed.data)
        return packed

    def description(self, name: str) -> ToolDescription:
        """Return what `help()` shows of a tool; nothing where the host cannot be asked, as in a forked child."""
        from toolcell_bridge.guest.tool_help import NOTHING, read_description

        if name not in self._described:
            try:
                self._described[name] = read_description(self.list_tools(name, detail="full"))
            except (ToolError, ChannelClosed):
                return NOTHING
        return self._described[name]

    def _parameters(self, name: str) -> Mapping[str, Any]:
        """Return a tool's JSON Schema. Only calls with values in order need it."""
        if not self._listed:
            self._listed = {tool["name"]: tool["parameters"] for tool in self.list_tools()}
        return self._listed.get(name, {})

    def _request(self, entry: object) -> tuple[str, Any]:
        """One entry of call_tools_parallel: ("name", {...}), "name", or {"tool": ..., "args": ...}."""
        if isinstance(entry, str):
            return self._registered_name(entry), to_packed({}, f"{entry} arguments")
        if isinstance(entry, Mapping) and {"tool", "name"} & entry.keys() and entry.keys() <= _CALL_KEYS:
            name = self._registered_name(entry.get("tool", entry.get("name")))
            given = [each for key, each in entry.items() if key in _ARGUMENT_KEYS]
            if not given or type(given[0]) is not str:
                return name, self._arguments(name, given, {})
        elif isinstance(entry, Sequence) and entry:
            name = self._registered_name(entry[0])
            return name, self._arguments(name, entry[1:], {})
        raise TypeError(f'a call is ("tool", {{...}}) or {{"tool": ..., "args": {{...}}}}, not {entry!r:.80}')

    def call_tools_parallel(
        self, calls: Iterable[Any], return_exceptions: bool = False, max_workers: int | None = None
    ) -> list[Any]:
        """Call several tools at once; values come back in the order of `calls`.

        The first failure is raised after all have finished, or with `return_exceptions=True` each failure
        is a ToolError in its place. `max_workers` keeps fewer than the run's own limit in flight.
        """
        if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
            form = "a list of calls, such as [('tool', {...}), ...]"
            raise TypeError(f"call_tools_parallel() takes {form}, not {type(calls).__name__}")
        requests = [(*self._request(entry), line_here()) for entry in calls]
        window = max(1, min(max_workers or WINDOW, WINDOW))
        replies = [reply for _, reply in self._channel.call(requests[:window])]
        answers: list[Any] = []
        for request in requests:
            answers.append(self._answer(request[0], replies[len(answers)]))
            if len(replies) < len(requests):
                replies += [reply for _, reply in self._channel.call([requests[len(replies)]])]
        if not return_exceptions:
            for answer in answers:
                if issubclass(type(answer), ToolError):  # isinstance() would look into a placeholder
                    raise answer
        return answers

    def _answer(self, name: str, reply: PendingReply) -> Any:
        try:
            return self._value(name, self._answered(reply))
        except ToolError as exc:
            return exc
        except ChannelClosed as exc:
            return ToolError(str(exc), tool=name, code="unavailable")

    def call_tool_async(self, name: Any = None, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """`call_tool` for asyncio code; cancelling the task cancels the call on the host.

        Raises:
            ToolError: the tool failed, is unknown, or was refused.
        """
        return self._call_async(
            name, args, kwargs, line_here()
        )  # a task that awaits it is not at the line that made it

    async def _call_async(self, name: Any, args: Sequence[Any], kwargs: Mapping[str, Any], line: int | None) -> Any:
        name = self._registered_name(name)
        reply = await replied(self._channel, (name, self._arguments(name, args, kwargs), line))
        return self._value(name, self._answered(reply))

    def list_tools(self, *names: str, detail: str | None = None) -> Any:
        """The tools that this script may call, or those of these names.

        Without `detail`, a list of dicts with name, description and parameters (a JSON Schema). With it, text to read:
        "names", "signatures" (a line each) or "full" (stubs with docstrings).

        Raises:
            ToolError: there is no such tool, or no such detail.
        """
        return self._ask({} if not names else {"names": list(names)}, detail)

    def search_tools(self, query: str, limit: int = 10, *, detail: str | None = None) -> Any:
        """The tools that fit `query`, best first. Words count in names, then descriptions, then parameters.

        Shape: as in `list_tools`.

        Raises:
            ToolError: `query` or `limit` is too large, or there is no such detail.
        """
        return self._ask({"query": query, "limit": limit}, detail)

    def _ask(self, wanted: dict[str, Any], detail: str | None) -> Any:
        """Ask the host about its tools. It answers from what it tells about them, and makes no call."""
        if detail is not None:
            wanted["detail"] = detail
        ((_, reply),) = self._channel.call([(LIST_TOOLS, to_packed(wanted, "list_tools arguments"), None)])
        return _value(LIST_TOOLS, self._channel.wait(reply))

    def progress(self, value: Any = None, /, **fields: Any) -> None:
        """Report progress to the host while the script runs; any plain value. Keywords make a dict of it."""
        if fields:
            named = {} if value is None else value if isinstance(value, Mapping) else {"value": value}
            value = {**named, **fields}
        self._channel.send(Progress(to_packed(value, "progress")))


async def replied(channel: Channel, request: Request) -> PendingReply:
    """Make a call, and wait in the event loop of asyncio for its answer. Cancelling that cancels the call on the host.

    Raises:
        ChannelClosed: the host is gone.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    ((call_id, reply),) = channel.call_with([request], lambda: loop.call_soon_threadsafe(done.set))
    _watch(loop, channel)
    try:
        await done.wait()
    except asyncio.CancelledError:
        channel.cancel(call_id)
        raise
    finally:
        _unwatch(loop, channel)
    return reply


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


for _function in (
    Toolbox.call_tool,
    Toolbox.call_tools_parallel,
    Toolbox.call_tool_async,
    Toolbox.list_tools,
    Toolbox.search_tools,
    Toolbox.progress,
):
    _function.__qualname__ = _function.__name__  # error messages hold it
Toolbox._call_async.__qualname__ = Toolbox._call_async.__name__ = "call_tool_async"
ToolError.__module__ = "__main__"  # where a script finds it


class ToolFunction:
    """A tool as a function. Its signature and docstring are asked for when somebody looks at them."""

    __slots__ = ("__name__", "__qualname__", "__weakref__", "_line", "_tool", "_toolbox")

    def __init__(self, toolbox: Toolbox, tool: str, name: str, line: int | None) -> None:
        self._toolbox, self._tool, self._line = toolbox, tool, line
        self.__name__ = self.__qualname__ = name

    def __call__(self, /, *values: Any, **kwargs: Any) -> Any:
        return self._toolbox.call(self._tool, values, kwargs, line=self._line)

    def __get__(self, instance: object, owner: type | None = None) -> ToolFunction:
        """Return itself: a tool takes no `self`. `pydoc` takes what has this for a function."""
        return self

    def __repr__(self) -> str:
        return f"<tool {self._tool}>"

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self._toolbox.description(self._tool).docstring

    @property
    def __signature__(self) -> inspect.Signature | None:
        return self._toolbox.description(self._tool).signature


ToolFunction.__name__ = ToolFunction.__qualname__ = "tool"  # what `help()` and messages call it
ToolFunction.__module__ = "tools"


class ToolNamespace:
    """`tools.<name>(...)`: each tool as a function. `tools["name"]` serves names that are not identifiers.

    `tools.github` is the namespace of tools such as `github.create_issue`.
    """

    def __init__(self, toolbox: Toolbox, prefix: str = "") -> None:
        self.__toolbox = toolbox
        self.__prefix = prefix

    def __getattr__(self, name: str) -> Any:
        toolbox, prefix = self.__toolbox, self.__prefix
        names = [each[len(prefix) :] for each in toolbox.names if each.startswith(prefix)] if prefix else toolbox.names
        found, is_namespace = _resolve_name(name, names)
        if is_namespace:
            return ToolNamespace(toolbox, f"{prefix}{found}.")
        return ToolFunction(toolbox, prefix + found, name, line_here())

    __getitem__ = __getattr__

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dir__())

    @property
    def __all__(self) -> list[str]:
        from toolcell_bridge.guest.tool_names import python_name

        return [*dict.fromkeys(python_name(each.partition(".")[0]) for each in self.__toolbox.names)]

    def __dir__(self) -> list[str]:
        prefix = self.__prefix
        names = [each[len(prefix) :] for each in self.__toolbox.names if each.startswith(prefix)]
        return list(dict.fromkeys(each.partition(".")[0] for each in names)) + [each for each in names if "." in each]


def _resolve_name(name: str, names: Sequence[str]) -> tuple[str, bool]:
    """Return the tool or the namespace that a script means, and whether it is a namespace.

    It is the one of that name, or one that is written so in Python.
    """
    if name in names and not name.startswith("__"):
        return name, False
    from toolcell_bridge.guest.tool_names import python_name, python_path

    for each in names:
        if python_path(each) == name:
            return each, False
        first, dot, _ = each.partition(".")
        if dot and name in (first, python_name(first)):
            return first, True
    import difflib

    near = difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(names) or 'none'}"
    raise AttributeError(f"no tool named {name!r}{hint}")


class ToolsModule:
    """Lets `from tools import NAME` and `import tools` work, unless the workspace has a module of that name."""

    def __init__(self) -> None:
        self.namespace: ToolNamespace | None = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return the spec of `tools`; None for all others."""
        if name != "tools" or self.namespace is None:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, _spec: object) -> Any:
        """Return the namespace of the script that runs."""
        return self.namespace

    def exec_module(self, module: object) -> None:
        """Do nothing: the namespace is ready."""


TOOLS_MODULE = ToolsModule()
