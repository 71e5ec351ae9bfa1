"""Real programs, broken by a random change: their repair makes no call twice, and its report is right.

The programs are modules of the standard library, read from this interpreter. `CONTROL_REPAIRS=50` is the long form.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from control.conftest import Effects
from toolcell import ExecutionResult, Limits, SyncRuntime
from toolcell.journal.identity import call_digest

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

REPAIRS = int(os.environ.get("CONTROL_REPAIRS", "4"))
PIECES = {
    "textwrap": [
        "wrap('a b c d', 3)", "dedent('  a\\n   b')", "indent('a\\n\\nb', '> ')", "shorten('hello big world', 12)",
        "fill('the quick-brown fox', 9, initial_indent='* ')", "wrap('x' * 30, 8)", "fill('a  b', 2, tabsize=4)",
    ],
    "shlex": [
        "quote('it is')", "join(['a b', 'c'])", "split('a b')", "split('\"b c\" d')", "list(shlex('x = y'))",
        "split('d\\\\ e # f', comments=True)", "list(shlex('a&&b', punctuation_chars=True))",
    ],
    "colorsys": [
        "rgb_to_yiq(0.1, 0.2, 0.3)", "yiq_to_rgb(0.9, 0.9, 0.1)", "rgb_to_hls(0.1, 0.9, 0.5)", "hls_to_rgb(0.7, 0.6, 0.5)",
        "hls_to_rgb(0.1, 0.2, 0)", "rgb_to_hsv(0.3, 0.2, 0.1)", "[hsv_to_rgb(n / 6, 0.5, 0.5) for n in range(6)]",
    ],
    "graphlib": [
        "TopologicalSorter().add(1)", "list(TopologicalSorter({2: [1], 3: [2, 1]}).static_order())",
        "[(t.prepare(), t.get_ready()) for t in [TopologicalSorter({2: [1]})]]",
        "[(t.prepare(), t.done(*t.get_ready()), t.is_active()) for t in [TopologicalSorter({2: [1]})]]",
    ],
    "quopri": [
        "needsquoting(b' ', False, False)", "quote(b'=')", "encodestring(b'a=b')", "encodestring(b'y' * 90)",
        "encodestring(b' x_y', header=True)", "ishex(b'F')", "unhex(b'3d')",
    ],
}  # fmt: skip
DRIVER = """
for n, piece in enumerate([lambda: 'begin', {pieces}]):
    mark = call_tool('read', name='mark')[1]
    call_tool('write', text=f'{{mark}} {{n}} {{piece()}}')
"""


def program(name: str, change: random.Random | None = None) -> str:
    """Return a program; with `change`, one whose module is changed somewhere."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # no main program
    if change is not None:
        places = [node for part in tree.body if hasattr(part, "body") for node in ast.walk(part) if can_break(node)]
        break_node(change.choice(places), change)
    return ast.unparse(ast.fix_missing_locations(tree)) + DRIVER.format(
        pieces=", ".join(f"lambda: {piece}" for piece in PIECES[name])
    )


def can_break(node: ast.AST) -> bool:
    is_number = isinstance(node, ast.Constant) and type(node.value) is int
    return is_number or isinstance(node, ast.Name | ast.Compare | ast.BinOp | ast.If | ast.Attribute | ast.Return)


def break_node(node: ast.AST, dice: random.Random) -> None:
    """Make a mistake that people and models make: a typo, a wrong operator, a wrong number, a wrong condition."""
    match node:
        case ast.Name() | ast.Attribute():
            name = "id" if isinstance(node, ast.Name) else "attr"
            setattr(node, name, getattr(node, name) + "s")
        case ast.Compare():
            node.ops[0] = dice.choice([ast.Lt(), ast.GtE(), ast.NotEq(), ast.Is()])
        case ast.BinOp():
            node.op = dice.choice([ast.Add(), ast.Sub(), ast.Mult(), ast.Mod()])
        case ast.Constant():
            node.value += dice.choice([-1, 1, 7])
        case ast.If():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Return():
            node.value = None


def identities(calls: Iterable[tuple[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((tool, call_digest(tool, args)) for tool, args in calls)


def made(result: ExecutionResult) -> Counter[tuple[str, str]]:
    return identities((call.name, call.args) for call in result.calls)


def reported(rows: Any) -> Counter[tuple[str, str]]:
    return identities((row.tool, row.args) for row in rows)


def texts(effects: Effects) -> list[str]:
    return [text.partition(" ")[2] for _, text in effects.of("write")]


def test_no_call_is_repeated_and_the_report_is_right(opened: SyncRuntime) -> None:
    dice, kinds = random.Random(14), Counter[str]()
    straight = {}
    for name in PIECES:
        alone = Effects()
        assert opened.execute_code(program(name), tools=alone.registry).ok
        straight[name] = texts(alone)
    while kinds.total() < REPAIRS:
        name, effects = dice.choice(list(PIECES)), Effects()
        source = program(name, dice)
        broken = opened.execute_code(source, tools=effects.registry, limits=Limits(wall_s=2, tool_calls=80))
        if not broken.calls or broken.ok:
            continue  # it failed before its first call, or the mistake breaks nothing here
        kinds[str(broken.outcome)] += 1
        mended = opened.execute_code(program(name), tools=effects.registry, repairs=broken)

        assert mended.ok and mended.repair is not None, (name, mended.error)
        before, after = made(broken), made(mended)
        assert reported(mended.repair.reused) == before & after
        assert reported(mended.repair.new) == after - before
        assert reported(mended.repair.orphaned) == Counter(
            {key: count for key, count in (before - after).items() if key[0] == "write"}
        )
        effects_made = identities((tool, {"name" if tool == "read" else "text": arg}) for tool, arg in effects.made)
        assert effects_made == before | after, "a call was made twice, or not at all"
        assert Counter(straight[name]) <= Counter(texts(effects)), "the mended program did not do all its work"
    print(dict(kinds))
