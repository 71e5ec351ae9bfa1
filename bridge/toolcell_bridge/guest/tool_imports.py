"""Names that `from tools import NAME` and `import tools as NAME` give to tools."""

from __future__ import annotations

import ast

# The name that one node of a syntax tree binds where it stands.


def bound_name(node: ast.AST) -> str | None:
    """Return the name that the node binds, not counting nodes inside it; `*` for a star import, None for no name."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.alias(name=name, asname=other):
            return other or name.partition(".")[0]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return name
        case ast.MatchMapping(rest=str(name)):
            return name
    return None


TOOLS_NAME = "tools"


def find_imported_tools(tree: ast.AST) -> dict[str, str]:
    """Return what each name of a script stands for: a path below `tools`, empty for all tools.

    A name that the script gives another value, too, is left out; so is all that a star imports.
    """
    found, bound = dict[str, str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == TOOLS_NAME and not node.level:
            found |= {each.asname or each.name: each.name for each in node.names if each.name != "*"}
        elif isinstance(node, ast.Import):
            found |= {each.asname: "" for each in node.names if each.name == TOOLS_NAME and each.asname}
        elif (name := bound_name(node)) is not None and not isinstance(node, ast.alias):
            bound.add(name)
    return {name: path for name, path in found.items() if name not in bound}


def find_star_imports(tree: ast.AST) -> list[ast.ImportFrom]:
    """Return each `from tools import *`."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == TOOLS_NAME and node.names[0].name == "*"
    ]
