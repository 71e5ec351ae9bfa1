"""Check the types of a script before it runs: its calls of tools, and what it does with their results.

The checker reads a stranger's text, so it runs in sandboxes of its own, whose only program is the checker. They are
kept warm; each serves one set of tools and a number of scripts, and is destroyed when one takes too long or its caller
gives up. Nothing that comes back decides what may run: a script without findings meets every later check as
before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import CallableTools, ScriptRuntime
from toolcell.calls.options import Origin
from toolcell.config import MIB, CheckTypes, Limits, PoolConfig
from toolcell.control import type_check_guest
from toolcell.errors import SandboxUnavailable, ToolcellError, UsageError
from toolcell.journal.identity import options_of
from toolcell.results import ErrorInfo, ExecutionResult, Outcome
from toolcell.run.run import Script, sendable
from toolcell.support.checks import check_kind
from toolcell.support.daemon_threads import run_sync
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.packing import bytes_digest, pack
from toolcell.support.text import shown_findings
from toolcell.tools.stubs import DETAILS, Described, Recent, checked_module, is_identifier
from toolcell_bridge.guest.tool_names import python_path
from toolcell_bridge.guest.tools import GUEST_NAMES

SCRIPT: Final = f"""{Path(type_check_guest.__file__).read_text(encoding="utf-8")}
serve(lambda answer: call_tool("next_check", {{"answer": answer}}), stubs, names, paths, version)
"""
"""What a checker runs: it gets scripts as answers of its only tool."""

MAX_CHECKERS: Final = 4
"""Alive at once, for all sets of tools together."""

MAX_CHECKS: Final = 500
"""By one checker. ty keeps a little of each script."""

CHECK_S: Final = 20.0
"""For one script. A checker that has just started has read nothing of Python's own types yet."""

IDLE_S: Final = 600.0
"""After so long without a script, a checker ends."""

LIMITS: Final = Limits(wall_s=86_400, cpu_s=600, memory_bytes=768 * MIB, processes=48, tool_calls=MAX_CHECKS + 8)
"""Limits of one checker in its whole life."""

ONLY_PROGRAM: Final = type_check_guest.TY


class NotChecked(Exception):
    """A script could not be checked; says why."""


class Checker:
    """One checker, from its start to its end. It checks one script at a time."""

    def __init__(self, key: str) -> None:
        self.key = key
        """Key of the tools that it knows."""
        self.is_busy = True
        self.checks = 0
        self.problem: str | None = None
        """Why it has ended."""
        self.has_died = False
        """It has ended by itself."""
        self._failure: ToolcellError | None = None
        self._end = anyio.Event()
        self._jobs, self._given = anyio.create_memory_object_stream[dict[str, Any]](1)
        self._answered = anyio.Event()
        self._answer: Any = None

    async def run(self, sandboxes: ScriptRuntime, inputs: Mapping[str, Any]) -> None:
        """Run until it is ended, or ends by itself. Raises nothing."""

        async def next_check(answer: Any = None) -> dict[str, Any] | None:
            """Give the answer about one script, and get the next one; None when none comes."""
            if answer is not None:
                self._answer = answer
                self._answered.set()
            with anyio.move_on_after(IDLE_S):
                return await self._given.receive()
            return None

        problem = "the checker was ended"
        try:
            result: ExecutionResult = await sandboxes.execute_code(
                SCRIPT, inputs=inputs, tools=[next_check], cancel=self._end
            )
            problem = f"{result.outcome}: {result.error.message if result.error is not None else ''}"
        except ToolcellError as exc:
            problem, self._failure = str(exc), exc
        finally:
            self.has_died = not self._end.is_set()
            self.problem = self.problem or problem
            self._answered.set()
            self._jobs.close()
            self._given.close()

    async def check(self, job: Mapping[str, Any]) -> Any:
        """Return the answer about one script.

        Raises:
            NotChecked: it took too long, or the checker has ended; it is of no use any more.
            SandboxUnavailable: the checker could not be started.

        Cancellation: the checker is ended.
        """
        self._answer, self._answered = None, anyio.Event()
        self.checks += 1
        try:
            self._check_alive()
            self._jobs.send_nowait(dict(job))
            with anyio.move_on_after(CHECK_S):
                await self._answered.wait()
        except BaseException:
            self.end()
            raise
        if self._answer is None:
            self._check_alive()
            self.end()
            raise NotChecked(f"it took more than {CHECK_S:g} s")
        return self._answer

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.problem is not None:
            raise NotChecked(self.problem)

    def end(self) -> None:
        """End its run. May be called twice."""
        self._end.set()
        self.problem = self.problem or "the checker was ended"


