"""Read which calls a script can make, without running it, as far as the names are written out.

Runs inside a sandbox: reading a hostile text can take all memory and the whole stack.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final

from toolcell_bridge.guest.compiling import TOP_LEVEL_AWAIT
from toolcell_bridge.guest.tool_imports import find_imported_tools, find_star_imports
from toolcell_bridge.guest.top_level_return import OUTSIDE

MAX_CALLS: Final = 1000
CALLS: Final = frozenset({"call_tool", "call_tool_async"})
PARALLEL: Final = "call_tools_parallel"

Found = tuple[ast.expr | ast.stmt, str | None, list[str] | None] | tuple[ast.expr, str, list[str] | None, bool]
"""Where it is written, the tool's name, and the names of its arguments. None: they are not written out."""


def planned_calls(source: str) -> dict[str, Any]:
    """Return the calls of a script in the order of its text.

    Shape: {"calls": [[line, tool or None, argument names or None]], "more": calls left out, "error": ""}; with a
    syntax error there is also its "line". A call of an imported name ends with True: a file may have that name, too.
    """
    try:
        tree = ast.parse(source)
        _check_compiles(source)
    except SyntaxError as exc:
        return {"calls": [], "more": 0, "error": f"{type(exc).__name__}: {exc.msg}"[:200], "line": exc.lineno}
    except (ValueError, RecursionError, MemoryError) as exc:
        return {"calls": [], "more": 0, "error": f"{type(exc).__name__}: {exc}"[:200]}
    imported = find_imported_tools(tree)
    found = [each for node in ast.walk(tree) if isinstance(node, ast.Call) for each in _calls(node, imported)]
    found += [(node, None, None) for node in find_star_imports(tree)]
    found.sort(key=lambda each: (each[0].lineno, each[0].col_offset))
    calls = [[where.lineno, tool, names, *imports] for where, tool, names, *imports in found[:MAX_CALLS]]
    return {"calls": calls, "more": max(0, len(found) - MAX_CALLS), "error": ""}


def _check_compiles(source: str) -> None:
    """Raise a SyntaxError that only the compiler finds, such as a `break` outside of a loop. A `return` is none."""
    try:
        compile(source, "<code>", "exec", TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as exc:
        if exc.msg != OUTSIDE:
            raise


def _calls(node: ast.Call, imported: Mapping[str, str]) -> Iterator[Found]:
    match node.func:
        case ast.Name(id=name) if name in CALLS:
            tool = _text(node.args[0]) if node.args else None
            yield node, tool, _names(node.args[1:], node.keywords)
        case ast.Name(id=name) if imported.get(name):
            yield node, imported[name], _names(node.args, node.keywords), True
        case ast.Attribute() | ast.Subscript() if (parts := _parts_below_tools(node.func, imported)) is not None:
            tool = None if None in parts else ".".join(map(str, parts))
            yield node, tool, _names(node.args, node.keywords)
        case ast.Name(id=name) if name == PARALLEL:
            match node.args[:1]:
                case [ast.List(elts=entries) | ast.Tuple(elts=entries)]:
                    yield from map(_entry, entries)
                case [ast.ListComp(elt=entry) | ast.GeneratorExp(elt=entry)]:
                    yield _entry(entry)
                case _:
                    yield node, None, None


def _parts_below_tools(node: ast.expr, imported: Mapping[str, str]) -> list[str | None] | None:
    """Return `["github", "search"]` for `tools.github["search"]`; None for what is not part of `tools`."""
    parts: list[str | None] = []
    while True:
        match node:
            case ast.Attribute(value=above, attr=name) if not name.startswith("__"):
                parts.append(name)
            case ast.Subscript(value=above, slice=key):
                parts.append(_text(key))
            case ast.Name(id="tools"):
                return parts[::-1]
            case ast.Name(id=name) if name in imported:
                return [*filter(None, [imported[name]]), *parts[::-1]]
            case _:
                return None
        node = above


def _entry(entry: ast.expr) -> Found:
    match entry:
        case ast.Constant(value=str() as tool):
            return entry, tool, []
        case ast.Tuple(elts=[first, *rest]) | ast.List(elts=[first, *rest]):
            return entry, _text(first), _names(rest, [])
        case ast.Dict(keys=keys, values=values):
            parts = {_text(key): value for key, value in zip(keys, values, strict=True) if key is not None}
            named, args = parts.get("tool", parts.get("name")), parts.get("args", parts.get("arguments"))
            return entry, _text(named), [] if args is None else _names([args], [])
    return entry, None, None


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _names(values: list[ast.expr], keywords: list[ast.keyword]) -> list[str] | None:
    """Return the names of a call's arguments, if all of them are written out."""
    names = [each.arg for each in keywords if each.arg is not None and each.arg != "raw"]
    if any(each.arg is None for each in keywords) or len(values) > 1:
        return None
    for value in values:
        if isinstance(value, ast.Constant) and value.value is None:
            continue
        if not isinstance(value, ast.Dict):
            return None
        for key in value.keys:
            if (name := _text(key)) is None:
                return None
            names.append(name)
    return names
