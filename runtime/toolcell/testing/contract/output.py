"""What a script prints: through Python, in order; around it, raw."""

from __future__ import annotations

from toolcell.results import Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("output")


@promises
async def prints(stand: BackendHarness) -> None:
    """What is printed to both streams is kept apart, and together in the order it was written."""
    result = await stand.run("import sys\nfor i in range(50):\n    print(i, file=sys.stdout if i % 3 else sys.stderr)")
    expect_outcome(result, Outcome.OK)
    expect_equal(result.logs.text, "".join(f"{i}\n" for i in range(50)), "both streams")
    expect_equal(result.logs.stderr, "".join(f"{i}\n" for i in range(0, 50, 3)), "stderr")


@promises
async def odd_text(stand: BackendHarness) -> None:
    """A line without an end, a very long one, and text that is no valid Unicode are all kept."""
    result = await stand.run("print('long' * 10_000)\nprint('\\udc80 é \\U0001f40d', end='')")
    expect_outcome(result, Outcome.OK)
    expect_equal(result.logs.text, "long" * 10_000 + "\n\\udc80 é \U0001f40d", "the output")


@promises
async def raw_writes(stand: BackendHarness) -> None:
    """Bytes written to descriptors 1 and 2 are captured, what is not UTF-8 replaced; those to 2 are stderr."""
    source = "import os\nos.write(1, b'one\\n')\nos.write(2, b'two \\xff\\n')\nos.write(1, b'three\\n' * 1000)"
    result = await stand.run(source)
    expect_outcome(result, Outcome.OK)
    for text, count in (("one\n", 1), ("two \ufffd\n", 1), ("three\n", 1000)):
        expect_equal(result.logs.text.count(text), count, f"times that {text!r} was captured")
    expect("two" in result.logs.stderr, "what was written to descriptor 2 is not in stderr")


@promises
async def raw_writes_do_not_disturb(stand: BackendHarness) -> None:
    """Raw output never mixes with the bridge, whatever it looks like."""
    source = """
import os
frame = bytes.fromhex("00000004931501c0")
for descriptor in (1, 2): os.write(descriptor, frame * 100)
set_result(call_tool("echo", q="whole"))
"""
    expect_equal(await stand.value(source), "whole", "the result")


@promises
async def nothing_to_read(stand: BackendHarness) -> None:
    """Standard input is at its end."""
    expect_equal(await stand.value("import os, sys\nset_result([os.read(0, 1), sys.stdin is None or sys.stdin.read()])")
                 in ([b"", ""], [b"", True]), True, "an empty standard input")  # fmt: skip


@promises
async def forked_children(stand: BackendHarness) -> None:
    """What a forked child prints is captured too, and harms nothing."""
    source = """
import os
child = os.fork()
if child == 0:
    print("from the child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
set_result(call_tool("echo", q=1))
"""
    result = await stand.run(source)
    expect_outcome(result, Outcome.OK)
    expect("from the child" in result.logs.text, f"the output is {result.logs.text!r:.200}")


@promises
async def while_it_runs(stand: BackendHarness) -> None:
    """Output can be seen before the script ends."""
    seen: list[tuple[str, str]] = []
    source = "print('early')\ncall_tool('echo', q=1)\nset_result(call_tool('meet', name='logs', size=1))"
    await stand.value(source, on_log=lambda stream, text: seen.append((stream, text)))
    expect_equal(seen, [("stdout", "early\n")], "what was seen")


@promises
async def survives_death(stand: BackendHarness) -> None:
    """What was printed before the sandbox died is kept, both ways of printing."""
    result = await stand.run("import os\nprint('printed')\nos.write(2, b'written')\nos._exit(1)")
    expect_outcome(result, Outcome.KILLED)
    for text in ("printed", "written"):
        expect(text in result.logs.text, f"{text!r} is missing: {result.logs.text!r:.200}")


@promises
async def head_and_tail(stand: BackendHarness) -> None:
    """Of too much output the beginning and the end are kept, and the rest is counted."""
    limits = LIMITS.model_copy(update={"output_bytes": 2000})
    result = await stand.run("print('first')\nfor i in range(20_000): print('-' * 80)\nprint('last')", limits=limits)
    expect_outcome(result, Outcome.OK)
    expect(result.logs.truncated and result.logs.stdout_bytes > 1_600_000, f"counted {result.logs.stdout_bytes} bytes")
    expect(result.logs.text.startswith("first") and result.logs.text.endswith("last\n"), "an end is missing")
    expect(len(result.logs.text) < 2200, f"{len(result.logs.text)} characters were kept")
