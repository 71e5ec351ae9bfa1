"""What `help(tools.name)` and `inspect.signature(tools.name)` show: read from the host's stub of a tool.

Imported when somebody asks for it: `inspect` and what it imports take a seventh of the time of a zygote's imports.
"""

from __future__ import annotations

import ast
from inspect import Parameter, Signature
from typing import Any, Final

from toolcell_bridge.wire.frozen import frozen


@frozen
class ToolDescription:
    """The docstring and the signature of a tool."""

    docstring: str | None = None
    signature: Signature | None = None


NOTHING: Final = ToolDescription()


class _Annotation(str):
    """An annotation as it is written in the stub. It is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def read_description(stub: str) -> ToolDescription:
    """Read the stub of one tool. The records that its annotations name are described below its docstring."""
    classes, functions = list[ast.ClassDef](), list[ast.FunctionDef]()
    for node in ast.walk(ast.parse(stub)):
        if isinstance(node, ast.FunctionDef):
            functions.append(node)
        elif isinstance(node, ast.ClassDef) and node.bases:  # a namespace has no base
            classes.append(node)
    if not functions:
        return NOTHING
    function = functions[0]
    parts = [ast.get_docstring(function) or "", *map(ast.unparse, classes)]
    return ToolDescription("\n\n".join(filter(None, parts)), _signature(function))


def _signature(function: ast.FunctionDef) -> Signature:
    given = function.args
    parameters = [
        Parameter(
            each.arg,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is None else ast.literal_eval(default),
            annotation=_annotation(each.annotation),
        )
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        rest = given.kwarg
        parameters.append(Parameter(rest.arg, Parameter.VAR_KEYWORD, annotation=_annotation(rest.annotation)))
    return Signature(parameters, return_annotation=_annotation(function.returns))


def _annotation(node: ast.expr | None) -> Any:
    return Parameter.empty if node is None else _Annotation(ast.unparse(node))
