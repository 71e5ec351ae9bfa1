"""The strict profile: the rules and guards of RestrictedPython. Ordinary scripts work under it."""

import ast
import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell_bridge.guest import lint
from toolcell_bridge.guest.lint import check, compile_tree
from toolcell_bridge.guest.lint_profiles import PRELOAD
from toolcell_bridge.guest.pictures import Picture

pytestmark = pytest.mark.quick


def run_strict(source: str, **names: Any) -> tuple[Any, str]:
    """Run as the guest does: last expression apart, guards in the globals. Returns (result, printed)."""
    checked = check(source, "strict")
    assert checked.findings == ()
    assert checked.tree is not None
    results: list[Any] = []
    namespace: dict[str, Any] = {"set_result": results.append, "call_tool": _tool, **names, **checked.guards}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if isinstance(last := checked.tree.body[-1], ast.Expr):
            exec(compile_tree(ast.Module(checked.tree.body[:-1], []), "exec"), namespace)
            results.append(eval(compile_tree(ast.Expression(last.value), "eval"), namespace))
        else:
            exec(compile_tree(checked.tree, "exec"), namespace)
    return next((value for value in reversed(results) if value is not None), None), printed.getvalue()


def _tool(name: str, args: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    if name == "fail":
        raise RuntimeError("Tool 'fail' failed: no")
    return [{"title": "a", "score": 0.9}, {"title": "b", "score": 0.2}]


@pytest.mark.conforms("Q-b3")
@each_row(
    ("source", "expected"),
    [
        ("rows = call_tool('s', {'q': 1})\nset_result({'top': [r for r in rows if r['score'] > 0.5]})",
         {"top": [{"title": "a", "score": 0.9}]}),
        ("total = 0\nfor row in call_tool('s'):\n    total += row['score']\nround(total, 1)", 1.1),
        ("best = {}\nfor i, (k, v) in enumerate([('a', 1), ('b', 2)]):\n    best[k] = v * i\nbest", {"a": 0, "b": 2}),
        ("try:\n    call_tool('fail')\nexcept RuntimeError as e:\n    set_result(str(e))", "Tool 'fail' failed: no"),
        ("def f(*args, **kw):\n    return sum(args) + kw['z']\nf(*[1, 2], **{'z': 3})", 6),
        ("import math, json\nfrom collections import Counter, defaultdict\ngroups = defaultdict(list)\n"
         "groups['a'] = [math.floor(2.5)]\njson.dumps([Counter('aab').most_common(1), groups])",
         '[[["a", 2]], {"a": [2]}]'),
        ("class Box:\n    def __init__(self, n):\n        self.n = n\n    def double(self):\n        return self.n * 2"
         "\nb = Box(4)\nb.n = b.n + 1\nb.double()", 10),
        ("(a, (b, c)) = (1, (2, 3))\na, b = b, a\n[a, b, c]", [2, 1, 3]),
        ("with_lambda = sorted(['bb', 'a'], key=lambda s: len(s))\n{k: v for k, v in zip(with_lambda, range(2))}",
         {"a": 0, "bb": 1}),
        ("def g():\n    yield 1\n    yield 2\nlist(g()) + [y for x in [2] if (y := x + 1)]", [1, 2, 3]),
        ("from datetime import date, timedelta\nstr(date(2024, 1, 31) + timedelta(days=1))", "2024-02-01"),
        ("import re\nre.sub('a+', lambda m: '<%s>' % m.group(0), 'caat')", "c<aa>t"),
        ("i = 0\nwhile True:\n    i += 1\n    if i > 5000:\n        break\nf'{i:05d}'", "05001"),
        ("import urllib.parse, string\nurllib.parse.quote('a b') + string.ascii_lowercase[:2]", "a%20bab"),
        ("sum(i for i in range(5000))", 12497500),
        ("getattr([3, 1], 'count')(3) + int(hasattr(1, 'nope'))", 1),
        ("[list(), tuple(), list('ab'), isinstance([], list), list[int]((1,))]", [[], (), ["a", "b"], True, [1]]),
        ("from collections import defaultdict\nd = defaultdict(list)\nd['a'].append(1)\nd['n'] = 1\nd['n'] += 1\n"
         "d['a'] += [2]\nd['a'][0:1] += [3]\ndict(d)", {"a": [1, 3, 2], "n": 2}),
        ("class A:\n    def __init__(self, n):\n        self.n: int = n\n    def say(self):\n        return 'a'\n"
         "class B(A):\n    def __init__(self):\n        super().__init__(2)\n        self.n += 1\n"
         "    def say(self):\n        return super().say() + 'b'\n[B().n, B().say()]", [3, "ab"]),
        ("x: int = 1\ny: dict[str, int] = {}\ny['a']: int = x\ny", {"a": 1}),
        ("def kind(v):\n    match v:\n        case {'a': [first, *rest], **more}:\n            return [first, rest, more]\n"
         "        case str() | int(_):\n            return 'scalar'\n        case -1.5 | None:\n            return 'odd'\n"
         "        case _ if v:\n            return 'else'\n"
         "[kind({'a': [1, 2], 'b': 3}), kind('x'), kind(None), kind([1])]",
         [[1, [2], {"b": 3}], "scalar", "odd", "else"]),
        ("def count():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    return up\n"
         "up = count()\nup()\nup()", 2),
        ("'{0}: {n:>{w}.1f} {0!r}'.format('a', n=1.25, w=5)", "a:   1.2 'a'"),
        ("'''doc'''\nfrom __future__ import annotations\n"
         "def f(x: Undefined) -> int:\n    print('in f')\n    return x\nf(1)", 1),
    ],
)  # fmt: skip
def test_ordinary_scripts_work_under_the_guards(source: str, expected: object) -> None:
    assert run_strict(source)[0] == expected


def test_print_reaches_stdout_from_every_scope_in_order() -> None:
    source = (
        "print('a', 1, sep='-')\ndef f():\n    print('b', end='!')\nf()\n"
        "[print(x) for x in 'cd']\nprint('e', flush=True)"
    )
    assert run_strict(source)[1] == "a-1\nb!c\nd\ne\n"


def test_tool_proxies_are_reached_through_the_attribute_guard() -> None:
    class Tools:
        def search(self, query: str) -> str:
            return query.upper()

    assert run_strict("tools.search(query='x')", tools=Tools())[0] == "X"


@pytest.mark.conforms("Q-b3")
@each_row(
    ("source", "place"),
    [
        ("d = {}\nd.__a += 1", (2, 1)),
        ("match 1:\n    case _x:\n        pass", (2, 10)),
        ("_name = 1", (1, 1)),
        ("x = 1\nprinted", (2, 1)),
        ("a.b._c", (1, 1)),
        ("from json import *", (1, 1)),
    ],
)
def test_what_restricted_python_refuses_has_line_and_column(source: str, place: tuple[int, int]) -> None:
    finding = check(source, "strict").findings[0]
    assert (finding.line, finding.column, finding.rule) == (*place, "restricted")
    assert finding.message.endswith("(profile strict)")


def test_strict_says_what_standard_would_say_where_both_refuse() -> None:
    assert [finding.rule for finding in check("import subprocess\ng.gi_frame", "strict").findings] == [
        "process",
        "introspection",
    ]


COMPILE_TIME_TRICKS = {
    "CVE-2023-37271 generator frames": "g = (g.gi_frame.f_back.f_back for _ in [1])\n[x for x in g]",
    "CVE-2025-22153 except star": "try:\n    raise ExceptionGroup('', [ValueError()])\nexcept* ValueError:\n    pass",
    "CVE-2026-55830 positional-only guard": "def f(_getattr_, /):\n    return ().x\nf(lambda o, n: o)",
    "keyword-only guard": "def f(*, _getitem_):\n    return [1][0]",
    "lambda guard": "f = lambda _write_: 1",
    "import guard": "import json as _getattr_",
    "match": "match 1:\n    case _getattr_:\n        pass",
    "walrus": "(_getattr_ := 1)",
    "metaclass": "class A(metaclass=M):\n    pass",
    "match of an attribute": "match 1:\n    case object(format=f):\n        pass",
    "match of a value behind an attribute": "match 1:\n    case a.b:\n        pass",
    "match of a key behind an attribute": "match {}:\n    case {a.b: 1}:\n        pass",
    "rest of a mapping": "match {}:\n    case {**_getattr_}:\n        pass",
    "nonlocal guard": "def f():\n    _getattr_ = 1\n    def g():\n        nonlocal _getattr_",
    "async guard": "async def f(_getattr_):\n    pass",
    "annotated guard": "_getattr_: int = 1",
    "augmented guard": "a._b += 1",
    "init of another class": "ToolError.__init__",
}
RUN_TIME_TRICKS = {
    "CVE-2023-41039 str.format": "'{0.__class__}'.format(1)",
    "CVE-2023-41039 str type": "str.format('{0.__class__}', 1)",
    "CVE-2023-41039 format_map": "'{a.__class__}'.format_map({'a': 1})",
    "CVE-2024-47532 string.Formatter": "import string\nstring.Formatter().format('{0.__class__}', 1)",
    "from-imported Formatter": "from string import Formatter",
    "getattr by name": "getattr(1, '__cl' + 'ass__')",
    "module under a module": "import json\njson.codecs.open",
    "module under a from import": "from uuid import os",
    "import of os": "import os",
    "attrgetter": "from operator import attrgetter",
    "write to a module": "import math\nmath.pi = 3",
    "augmented write to a module": "import math\nmath.pi += 3",
    "augmented read of a module": "import json\njson.codecs += 3",
    "augmented write into a tuple": "x = ([],)\nx[0] += [1]",
    "format of an attribute": "'{a.real}'.format(a=1)",
    "format of an item": "'{0[0]}'.format([1])",
    "format of a nested attribute": "'{:{a.real}}'.format(1, a=1)",
    "write to a class of ours": "set_result.x = 1",
    "setattr": "setattr(1, 'x', 1)",
    "setattr of a private name": "class A:\n    pass\nsetattr(A(), '_x', 1)",
    "delattr of a private name": "class A:\n    _x = 1\ndelattr(A, '_x')",
    "open": "open('/etc/passwd')",
    "type": "type('X', (), {})",
    "print into an object": "import math\nprint(1, file=math)",
    "str subclass": "class S(str):\n    pass\nS('{0.__class__}').format(1)",
}


@each_row("source", COMPILE_TIME_TRICKS.values(), ids=COMPILE_TIME_TRICKS.keys())
def test_known_tricks_of_syntax_are_refused_before_the_run(source: str) -> None:
    assert check(source, "strict").findings


@each_row("source", RUN_TIME_TRICKS.values(), ids=RUN_TIME_TRICKS.keys())
def test_known_tricks_of_values_are_refused_by_a_guard(source: str) -> None:
    refusals = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)
    try:
        with pytest.raises(refusals):
            run_strict(source)
    except AssertionError:
        assert check(source, "strict").findings


