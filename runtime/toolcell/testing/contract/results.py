"""Values, output and files: what a script is given, what it prints, and what it gives back."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from toolcell.results import ExecutionResult, Outcome
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    LIMITS,
    BackendHarness,
    expect,
    expect_equal,
)

values_cases = CaseGroup("values")

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


values_cases.value(
    "plain_inputs",
    "Plain data of every kind is unchanged as an input and as a result.",
    "set_result(given)",
    PLAIN,
    inputs={"given": PLAIN},
)


values_cases.value(
    "plain_results",
    "Plain data of every kind that a script makes is unchanged as a result.",
    "set_result([None, True, 7, 0.5, 'text', b'bytes', [1], {'a': 1}])",
    [None, True, 7, 0.5, "text", b"bytes", [1], {"a": 1}],
)


@values_cases
async def large_values(harness: BackendHarness) -> None:
    """Megabytes of input and result arrive intact."""
    rows = [{"index": index, "text": "x" * 100} for index in range(10_000)]
    expect_equal(await harness.value("set_result(rows)", inputs={"rows": rows}), rows, "the rows")
    data = bytes(range(256)) * 12_000
    expect_equal(await harness.value("set_result(data)", inputs={"data": data}), data, "the bytes")


@values_cases
async def converted_values(harness: BackendHarness) -> None:
    """The guest converts a value that is not plain data, or refuses it and names its path."""
    value = await harness.value("import datetime\nset_result({'when': datetime.date(2024, 2, 3), 'pair': (1, 2)})")
    expect_equal(value, {"when": "2024-02-03", "pair": [1, 2]}, "the converted result")
    result = await harness.run("set_result({'rows': [object()]})", Outcome.ERROR)
    expect("rows" in _message(result), f"the refusal does not say where: {_message(result)!r}")


@values_cases
async def no_result(harness: BackendHarness) -> None:
    """None as a result differs from no result; a trailing expression is a result; the last result set counts."""
    nothing, none = await harness.run("x = 1"), await harness.run("set_result(None)")
    expect_equal((nothing.has_value, none.has_value), (False, True), "has_value without and with a result")
    expect_equal(await harness.value("x = 20\nx + 1"), 21, "the trailing expression")
    expect_equal(await harness.value("set_result(1)\nset_result(2)"), 2, "the last result")


@values_cases
async def progress(harness: BackendHarness) -> None:
    """Progress reports arrive in order, while the script runs."""
    seen: list[object] = []
    await harness.value("for i in range(3): progress({'at': i})", on_progress=seen.append)
    expect_equal(seen, [{"at": 0}, {"at": 1}, {"at": 2}], "the reports")


@values_cases
async def repeatable(harness: BackendHarness) -> None:
    """Two runs with the same seed and clock see the same random numbers and time."""
    source = "import random, time, datetime\nset_result([random.random(), time.time(), str(datetime.datetime.now())])"
    first, second = [await harness.value(source, seed=7, clock=1_700_000_000.0) for _ in range(2)]
    expect_equal(first, second, "the second run")
    other = await harness.value(source)
    expect(other[0] != first[0], "a run without a seed repeats one that had it")


values_cases.value(
    "top_level_await",
    "A script may await at its top level.",
    "import asyncio\nawait asyncio.sleep(0)\nset_result('awaited')",
    "awaited",
)


@values_cases
async def errors(harness: BackendHarness) -> None:
    """An error has the exception's type, message and line; its traceback shows the script and nothing of the guest."""
    result = await harness.run("x = 1\n\ndef broken():\n    raise KeyError('missing')\n\nbroken()", Outcome.ERROR)
    assert result.error is not None
    expect_equal((result.error.type, result.error.line), ("KeyError", 4), "type and line")
    expect("missing" in result.error.message, f"the message is {result.error.message!r}")
    expect("raise KeyError('missing')" in result.error.traceback, "the traceback shows no source line")
    expect("toolcell" not in result.error.traceback, "the traceback shows the harness")


@values_cases
async def syntax_errors(harness: BackendHarness) -> None:
    """A script that does not compile is an error with its line, and no line of it runs."""
    result = await harness.run("print('ran')\nx = (\n", Outcome.ERROR)
    assert result.error is not None
    expect_equal((result.error.type, result.error.line), ("SyntaxError", 2), "type and line")
    expect_equal(result.logs.text, "", "the output")


