"""No pattern of the host takes longer than in proportion to the text that it reads: each is collected and pumped."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import pkgutil
import re
import re._constants as sre
import re._parser as parser
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import toolcell
import toolcell_bridge
from toolcell.errors import ToolcellError

SIZES = (2_000, 8_000, 32_000)
FREE_S = 0.004
"""CPU time of a text that is not looked at more closely: noise is larger."""
TOO_LONG_S = 1.0
"""CPU time of one text, after which nothing more has to be measured."""
MOST_GROWTH = 8.0
"""Of the time, where a text becomes four times as long. What is quadratic grows sixteenfold."""


def modules_of(package: Any) -> Iterator[str]:
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith("__main__"):
            yield found.name


METHODS = frozenset({"search", "match", "fullmatch", "finditer", "findall", "sub", "subn", "split"})
_USE = re.compile(r"\b(\w+)(?:\[[^\]\n]*\])?\.(" + "|".join(METHODS) + r")\b")


@dataclass(frozen=True)
class Found:
    """A pattern of the host: where it is, and how it is used. `methods`: all, where that cannot be told."""

    module: str
    pattern: str | bytes
    flags: int
    methods: frozenset[str]


def sources() -> dict[str, str]:
    """Return the text of each module that mentions patterns, by its name."""
    found = {}
    for name in (name for package in (toolcell, toolcell_bridge) for name in modules_of(package)):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and "re." in (text := Path(spec.origin).read_text()):
            found[name] = text
    return found


def patterns() -> list[Found]:
    """Return every pattern that the host compiles while its modules are imported, and those that stand in calls.

    Each module is executed anew beside the imported one: what it compiles is seen, wherever it keeps that.
    """
    texts = sources()
    used: dict[str, set[str]] = {}
    for text in texts.values():
        for name, method in _USE.findall(text):
            used.setdefault(name, set()).add(method)
    compiled = list[Found]()
    original = re.compile

    def noted(pattern: Any, flags: Any = 0) -> Any:
        made = original(pattern, flags)
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == executed:
            named = _assigned(trees[executed], frame.f_lineno)
            methods = frozenset(method for name in named for method in used.get(name, ()))
            compiled.append(Found(executed, made.pattern, made.flags, methods or METHODS))
        return made

    trees = {name: ast.parse(text) for name, text in texts.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(re, "compile", noted)
        for executed, text in texts.items():
            compiled += _in_calls(executed, trees[executed])
            if "re.compile(" not in text:
                continue
            try:
                importlib.import_module(executed)
                spec = importlib.util.find_spec(executed)
                assert spec is not None and spec.origin is not None
                module = importlib.util.module_from_spec(spec)
                sys.modules[executed], before = module, sys.modules[executed]  # dataclasses look there
                try:
                    exec(original_compile(text, spec.origin, "exec"), module.__dict__)
                finally:
                    sys.modules[executed] = before
            except (ImportError, ToolcellError):  # an extra that is not installed
                continue
    return [*dict.fromkeys(compiled)]


original_compile = compile


def _assigned(tree: ast.Module, line: int) -> list[str]:
    """Return the names that the statement at a line is assigned to."""
    for each in ast.walk(tree):
        if isinstance(each, ast.Assign | ast.AnnAssign) and each.lineno <= line <= (each.end_lineno or 0):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return []


def _in_calls(module: str, tree: ast.Module) -> Iterator[Found]:
    """Yield the patterns that stand in calls, as in `re.sub("a+", "", text)`."""
    for each in ast.walk(tree):
        match each:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="re"), attr=method),
                args=[ast.Constant(value=str() | bytes() as pattern), *_],
            ) if method in METHODS:
                yield Found(module, pattern, re.compile(pattern).flags, frozenset({method}))


def text_of(tree: Any, case: Callable[[int], str]) -> str:
    """Return a short text that (mostly) fits a parsed pattern."""
    made = ""
    for operator, argument in tree:
        made += _text_of(operator, argument, case)
    return made


def _text_of(operator: Any, argument: Any, case: Callable[[int], str]) -> str:
    if operator is sre.LITERAL:
        return case(argument)
    if operator is sre.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if operator is sre.ANY:
        return "a"
    if operator is sre.IN:
        return _member(argument, case)
    if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, _, below = argument
        return text_of(below, case) * min(max(least, 0), 3)
    if operator is sre.SUBPATTERN:
        return text_of(argument[3], case)
    if operator is sre.ATOMIC_GROUP:
        return text_of(argument, case)
    if operator is sre.BRANCH:
        return text_of(argument[1][0], case)
    return ""


_CATEGORIES = {
    sre.CATEGORY_DIGIT: "1", sre.CATEGORY_NOT_DIGIT: "a", sre.CATEGORY_SPACE: " ", sre.CATEGORY_NOT_SPACE: "a",
    sre.CATEGORY_WORD: "a", sre.CATEGORY_NOT_WORD: "-",
}  # fmt: skip


def _member(members: Any, case: Callable[[int], str], skip: int = 0) -> str:
    if members[0][0] is sre.NEGATE:
        return next(each for each in "a1 -;\x01" if not any(_holds(one, each) for one in members[1:]))
    operator, argument = members[skip % len(members)]
    if operator is sre.LITERAL:
        return case(argument)
    if operator is sre.RANGE:
        return case(argument[0])
    return _CATEGORIES.get(argument, "a")


def _holds(member: Any, sign: str) -> bool:
    operator, argument = member
    if operator is sre.LITERAL:
        return bool(ord(sign) == argument)
    if operator is sre.RANGE:
        return bool(argument[0] <= ord(sign) <= argument[1])
    return _CATEGORIES.get(argument) == sign


def pumps(tree: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield what stands before a part that is repeated, and a text that it takes once."""
    for operator, argument in tree:
        if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            _, most, below = argument
            if most > 50:
                yield before, text_of(below, chr)
                for each, (inner, said) in enumerate(below):
                    if inner is sre.IN and said[0][0] is not sre.NEGATE:
                        for skip in range(min(len(said), 4)):
                            yield before, _member(said, chr, skip)
                    if inner is sre.BRANCH and each == 0:
                        for branch in said[1]:
                            yield before, text_of(branch, chr)
            yield from pumps(below, before)
        elif operator is sre.SUBPATTERN:
            yield from pumps(argument[3], before)
        elif operator is sre.ATOMIC_GROUP:
            yield from pumps(argument, before)
        elif operator is sre.BRANCH:
            for branch in argument[1]:
                yield from pumps(branch, before)
        elif operator in (sre.ASSERT, sre.ASSERT_NOT):
            yield from pumps(argument[1], before)
        before += _text_of(operator, argument, chr)


