"""The product's files as a graph: which file imports which, and where each class is defined.

Every import statement counts, inside functions and under `TYPE_CHECKING` too. A name imported from a package whose
`__init__` only hands names on counts as an import from the file that defines it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = {"toolcell": ROOT / "runtime" / "toolcell", "toolcell_bridge": ROOT / "bridge" / "toolcell_bridge"}


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def only_hands_names_on(self) -> bool:
        """True of an `__init__` that defines nothing but the two hooks of a lazy module."""
        defined = {
            node.name
            for node in self.tree.body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        }
        return self.is_package and defined <= {"__getattr__", "__dir__"}

    @cached_property
    def imported_names(self) -> frozenset[tuple[str, str]]:
        """Each import as a module and a name in it; the name of a plain `import` is empty."""
        found: set[tuple[str, str]] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {(self._absolute(node), alias.name) for alias in node.names}
        return frozenset(found)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.name.split(".")
        kept = parents[: len(parents) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


class House:
    """All files of a set of packages. `sources` maps a package's name to its folder."""

    def __init__(self, sources: dict[str, Path]) -> None:
        self.modules = {module.name: module for package, folder in sources.items() for module in _walk(package, folder)}

    def imports(self, name: str) -> set[str]:
        """Return the files that the file `name` imports from."""
        found = {self._home(base, each) for base, each in self.modules[name].imported_names}
        return {home for home in found if home is not None and home != name}

    def _home(self, base: str, name: str) -> str | None:
        if f"{base}.{name}" in self.modules:
            base, name = f"{base}.{name}", ""
        while base and base not in self.modules:
            base = base.rpartition(".")[0]
        if base and name and self.modules[base].only_hands_names_on:
            handed_on = next((b for b, n in self.modules[base].imported_names if n == name), base)
            return base if handed_on == base else self._home(handed_on, name)
        return base or None

    def cycles(self) -> list[list[str]]:
        """Return each largest set of files that all reach one another. A package that hands names on is not a file."""
        files = {name for name, module in self.modules.items() if not module.only_hands_names_on}
        edges = {name: self.imports(name) & files for name in files}
        reach = {name: _reachable(name, edges) for name in files}
        found = {frozenset(other for other in reach[name] if name in reach[other]) for name in files}
        return sorted(sorted(cycle) for cycle in found if cycle)

    def public_classes(self) -> dict[str, set[str]]:
        """Return the files that define a class of each name."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, module in self.modules.items():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].add(name)
        return found


def _walk(package: str, folder: Path) -> Iterator[Module]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield Module(".".join([package, *(part for part in parts if part != "__init__")]), path)


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for name in edges[left.pop()] - seen:
            seen.add(name)
            left.append(name)
    return seen