@values_cases
async def exits(harness: BackendHarness) -> None:
    """sys.exit() is a success, sys.exit(3) an error with the code; a result set before is kept."""
    await harness.run("import sys\nset_result(1)\nsys.exit()", Outcome.OK)
    result = await harness.run("import sys\nset_result(1)\nsys.exit(3)", Outcome.ERROR)
    expect_equal((result.value, result.error and result.error.exit_code), (1, 3), "value and exit code")


@values_cases
async def lint(harness: BackendHarness) -> None:
    """A lint profile refuses a script before it runs, and returns its findings."""
    result = await harness.run("print('ran')\nimport os\n().__class__.__mro__", Outcome.DENIED, lint="strict")
    expect(result.error is not None and result.error.findings, "there are no findings")
    expect_equal(result.logs.text, "", "the output")


def _message(result: ExecutionResult) -> str:
    return result.error.message if result.error is not None else ""


output_cases = CaseGroup("output")


@output_cases
async def prints(harness: BackendHarness) -> None:
    """Both output streams are kept apart, and `text` has both in the order of writing."""
    result = await harness.run(
        "import sys\nfor i in range(50):\n    print(i, file=sys.stdout if i % 3 else sys.stderr)", Outcome.OK
    )
    expect_equal(result.logs.text, "".join(f"{i}\n" for i in range(50)), "both streams")
    expect_equal(result.logs.stderr, "".join(f"{i}\n" for i in range(0, 50, 3)), "stderr")


@output_cases
async def odd_text(harness: BackendHarness) -> None:
    """A line without a newline, a very long line, and invalid Unicode are all kept."""
    result = await harness.run("print('long' * 10_000)\nprint('\\udc80 é \\U0001f40d', end='')", Outcome.OK)
    expect_equal(result.logs.text, "long" * 10_000 + "\n\\udc80 é \U0001f40d", "the output")


@output_cases
async def raw_writes(harness: BackendHarness) -> None:
    """Raw bytes on descriptors 1 and 2 are captured; invalid UTF-8 is replaced; those on 2 are stderr."""
    source = "import os\nos.write(1, b'one\\n')\nos.write(2, b'two \\xff\\n')\nos.write(1, b'three\\n' * 1000)"
    result = await harness.run(source, Outcome.OK)
    for text, count in (("one\n", 1), ("two \ufffd\n", 1), ("three\n", 1000)):
        expect_equal(result.logs.text.count(text), count, f"times that {text!r} was captured")
    expect("two" in result.logs.stderr, "what was written to descriptor 2 is not in stderr")


output_cases.value(
    "raw_writes_do_not_disturb",
    "Raw output never mixes with the bridge, even if it looks like a frame.",
    """
import os
frame = bytes.fromhex("00000004931501c0")
for descriptor in (1, 2): os.write(descriptor, frame * 100)
set_result(call_tool("echo", q="whole"))
""",
    "whole",
)


@output_cases
async def nothing_to_read(harness: BackendHarness) -> None:
    """Standard input is empty."""
    value = await harness.value("import os, sys\nset_result([os.read(0, 1), sys.stdin is None or sys.stdin.read()])")
    expect(value in ([b"", ""], [b"", True]), f"standard input gives {value!r:.300}")


@output_cases
async def forked_children(harness: BackendHarness) -> None:
    """The output of a forked child is captured too, and does not disturb the bridge."""
    source = """
import os
child = os.fork()
if child == 0:
    print("from the child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
set_result(call_tool("echo", q=1))
"""
    result = await harness.run(source, Outcome.OK)
    expect("from the child" in result.logs.text, f"the output is {result.logs.text!r:.200}")


@output_cases
async def while_it_runs(harness: BackendHarness) -> None:
    """`on_log` is called before the script ends."""
    seen: list[tuple[str, str]] = []
    source = "print('early')\ncall_tool('echo', q=1)\nset_result(call_tool('meet', name='logs', size=1))"
    await harness.value(source, on_log=lambda stream, text: seen.append((stream, text)))
    expect_equal(seen, [("stdout", "early\n")], "what was seen")


@output_cases
async def kept_after_death(harness: BackendHarness) -> None:
    """Printed and raw output from before the sandbox died is kept."""
    result = await harness.run("import os\nprint('printed')\nos.write(2, b'written')\nos._exit(1)", Outcome.KILLED)
    for text in ("printed", "written"):
        expect(text in result.logs.text, f"{text!r} is missing: {result.logs.text!r:.200}")


