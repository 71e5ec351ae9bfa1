"""The name that one node of a syntax tree binds where it stands."""

from __future__ import annotations

import ast


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
