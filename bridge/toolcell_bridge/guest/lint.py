"""Lint: parse a script and report, before it runs, what its profile refuses: line, column, rule, reason.

Lint gives early and readable refusals. It is not isolation: the kernel isolates, and nothing depends on lint.
RestrictedPython is loaded only for a profile that needs it.

    off        parse only
    standard   the script is checked and then compiled unchanged: semantics and line numbers are native
    strict     RestrictedPython transforms the script, which then runs with the guards in `LintResult.guards`

The tables at the end say what the profiles refuse or allow.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

from toolcell_bridge.guest.lint_profiles import POLICIES, Profile


class LintUnavailable(RuntimeError):
    """A profile was asked for, and this interpreter cannot import what the profile needs."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing the profile refuses."""

    line: int
    """1-based, the script's own numbering."""
    column: int
    """1-based, in characters."""
    rule: str
    """Stable name of the reason: process, network, native, introspection, dynamic-code, restricted."""
    message: str


@dataclass(frozen=True, slots=True)
class LintResult:
    """A parsed script and what the profile refuses in it."""

    tree: ast.Module | None
    """What to compile; None exactly when there are findings."""
    findings: tuple[LintFinding, ...] = ()
    """What was found, in the order of the source."""
    guards: dict[str, object] = field(default_factory=dict)
    """Globals that the tree needs, `__builtins__` among them. Empty unless the profile is strict."""


@dataclass(frozen=True, slots=True, order=True)
class Offence:
    """A finding whose column still counts UTF-8 bytes from 0, as `ast` does."""

    line: int
    byte_offset: int
    rule: str
    message: str


class _Policies(Protocol):
    def find_offences(self, tree: ast.Module) -> list[Offence]: ...

    def find_unavailable(self, tree: ast.Module, defined: Collection[str]) -> list[Offence]: ...

    def restrict(self, tree: ast.Module) -> tuple[ast.Module, list[Offence]]: ...

    def guards(self) -> dict[str, object]: ...


def check(source: str, profile: Profile = "off", filename: str = "<code>", defined: Collection[str] = ()) -> LintResult:
    """Parse `source` and check it against `profile`. `defined`: names that the script finds in its namespace.

    Raises:
        SyntaxError: the source is not Python, or too deep or too large for the interpreter to parse.
        LintUnavailable: the profile needs RestrictedPython, which cannot be imported.
    """
    with _failures_as_syntax_errors(filename):
        tree = ast.parse(source, filename)
        if profile == "off":
            return LintResult(tree)
        policies = _load_policies()
        offences = policies.find_offences(tree)
        if profile == "standard":
            return _checked(source, tree, offences, {})
        unavailable = policies.find_unavailable(tree, defined)  # before the tree is transformed
        restricted, more = policies.restrict(tree)
        return _checked(source, restricted, offences + unavailable + more, policies.guards())


def compile_tree(
    tree: ast.Module | ast.Expression | ast.Interactive, mode: str, filename: str = "<code>", flags: int = 0
) -> CodeType:
    """Compile a tree of `check`, or a part of one. It inherits no compiler flags from this module.

    Raises:
        SyntaxError: the compiler refuses it; too deep a tree included.
    """
    with _failures_as_syntax_errors(filename):
        code: CodeType = compile(tree, filename, mode, flags=flags, dont_inherit=True)
        return code


def _load_policies() -> _Policies:
    try:
        policies: Any = importlib.import_module(POLICIES)
    except ModuleNotFoundError as exc:
        raise LintUnavailable(f"a lint profile other than 'off' needs RestrictedPython in the guest: {exc}") from exc
    loaded: _Policies = policies
    return loaded


def _checked(source: str, tree: ast.Module, offences: list[Offence], guards: dict[str, object]) -> LintResult:
    if not offences:
        return LintResult(tree, (), guards)
    lines = re.split("\r\n|\r|\n", source)  # str.splitlines also cuts at form feeds, where Python does not
    return LintResult(None, tuple(_finding(lines, offence) for offence in _one_per_place(offences)))


def _one_per_place(offences: list[Offence]) -> list[Offence]:
    """Keep the first offence at each place: the standard profile's messages are clearer than RestrictedPython's."""
    first: dict[tuple[int, int], Offence] = {}
    for offence in offences:
        first.setdefault((offence.line, offence.byte_offset), offence)
    return sorted(first.values())


def _finding(lines: list[str], offence: Offence) -> LintFinding:
    text = lines[offence.line - 1] if 0 < offence.line <= len(lines) else ""
    before = text.encode("utf-8", "surrogatepass")[: offence.byte_offset].decode("utf-8", "replace")
    return LintFinding(offence.line, len(before) + 1, offence.rule, offence.message)