@output_cases
async def head_and_tail(harness: BackendHarness) -> None:
    """The beginning and the end of too much output are kept, and all of it is counted."""
    limits = LIMITS.model_copy(update={"output_bytes": 2000})
    result = await harness.run(
        "print('first')\nfor i in range(20_000): print('-' * 80)\nprint('last')", Outcome.OK, limits=limits
    )
    expect(result.logs.truncated and result.logs.stdout_bytes > 1_600_000, f"counted {result.logs.stdout_bytes} bytes")
    expect(result.logs.text.startswith("first") and result.logs.text.endswith("last\n"), "an end is missing")
    expect(len(result.logs.text) < 2200, f"{len(result.logs.text)} characters were kept")


files_cases = CaseGroup("files")


@files_cases
async def going_in(harness: BackendHarness) -> None:
    """Given files are in the workspace before the script starts: empty ones, large ones, and in folders."""
    large = random.Random(1).randbytes(3_000_000)
    source = """
import hashlib
names = ["empty", "small.txt", "folder/deep/large"]
set_result([[len(data), hashlib.sha256(data).hexdigest()] for data in (open(name, "rb").read() for name in names)])
"""
    given = [("empty", b""), ("small.txt", "text é"), ("folder/deep/large", large)]
    contents = [b"", "text é".encode(), large]
    wanted = [[len(data), hashlib.sha256(data).hexdigest()] for data in contents]
    expect_equal(await harness.value(source, files=given), wanted, "sizes and digests")


@files_cases
async def going_out(harness: BackendHarness) -> None:
    """Returned files come whole, with their media types. Folders and patterns return the files in them."""
    source = """
import os
os.makedirs("plots")
for i in range(2): open(f"plots/{i}.png", "wb").write(b"\\x89PNG\\r\\n\\x1a\\n" + bytes(i))
open("large.bin", "wb").write(bytes(range(256)) * 8000)
open("empty.txt", "w").close()
set_result("done", files=["plots", "large.bin", "*.txt"])
"""
    result = await harness.run(source, Outcome.OK)
    files = {file.name: file for file in result.files}
    expect_equal(sorted(files), ["empty.txt", "large.bin", "plots/0.png", "plots/1.png"], "the names")
    expect_equal(files["large.bin"].data, bytes(range(256)) * 8000, "large.bin")
    expect_equal(files["empty.txt"].data, b"", "empty.txt")
    expect_equal(files["plots/1.png"].media_type, "image/png", "the media type")
    expect_equal(files["large.bin"].sha256, hashlib.sha256(bytes(range(256)) * 8000).hexdigest(), "the digest")


@files_cases
async def problems(harness: BackendHarness) -> None:
    """A file that cannot be returned is named with its problem: missing, outside, a link, not a regular file."""
    source = """
import os
os.symlink("/etc/passwd", "link")
os.mkfifo("pipe")
set_result(1, files=["missing.txt", "../outside", "/etc/passwd", "link", "pipe"])
"""
    result = await harness.run(source, Outcome.OK)
    expect_equal(len(result.files), 5, "files reported")
    for file in result.files:
        expect(file.data is None and file.problem, f"{file.name} was returned")


@files_cases
async def limits(harness: BackendHarness) -> None:
    """A run returns at most `files` files and `files_bytes` bytes."""
    limits = LIMITS.model_copy(update={"files": 2, "files_bytes": 1000})
    source = "for i in range(4): open(f'{i}', 'wb').write(bytes(%d))\nset_result(1, files=list('0123'))"
    many, large = await harness.run(source % 10, limits=limits), await harness.run(source % 600, limits=limits)
    expect_equal([file.data is not None for file in many.files], [True, True, False, False], "files of ten bytes")
    expect_equal([file.data is not None for file in large.files], [True, False, False, False], "files of 600 bytes")


files_cases.value(
    "workspace",
    "A script starts in an empty workspace, and can write to it and to the temporary folder.",
    """
import os, tempfile
before = os.listdir(".")
os.makedirs("a/b")
open("a/b/c", "w").write("x" * 1000)
os.rename("a/b/c", "a/d")
os.remove("a/d")
with tempfile.TemporaryFile() as file: file.write(b"x" * 1000)
set_result([before, os.path.samefile(OUTPUT_DIR, ".")])
""",
    [[], True],
)
