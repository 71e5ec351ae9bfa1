"""Compile a script so that the value of its last expression is kept."""

from __future__ import annotations

import _ast
import re
import types
from collections.abc import Callable, Collection
from typing import Any, Final

from toolcell_bridge.guest.scripts import SCRIPT
from toolcell_bridge.wire.messages import Plain, RunScript

LAST: Final = "<last>"
"""Name in the script's namespace for the value of the expression it ends with. No source can contain this name."""

LAST_RESULT: Final = "<set_result>"
"""What a script calls when its last statement is a call of set_result."""

ONLY_AST: Final = 0x400
TOP_LEVEL_AWAIT: Final = 0x2000


class Denied(Exception):
    """The lint profile refused the script."""

    def __init__(self, error: dict[str, Plain]) -> None:
        super().__init__(error["message"])
        self.error = error


def parse(
    run: RunScript,
    name: str = SCRIPT,
    defined: Collection[str] = (),
    changed: Callable[[Any], Any] | None = None,
) -> tuple[types.CodeType, dict[str, Any]]:
    """Compile a script under this file name; returns it with the names it needs. Its last value will be under `LAST`.

    `defined`: names that it finds in its namespace, beside its inputs. `changed`: what is done with its syntax tree.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as compile() does.
        Denied: the lint profile found something.
    """
    if run.lint == "off":
        tree = compile(run.source, name, "exec", ONLY_AST | TOP_LEVEL_AWAIT, dont_inherit=True)
        return _compiled(
            tree, lambda tree: compile(tree, name, "exec", TOP_LEVEL_AWAIT, dont_inherit=True), changed
        ), {}
    from toolcell_bridge.guest.lint import check, compile_tree

    checked = check(run.source, run.lint, name, {*defined, *run.inputs})  # type: ignore[arg-type]
    if checked.tree is None:
        raise Denied(_denied(checked.findings))
    made = _compiled(checked.tree, lambda tree: compile_tree(tree, "exec", name, TOP_LEVEL_AWAIT), changed)
    return made, checked.guards


IS_COROUTINE: Final = 0x80

SET_RESULT: Final = "set_result"

MAY_HAVE_VALUE: Final = re.compile(r";|(^|,)\s*\*")
"""Found in what `eval` refuses and what may have a value all the same: several statements in a line, of which the last
is an expression, and a tuple of starred ones."""

LOOKED_THROUGH: Final = 64
"""Most lines from the end in which the start of the last statement is looked for."""


def parse_in_two(source: str, name: str = SCRIPT) -> tuple[types.CodeType, types.CodeType] | None:
    """Compile what comes before a script's last statement, and that statement: an expression's value is to be kept.

    None where it is not certain where that begins; `parse` finds out. It makes a syntax tree, which has a class for
    each kind of node: in a fresh sandbox these are 100 pages to copy first, half a millisecond.
    """
    start = _start_of_last(source)
    if start is None or "__future__" in source or "\r" in source or "\f" in source:
        return None
    before, last = source[:start], source[start:]
    line = before.count("\n") + 1
    is_value = True
    try:
        # The last statement first: where it is none, nothing was compiled that could warn twice.
        try:
            value = compile("\n" * (line - 1) + last, name, "eval", TOP_LEVEL_AWAIT, dont_inherit=True)
        except SyntaxError:
            if MAY_HAVE_VALUE.search(last):
                return None
            is_value = False
            value = compile("\n" * (line - 1) + last, name, "exec", TOP_LEVEL_AWAIT, dont_inherit=True)
        code = compile(before, name, "exec", TOP_LEVEL_AWAIT, dont_inherit=True)
    except Exception:  # which `parse` raises, if the script is to blame
        return None
    if (value.co_flags | code.co_flags) & IS_COROUTINE:
        return None
    if is_value and SET_RESULT in last:
        if last.count(SET_RESULT) > 1 or not _is_one_call(value, last, line):
            return None
        value = value.replace(co_names=tuple([LAST_RESULT if each == SET_RESULT else each for each in value.co_names]))
    return code, value


def _start_of_last(source: str) -> int | None:
    """Return where the last line begins that is not part of another statement by its first character."""
    end = len(source)
    for _ in range(LOOKED_THROUGH):
        start = source.rfind("\n", 0, end) + 1
        if start < len(source) and source[start] not in " \t\n#)]}":
            return start
        if not start:
            return None
        end = start - 1
    return None


def _is_one_call(value: types.CodeType, source: str, line: int) -> bool:
    """Whether an expression on this line that has `set_result` in it is a call of that and nothing else."""
    lines = source.rstrip().split("\n")
    last = line + len(lines) - 1, len(lines[-1].encode())
    found = {each[1::2] for each in value.co_positions() if each[0] == line and each[2] == 0}
    return source.startswith(f"{SET_RESULT}(") and found - {(line, 0)} == {(line, len(SET_RESULT)), last}


def _compiled(tree: Any, compiled: Callable[[Any], Any], changed: Callable[[Any], Any] | None) -> Any:
    """Compile a script that keeps the value of the expression that it ends with under `LAST`."""
    tree = tree if changed is None else changed(tree)
    if tree.body and isinstance(tree.body[-1], _ast.Expr):
        tree.body[-1] = _assign_last(tree.body[-1])
    try:
        return compiled(tree)
    except SyntaxError as exc:
        from toolcell_bridge.guest import top_level_return

        if exc.msg != top_level_return.OUTSIDE:
            raise
        last = tree.body[-1]
        if isinstance(last, _ast.Assign) and isinstance(last.value, _ast.Call):
            called: Any = last.value.func
            if isinstance(called, _ast.Name) and called.id == LAST_RESULT:
                called.id = "set_result"
        return top_level_return.compile_as_function(tree, LAST, exc, compiled)


def _assign_last(last: _ast.Expr) -> _ast.Assign:
    """Turn the statement `last` into an assignment to `LAST`."""
    called = last.value.func if isinstance(last.value, _ast.Call) else None
    if isinstance(called, _ast.Name) and called.id == "set_result":
        called.id = LAST_RESULT
    name, kept = _ast.Name(LAST, _ast.Store()), _ast.Assign([], last.value)
    kept.targets.append(name)
    for node in (name, kept):
        node.lineno, node.col_offset = last.lineno, last.col_offset
        node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset
    return kept


def _denied(findings: Any) -> dict[str, Plain]:
    first = findings[0]
    plain = [
        {"line": each.line, "column": each.column, "rule": each.rule, "message": each.message} for each in findings[:50]
    ]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return {
        "type": "Denied",
        "message": f"{first.message}{more}",
        "line": first.line,
        "column": first.column,
        "traceback": "\n".join(f"line {each['line']}, column {each['column']}: {each['message']}" for each in plain),
        "findings": plain,
        "denied": True,
    }