class Checkers:
    """The checkers of one Runtime. They are started when they are needed."""

    def __init__(self, runtime: Callable[..., Any], tasks: Callable[[], TaskGroup]) -> None:
        """`runtime`: the class `Runtime`, of their sandboxes; each runs in a task of `tasks`."""
        self._make, self._tasks = runtime, tasks
        self._runtime: Any = None
        self._alive: list[Checker] = []
        """The one that was used last is the last."""
        self._lock: anyio.Lock | None = None
        self._changed = ChangeEvent()

    async def close(self) -> None:
        """End them, and their sandboxes."""
        runtime, self._runtime, self._lock = self._runtime, None, None
        for each in self._alive:
            each.end()
        self._alive.clear()
        if runtime is not None:
            await runtime.close()

    async def check(self, key: str, inputs: Mapping[str, Any], job: Mapping[str, Any]) -> Any:
        """Return the answer about a script. `inputs` are those of a checker that knows the tools of `key`.

        Raises:
            NotChecked: this script cannot be checked.
            UsageError, SandboxUnavailable: no checker can be started.
        """
        while True:
            checker = await self._take_checker(key, inputs)
            is_new = not checker.checks
            try:
                return await checker.check(job)
            except NotChecked:
                if is_new or not checker.has_died:
                    raise  # else what earlier scripts left may be the cause
            finally:
                self._put_back(checker)

    async def _take_checker(self, key: str, inputs: Mapping[str, Any]) -> Checker:
        """Return a checker that nobody else has, started if there is none."""
        runtime = await self._open()
        while True:
            idle = [each for each in self._alive if not each.is_busy]
            for each in reversed(idle):
                if each.key == key:
                    each.is_busy = True
                    return each
            if len(self._alive) >= MAX_CHECKERS and idle:
                idle[0].end()
                self._alive.remove(idle[0])
            if len(self._alive) < MAX_CHECKERS:
                checker = Checker(key)
                self._tasks().start_soon(checker.run, runtime, inputs)
                self._alive.append(checker)
                return checker
            await self._changed.wait()

    def _put_back(self, checker: Checker) -> None:
        checker.is_busy = False
        if checker in self._alive:
            self._alive.remove(checker)
            if checker.problem is None and checker.checks < MAX_CHECKS:
                self._alive.append(checker)
            else:
                checker.end()
        self._changed.notify()

    async def _open(self) -> Any:
        self._lock = self._lock or anyio.Lock()
        async with self._lock:
            if self._runtime is None:
                if sys.platform != "linux":
                    raise SandboxUnavailable(f"types are checked in a sandbox of Linux, and this is {sys.platform}")
                from toolcell.sandbox.process.backend import ProcessBackend
                from toolcell.sandbox.process.programs import copy_type_checker

                backend = ProcessBackend(packages=await run_sync(copy_type_checker), program=ONLY_PROGRAM)
                runtime = self._make(backend=backend, limits=LIMITS, pool=PoolConfig(warm=1, cap=MAX_CHECKERS + 1))
                await runtime.open()
                self._runtime = runtime
            return self._runtime


Findings = tuple[Mapping[str, Any], ...]
"""Line, column, rule and message of each."""

MAX_FINDINGS: Final = 50
MAX_EARLIER_CHARS: Final = 1 << 20
"""Most characters of the scripts of a session, for the next one's check."""
UNCHECKED: Final = "not-checked"
"""Rule of the finding that a script could not be checked. Nobody is told who has not asked for the check."""
MAX_KNOWN: Final = 8
"""Sets of tools whose stubs are kept."""


