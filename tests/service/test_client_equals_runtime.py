"""A script run by `Client` leaves behind what it leaves behind in a `Runtime` here, whatever it does with its tools."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel, computed_field

from rows import each_row
from toolcell import ExecutionResult, Limits, Outcome, Runtime, ToolError, ToolRegistry, UsageError
from toolcell.errors import ToolAbort
from toolcell.service import Client
from toolcell.tools import File, Image, Text, ToolResult

from .client_serving import serving

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]


class Price(BaseModel):
    amount: Decimal

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cents(self) -> int:
        return int(self.amount * 100)


registry = ToolRegistry()


@registry.tool
def double(price: Price) -> Price:
    """Return twice the price."""
    return Price(amount=2 * price.amount)


@registry.tool
def add(a: int, b: int = 1) -> int:
    """Return the sum of two numbers."""
    return a + b


@registry.tool
async def echo(value: Any = None) -> Any:
    """Return what it is given, whatever that is."""
    return value


@registry.tool
def as_bytes(data: bytes) -> bytes:
    """Return the bytes the other way round."""
    return data[::-1]


@registry.tool
def when(day: datetime.datetime) -> datetime.datetime:
    """Return the moment one day later."""
    return day + datetime.timedelta(days=1)


@registry.tool
def raises() -> None:
    """Raise what no tool expects."""
    raise ValueError("the password is swordfish")


@registry.tool(expose_errors=True)
def raises_openly() -> None:
    """Raise what a script may read."""
    raise ValueError("the file is empty")


@registry.tool
def fails(code: str = "not_found") -> None:
    """Fail as a tool may, with facts."""
    raise ToolError("there is none", code=code, retryable=True, details={"near": ["one", "two"]})


@registry.tool
def aborts() -> None:
    """End the whole run."""
    raise ToolAbort("enough")


@registry.tool
def big(size: int) -> str:
    """Return a text of that size."""
    return "x" * size


@registry.tool
def special() -> list[float]:
    """Return numbers that JSON does not have."""
    return [math.inf, -math.inf, 1.5]


@registry.tool
def nothing() -> None:
    """Return nothing at all."""


@registry.tool
def picture() -> ToolResult:
    """Return parts of each kind."""
    return ToolResult(parts=(Text("look"), Image(b"\x89PNG\r\n\x1a\n")), files=(File("a.txt", b"hello", "text/plain"),))


@registry.tool
def odd() -> Any:
    """Return what cannot be sent."""
    return {"value": object()}


@registry.tool(requires_approval=True)
def guarded() -> str:
    """Do what somebody has to approve."""
    return "done"


@registry.tool(timeout_s=0.2)
async def slow() -> None:
    """Take longer than it may."""
    import anyio

    await anyio.sleep(30)


@registry.tool(callable_from=["plan"])
def only_plans() -> int:
    """Return a number to plans."""
    return 1


@registry.tool
def hidden() -> int:
    """Return a number to nobody."""
    return 1


registry.blacklist("hidden")
registry.alias("plus", "add")

SCRIPTS = {
    "value": "set_result({'a': [1, 2.5, None, True, 'ü', b'\\x00\\xff']})",
    "no value": "x = 1",
    "none": "set_result(None)",
    "trailing expression": "40 + 2",
    "unicode": "print('grüße 😀 \\u202e'); '😀'",
    "nan and infinity": "set_result([float('nan'), float('inf')])",
    "deep": "v = 1\nfor _ in range(60): v = [v]\nset_result(v)",
    "too deep": "v = 1\nfor _ in range(70): v = [v]\nset_result(v)",
    "datetime": "import datetime\nset_result(datetime.datetime(2026, 1, 2, 3, 4, 5))",
    "both streams": "import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out again')",
    "much output": "for n in range(20000): print(n)",
    "syntax error": "def f(:\n  pass",
    "exception": "def f(n): return 1 / n\n\nf(0)",
    "exit code": "import sys; sys.exit(3)",
    "timeout": "while True: pass",
    "memory": "x = bytearray(1 << 30)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "call": "call_tool('add', a=1)",
    "call by attribute": "tools.add(a=1, b=5)",
    "alias": "call_tool('plus', a=1)",
    "coerced": "call_tool('add', a='7')",
    "invalid": "call_tool('add', a='seven')",
    "missing argument": "call_tool('add')",
    "unknown tool": "call_tool('ad', a=1)",
    "only plans": "call_tool('only_plans')",
    "blacklisted": "call_tool('hidden')",
    "echo unicode": "call_tool('echo', value={'ключ': ['😀', 'e\\u0301', '\\u0000']})",
    "echo nan": "call_tool('echo', value=float('nan'))",
    "echo large int": "call_tool('echo', value=2**62)",
    "echo bytes": "call_tool('echo', value=b'\\x00\\x01')",
    "bytes both ways": "call_tool('as_bytes', data=b'\\xff\\x00abc')",
    "computed fields both ways": "x = tools.double(price={'amount': 1})\nset_result([x, tools.double(price=x)])",
    "datetime both ways": "import datetime\ncall_tool('when', day=datetime.datetime(2026, 1, 2, 3, 4, 5))",
    "raises": "call_tool('raises')",
    "raises openly": "call_tool('raises_openly')",
    "fails": "try: call_tool('fails')\nexcept ToolError as e: set_result([str(e), e.code, e.retryable, e.details])",
    "fails again and again": "for _ in range(5):\n  try: call_tool('fails')\n  except ToolError as e: print(e)",
    "aborts": "call_tool('aborts')",
    "huge argument": "call_tool('echo', value='y' * 3_000_000)[:3]",
    "huge result": "len(call_tool('big', size=5_000_000))",
    "result past the frame": "call_tool('big', size=9_000_000)",
    "numbers that JSON lacks": "call_tool('special')",
    "nothing": "set_result(call_tool('nothing'))",
    "parts": "set_result(call_tool('picture'))",
    "odd": "call_tool('odd')",
    "not approved": "call_tool('guarded')",
    "tool timeout": "call_tool('slow')",
    "parallel": "call_tools_parallel([('add', {'a': n}) for n in range(20)])",
    "async": "import asyncio\nawait asyncio.gather(*(call_tool_async('add', a=n) for n in range(5)))",
    "list of tools": "set_result(sorted(t['name'] for t in list_tools()))",
    "definitions": "set_result(list_tools())",
    "inputs and files": "set_result([n, open('in.txt').read()], files=['in.txt'])",
    "returned file": "open('o.bin', 'wb').write(bytes(range(256)) * 400)\nset_result(1, files=['o.bin', 'missing'])",
    "progress": "progress(1); progress({'done': 2})",
}
"""Every one runs here and there."""

LIMITED = {"timeout": Limits(wall_s=1.0), "memory": Limits(memory_bytes=200 << 20)}


@pytest.fixture(scope="module")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Runtime, Client]]:
    served = serving(tmp_path_factory.mktemp("state"))
    async with served as (url, _), Runtime(registry) as runtime, Client(url, registry=registry) as client:
        yield runtime, client


def comparable(result: ExecutionResult) -> dict[str, Any]:
    """Return everything of a result but ids and what a clock measured."""
    plain = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    for name in ("run_id", "journal_id", "isolation"):
        del plain[name]
    plain["usage"] = result.usage.calls
    plain["calls"] = [dataclasses.replace(each, started_s=0.0, duration_s=0.0) for each in result.calls]
    plain["abandoned"] = [each.tool for each in result.abandoned]
    if result.error is not None:
        limit_value = float(result.error.limit_value) if result.error.limit_value is not None else None
        # The line of a script whose time was up is known if it said so soon enough.
        measured: dict[str, Any] = (
            {"message": "", "used": None, "line": None} if result.error.limit in ("memory_bytes", "wall_s") else {}
        )
        plain["error"] = dataclasses.replace(result.error, limit_value=limit_value, **measured)
    return plain


@each_row("name", SCRIPTS)
async def test_a_result_of_the_service_equals_one_from_here(name: str, both: tuple[Runtime, Client]) -> None:
    options: dict[str, Any] = {"inputs": {"n": 7}, "files": [("in.txt", "text ü")], "limits": LIMITED.get(name)}
    results, told = [], []
    for runtime in both:
        heard: list[object] = []
        options["on_progress"] = heard.append
        results.append(await runtime.execute_code(SCRIPTS[name], **options))
        told.append(heard)

    here, there = map(comparable, results)
    assert repr(there) == repr(here)  # not ==: a NaN is not equal to itself
    assert told[0] == told[1]
    assert here["outcome"] is not Outcome.PROTOCOL_ERROR


@each_row(
    "options",
    [
        {"inputs": {"x": object()}}, {"inputs": {"1x": 1}}, {"files": ["/nowhere/at/all"]}, {"files": [("../x", "")]},
        {"seed": "one"}, {"clock": "now"}, {"on_approval": "never"}, {"lint": "strictest"}, {"cancel": 1},
        {"context": {}}, {"tools": ["no such thing"]}, {"limits": {"wall_s": 1}},
        {"on_log": "print"}, {"refresh": "reads"}, {"repairs": "0" * 32}, {"check_types": "perhaps"},
    ],
    ids=lambda each: next(iter(each)) + "-" + type(next(iter(each.values()))).__name__,
)  # fmt: skip
async def test_a_wrong_argument_is_refused_with_the_same_words(options: Any, both: tuple[Runtime, Client]) -> None:
    said = []
    for runtime in both:
        with pytest.raises(UsageError) as caught:
            await runtime.execute_code("1", **options)
        said.append(str(caught.value))

    assert said[1] == said[0]
