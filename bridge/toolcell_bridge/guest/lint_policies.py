"""The lint policies: how RestrictedPython is used for the profiles standard and strict.

Standard only looks. Each check is about one node and the script's imports, so the nodes are visited in a flat walk and
nothing is rewritten: what passes is compiled exactly as the model wrote it.

Strict is RestrictedPython's transformation with the guards that its output calls: where `print` goes, which builtins
exist, which modules may be imported. Bypasses of it have been found before (generator frames, str.format,
AttributeError.obj, except*): it is lint, no isolation.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import operator
import re
import string
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from RestrictedPython.Eval import default_guarded_getitem, default_guarded_getiter
from RestrictedPython.Guards import (
    full_write_guard,
    guarded_iter_unpack_sequence,
    guarded_unpack_sequence,
    safe_builtins,
    safer_getattr_raise,
)
from RestrictedPython.PrintCollector import PrintCollector
from RestrictedPython.transformer import INSPECT_ATTRIBUTES, IOPERATOR_TO_STR, RestrictingNodeTransformer
from RestrictedPython.Utilities import utility_builtins

from toolcell_bridge.guest import lint as rules
from toolcell_bridge.guest.lint import Offence
from toolcell_bridge.guest.pictures import Picture
from toolcell_bridge.guest.tool_imports import TOOLS_NAME
from toolcell_bridge.guest.tools import TOOLS_MODULE

_Node = TypeVar("_Node", bound=ast.AST)
_ATTRIBUTES = rules.ATTRIBUTES | INSPECT_ATTRIBUTES
_FORMAT_FIELD = re.compile(r"[.\[](\w+)")


def find_offences(tree: ast.Module) -> list[Offence]:
    """List what the standard profile refuses in `tree`. The tree is not changed."""
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
        """Ignore RestrictedPython's own refusals: our tables refuse what matters, with our messages."""

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


_PLAIN_BUILTINS = [
    "all", "any", "bytes", "classmethod", "dict", "enumerate", "filter", "iter", "list", "map", "max", "min", "next",
    "object", "property", "reversed", "sorted", "staticmethod", "sum", "super", "tuple", "zip", "ConnectionError",
    "FileExistsError", "FileNotFoundError", "InterruptedError", "ModuleNotFoundError", "NotImplemented",
    "PermissionError", "RecursionError", "StopAsyncIteration", "TimeoutError",
]  # fmt: skip
"""Builtins that RestrictedPython leaves out because some of its users guard iteration; no guard here looks at it."""

_WRITABLE: frozenset[type] = frozenset({defaultdict, OrderedDict, Counter, deque, bytearray})
"""Containers a script may change, beside the dict and list that RestrictedPython knows."""

_IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    text: getattr(operator, f"__i{name}__")
    for text, name in zip(
        IOPERATOR_TO_STR.values(),
        ["add", "sub", "mul", "truediv", "mod", "pow", "lshift", "rshift", "or", "xor", "and", "floordiv", "matmul"],
        strict=True,
    )
}


def restrict(tree: ast.Module) -> tuple[ast.Module, list[Offence]]:
    """Transform `tree` in place and list what RestrictedPython refuses.

    Raises:
        RecursionError: the tree is deeper than the transformer can follow.
    """
    policy = StrictPolicy()
    policy.visit(tree)
    return ast.fix_missing_locations(tree), policy.offences


