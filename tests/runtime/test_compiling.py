"""A script that is compiled in two parts does what it does as one."""

from __future__ import annotations

import traceback
import types
from collections.abc import Callable
from typing import Any

from rows import each_row
from toolcell_bridge.guest.compiling import LAST, LAST_RESULT, parse, parse_in_two
from toolcell_bridge.wire.messages import RunScript

IN_TWO = (
    "1",
    "'a text, and no docstring'",
    "'''A docstring.'''\n__doc__",
    "x = 5\nx + 1",
    "x = 5\r\nx",
    "x = 1\\\n+2\nx",
    "if True:\n    x = 2\nelse:\n    x = 3\n\n\n(y := x)\n\n# the end\n",
    "def f(a):\n    return 1 / a\n\nf(0)",
    "rows = [1, 2]\nsum(\n    row\n    for row in rows\n    if row / 0\n)\n",
    "x = 1\nnot_there + x",
    "f'{1}' 'ä' + 'ü' + nothing",
    "set_result(1)",
    "x = {'ä': [1]}\nset_result({\n    'x': x,\n    'y': 'ü',\n})\n",
    "set_result(rows=[1], total=2)   ",
    "set_result()",
    "set_result(1 / 0, 'ü')",
    "(set_result(1))",
    "set_result(1) or print('later')",
    "set_result(1)['key']",
    "set_result(1)(2)",
    "set_result(1).part",
    "set_result(1), 2",
    "set_result(1) if True else 2",
    "set_result(set_result(1))",
    "set_result(1)  # a comment",
    "lambda: 3",
    "[x for x in range(3)]",
    "raise ValueError('before')\n1",
    "x = 5",
    "x = [1]\nx[0] += 1",
    "x: int = 5\ny: str = 'a'",
    "for x in range(3):\n    x\n",
    "x = 0\nif x:\n    set_result(1)\nelif not x:\n    set_result(2)\n",
    "if True:\n    1\n\n\nclass A:\n    'A docstring.'\n    x = 1\n",
    "def f():\n    return 1\n\n\ndef g():\n    return [\n        f(),\n    ]\n",
    "'''A docstring.'''\nx = __doc__",
    "x = 1\nfor y in (1, 0):\n    x / y",
    "x = '''\ny = 1\n'''\ny = [\n    1,\n]\n# the end",
    "x = set_result(1)",
    "a = 1; a",
    "*[1], 2",
    "1, *[2]",
    "x, *y = 1, 2\nassert not y, [*y, x]",
    "assert 0, '*'",
)


def in_one(source: str) -> tuple[types.CodeType, ...]:
    run = RunScript(1, source, {}, "", "off", 1 << 20, 8, 1 << 20, None, None)
    return (parse(run)[0],)


def outcome(codes: tuple[types.CodeType, ...]) -> tuple[Any, ...]:
    """Return what a script leaves behind: its value, its names, its results, and where in it an exception was raised."""
    results: list[Any] = []

    def set_result_as(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: results.append((name, args, kwargs))

    namespace: dict[str, Any] = {"set_result": set_result_as("set_result"), LAST_RESULT: set_result_as("last")}
    raised: Any = None
    try:
        *before, last = codes
        for code in before:
            eval(code, namespace)
        value = eval(last, namespace)
        if before and value is not None:
            namespace[LAST] = value
    except Exception as exc:
        frames = traceback.extract_tb(exc.__traceback__)[1:]
        raised = repr(exc), [(each.lineno, each.end_lineno, each.colno, each.end_colno, each.name) for each in frames]
    kinds = {
        name: each if isinstance(each, int | str | list | dict) else type(each) for name, each in namespace.items()
    }
    del kinds["__builtins__"]
    if kinds.get(LAST) is types.NoneType:
        del kinds[LAST]
    return kinds, results, raised


@each_row("source", IN_TWO)
def test_a_script_in_two_parts_does_what_it_does_as_one(source: str) -> None:
    assert outcome(parse_in_two(source) or in_one(source)) == outcome(in_one(source))


@each_row("source", [IN_TWO[0], IN_TWO[3], IN_TWO[7], IN_TWO[12], IN_TWO[13]])
def test_most_scripts_that_end_with_an_expression_need_no_syntax_tree(source: str) -> None:
    parts = parse_in_two(source)
    assert parts is not None
    assert (LAST_RESULT in parts[1].co_names) == ("set_result" in source)


@each_row("source", ["x = 5", "x = set_result(1)", "for x in range(3):\n    set_result(x)\n"])
def test_most_scripts_that_end_with_another_statement_need_none(source: str) -> None:
    parts = parse_in_two(source)
    assert parts is not None
    assert LAST_RESULT not in parts[1].co_names


@each_row(
    "source",
    [
        "",
        "# nothing",
        "a = 1; a",
        "*[1], 2",
        "1, *[2]",
        "x = '''\ny = 1'''",
        "x = '''\nset_result(1)'''",
        "print('''\nfor all''')",
        "x = 1 \\\n+ 2",
        "@print\ndef f(): pass",
        "if True:\n    1\nelse:\n    2",
        "from __future__ import annotations\n1",
        "import asyncio\nawait asyncio.sleep(0)",
        "x = await nothing\n1",
        "return 5\n1",
        "1 +",
        "x = (\n1",
        "def f(:\n1",
    ],
)
def test_what_may_be_part_of_another_statement_is_compiled_as_one(source: str) -> None:
    assert parse_in_two(source) is None
