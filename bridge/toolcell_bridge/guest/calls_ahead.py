"""Find the calls of tools in a statement that has not run yet, as far as it is certain that they are made.

Only calls whose arguments are all literals, of tools that the host has named, are found. The host decides about each.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from toolcell_bridge.guest.bound_names import bound_name
from toolcell_bridge.guest.tool_names import name_meant, python_path
from toolcell_bridge.guest.tools import bind_arguments

Found = tuple[str, dict[str, Any], int]
"""Tool name, arguments, line."""

CALLING: Final = frozenset({"call_tool", "call_tool_async"})
NOT_AT_ONCE: Final = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.IfExp,
    ast.BoolOp,
    ast.Compare,
)
"""Expressions of which a part may not be evaluated."""

SIMPLE: Final = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Assert, ast.Delete)
ENDING: Final = frozenset(
    {"SystemExit", "KeyboardInterrupt", "exit", "quit", "_exit", "abort", "kill", "interrupt_main"}
)
"""Names of what ends a script on purpose."""
REBINDING: Final = frozenset({"exec", "eval", "globals", "locals", "vars", "setattr", "delattr"})
"""Names of what may give the names of calls another meaning, unseen."""
DEFINED: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CallsAhead:
    """Reads statements in order, up to the first call of a tool that the host has not named: it may change something.

    `ahead`: parameters by tool.
    """

    def __init__(self, ahead: Mapping[str, Any]) -> None:
        self._ahead = ahead
        self._path_of = {python_path(name): name for name in ahead}
        self._ending = set(ENDING)
        """Also the functions of the script that end it."""

    def of(self, tree: ast.Module, rebound: Collection[str] = ()) -> tuple[list[Found], bool]:
        """Return the calls of a statement, and whether the statements after it may be read now.

        `rebound`: names of calls that mean something else in the namespace now.
        """
        nodes = [*ast.walk(tree)]
        if NAMES.intersection(map(bound_name, nodes)) or any(_is_deleted(each) for each in nodes):
            return [], False  # only when it has run is it known what its names mean
        goes_on = not self._may_end(tree, nodes)
        found: list[Found] = []
        for call in _calls_of(tree.body):
            if _root(call.func) in rebound:
                continue
            for tool, args in self._requested_tools(call):
                if tool is None:
                    return found, False
                if args is not None:
                    found.append((tool, args, call.lineno))
        return found, goes_on and not any(isinstance(each, ast.Call) and self._writes(each) for each in nodes)

    def _may_end(self, tree: ast.Module, nodes: Iterable[ast.AST]) -> bool:
        """Whether the script may end on purpose in a statement, or its names may mean something else afterwards."""
        names = {each.id if isinstance(each, ast.Name) else each.attr for each in nodes if isinstance(each, NAMING)}
        if names & self._ending:
            self._ending.update(each.name for each in tree.body if isinstance(each, DEFINED))
            return True
        return bool(names & REBINDING) or any(isinstance(each, ast.Raise | ast.Return) for each in _outside(tree))

    def _writes(self, call: ast.Call) -> bool:
        """Whether this, wherever it stands, is a call of a tool that was not named."""
        return any(tool is None for tool, _ in self._requested_tools(call))

    def _requested_tools(self, call: ast.Call) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
        """Yield each tool that a call asks for, or None for one that was not named; and its arguments, if literal."""
        path = _path(call.func)
        if path in CALLING:
            tool = self._known_tool(_literal(call.args[0]) if call.args else None)
            yield tool, self._arguments(tool, call.args[1:], call.keywords)
        elif path == "call_tools_parallel":
            entries = call.args[0].elts if call.args and isinstance(call.args[0], ast.List | ast.Tuple) else None
            for each in entries if entries is not None else (None,):
                yield self._entry(_literal(each) if each is not None else None)
        elif path is not None and path.startswith("tools."):
            tool = self._path_of.get(path.removeprefix("tools.")) or self._known_tool(path.removeprefix("tools."))
            yield tool, self._arguments(tool, call.args, call.keywords)

    def _known_tool(self, name: object) -> str | None:
        if not isinstance(name, str):
            return None
        meant = name if name in self._ahead else name_meant(name, [*self._ahead])
        return meant if meant in self._ahead else None

    def _arguments(
        self, tool: str | None, values: Sequence[ast.expr], keywords: Iterable[ast.keyword]
    ) -> dict[str, Any] | None:
        """Return the arguments of a call as `Toolbox` would; None when they are not all literals."""
        if tool is None:
            return None
        try:
            given = [ast.literal_eval(each) for each in values]
            named = {str(each.arg): ast.literal_eval(each.value) for each in keywords if each.arg != "raw"}
            if any(each.arg is None for each in keywords):
                return None
            if not given or (len(given) == 1 and given[0] is None):
                return named
            if len(given) == 1 and isinstance(given[0], dict):
                return {**given[0], **named}
            names = self._ahead[tool]
            return bind_arguments(tool, {"properties": dict.fromkeys(names), "required": names}, given, named)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None

    def _entry(self, entry: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Read one entry of call_tools_parallel."""
        match entry:
            case str():
                return self._known_tool(entry), {}
            case {"tool": str(name), **rest} | {"name": str(name), **rest}:
                args = rest.get("args", rest.get("arguments")) or {}
                return self._known_tool(name), args if isinstance(args, dict) else None
            case [str(name)] | (str(name),):
                return self._known_tool(name), {}
            case [str(name), dict(args)] | (str(name), dict(args)):
                return self._known_tool(name), args
        return None, None


NAMES: Final = frozenset({*CALLING, "call_tools_parallel", "tools", "*"})
"""What calls begin with; `*` stands for whatever a module has."""
NAMING: Final = (ast.Name, ast.Attribute)


def _is_deleted(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del) and node.id in NAMES


def _outside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below one that stand in no function of their own."""
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield each
            yield from _outside(each)


def _root(function: ast.expr) -> str | None:
    path = _path(function)
    return path.partition(".")[0] if path is not None else None


def _calls_of(body: Sequence[ast.stmt]) -> list[ast.Call]:
    """Return the calls that these statements are certain to come to, unless something before them raises."""
    found: list[ast.Call] = []
    _add_calls(body, found)
    return found


def _add_calls(body: Sequence[ast.stmt], found: list[ast.Call]) -> bool:
    """Add the calls of these statements; return whether it is certain that what comes after them is reached."""
    for each in body:
        if isinstance(each, SIMPLE):
            found += _calls_in(each)
        elif isinstance(each, ast.With | ast.AsyncWith | ast.Try):
            if not isinstance(each, ast.Try):
                for item in each.items:
                    found += _calls_in(item.context_expr)
            if not _add_calls(each.body, found):
                return False
        elif not isinstance(each, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.Pass):
            return False  # what it does decides what comes after it
    return True


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, NOT_AT_ONCE):
        return
    for each in ast.iter_child_nodes(node):
        yield from _calls_in(each)
    if isinstance(node, ast.Call):
        yield node


def _path(function: ast.expr) -> str | None:
    """Return `tools.a.b` or `call_tool` as written; None for any other expression."""
    match function:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) | ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            path = _path(value)
            return f"{path}.{name}" if path is not None else None
    return None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