@pytest.mark.parametrize("save", ["p.save('p.png')", "getattr(p, 'save')('p.png')", "f = p.save\nf('p.png')"])
def test_a_picture_is_not_written_to_a_file(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture = Picture(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(AttributeError, match=r"writes no files: return the picture with set_result"):
        run_strict(save, p=picture)
    assert not any(tmp_path.iterdir())
    assert run_strict("[p.media_type, hasattr(p, 'save')]", p=picture)[0] == ["image/png", False]


def test_the_object_behind_a_failed_attribute_of_a_stand_in_is_the_stand_in() -> None:
    source = "import string\ntry:\n    string.nope\nexcept AttributeError as e:\n    leaked = e.obj\nset_result(leaked)"
    assert run_strict(source)[0] is not importlib.import_module("string")


def test_line_numbers_of_a_restricted_script_are_its_own() -> None:
    source = "class A:\n    def f(self):\n        print('x')\n        return 1 / 0\n\nprint('y')\nA().f()"
    with pytest.raises(ZeroDivisionError) as caught:
        run_strict(source)
    lines = [(entry.path, entry.lineno + 1) for entry in caught.traceback if str(entry.path) == "<code>"]
    assert [line for _, line in lines] == [7, 4]


def test_a_profile_without_restricted_python_fails_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toolcell_bridge.guest.lint_policies", None)
    with pytest.raises(lint.LintUnavailable, match="needs RestrictedPython"):
        check("x = 1", "standard")
    assert check("x = 1", "off").tree is not None


def test_the_module_itself_does_not_import_restricted_python() -> None:
    import subprocess

    probe = "import sys, toolcell_bridge.guest.lint as l; l.check('1'); print('RestrictedPython' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_preloading_makes_every_profile_usable() -> None:
    for name in PRELOAD["strict"]:
        importlib.import_module(name)
    assert check("x = 1", "standard").tree is not None
    assert check("x = 1", "strict").guards
