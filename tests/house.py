"""The product's files as a graph: which file imports which.

Every import statement counts, inside functions and under `TYPE_CHECKING` too. A name imported from a package whose
`__init__` only hands names on counts as an import from the file that defines it; what such an `__init__` imports for its
own use counts as any import.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
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
        return self._names_in(ast.walk(self.tree))

    @cached_property
    def own_imports(self) -> frozenset[tuple[str, str]]:
        """The same without what a face hands on, which it imports under `TYPE_CHECKING`: that is for those who ask."""
        if not self.only_hands_names_on:
            return self.imported_names
        typed = [node for node in self.tree.body if isinstance(node, ast.If)]
        handed_on = {id(each) for node in typed for part in node.body for each in ast.walk(part)}
        return self._names_in(each for each in ast.walk(self.tree) if id(each) not in handed_on)

    def _names_in(self, nodes: Iterable[ast.AST]) -> frozenset[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for node in nodes:
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
        """Return each largest set of files that all reach one another."""
        return _cycles(self._edges())

    def room_cycles(self) -> list[list[str]]:
        """Return the same of rooms: folders and files directly below a package."""
        edges: dict[str, set[str]] = defaultdict(set)
        for name, homes in self._edges().items():
            edges[_room(name)] |= {_room(home) for home in homes if "." in home} - {_room(name)}
        return _cycles(edges)

    def _edges(self) -> dict[str, set[str]]:
        return {
            name: {home for base, each in module.own_imports if (home := self._home(base, each)) not in (None, name)}
            for name, module in self.modules.items()
        }  # type: ignore[misc]


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    reach = {name: _reachable(name, edges) for name in edges}
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in edges}
    return sorted(sorted(cycle) for cycle in found if cycle)


def _walk(package: str, folder: Path) -> Iterator[Module]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield Module(".".join([package, *(part for part in parts if part != "__init__")]), path)


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for name in edges.get(left.pop(), set()) - seen:
            seen.add(name)
            left.append(name)
    return seen
