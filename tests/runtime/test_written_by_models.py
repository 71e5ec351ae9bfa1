"""Scripts as models write them: what is accepted although plain Python would not, and errors in the model's own terms."""

from __future__ import annotations

import pytest

from toolcell import Limits, Outcome
from toolcell.sandbox.process.backend import ProcessSandbox

from .conftest import Run

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

PATIENCE_S = 60.0
"""For an answer that takes a fraction of a millisecond, and for which a run waits no longer than `answer_s`."""

PROGRAM = 'text = """\na\n"""\nfor n in [1]:\n    total = call_tool("add", a=n, b=len(text))\nset_result(total)'

INDENTED = PROGRAM.replace("\n", "\n    ")


@pytest.mark.parametrize(
    "source",
    [
        "\ufeff" + PROGRAM,
        f"```python\n{PROGRAM}\n```",
        f"\n```py\n{PROGRAM}\n```\n",
        f"```\r\n{PROGRAM}\r\n```\r\n",
        f"```python\n{PROGRAM}",
        f"````\n{PROGRAM}\n````\nThis adds two numbers.",
        f"    {INDENTED}",
        f"\n{PROGRAM}".replace("\n", "\n\t"),
        f"```python\n    {INDENTED}\n```",
        f"  ```python\n{PROGRAM}\n```".replace("\n", "\n  "),
    ],
)
def test_a_fence_an_indentation_or_a_byte_order_mark_around_a_program_is_accepted(run: Run, source: str) -> None:
    result = run(source)

    assert (result.outcome, result.value) == (Outcome.OK, 4), result.error


def test_lines_keep_their_numbers_in_a_fence(run: Run) -> None:
    result = run("```python\nx = 1\n    \n1/0\n```")

    assert result.error is not None
    assert (result.error.line, result.error.type) == (4, "ZeroDivisionError")
    assert "    1/0" in result.error.traceback


@pytest.mark.parametrize("lint", ["standard", "strict"])
def test_a_fence_is_accepted_under_every_lint_profile(run: Run, lint: str) -> None:
    assert run("```python\nset_result(1)\n```", lint=lint).value == 1


@pytest.mark.parametrize(
    "source",
    ["```python set_result(1)```", "`set_result(1)`", "x = 1\n```\ny = 2", "x = 1\n    y = 2", "  x = 1\n y = 2"],
)
def test_what_is_no_program_otherwise_stays_a_syntax_error(run: Run, source: str) -> None:
    result = run(source)

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert result.error.type in ("SyntaxError", "IndentationError")


@pytest.mark.parametrize(
    "call",
    [
        "tools.add(2, 3)",
        "tools.add(2, b=3)",
        "tools.add({'a': 2, 'b': 3})",
        "tools['add'](2, 3)",
        "call_tool('add', 2, 3)",
        "call_tool('add', 2, b=3)",
        "call_tools_parallel([('add', 2, 3)])[0]",
        "await call_tool_async('add', 2, 3)",
    ],
)
def test_arguments_may_be_given_in_the_order_of_the_parameters(run: Run, call: str) -> None:
    assert run(f"set_result({call})").value == 5


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("tools.add(1, 2, 3)", "TypeError: add() was given 3 values, and its parameters are: a, b"),
        ("tools.add(1, a=1)", "TypeError: add() got multiple values for argument 'a'"),
        ("call_tool('nope', 1)", "ToolError: Tool 'nope' failed: unknown tool: nope"),
        ("tools.ad(1)", "AttributeError: no tool named 'ad'; did you mean 'add'?"),
        ("set_result(1, total=2)", "set_result() takes one value or named values, not both"),
    ],
)
def test_arguments_that_do_not_fit_are_named(run: Run, call: str, said: str) -> None:
    result = run(call)

    assert result.error is not None
    assert said in result.error.traceback


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("set_result(total=3, mean=1.5)", {"total": 3, "mean": 1.5}),
        ("set_result(data=3)", 3),
        ("set_result()", None),
        ("open('a.txt', 'w').close()\nset_result(total=3, files=['a.txt'])", {"total": 3}),
    ],
)
def test_a_result_may_be_given_as_named_values(run: Run, call: str, value: object) -> None:
    result = run(call)

    assert (result.has_value, result.value) == (True, value), result.error


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()", "raise SystemExit"])
def test_a_script_may_exit_and_keeps_its_result(run: Run, end: str) -> None:
    result = run(f"set_result(1)\nif True:\n    {end}\nset_result(2)")

    assert (result.outcome, result.value) == (Outcome.OK, 1)