def texts_for(pattern: str | bytes, flags: int) -> set[tuple[str, str, str]]:
    """Return beginning, what is repeated and end of the texts that a pattern is pumped with."""
    tree = parser.parse(pattern, flags)
    found = {("", "", "")}
    whole = text_of(tree, chr)
    found |= {("", whole, ""), ("", whole[:1], ""), ("", whole[:-1], ""), ("", " ", ""), ("", "a", "")}
    for before, repeated in pumps(tree):
        for end in ("", "\x01", "!"):
            found |= {(before, repeated, end), ("", before + repeated, end), ("", repeated, end)}
    return {each for each in found if each[1]}


def cpu_s(compiled: re.Pattern[Any], methods: frozenset[str], text: Any) -> float:
    began = time.process_time()
    for method in methods & {"match", "fullmatch", "search"}:
        getattr(compiled, method)(text)
    if methods & {"finditer", "findall", "sub", "subn", "split"}:
        for _ in compiled.finditer(text):
            pass
    return time.process_time() - began


class _TooLong(Exception):
    """A pattern took `TOO_LONG_S` for one text."""


def _stop(*_: object) -> None:
    raise _TooLong


def slowest(found: Found) -> tuple[float, tuple[str, str, str]]:
    """Return by how much the time of a pattern grows, at worst, where its text becomes four times as long."""
    before = signal.signal(signal.SIGVTALRM, _stop)
    try:
        return _slowest(found)
    except _TooLong:
        return math.inf, ("", found.module, "")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _slowest(found: Found) -> tuple[float, tuple[str, str, str]]:
    compiled, worst = re.compile(found.pattern, found.flags), (0.0, ("", "", ""))
    for begin, repeated, end in texts_for(found.pattern, found.flags):
        before = 0.0
        for size in SIZES:
            text: Any = begin + repeated * (size // len(repeated)) + end
            text = text.encode("latin-1", "replace") if isinstance(found.pattern, bytes) else text
            signal.setitimer(signal.ITIMER_VIRTUAL, TOO_LONG_S)
            took = cpu_s(compiled, found.methods, text)
            if took > FREE_S and before:
                growth = took / max(before, FREE_S / 4)
                # A neighbour may have taken our caches: what is four times as long tells.
                if growth > MOST_GROWTH and took < 1.0:
                    longer = begin + repeated * (4 * size // len(repeated)) + end
                    more: Any = longer.encode("latin-1", "replace") if isinstance(found.pattern, bytes) else longer
                    once, again = (min(cpu_s(compiled, found.methods, each) for _ in range(3)) for each in (text, more))
                    growth = again / max(once, FREE_S / 4)
                worst = max(worst, (growth, (begin, repeated, end)))
                if growth > MOST_GROWTH:
                    return worst
            before = took
    return worst


OF_ITS_USER = ("toolcell.cli.run",)
"""Modules whose patterns read nothing but what the user of a command has typed."""


@pytest.mark.slow
def test_no_pattern_of_the_host_takes_longer_than_in_proportion_to_its_text() -> None:
    found = [each for each in patterns() if each.module not in OF_ITS_USER]
    assert len(found) > 140
    slow = {
        f"{each.module}: {each.pattern!r:.120}": (growth, text)
        for each in found
        for growth, text in [slowest(each)]
        if growth > MOST_GROWTH
    }
    assert slow == {}


def test_pumping_finds_a_pattern_that_is_not_linear() -> None:
    assert slowest(Found("", r"a+b", 0, METHODS))[0] > MOST_GROWTH