class StrictPolicy(RestrictingNodeTransformer):
    """RestrictedPython unchanged, except for where refusals are noted and how `print` is bound."""

    def __init__(self) -> None:
        super().__init__()
        self.offences: list[Offence] = []

    def error(self, node: ast.AST, info: str) -> None:
        """Note the refusal with its place."""
        line, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        self.offences.append(Offence(line, offset, "restricted", f"{info.rstrip('.')} (profile strict)"))

    def inject_print_collector(self, node: ast.Module | ast.FunctionDef, position: int = 0) -> None:
        """Add nothing: `_print` is a global, so no line moves and a `from __future__` import stays first."""

    def visit_Name(self, node: ast.Name) -> Any:
        """Refuse `printed`: what was printed is in the logs, not in a variable."""
        if node.id == "printed":
            self.error(node, '"printed" is a reserved name.')
            return node
        return super().visit_Name(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Write `d[k] += 1` and `o.x += 1` as calls of guards, which read and write as the guards of both do."""
        key: ast.expr
        match node.target:
            case ast.Subscript(value=holder, slice=ast.Slice(lower=lower, upper=upper, step=step)):
                ends: list[ast.expr] = [self.visit(each or ast.Constant(None)) for each in (lower, upper, step)]
                guard, key = "_inplace_item_", ast.Call(ast.Name("_slice_", ast.Load()), ends, [])
            case ast.Subscript(value=holder, slice=index):
                guard, key = "_inplace_item_", self.visit(index)
            case ast.Attribute(value=holder, attr=name):
                if name.startswith("_") or name in INSPECT_ATTRIBUTES:
                    self.error(node, f'"{name}" is an invalid attribute name.')
                guard, key = "_inplace_attr_", ast.Constant(name)
            case _:
                return super().visit_AugAssign(node)
        symbol = ast.Constant(IOPERATOR_TO_STR[type(node.op)])
        call = ast.Call(ast.Name(guard, ast.Load()), [symbol, self.visit(holder), key, self.visit(node.value)], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Let a class of the script call the `__init__` of the class above it."""
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[], keywords=[]), attr="__init__"):
                return node
        return super().visit_Attribute(node)

    def visit_Match(self, node: ast.Match) -> Any:
        """Let values, sequences, mappings and types be matched: Python reads no attribute for these."""
        return self.node_contents_visit(node)

    def visit_MatchValue(self, node: ast.MatchValue) -> Any:
        """Refuse `case Color.RED`, which reads an attribute that no guard can look at."""
        if isinstance(node.value, ast.Attribute):
            self.error(node, "A pattern that reads an attribute is not allowed; write case x if x == ...")
            return node
        return self.node_contents_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> Any:
        """Refuse `case Point(x=0)` for the same reason; `case str()` and `case int(n)` read none."""
        if node.kwd_attrs or not isinstance(node.cls, ast.Name):
            self.error(node, "A pattern that reads attributes is not allowed; write case Class(), then look at them")
            return node
        return self.node_contents_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> Any:
        """Check the name that is bound, as for any binding."""
        self.check_name(node, node.name)
        return self.node_contents_visit(node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> Any:
        """Check the name that the rest is bound to, and that no key reads an attribute."""
        self.check_name(node, node.rest)
        if any(isinstance(key, ast.Attribute) for key in node.keys):
            self.error(node, "A pattern that reads attributes is not allowed; write case {'key': value}")
            return node
        return self.node_contents_visit(node)

    def visit_Nonlocal(self, node: ast.Nonlocal | ast.Global) -> Any:
        """Check the names, as for any binding."""
        for name in node.names:
            self.check_name(node, name)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        """Treat it as any function: the frame of a coroutine is refused by its name."""
        return self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        """Leave an asynchronous one to Python: the guard of iteration is for others."""
        return self.node_contents_visit(node) if node.is_async else super().visit_comprehension(node)

    def _visit_contents(self, node: Any) -> Any:
        return self.node_contents_visit(node)

    visit_match_case = visit_MatchSequence = visit_MatchSingleton = visit_MatchOr = _visit_contents
    visit_AnnAssign = visit_Await = visit_AsyncFor = visit_AsyncWith = _visit_contents
    visit_MatchStar = visit_MatchAs

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Keep the place of a class, which RestrictedPython rebuilds from a template."""
        rebuilt = super().visit_ClassDef(node)
        return ast.copy_location(rebuilt, node) if isinstance(rebuilt, ast.AST) else rebuilt


class LogPrint(PrintCollector):
    """`print` of a restricted script: straight to stdout, which is the run's log."""

    def write(self, text: str) -> None:
        """Pass the text on instead of collecting it."""
        sys.stdout.write(text)

    def flush(self) -> None:
        """Stand behind `print(flush=True)`."""
        sys.stdout.flush()


def find_unavailable(tree: ast.Module, defined: Collection[str]) -> list[Offence]:
    """Find the modules and builtins that a restricted script does not have, so that none of it runs."""
    known = {*_restricted_builtins(), "print", *_bound_names(tree), *defined}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                problem = next((said for each in node.names if (said := _not_importable(each.name))), "")
            case ast.ImportFrom(module=str(module), level=0):
                problem = _not_importable(module) or next(
                    (said for each in node.names if (said := _not_exported(module, each.name))), ""
                )
            case ast.ImportFrom(module=module, level=level) if level:
                problem = _not_importable("." * level + (module or ""))
            case ast.Name(id=name, ctx=ast.Load()) if name not in known and hasattr(builtins, name):
                problem = f"{name} is not there in a restricted script"
            case _:
                problem = ""
        if problem:
            place: Any = node
            found.append(Offence(place.lineno, place.col_offset, "restricted", problem))
    return found


def _not_importable(name: str) -> str:
    if name in rules.IMPORTABLE or name == TOOLS_NAME:
        return ""
    return f"import of {name!r} is blocked in a restricted script: use call_tool() instead"


def _not_exported(module: str, name: str) -> str:
    if name == "*" or module == TOOLS_NAME or _is_exported(importlib.import_module(module), name):
        return ""
    return f"cannot import {name!r} from {module!r} in a restricted script"


def guards() -> dict[str, object]:
    """Make the globals a restricted script needs: its builtins, and the functions its transformed tree calls."""
    return {
        "__builtins__": _restricted_builtins(),
        "__metaclass__": _make_class,
        "__name__": "__main__",
        "_apply_": lambda function, *args, **kwargs: function(*args, **kwargs),
        "_getattr_": guarded_getattr,
        "_getitem_": default_guarded_getitem,
        "_getiter_": default_guarded_getiter,
        "_inplacevar_": lambda symbol, value, operand: _IN_PLACE[symbol](value, operand),
        "_inplace_item_": _change_item,
        "_inplace_attr_": _change_attribute,
        "_slice_": slice,
        "_iter_unpack_sequence_": guarded_iter_unpack_sequence,
        "_print": LogPrint(guarded_getattr),  # type: ignore[no-untyped-call]
        "_unpack_sequence_": guarded_unpack_sequence,
        "_write_": guarded_write,
    }


def _restricted_builtins() -> dict[str, object]:
    return {
        **{name: getattr(builtins, name) for name in _PLAIN_BUILTINS},
        **utility_builtins,
        **safe_builtins,
        "getattr": guarded_getattr,
        "hasattr": _guarded_hasattr,
        "setattr": lambda target, name, value: setattr(guarded_write(target), _public(name), value),
        "delattr": lambda target, name: delattr(guarded_write(target), _public(name)),
        "__import__": guarded_import,
    }


def _change_item(symbol: str, target: Any, key: Any, operand: Any) -> None:
    guarded_write(target)[key] = _IN_PLACE[symbol](default_guarded_getitem(target, key), operand)


def _change_attribute(symbol: str, target: Any, name: str, operand: Any) -> None:
    value = _IN_PLACE[symbol](guarded_getattr(target, name), operand)
    setattr(guarded_write(target), _public(name), value)


class _Formatter(string.Formatter):
    """`format` of a text, with fields that read no attribute and no item."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        if not field_name.isidentifier() and not field_name.isdecimal():
            raise AttributeError(f"{{{field_name}}} reads into a value, which format() may not in a restricted script")
        return super().get_field(field_name, args, kwargs)


def guarded_getattr(target: object, name: str, *default: object) -> Any:
    """Look an attribute up as RestrictedPython does; of modules see only the exported names, of a picture no `save`."""
    if isinstance(target, Picture) and name == "save":
        raise AttributeError("a restricted script writes no files: return the picture with set_result()")
    if isinstance(target, ModuleType) and not _is_exported(target, name):
        if default:
            return default[0]
        raise AttributeError(f"{target.__name__}.{name} may not be used in a restricted script")
    if isinstance(target, str) and name == "format":
        return lambda *args, **kwargs: _Formatter().format(str.__str__(target), *args, **kwargs)
    return safer_getattr_raise(target, name, *default)  # type: ignore[no-untyped-call]


def _guarded_hasattr(target: object, name: str) -> bool:
    try:
        guarded_getattr(target, name)
    except (AttributeError, NotImplementedError):
        return False
    return True


def _public(name: str) -> str:
    if type(name) is not str or name.startswith("_"):
        raise AttributeError(f"{name!r} is an invalid attribute name in a restricted script")
    return name


def guarded_write(target: object) -> Any:
    """Let a script change plain containers and instances of its own classes, nothing else."""
    return target if type(target) in _WRITABLE else full_write_guard(target)


def _make_class(name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> type:
    return type(name, bases, namespace | {"_guarded_writes": True})


def guarded_import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> object:
    """Import a module of the table; `from` imports take exported names only."""
    if level or (problem := _not_importable(name)):
        raise ImportError(problem if not level else _not_importable("." * level + name))
    if name == TOOLS_NAME:
        return TOOLS_MODULE.namespace  # never a file of the workspace
    module = importlib.import_module(name)
    for wanted in fromlist or ():
        if problem := _not_exported(name, wanted):
            raise ImportError(problem)
    found = module if fromlist else sys.modules[name.partition(".")[0]]
    # RestrictedPython's stand-in hides string.Formatter, which reads attributes unguarded (CVE-2024-47532).
    return utility_builtins["string"] if found is string else found


def _is_exported(module: ModuleType, name: str) -> bool:
    """Tell whether `module` offers `name` itself: `json.codecs` is there, but it is not part of json."""
    return name in _exports(module) or f"{module.__name__}.{name}" in rules.IMPORTABLE


@functools.cache
def _exports(module: ModuleType) -> frozenset[str]:
    if wanted := rules.IMPORTABLE.get(module.__name__):
        return wanted
    offered = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return frozenset(name for name in offered if not isinstance(getattr(module, name, None), ModuleType))