@contextmanager
def _failures_as_syntax_errors(filename: str) -> Iterator[None]:
    """Turn every error with which the parser can fail into a SyntaxError."""
    try:
        yield
    except SyntaxError as exc:
        exc.filename = exc.filename or filename  # "null bytes" comes without a place
        raise
    except UnicodeEncodeError as exc:
        place = str(exc.object).count("\n", 0, exc.start) + 1
        code_point = ord(str(exc.object)[exc.start])
        raise SyntaxError(f"lone surrogate U+{code_point:04X} in the source", (filename, place, None, None)) from None
    except (RecursionError, MemoryError):
        raise SyntaxError("the source is nested too deeply to compile", (filename, None, None, None)) from None
    except (ValueError, OverflowError, SystemError) as exc:  # null bytes; sizes past the compiler's integers
        raise SyntaxError(str(exc), (filename, None, None, None)) from None


MESSAGES: dict[str, str] = {
    "process": "{what} is blocked: use call_tool() instead of starting processes",
    "network": "{what} is blocked: use call_tool() instead, the sandbox has no network",
    "native": "{what} is blocked: use call_tool() instead of native libraries",
    "introspection": "{what} is blocked: it reaches the interpreter's own objects, which no script needs",
    "dynamic-code": "{what} is blocked: write the code itself instead of building it as text",
}
"""Rule to reason. Every message says that it is blocked and, where there is one, the way to go instead."""

MODULES: dict[str, str] = {
    "subprocess": "process",
    "_posixsubprocess": "process",
    "posix": "process",
    "nt": "process",
    "pty": "process",
    "asyncio.subprocess": "process",
    "ctypes": "native",
    "_ctypes": "native",
    "cffi": "native",
    "_cffi_backend": "native",
    "socket": "network",
    "_socket": "network",
    "socketserver": "network",
}
"""Module to rule; a submodule goes with its parent."""

_STARTS_PROCESS = re.compile(r"system|popen|fork|forkpty|posix_spawnp?|startfile|exec[lv]p?e?|spawn[lv]p?e?")

MEMBERS: dict[str, tuple[re.Pattern[str], str]] = {
    "os": (_STARTS_PROCESS, "process"),
    "asyncio": (re.compile(r"create_subprocess_(exec|shell)"), "process"),
    "gc": (re.compile(r"get_(objects|referrers|referents)"), "introspection"),
    "sys": (re.compile(r"_getframe|_current_frames|_current_exceptions|settrace|setprofile"), "introspection"),
    "inspect": (re.compile(r"currentframe|stack|trace|get(inner|outer)frames"), "introspection"),
    "builtins": (re.compile(r"exec|eval|compile|__import__"), "dynamic-code"),
    "importlib": (re.compile(r"__import__"), "dynamic-code"),
}
"""Module to the members nobody may touch, and the rule; the rest of the module is free."""

ATTRIBUTES: frozenset[str] = frozenset([
    "__subclasses__", "__bases__", "__base__", "__mro__", "mro", "__globals__", "__builtins__", "__code__",
    "__closure__", "__func__", "__self__", "__import__", "__loader__", "__spec__", "__reduce__",
    "__reduce_ex__", "__subclasshook__", "__objclass__", "__defaults__", "__kwdefaults__",
])  # fmt: skip
"""Attributes that lead from any value to the interpreter's whole object graph. Frame, code and generator attributes
come from RestrictedPython's own table. `__class__`, `__dict__`, `__name__` and the like are everyday Python."""

NAMES: dict[str, str] = {
    "__builtins__": "introspection",
    "__loader__": "introspection",
    "__spec__": "introspection",
    "__import__": "dynamic-code",
}
"""Names nobody may read or bind."""

CODE_BUILTINS: frozenset[str] = frozenset({"exec", "eval", "compile"})
"""Refused as builtins; a script that binds such a name itself means its own."""

BY_NAME_LOOKUPS: frozenset[str] = frozenset(
    {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "getattr_static", "__getattribute__"}
)
"""Calls whose constant text arguments are attribute names."""


_ANY_EXPORT: frozenset[str] = frozenset()

_WHOLE_MODULES = [
    "__future__", "base64", "bisect", "calendar", "collections", "collections.abc", "copy", "datetime",
    "decimal", "fractions", "hashlib", "heapq", "html", "itertools", "json", "math", "random", "re",
    "statistics", "string", "textwrap", "time", "unicodedata", "urllib", "urllib.parse", "uuid", "zoneinfo",
]  # fmt: skip

IMPORTABLE: dict[str, frozenset[str]] = {
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
"""What a script may import in the strict profile, and which names of it; the empty set stands for all it exports."""


def refused_module(name: str) -> str | None:
    """Return the rule that refuses importing `name`, None when it may be imported."""
    parts = name.split(".")
    return next((rule for end in range(1, len(parts) + 1) if (rule := MODULES.get(".".join(parts[:end])))), None)


def refused_member(module: str, name: str) -> str | None:
    """Return the rule that refuses `module.name`, None when it may be used."""
    if rule := refused_module(f"{module}.{name}"):
        return rule
    pattern, rule = MEMBERS.get(module, (None, ""))
    return rule if pattern and pattern.fullmatch(name) else None