def _by_detail(stub: str) -> str:
    """Return a function that gives rows, or text with `detail`. `*names` ends the arguments without a star."""
    star = "" if "*" in stub else ", *"
    rows = stub.format(detail="", returns="list[dict[str, Any]]")
    text = stub.format(detail=f"{star}, detail: Literal{list(DETAILS)!r}", returns="str")
    return f"@overload\n{rows}\n@overload\n{text}"


NAMES: Final[Mapping[str, str]] = {
    "call_tool": "def call_tool(name: str, /, *args: Any, raw: bool = ..., **kwargs: Any) -> Any: ...",
    "call_tool_async": "async def call_tool_async(name: str, /, *args: Any, **kwargs: Any) -> Any: ...",
    "list_tools": _by_detail("def list_tools(*names: str{detail}) -> {returns}: ..."),
    "search_tools": _by_detail("def search_tools(query: str, limit: int = ...{detail}) -> {returns}: ..."),
    "OUTPUT_DIR": "OUTPUT_DIR: str",
    "ToolError": "class ToolError(RuntimeError):\n    tool: str\n    code: str\n    retryable: bool\n    details: Any",
}
"""What a script finds besides its tools. Names of the guest that are not here are Any."""

_HELPERS: Final = """from typing import Any, Literal, overload
class _Tools(type):
    def __getitem__(cls, name: str) -> Any: ...
async def _awaited[T](value: T) -> T: ...
def _values(value: Any) -> Any: ...
class _Picture(bytes):
    media_type: str
    def save(self, path: Any) -> None: ...
"""
NAMES_OFFERED: Final = [*sorted(GUEST_NAMES), "_awaited", "_values"]
_TYPES: Final[Mapping[type, str]] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    bytes: "bytes",
    list: "list[Any]",
    dict: "dict[str, Any]",
}


@dataclass(frozen=True, slots=True)
class Earlier:
    """What scripts before this one have left in their session."""

    sources: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Names of their inputs."""


NOTHING_EARLIER: Final = Earlier()
ANYTHING_EARLIER: Final = Earlier(("from anything import *",))
"""Nobody knows what scripts before this one have left."""


def earlier_scripts(scripts: Sequence[Script]) -> Earlier:
    """Return what these scripts of a session have left in it."""
    if sum(len(each.source) for each in scripts) > MAX_EARLIER_CHARS:
        return ANYTHING_EARLIER
    names = tuple(str(name) for each in scripts for name in each.inputs or ())
    return Earlier(tuple(each.source for each in scripts), names)


@dataclass(frozen=True, slots=True)
class TypeFindings:
    """What was found in a script, and whether it must not run because of that."""

    findings: Findings = ()
    is_strict: bool = False

    @property
    def refuses(self) -> bool:
        """True when the script must not run."""
        return self.is_strict and bool(self.findings)

    def refusal(self) -> ExecutionResult:
        """Return the result of the script that was not run."""
        message = f"{shown_findings(self.findings)}; the script was not run"
        error = ErrorInfo("Denied", message, self.findings[0]["line"], findings=self.findings)
        return ExecutionResult("", Outcome.DENIED, error=error, type_findings=self.findings)


NOT_CHECKED: Final = TypeFindings()


class TypeChecker:
    """Checks scripts. The checkers are started with the first check."""

    def __init__(self, runtime: Callable[..., Any], tasks: Callable[[], TaskGroup]) -> None:
        """`runtime` makes the Runtime of the checkers' sandboxes; each checker runs in a task of `tasks`."""
        self._checkers = Checkers(runtime, tasks)
        self._known = Recent[tuple[str, Mapping[str, Any]]](MAX_KNOWN)
        """Stubs of many tools take longer to write than a check takes."""
        self._is_impossible = False

    async def close(self) -> None:
        """End the checkers."""
        await self._checkers.close()

    async def check(
        self,
        degree: CheckTypes | None,
        by_default: CheckTypes | None,
        source: str,
        tools: CallableTools,
        inputs: Mapping[str, Any] | None,
        earlier: Earlier,
    ) -> TypeFindings:
        """Check a script, if that is wanted. `by_default` holds without a `degree`, and where this machine can check.

        Raises:
            UsageError: ty is not installed.
            SandboxUnavailable: the checker's sandbox could not be started on this machine.
        """
        if (degree or by_default or "off") == "off":
            return NOT_CHECKED
        if degree is not None:
            return TypeFindings(await self.findings(source, tools, inputs, earlier), degree == "refuse")
        if self._is_impossible or not is_installed():
            return NOT_CHECKED
        try:
            found = await self.findings(source, tools, inputs, earlier)
            return TypeFindings(tuple(each for each in found if each["rule"] != UNCHECKED), by_default == "refuse")
        except (UsageError, SandboxUnavailable):
            self._is_impossible = True
            return NOT_CHECKED

    async def findings(
        self,
        source: str,
        tools: CallableTools,
        inputs: Mapping[str, Any] | None,
        earlier: Earlier = NOTHING_EARLIER,
    ) -> Findings:
        """Return what is wrong with the types of a script.

        Raises: as `check`.
        """
        check_kind("source", source, str)
        of_tools = described(tools)
        key, shown = self._known.get([part for tool in of_tools for part in tool], lambda: known_tools(of_tools))
        given = given_names(inputs, earlier.names)
        job = {"source": sendable(source), "given": given, "earlier": [sendable(each) for each in earlier.sources]}
        try:
            answer = await self._checkers.check(key, shown, job)
        except NotChecked as exc:
            message = f"the types of this script could not be checked: {exc!s:.300}"
            return ({"line": 1, "column": 0, "rule": UNCHECKED, "message": message},)
        return read_findings(answer.get("findings") if isinstance(answer, dict) else None)


