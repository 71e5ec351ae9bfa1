"""An office: tools that note what they were asked and what they knew of the run, and an order for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import anyio

from toolcell import Limits, RunContext, ToolContext, ToolRegistry
from toolcell.tools import Event, EventBus, Feature

SECRET = "tok-7Hq2planted-93"
"""What tools may use, and nobody may read."""

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def write(*texts: str) -> Calls:
    """Calls of the tool that writes and can be undone."""
    return [("write", {"text": text}) for text in texts]


BOOK: Calls = [("book", {"text": "b"})]
MAIL: Calls = [("mail", {})]
POST: Calls = [("post", {"text": "the code is 1234"})]
USE_SECRET: Calls = [("use_secret", {})]
REPORT: Calls = [("report", {})]
WAIT: Calls = [("wait", {})]


class Office:
    """A registry, and what its tools have done."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.undone: list[str] = []
        self.used: list[str] = []
        """Secrets that the tool got."""
        self.deadlines: list[float] = []
        self.users: list[str] = []
        self.while_waiting: Callable[[], object] | None = None
        self.ended_waiting = anyio.Event()
        self.registry = registry = ToolRegistry()

        def unwrite(args: Mapping[str, Any], _result: Any) -> None:
            self.undone.append(args["text"])

        def note(ctx: ToolContext) -> None:
            self.deadlines.append(ctx.deadline)
            self.users.append(ctx.user_id)

        @registry.tool(revert=unwrite)
        async def write(text: str, ctx: ToolContext) -> str:
            """Append a text to the ledger, where it can be undone."""
            note(ctx)
            self.made.append(text)
            return f"wrote {text}"

        def as_if_booked(text: str) -> str:
            return f"booked {text}"

        @registry.tool(revert=unwrite, preview=as_if_booked)
        async def book(text: str, ctx: ToolContext) -> str:
            """Book something; a dry run knows what would come of it."""
            note(ctx)
            self.made.append(text)
            return f"booked {text}"

        @registry.tool(reads="private", read_only=True)
        async def mail(ctx: ToolContext) -> str:
            """Read all the private mail there is."""
            note(ctx)
            self.made.append("mail")
            return "the code is 1234"

        @registry.tool(sends="public")
        async def post(text: str, ctx: ToolContext) -> str:
            """Post a text where everybody can read it."""
            note(ctx)
            self.made.append(f"post {text}")
            return "posted"

        @registry.tool(read_only=True)
        async def use_secret(ctx: ToolContext) -> str:
            """Use the key of the run, and say carelessly what it is."""
            note(ctx)
            self.used.append(ctx.secret("key"))
            return f"the key is {ctx.secret('key')}"

        @registry.tool(read_only=True)
        async def report(ctx: ToolContext) -> str:
            """Report some progress on the way."""
            note(ctx)
            ctx.update("reported by the tool")
            return "reported"

        @registry.tool(read_only=True)
        async def wait(ctx: ToolContext) -> None:
            """Wait for something that never comes."""
            note(ctx)
            try:
                if self.while_waiting is not None:
                    self.while_waiting()
                await anyio.sleep_forever()
            finally:
                self.ended_waiting.set()

        @registry.tool(requires_approval=True, read_only=True)
        async def agree(ctx: ToolContext) -> str:
            """Ask a person to agree, and go on then."""
            note(ctx)
            return "agreed"

    @property
    def written(self) -> list[str]:
        """What was written, without what was read."""
        return [each for each in self.made if each != "mail"]


class MovedClock:
    """Within its block, the clock of this event loop can be moved on."""

    def __enter__(self) -> Self:
        loop: Any = asyncio.get_running_loop()
        self._loop, self._time, self._moved_s = loop, loop.time, 0.0
        loop.time = lambda: self._time() + self._moved_s
        return self

    def __exit__(self, *exc_info: object) -> None:
        del self._loop.time

    def move(self, seconds: float) -> None:
        """Let this many seconds pass at once."""
        self._moved_s += seconds


class Watcher(Feature):
    """Notes starts and ends of calls."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []

    def call_started(self, call: Any) -> None:
        self.started.append(call.name)

    def call_ended(self, call: Any) -> None:
        self.ended.append(call.name)


@dataclass
class Order:
    """What a run is to do, and what it is given for that."""

    first: Calls = ()
    """Made before the middle of a route that has one: before the failure, the suspension, the fork."""
    then: Calls = ()
    """Made after it."""
    code: str = ""
    """Python that runs after `then`."""
    context: dict[str, Any] = field(default_factory=dict)
    """Fields of the `RunContext`."""
    features: list[Feature] = field(default_factory=list)
    limits: Limits | None = None
    runtime: dict[str, Any] = field(default_factory=dict)
    """Options of the `Runtime`."""
    folder: Path | None = None
    """For journals that outlive a Runtime."""
    reverts: bool = False
    """Undo at the end what was made."""

    def __post_init__(self) -> None:
        self.bus = EventBus()
        self.events: list[Event] = []
        self.heard: list[str] = []
        """Progress, as its caller was told of it."""
        self.bus.subscribe(self._note)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if event.type == "tool_execution_update":
            self.heard.append(str(event.update))

    def run(self, **fields: Any) -> RunContext:
        """Return the context for one run."""
        return RunContext(events=self.bus, user_id="ann", **{**self.context, **fields}).having(*self.features)

    @property
    def calls(self) -> Calls:
        """All calls, in order."""
        return [*self.first, *self.then]

    @property
    def handlers(self) -> dict[str, Any]:
        """The callbacks of a script."""
        return {"on_progress": lambda value: self.heard.append(str(value))}

    def bounds(self) -> dict[str, Any]:
        """Return `limits=`, if there are any."""
        return {} if self.limits is None else {"limits": self.limits}

    def names(self, kind: str) -> list[str]:
        """Return the tools of the events of one type."""
        return [event.tool or "" for event in self.events if event.type == f"tool_execution_{kind}"]


def source(calls: Calls, code: str = "", middle: str = "", then: Calls = ()) -> str:
    """Return a script that makes calls one after the other, and whose value is what each gave.

    In a session, it has the rows of the script before as `earlier`.
    """
    lines = [
        "earlier, rows = globals().get('rows', []), []",
        "def make(name, args):",
        "    try:",
        "        rows.append(['ok', call_tool(name, args)])",
        "    except ToolError as exc:",
        "        rows.append(['failed', str(exc)])",
        *(f"make({name!r}, {dict(args)!r})" for name, args in calls),
        middle,
        *(f"make({name!r}, {dict(args)!r})" for name, args in then),
        code,
        "set_result(rows)",
    ]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return everything that somebody can read of a value."""
    methods = (getattr(value, name, None) for name in ("to_dict", "to_json", "_repr_html_"))
    parts = [str(value), repr(value), *(str(method()) for method in methods if method is not None)]
    with contextlib.suppress(TypeError, ValueError):
        parts.append(json.dumps(value))
    return "\n".join(parts)
