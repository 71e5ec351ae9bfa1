"""The standard profile: code that models write passes unchanged. A refusal names the place."""

import ast
import asyncio
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.guest.lint import LintResult, check, compile_tree

pytestmark = pytest.mark.quick


def _snippets() -> Iterator[Any]:
    text = Path(__file__).with_name("model_snippets.txt").read_text(encoding="utf-8")
    for block in re.split(r"(?m)^=== ", text)[1:]:
        title, _, source = block.partition("\n")
        needs = re.search(r"\[3\.(\d+)\]", title)
        too_new = needs is not None and sys.version_info < (3, int(needs[1]))
        skip = pytest.mark.skipif(too_new, reason="newer syntax")
        yield pytest.param(source, id=title, marks=skip)


SNIPPETS = list(_snippets())


class Guest:
    """The names a script finds, answering from fixed data."""

    def __init__(self) -> None:
        self.result: object = "unset"
        self.printed = io.StringIO()

    def call_tool(self, name: str, args: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        args = {**(args or {}), **kwargs}
        match name:
            case "web_search":
                return [{"title": "a", "score": 0.9}, {"title": "b", "score": 0.2}, {"title": "c"}]
            case "weather":
                return {"city": args["city"], "celsius": len(args["city"]) * 3}
            case "list_page":
                return {1: [1, 2, 3], 2: [4, 5]}.get(args["page"], [])
        raise RuntimeError(f"Tool '{name}' failed: unknown tool")

    def run(self, tree: ast.Module, guards: dict[str, object]) -> None:
        namespace: dict[str, Any] = {
            "__name__": "__script__",
            "call_tool": self.call_tool,
            "call_tool_async": self._async,
            "call_tools_parallel": lambda calls: [self.call_tool(*call) for call in calls],
            "set_result": lambda value: setattr(self, "result", value),
            **guards,
        }
        code = compile_tree(tree, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(self.printed):
            outcome = eval(code, namespace)
            if asyncio.iscoroutine(outcome):
                asyncio.run(outcome)

    async def _async(self, name: str, args: dict[str, Any]) -> Any:
        return self.call_tool(name, args)


def refusals(source: str, profile: Any = "standard") -> list[tuple[int, int, str]]:
    return [(finding.line, finding.column, finding.rule) for finding in check(source, profile).findings]


@pytest.mark.conforms("Q-b3", "Q3")
@each_row("source", SNIPPETS)
def test_what_models_write_passes_and_runs_as_it_does_without_lint(source: str) -> None:
    native, linted = Guest(), Guest()
    checked = check(source, "standard")
    assert checked.findings == ()
    assert checked.tree is not None
    native.run(ast.parse(source, "<code>"), {})
    linted.run(checked.tree, checked.guards)

    assert ast.dump(checked.tree, include_attributes=True) == ast.dump(ast.parse(source), include_attributes=True)
    assert native.result != "unset"
    assert repr(linted.result) == repr(native.result)
    assert linted.printed.getvalue() == native.printed.getvalue()


@pytest.mark.conforms("Q-b3")
@each_row(
    "source",
    [
        "d = {'a': 1}\nd['a'] += 1",
        "class P: x = 1\np = P()\np.x += 1",
        "x: int = 1",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 0",
        "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n    g()",
        "match 3:\n    case int(): pass",
        "async def f(): return await g()",
        "_name = 1",
        "if __name__ == '__main__': pass",
        "try:\n    pass\nexcept* ValueError:\n    pass",
    ],
)
def test_everything_that_plain_restricted_python_rejects_needlessly_passes(source: str) -> None:
    from RestrictedPython.compile import compile_restricted_exec

    assert compile_restricted_exec(source).errors
    assert check(source, "standard").findings == ()


@pytest.mark.conforms("Q-b4")
def test_a_comment_or_a_string_that_mentions_subprocess_is_no_offence() -> None:
    assert refusals("# never use subprocess.run(\nx = 'os.system(1)'") == []


REFUSED = [
    ("import subprocess", (1, 1, "process")),
    ("x = 1\nimport json, subprocess as sp", (2, 1, "process")),
    ("from subprocess import run", (1, 1, "process")),
    ("import posix", (1, 1, "process")),
    ("import pty", (1, 1, "process")),
    ("from multiprocessing import Process\nimport _posixsubprocess", (2, 1, "process")),
    ("if True:\n    import ctypes", (2, 5, "native")),
    ("from ctypes.util import find_library", (1, 1, "native")),
    ("import cffi", (1, 1, "native")),
    ("import socket", (1, 1, "network")),
    ("from socket import create_connection as dial", (1, 1, "network")),
    ("import os\nos.system('rm -rf /')", (2, 1, "process")),
    ("os.system('rm -rf /')", (1, 1, "process")),
    ("subprocess.run(['ls'])", (1, 1, "process")),
    ("import os as o\no.popen('ls')", (2, 1, "process")),
    ("import os\nrun = os.execvp", (2, 7, "process")),
    ("import os\nos.spawnv(0, '/bin/sh', [])", (2, 1, "process")),
    ("import os\nif os.fork() == 0: pass", (2, 4, "process")),
    ("import os\nos.posix_spawn('/bin/sh', [], {})", (2, 1, "process")),
    ("from os import system", (1, 1, "process")),
    ("from os import path, popen as p", (1, 1, "process")),
    ("from os import *", (1, 1, "process")),
    ("import os.path\nos.system('ls')", (2, 1, "process")),
    ("import shutil\nshutil.os.system('ls')", (2, 1, "process")),
    ("import platform\nplatform.subprocess.run('ls')", (2, 1, "process")),
    ("import sys\nsys.modules['subprocess'].run('ls')", (2, 1, "process")),
    ("import importlib\nimportlib.import_module('subprocess')", (2, 1, "process")),
    ("from importlib import import_module\nimport_module('ctypes')", (2, 1, "native")),
    ("import os\ngetattr(os, 'system')('ls')", (2, 1, "process")),
    ("import asyncio\nawait asyncio.create_subprocess_shell('ls')", (2, 7, "process")),
    ("import asyncio.subprocess", (1, 1, "process")),
    ("from asyncio import subprocess", (1, 1, "process")),
    ("().__class__.__base__.__subclasses__()", (1, 1, "introspection")),
    ("x = type(1).__mro__", (1, 5, "introspection")),
    ("int.mro()", (1, 1, "introspection")),
    ("def f(): pass\nf.__globals__", (2, 1, "introspection")),
    ("print.__self__", (1, 1, "introspection")),
    ("f = lambda: 1\nf.__code__.co_consts", (2, 1, "introspection")),
    ("g = (i for i in [])\ng.gi_frame", (2, 1, "introspection")),
    ("g = (i for i in [])\nx = g.gi_frame.f_back.f_back", (2, 5, "introspection")),
    ("try:\n    1/0\nexcept Exception as e:\n    e.__traceback__.tb_frame", (4, 5, "introspection")),
    ("async def c(): pass\nc().cr_frame", (2, 1, "introspection")),
    ("__builtins__", (1, 1, "introspection")),
    ("x = __builtins__['open']", (1, 5, "introspection")),
    ("def f(__builtins__): pass", (1, 7, "introspection")),
    ("global __builtins__", (1, 1, "introspection")),
    ("globals()['__builtins__']", (1, 1, "introspection")),
    ("getattr((), '__class__').x\ngetattr(int, '__subclasses__')", (2, 1, "introspection")),
    ("object.__getattribute__(int, '__subclasses__')", (1, 1, "introspection")),
    ("from operator import attrgetter\nattrgetter('a.__globals__')", (2, 1, "introspection")),
    ("'{0.__class__.__init__.__globals__}'.format(x)", (1, 1, "introspection")),
    ("'{x[__globals__]}'.format_map({})", (1, 1, "introspection")),
    ("import sys\nsys._getframe(1)", (2, 1, "introspection")),
    ("import gc\ngc.get_objects()", (2, 1, "introspection")),
    ("import inspect\ninspect.currentframe()", (2, 1, "introspection")),
    ("exec('x = 1')", (1, 1, "dynamic-code")),
    ("y = eval('1')", (1, 5, "dynamic-code")),
    ("compile('1', 'f', 'eval')", (1, 1, "dynamic-code")),
    ("__import__('os').system('ls')", (1, 1, "dynamic-code")),
    ("import builtins\nbuiltins.exec('1')", (2, 1, "dynamic-code")),
    ("from builtins import eval as e", (1, 1, "dynamic-code")),
    ("run = exec", (1, 7, "dynamic-code")),
]


@pytest.mark.conforms("Q26", "Q-b4")
@each_row(("source", "first"), REFUSED)
def test_every_refusal_has_its_line_column_and_reason(source: str, first: tuple[int, int, str]) -> None:
    checked = check(source, "standard")

    assert refusals(source)[0] == first
    assert "is blocked" in checked.findings[0].message
    assert checked.tree is None


@pytest.mark.conforms("Q26")
def test_a_refused_process_call_says_what_to_use_instead() -> None:
    message = check("import os\nos.system('rm -rf /')", "standard").findings[0].message
    assert message == "os.system is blocked: use call_tool() instead of starting processes"


def test_all_offences_are_reported_in_the_order_of_the_source() -> None:
    source = "import subprocess\nprint(1)\neval('1'); import socket\n\nx.__globals__\n"
    assert [place[:2] for place in refusals(source)] == [(1, 1), (3, 1), (3, 12), (5, 1)]


def test_columns_count_characters_not_bytes() -> None:
    assert refusals("é = '☃'; eval('1')") == [(1, 10, "dynamic-code")]


def test_a_form_feed_or_a_carriage_return_does_not_shift_the_lines() -> None:
    assert refusals("x = 1\f\r\ny = 2\x0b if False else 3\r\neval('1')".replace("\x0b", " ")) == [
        (3, 1, "dynamic-code")
    ]


@pytest.mark.conforms("V-16")
@each_row("source", [source for source, _ in REFUSED])
def test_the_off_profile_refuses_nothing_because_the_walls_are_the_kernels(source: str) -> None:
    assert check(source, "off").findings == ()


def test_a_sum_of_seven_hundred_terms_is_checked_like_any_other() -> None:
    source = "x = " + " + ".join(["f(1)"] * 700) + "\neval('1')"
    assert refusals(source) == [(2, 1, "dynamic-code")]


ODD = {
    "parentheses": "(" * 300 + ")" * 300,
    "minus signs": "-" * 200_000 + "1",
    "attributes": "a" + ".b" * 100_000,
    "sums": "+".join(["1"] * 200_000),
    "nested lists": "[" * 90 + "]" * 90 + "\n" + "x = " + "not " * 100_000 + "1",
    "indentation": "".join(" " * depth + "if 1:\n" for depth in range(150)) + " " * 150 + "pass",
    "null byte": "x = 1\0",
    "surrogate": "x = 1\ny = '\ud800'",
    "unterminated": "x = '''abc",
    "digits": "x = " + "9" * 10_000,
    "nothing python": "this is not a python",
}


@pytest.mark.conforms("Q-b8")
@each_row("profile", ["off", "standard", "strict"])
@each_row("source", ODD.values(), ids=ODD.keys())
def test_a_source_the_interpreter_cannot_take_is_a_syntax_error_and_nothing_else(source: str, profile: Any) -> None:
    with pytest.raises(SyntaxError) as caught:
        tree = check(source, profile).tree
        assert tree is not None
        compile_tree(tree, "exec")
    assert caught.value.filename == "<code>"
    assert caught.value.msg


@pytest.mark.conforms("Q-b8")
def test_a_syntax_error_carries_the_scripts_own_line_and_text() -> None:
    with pytest.raises(SyntaxError) as caught:
        check("x = 1\ny = = 2\n", "standard")
    assert (caught.value.lineno, caught.value.offset, caught.value.text) == (2, 5, "y = = 2\n")


def test_a_lone_surrogate_is_reported_on_its_line() -> None:
    with pytest.raises(SyntaxError, match=r"U\+D800") as caught:
        check("x = 1\ny = '\ud800'")
    assert caught.value.lineno == 2


@given(st.text(alphabet="abx(){}[]:=.,'\"\n #*@-+\\0_\t", max_size=60))
def test_any_text_is_a_tree_or_findings_or_a_syntax_error(source: str) -> None:
    import warnings

    with contextlib.suppress(SyntaxError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checked: LintResult = check(source, "standard")
        assert (checked.tree is None) == bool(checked.findings)


def test_compiling_inherits_no_future_import_from_the_package() -> None:
    tree = check("def f(x: int): pass\nkind = type(f.__annotations__['x']).__name__").tree
    assert tree is not None
    namespace: dict[str, object] = {}
    exec(compile_tree(tree, "exec"), namespace)
    assert namespace["kind"] == "type"
