"""The standard profile: a RestrictedPython policy that only looks.

Every check is about one node and the script's imports, so the nodes are visited in a flat walk and nothing is
rewritten: what passes is compiled exactly as the model wrote it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from RestrictedPython.transformer import INSPECT_ATTRIBUTES, RestrictingNodeTransformer

from toolcell_bridge.guest import lint_rules as rules
from toolcell_bridge.guest.lint import Offence

_Node = TypeVar("_Node", bound=ast.AST)
_ATTRIBUTES = rules.ATTRIBUTES | INSPECT_ATTRIBUTES
_FORMAT_FIELD = re.compile(r"[.\[](\w+)")


def offences(tree: ast.Module) -> list[Offence]:
    """List what the standard profile refuses in `tree`, which stays as it is."""
    policy = StandardPolicy(tree)
    for node in ast.walk(tree):
        policy.visit(node)
    return policy.offences


class StandardPolicy(RestrictingNodeTransformer):
    """RestrictedPython's checks of names, imports and calls, with our tables in place of its rules.

    Its `visit_` methods recurse and rewrite; here the caller walks, so `node_contents_visit` is the identity and every
    method that rewrites is replaced by one that checks.
    """

    def __init__(self, tree: ast.Module) -> None:
        super().__init__()
        self.offences: list[Offence] = []
        self.modules = dict(_imported_modules(tree))
        self.bound = set(_bound_names(tree))

    def refuse(self, node: ast.AST, rule: str, what: str) -> None:
        """Note that `what`, found at `node`, is refused by `rule`."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        self.offences.append(Offence(line, offset, rule, rules.MESSAGES[rule].format(what=what)))

    def error(self, node: ast.AST, info: str) -> None:
        """RestrictedPython's own refusals. Those we share are refused with our words before it comes to this."""

    def node_contents_visit(self, node: _Node) -> _Node:
        """Leave the children to the walk."""
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Let statements that RestrictedPython does not know pass: they are compiled natively."""
        return node

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        """Leading underscores are ordinary here; only a few names are not."""
        if name and (rule := rules.NAMES.get(name)):
            self.refuse(node, rule, name)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Refuse the names of the table, and the builtins that make code out of text."""
        self.check_name(node, node.id)
        if node.id in rules.CODE_BUILTINS and node.id not in self.bound:
            self.refuse(node, "dynamic-code", f"{node.id}()")
        elif node.id not in self.bound and (rule := rules.refused_module(node.id)):
            self.refuse(node, rule, node.id)
        return node

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        """Check the names, as for any binding."""
        for name in node.names:
            self.check_name(node, name)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Check the name, as for any binding."""
        self.check_name(node, node.arg)
        return node

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        """Check the name; bases, decorators, metaclass and body are ordinary code."""
        self.check_name(node, node.name)
        return node

    def check_import_names(self, node: ast.ImportFrom | ast.Import) -> ast.AST:
        """Refuse modules and members of the tables, by whatever name they are bound."""
        origin = (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
        if origin and (rule := rules.refused_module(origin)):
            self.refuse(node, rule, origin)
            return node
        for alias in node.names:
            self.check_name(node, alias.asname or alias.name)
            self._check_imported(node, origin, alias.name)
        return node

    def _check_imported(self, node: ast.AST, origin: str, name: str) -> None:
        if name == "*" and origin in rules.MEMBERS:
            self.refuse(node, rules.MEMBERS[origin][1], f"from {origin} import *")
        elif rule := rules.refused_member(origin, name) if origin else rules.refused_module(name):
            self.refuse(node, rule, f"{origin}.{name}" if origin else name)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Refuse attributes that reach the object graph, and refused members of modules."""
        if node.attr in _ATTRIBUTES:
            self.refuse(node, "introspection", f"attribute {node.attr}")
        elif module := self.module_of(node.value):
            self._check_member(node, module, node.attr)
        return node

    def _check_member(self, node: ast.AST, module: str, name: str) -> None:
        # `asyncio.subprocess` is refused itself, `platform.subprocess` because it is the module under another roof.
        if rule := rules.refused_member(module, name) or rules.refused_module(name):
            self.refuse(node, rule, f"{module}.{name}")

    def module_of(self, node: ast.expr) -> str | None:
        """Return the module that an expression names, as far as the imports tell; a bare `os` needs no import."""
        match node:
            case ast.Name(id=name):
                return self.modules.get(name) or (name if name in rules.MEMBERS and name not in self.bound else None)
            case ast.Attribute(value=value, attr=name) if name in rules.MEMBERS and self.module_of(value):
                return name
        return None

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Refuse `x.__dict__['__globals__']` and `sys.modules['subprocess']`."""
        match node:
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value=str(name))):
                if rule := rules.refused_module(name):
                    self.refuse(node, rule, name)
            case ast.Subscript(slice=ast.Constant(value=str(name))) if name in _ATTRIBUTES - {"mro"}:
                if name.startswith("__"):
                    self.refuse(node, "introspection", f"[{name!r}]")
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Refuse the same things when their names are passed as constant text."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format" | "format_map")):
                self._check_text(node, _FORMAT_FIELD.findall(text))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in rules.BY_NAME_LOOKUPS:
                self._check_lookup(node)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                if rule := rules.refused_module(name):
                    self.refuse(node, rule, name)
        return node

    def _check_lookup(self, node: ast.Call) -> None:
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        self._check_text(node, [part for name in names for part in name.split(".")])
        if len(node.args) > 1 and names and (module := self.module_of(node.args[0])):
            self._check_member(node, module, names[0])

    def _check_text(self, node: ast.AST, names: list[str]) -> None:
        for name in names:
            if name in _ATTRIBUTES:
                self.refuse(node, "introspection", f"attribute {name}")

    def _pass(self, node: ast.AST) -> ast.AST:
        return node

    # RestrictedPython forbids or rewrites these; here they are what models write every day.
    visit_Nonlocal = visit_Global
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef
    visit_Assign = visit_AugAssign = visit_For = visit_comprehension = visit_With = visit_Lambda = _pass
    visit_Module = visit_TryStar = visit_Await = visit_AsyncFor = visit_AsyncWith = visit_NamedExpr = _pass


def _imported_modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name bound anywhere in the script, module it was bound to)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    top = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (top, top)
            case ast.ImportFrom(names=aliases, level=0):
                yield from (
                    (alias.asname or alias.name, alias.name) for alias in aliases if alias.name in rules.MEMBERS
                )


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name the script binds, wherever it does so."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.partition(".")[0]
