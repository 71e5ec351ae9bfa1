"""What a script is given and what it gives back: results, inputs, errors."""

from __future__ import annotations

from typing import Any

from toolcell.results import ExecutionResult, Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("values")

PLAIN: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**64 - 1],
    "floats": [0.5, -0.0, 1e308, float("inf")],
    "text": "grüße \U0001f40d \u2028 \0",
    "bytes": bytes(range(256)),
    "nested": [[[[{"deep": [{}, []]}]]]],
    "": {"empty key": 1},
}


@promises
async def plain_data(stand: BackendHarness) -> None:
    """Plain data of every kind goes in as an input and comes back as the result, unchanged."""
    expect_equal(await stand.value("set_result(given)", inputs={"given": PLAIN}), PLAIN, "the result")
    wanted = "[None, True, 7, 0.5, 'text', b'bytes', [1], {'a': 1}]"
    expect_equal(await stand.value(f"set_result({wanted})"), eval(wanted), "the result")


@promises
async def large_values(stand: BackendHarness) -> None:
    """Megabytes of input and result cross whole."""
    rows = [{"index": index, "text": "x" * 100} for index in range(10_000)]
    expect_equal(await stand.value("set_result(rows)", inputs={"rows": rows}), rows, "the rows")
    data = bytes(range(256)) * 12_000
    expect_equal(await stand.value("set_result(data)", inputs={"data": data}), data, "the bytes")


@promises
async def converted_values(stand: BackendHarness) -> None:
    """What is not plain is converted by the guest, or refused with its path."""
    value = await stand.value("import datetime\nset_result({'when': datetime.date(2024, 2, 3), 'pair': (1, 2)})")
    expect_equal(value, {"when": "2024-02-03", "pair": [1, 2]}, "the converted result")
    result = await stand.run("set_result({'rows': [object()]})")
    expect_outcome(result, Outcome.ERROR)
    expect("rows" in _message(result), f"the refusal does not say where: {_message(result)!r}")


@promises
async def no_result(stand: BackendHarness) -> None:
    """A result of None is told from no result at all; a trailing expression is a result; the last one set counts."""
    nothing, none = await stand.run("x = 1"), await stand.run("set_result(None)")
    expect_equal((nothing.has_value, none.has_value), (False, True), "has_value without and with a result")
    expect_equal(await stand.value("x = 20\nx + 1"), 21, "the trailing expression")
    expect_equal(await stand.value("set_result(1)\nset_result(2)"), 2, "the last result")


@promises
async def progress(stand: BackendHarness) -> None:
    """Progress reports arrive in order, while the script runs."""
    seen: list[object] = []
    await stand.value("for i in range(3): progress({'at': i})", on_progress=seen.append)
    expect_equal(seen, [{"at": 0}, {"at": 1}, {"at": 2}], "the reports")


@promises
async def repeatable(stand: BackendHarness) -> None:
    """With the same seed and clock, two runs see the same randomness and time."""
    source = "import random, time, datetime\nset_result([random.random(), time.time(), str(datetime.datetime.now())])"
    first, second = [await stand.value(source, seed=7, clock=1_700_000_000.0) for _ in range(2)]
    expect_equal(first, second, "the second run")
    other = await stand.value(source)
    expect(other[0] != first[0], "a run without a seed repeats one that had it")


@promises
async def top_level_await(stand: BackendHarness) -> None:
    """A script may await at its top level."""
    expect_equal(await stand.value("import asyncio\nawait asyncio.sleep(0)\nset_result('awaited')"), "awaited", "value")


@promises
async def errors(stand: BackendHarness) -> None:
    """An exception is told with its type, message and line, and the script's own lines; nothing of the harness is."""
    result = await stand.run("x = 1\n\ndef broken():\n    raise KeyError('missing')\n\nbroken()")
    expect_outcome(result, Outcome.ERROR)
    assert result.error is not None
    expect_equal((result.error.type, result.error.line), ("KeyError", 4), "type and line")
    expect("missing" in result.error.message, f"the message is {result.error.message!r}")
    expect("raise KeyError('missing')" in result.error.traceback, "the traceback shows no source line")
    expect("toolcell" not in result.error.traceback, "the traceback shows the harness")


@promises
async def syntax_errors(stand: BackendHarness) -> None:
    """What does not compile is an error with its line, and nothing of it ran."""
    result = await stand.run("print('ran')\nx = (\n")
    expect_outcome(result, Outcome.ERROR)
    assert result.error is not None
    expect_equal((result.error.type, result.error.line), ("SyntaxError", 2), "type and line")
    expect_equal(result.logs.text, "", "the output")


@promises
async def exits(stand: BackendHarness) -> None:
    """sys.exit() ends a run well, sys.exit(3) with an error that has the code; what was set before stays."""
    expect_outcome(await stand.run("import sys\nset_result(1)\nsys.exit()"), Outcome.OK)
    result = await stand.run("import sys\nset_result(1)\nsys.exit(3)")
    expect_outcome(result, Outcome.ERROR)
    expect_equal((result.value, result.error and result.error.exit_code), (1, 3), "value and exit code")


@promises
async def lint(stand: BackendHarness) -> None:
    """A lint profile refuses before anything runs, with line and rule."""
    result = await stand.run("print('ran')\nimport os\n().__class__.__mro__", lint="strict")
    expect_outcome(result, Outcome.DENIED)
    expect(result.error is not None and result.error.findings, "there are no findings")
    expect_equal(result.logs.text, "", "the output")


def _message(result: ExecutionResult) -> str:
    return result.error.message if result.error is not None else ""