def known_tools(given: list[Described]) -> tuple[str, Mapping[str, Any]]:
    """Return what checkers are told about a set of tools, after its key."""
    names = [definition.name for definition, _ in given]
    shown: Mapping[str, Any] = {
        "stubs": stubs_of(given),
        "names": NAMES_OFFERED,
        "version": f"3.{sys.version_info.minor}",
        "paths": {name: python_path(name) for name in names},
    }
    return bytes_digest(pack([shown["stubs"], names])), shown


def described(tools: CallableTools) -> list[Described]:
    """Return the tools that a script may call, and what they return."""
    return [(each, options_of(tools, each.name).returns) for each in tools.definitions(Origin.CODE)]


def stubs_of(given: list[Described]) -> str:
    """Return what every script with these tools finds, as the text of a `.pyi` file."""
    module = checked_module(given).replace("\nclass tools:\n", "\nclass tools(metaclass=_Tools):\n", 1)
    names = [NAMES.get(name, f"{name}: Any") for name in sorted(GUEST_NAMES - {"tools"})]
    return "\n".join([_HELPERS, *names, module if given else "tools: Any", ""])


def given_names(inputs: Mapping[str, Any] | None, known: Iterable[str] = ()) -> str:
    """Return the inputs of one script, and other names that it may use, as lines of a `.pyi` file."""
    types = dict.fromkeys(known, "Any") | {
        name: _TYPES.get(type(value), "Any") for name, value in dict(inputs or {}).items()
    }
    return "".join(f"{name}: {written}\n" for name, written in sorted(types.items()) if is_identifier(name))


def read_findings(rows: Any) -> tuple[Mapping[str, Any], ...]:
    """Return findings as results have them. The guest is not trusted: what is not of their shape is left out."""
    found = []
    for row in rows[:MAX_FINDINGS] if isinstance(rows, list) else ():
        match row:
            case [int(line), str(rule), str(message)]:
                found.append({"line": line, "column": 0, "rule": rule[:64], "message": message[:300]})
    return tuple(found)


def is_installed() -> bool:
    """Return whether ty is installed, without importing it."""
    try:
        return find_spec("ty") is not None
    except (ImportError, ValueError):
        return False
