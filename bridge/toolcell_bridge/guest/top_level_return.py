"""Scripts with a `return` at the top level, as models write them: the value is the result, and the script ends there.

Such a script is not Python, so no program changes its meaning. It becomes a function's body whose names are global,
so they are still there for the next script of a session.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from toolcell_bridge.guest.tool_imports import bound_name

OUTSIDE = "'return' outside function"
"""What compile() says of it."""

MODULE = "<module>"
"""Name of the function, as tracebacks show it."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def compile_as_function(tree: Any, last: str, refused: SyntaxError, compiled: Callable[[Any], Any]) -> Any:
    """Compile the body of `tree` as a function and a call of it, whose value will be under the name `last`.

    A last statement that assigns to `last` returns instead.

    Raises:
        SyntaxError: `refused`, when something else is wrong as well.
    """
    for make, call in ((ast.FunctionDef, "{}()"), (ast.AsyncFunctionDef, "await {}()")):
        try:
            return compiled(_wrapped(tree, last, make, call))
        except SyntaxError:
            continue
    raise refused


def _wrapped(tree: Any, last: str, make: type[Any], call: str) -> ast.Module:
    imports = [each for each in tree.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    body = [each for each in tree.body if each not in imports]
    match body[-1]:
        case ast.Assign(targets=[ast.Name(id=name)]) as kept if name == last:
            body[-1] = ast.copy_location(ast.Return(kept.value), kept)
    names = sorted(_bound_names(body) - _annotated(body))
    whole = ast.parse(f"def f(): pass\nx = {call.format('f')}\ndel f").body
    function = make(MODULE, whole[0].args, body, [], None, None)  # type: ignore[attr-defined]
    if "type_params" in make._fields:  # since Python 3.12
        function.type_params = []
    if names:
        function.body = [ast.Global(names), *body]
    for node in (*ast.walk(whole[1]), *ast.walk(whole[2])):
        if isinstance(node, ast.Name):
            node.id = {"f": MODULE, "x": last}[node.id]
    return ast.fix_missing_locations(ast.Module([*imports, function, *whole[1:]], []))


def _bound_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind where they stand."""
    nodes = list(_own_nodes(body))
    names = {name for each in nodes if (name := bound_name(each)) is not None}
    deleted = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Del)}
    return (names | deleted) - {"*"}


def _annotated(body: list[ast.stmt]) -> set[str]:
    """Return the names with annotations: Python allows no global ones."""
    nodes = _own_nodes(body)
    return {each.target.id for each in nodes if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def _own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk through statements, and into no function or class of theirs."""
    left = list[ast.AST](body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (*_SCOPES, ast.Lambda)):
            left += ast.iter_child_nodes(node)
