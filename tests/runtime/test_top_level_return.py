"""A `return` at the top level, which models write: its value is the result, and the script ends there."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell import Outcome

from .conftest import Run

pytestmark = pytest.mark.isolation


@each_row(
    ("source", "value"),
    [
        ("return 6 * 7", 42),
        ("x = 1\nif x:\n    return 'early'\nx = 2\nx", "early"),
        ("x = 0\nif x:\n    return 'early'\nx = 2\nx", 2),
        ("if input_files:\n    return 1\nset_result(7)", 7),
        ("if input_files:\n    return 1\ndef set_result(n): return n + 1\nset_result(7)", 8),
        (
            "for n in range(9):\n    try:\n        if n == 3:\n            return n\n    except BaseException:\n        pass",
            3,
        ),
        ("r = await call_tool_async('add', {'a': 1})\nreturn r + 1", 3),
        ("import asyncio\nasync with asyncio.timeout(60):\n    return await call_tool_async('add', {'a': 1})", 2),
        (
            "from __future__ import annotations\nimport os.path as p, json\ndef f(n): return n + k\nk = 2\nreturn f(1)",
            3,
        ),
        ("total: int = 1\ndef more():\n    return total + 1\nreturn more()", 2),
        ("names = []\n[names.append(n) for n in 'ab']\n(m := len(names))\nreturn [names, m]", [["a", "b"], 2]),
        ("match {'a': 1, 'b': 2}:\n    case {'a': one, **rest}:\n        return [one, rest]", [1, {"b": 2}]),
    ],
)
def test_a_return_at_the_top_level_ends_the_script_with_its_value(run: Run, source: str, value: Any) -> None:
    result = run(source)
    assert (result.outcome, result.value) == (Outcome.OK, value), result.error


@pytest.mark.parametrize("lint", ["standard", "strict"])
def test_a_lint_profile_lets_it_pass(run: Run, lint: str) -> None:
    result = run("rows = call_tool('add', {'a': 1})\nif rows:\n    return rows\nset_result(0)", lint=lint)
    assert (result.outcome, result.value) == (Outcome.OK, 2), result.error


def test_a_return_without_a_value_is_no_result(run: Run) -> None:
    result = run("print('a')\nreturn\nprint('b')")
    assert (result.outcome, result.has_value, result.logs.text) == (Outcome.OK, False, "a\n")


def test_an_error_before_a_return_has_the_scripts_own_line(run: Run) -> None:
    error = run("x = 1\n\n1 / 0\nreturn x").error
    assert error is not None and (error.type, error.line) == ("ZeroDivisionError", 3)
    assert 'File "<code>", line 3' in error.traceback


@each_row(
    ("source", "line"),
    [("x = 1\nreturn x\nbreak", 2), ("return 1\nyield 2\nawait 3", 1), ("class A:\n    return 1", 2)],
)
def test_other_syntax_errors_stay(run: Run, source: str, line: int) -> None:
    error = run(source).error
    assert error is not None and (error.type, error.line) == ("SyntaxError", line)
