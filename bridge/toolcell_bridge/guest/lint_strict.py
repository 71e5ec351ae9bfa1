"""The strict profile: RestrictedPython's transformation, and the guards its output calls.

RestrictedPython decides what may be written; this page supplies what it leaves to its users: where refusals are
noted, where `print` goes, which builtins exist and which modules may be imported. Its bypasses so far were found by
people who looked (generator frames, str.format, AttributeError.obj, except*): lint, as the rest.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import operator
import string
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from RestrictedPython.Eval import default_guarded_getitem, default_guarded_getiter
from RestrictedPython.Guards import (
    full_write_guard,
    guarded_iter_unpack_sequence,
    guarded_unpack_sequence,
    safe_builtins,
    safer_getattr_raise,
)
from RestrictedPython.Limits import limited_builtins
from RestrictedPython.PrintCollector import PrintCollector
from RestrictedPython.transformer import IOPERATOR_TO_STR, RestrictingNodeTransformer
from RestrictedPython.Utilities import utility_builtins

from toolcell_bridge.guest.lint import Offence

_ANY_EXPORT: frozenset[str] = frozenset()

_WHOLE_MODULES = [
    "__future__", "base64", "bisect", "calendar", "collections", "collections.abc", "copy", "datetime",
    "decimal", "fractions", "hashlib", "heapq", "html", "itertools", "json", "math", "random", "re",
    "statistics", "string", "textwrap", "time", "unicodedata", "urllib", "urllib.parse", "uuid", "zoneinfo",
]  # fmt: skip

MODULES: dict[str, frozenset[str]] = {
    **dict.fromkeys(_WHOLE_MODULES, _ANY_EXPORT),
    # typing and functools evaluate annotations, operator looks attributes up unguarded: only the harmless part.
    "functools": frozenset(["cache", "cmp_to_key", "lru_cache", "partial", "reduce", "total_ordering", "wraps"]),
    "operator": frozenset(
        ["add", "and_", "eq", "ge", "gt", "itemgetter", "le", "lt", "mul", "ne", "or_", "sub", "truediv"]
    ),
    "typing": frozenset(
        ["Any", "Callable", "Dict", "Iterable", "List", "Literal", "Optional", "Set", "Tuple", "Union"]
    ),
}
"""What may be imported, and which of its names; the empty set stands for everything it exports."""

_PLAIN_BUILTINS = [
    "all", "any", "bytes", "classmethod", "dict", "enumerate", "filter", "iter", "map", "max", "min", "next",
    "object", "property", "reversed", "sorted", "staticmethod", "sum", "zip", "ConnectionError",
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
    """RestrictedPython as it is, but for where refusals are noted and how `print` is bound."""

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
        "_iter_unpack_sequence_": guarded_iter_unpack_sequence,
        "_print": LogPrint(guarded_getattr),  # type: ignore[no-untyped-call]
        "_unpack_sequence_": guarded_unpack_sequence,
        "_write_": guarded_write,
    }


def _restricted_builtins() -> dict[str, object]:
    # safe_builtins come last for `range`: the limited one stops at 1000, and time is bounded by cpu_s already.
    return {
        **{name: getattr(builtins, name) for name in _PLAIN_BUILTINS},
        **utility_builtins,
        **limited_builtins,
        **safe_builtins,
        "getattr": guarded_getattr,
        "hasattr": _guarded_hasattr,
        "setattr": lambda target, name, value: setattr(guarded_write(target), _public(name), value),
        "delattr": lambda target, name: delattr(guarded_write(target), _public(name)),
        "__import__": guarded_import,
    }


def guarded_getattr(target: object, name: str, *default: object) -> Any:
    """Look an attribute up as RestrictedPython does, and of modules see only the exported names."""
    if isinstance(target, ModuleType) and not _is_exported(target, name):
        if default:
            return default[0]
        raise AttributeError(f"{target.__name__}.{name} may not be used in a restricted script")
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
    if level or name not in MODULES:
        raise ImportError(f"import of {name!r} is blocked in a restricted script: use call_tool() instead")
    module = importlib.import_module(name)
    for wanted in fromlist or ():
        if not _is_exported(module, wanted):
            raise ImportError(f"cannot import {wanted!r} from {name!r} in a restricted script")
    found = module if fromlist else sys.modules[name.partition(".")[0]]
    # RestrictedPython's stand-in hides string.Formatter, which reads attributes unguarded (CVE-2024-47532).
    return utility_builtins["string"] if found is string else found


def _is_exported(module: ModuleType, name: str) -> bool:
    """Tell whether `module` offers `name` itself: `json.codecs` is there, but it is no part of json."""
    return name in _exports(module) or f"{module.__name__}.{name}" in MODULES


@functools.cache
def _exports(module: ModuleType) -> frozenset[str]:
    if wanted := MODULES.get(module.__name__):
        return wanted
    offered = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return frozenset(name for name in offered if not isinstance(getattr(module, name, None), ModuleType))
