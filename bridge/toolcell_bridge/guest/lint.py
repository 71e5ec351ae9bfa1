"""Parse a script and say, before it runs, what its lint profile refuses: line, column, rule, reason.

Early and readable refusals, never isolation: the kernel holds the walls, and nothing depends on this page. It refuses
to know how a script is run, and it loads RestrictedPython only when a profile wants it.

    off        parse only
    standard   the script is checked and then compiled as it is: semantics and line numbers are native
    strict     RestrictedPython's own transformation, run with the guards in `LintResult.guards`
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Literal, Protocol

Profile = Literal["off", "standard", "strict"]

PRELOAD: dict[Profile, tuple[str, ...]] = {
    "off": (),
    "standard": ("toolcell_bridge.guest.lint_standard",),
    "strict": ("toolcell_bridge.guest.lint_standard", "toolcell_bridge.guest.lint_strict"),
}
"""Modules to import while RestrictedPython can still be found: inside a sandbox it is no longer on the path."""


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

    def to_dict(self) -> dict[str, int | str]:
        """Plain data for the wire."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LintResult:
    """A parsed script and what the profile thinks of it."""

    tree: ast.Module | None
    """What to compile; None exactly when there are findings."""
    findings: tuple[LintFinding, ...] = ()
    """In the order of the source."""
    guards: dict[str, object] = field(default_factory=dict)
    """Globals that the tree needs, `__builtins__` among them. Empty unless the profile is strict."""


@dataclass(frozen=True, slots=True, order=True)
class Offence:
    """A finding whose column still counts UTF-8 bytes from 0, as `ast` does."""

    line: int
    byte_offset: int
    rule: str
    message: str


class _Standard(Protocol):
    def offences(self, tree: ast.Module) -> list[Offence]: ...


class _Strict(Protocol):
    def restrict(self, tree: ast.Module) -> tuple[ast.Module, list[Offence]]: ...

    def guards(self) -> dict[str, object]: ...


def check(source: str, profile: Profile = "off", filename: str = "<code>") -> LintResult:
    """Parse `source` and check it against `profile`.

    Raises:
        SyntaxError: the source is no Python, or too deep or too large for the interpreter to parse.
        LintUnavailable: the profile needs RestrictedPython, which cannot be imported.
    """
    with _failures_as_syntax_errors(filename):
        tree = ast.parse(source, filename)
        if profile == "off":
            return LintResult(tree)
        standard: _Standard = _load("toolcell_bridge.guest.lint_standard")
        offences = standard.offences(tree)
        if profile == "standard":
            return _checked(source, tree, offences, {})
        strict: _Strict = _load("toolcell_bridge.guest.lint_strict")
        restricted, more = strict.restrict(tree)
        return _checked(source, restricted, offences + more, strict.guards())


def compile_tree(
    tree: ast.Module | ast.Expression | ast.Interactive, mode: str, filename: str = "<code>", flags: int = 0
) -> CodeType:
    """Compile a tree of `check`, or a part of one, without inheriting anything from this module.

    Raises:
        SyntaxError: the compiler refuses it; too deep a tree included.
    """
    with _failures_as_syntax_errors(filename):
        code: CodeType = compile(tree, filename, mode, flags=flags, dont_inherit=True)
        return code


def preload(profile: Profile) -> None:
    """Import now what `check` would import later.

    Raises:
        LintUnavailable: RestrictedPython is not installed here.
    """
    for name in PRELOAD[profile]:
        _load(name)


def _load(name: str):  # type: ignore[no-untyped-def]  # callers bind it to the Protocol they need
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise LintUnavailable(f"a lint profile other than 'off' needs RestrictedPython in the guest: {exc}") from exc


def _checked(source: str, tree: ast.Module, offences: list[Offence], guards: dict[str, object]) -> LintResult:
    if not offences:
        return LintResult(tree, (), guards)
    lines = re.split("\r\n|\r|\n", source)  # str.splitlines also cuts at form feeds, where Python does not
    return LintResult(None, tuple(_finding(lines, offence) for offence in _one_per_place(offences)))


def _one_per_place(offences: list[Offence]) -> list[Offence]:
    """Keep the first word on each place: standard's reasons read better than the stock ones that strict adds."""
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
    """Whatever odd way the parser has of giving up, the model reads one kind of error."""
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