OURS = ("toolcell_bridge", "<locals>", "Toolbox", "Runner.")


@pytest.mark.parametrize(
    "mistake",
    [
        "call_tool()",
        "call_tool(1)",
        "call_tool('add', {1: 2}, 3, 4)",
        "call_tool('add', q=print)",
        "call_tool('add', {'a': tools})",
        "call_tools_parallel()",
        "call_tools_parallel([1])",
        "call_tools_parallel([('add', {'a': 1})], nope=1)",
        "await call_tool_async()",
        "list_tools(1)",
        "search_tools()",
        "progress(1, 2)",
        "set_result(1, 2, 3)",
        "set_result(tools)",
        "set_result(call_tool)",
        "set_result(1, files=[3])",
        "log()",
        "log('loud', 'x')",
        "tools.nope(1)",
        "tools.fail(text='no')",
        "tools()",
        "install_package()",
    ],
)
def test_errors_never_show_names_of_the_harness(run: Run, mistake: str) -> None:
    result = run(f"import traceback\ntry:\n    {mistake}\nexcept Exception as e:\n    said = repr(e)\n    raise")

    assert result.error is not None, mistake
    shown = f"{result.error.type}: {result.error.message}\n{result.error.traceback}"
    assert not [name for name in OURS if name in shown], shown


def test_a_tools_error_has_the_name_under_which_a_script_finds_it(run: Run) -> None:
    result = run(
        "import traceback\ntry:\n    tools.fail(text='no')\n"
        "except ToolError as e:\n    set_result(traceback.format_exception_only(e)[0])"
    )

    assert result.value.startswith("ToolError: Tool 'fail' failed: no")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\nwhile True:\n    x += 1 if x else 2", (2, 3)),
        ("import time\ntime.sleep(60)", (2,)),
        ("def f():\n    return sum(range(10**12))\n\nf()", (2,)),
        ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", (2,)),
        ("call_tool('wait', seconds=60)", (1,)),
        ("import threading\nthreading.Event().wait()", (2,)),
    ],
)
def test_a_timeout_names_the_line_it_was_at(
    run: Run, source: str, line: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessSandbox, "answer_s", PATIENCE_S)
    result = run(f"print('said')\n{source}", limits=Limits(wall_s=1))

    assert result.outcome is Outcome.TIMEOUT and result.error is not None
    assert result.error.line in [each + 1 for each in line]
    assert result.logs.text == "said\n"


def test_a_cpu_limit_names_the_line_too_and_raw_output_stays(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessSandbox, "answer_s", PATIENCE_S)
    result = run("import os\nos.write(2, b'raw')\nwhile True: pass", limits=Limits(wall_s=PATIENCE_S, cpu_s=0.2))

    assert result.outcome is Outcome.CPU_LIMIT and result.error is not None
    assert result.error.line == 3
    assert result.logs.text == "raw"


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.close(2)",
        "import signal\nsignal.signal(50, signal.SIG_IGN)",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
        "import os\nos.write(2, b'Stack (most recent call first):\\n  File \"<code>\", line 999999999999 in x\\n')",
    ],
)
def test_a_script_that_does_not_answer_ends_as_soon(run: Run, before: str) -> None:
    result = run(f"{before}\nwhile True: pass", limits=Limits(wall_s=0.3))

    assert result.outcome is Outcome.TIMEOUT
    assert result.usage.wall_s < 5
