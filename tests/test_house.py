"""The shape of the house: imports go one way, names are light, what is written down is true."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import toolcell
from house import ROOT, SOURCES, House, Module
from private_names import PRIVATE_NAMES, missing_private_names
from rows import each_row

pytestmark = pytest.mark.quick

HOUSE = House(SOURCES)

LAYERS = (
    ("toolcell_bridge.wire",),
    ("toolcell_bridge.guest", "toolcell_bridge.isolation"),
    ("toolcell_bridge.entry",),
    ("toolcell._version",),
    (
        "toolcell.support",
        "toolcell.errors",
        "toolcell.config",
        "toolcell.settings",
        "toolcell.results",
        "toolcell.result_html",
        "toolcell.flows",
    ),
    ("toolcell.calls",),
    ("toolcell.sandbox", "toolcell.tools", "toolcell.quotas"),
    ("toolcell.run",),
    ("toolcell.audit",),
    ("toolcell.journal",),
    ("toolcell.control",),
    ("toolcell.sessions",),
    ("toolcell.runtime", "toolcell.sync"),
    ("toolcell.egress",),
    ("toolcell.builtin",),
    ("toolcell.agents",),
    ("toolcell.mcp",),
    ("toolcell.integrations",),
    ("toolcell.service",),
    ("toolcell.kernel",),
    ("toolcell.cli", "toolcell.compat", "toolcell.testing"),
    ("toolcell.__main__",),
)
"""Lowest first; a module may import its own row and those above it in this table."""

INDEPENDENT = ("calls", "connection", "conversation", "outcome", "output", "run")
"""Modules of `toolcell.run` that a run goes through, whatever its tools, its log and its backend are."""


CORE = ("sandbox", "tools", "journal", "run", "audit", "control", "sessions")
"""Folders with a face: the names in the `__all__` of its `__init__`, and in those of the folders in it.

`calls`, `support` and `toolcell_bridge` have none, and `results`, `errors` and `config` are modules. Everybody shares
their words, and imports them from the modules.
"""

OUTER_ROOMS = ("egress", "builtin", "agents", "mcp", "integrations", "service", "kernel", "cli", "testing", "compat")
"""They use the core as any program would: by its faces."""


def level(module: str) -> int | None:
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return index
    return None


def wrong_imports(module: Module) -> list[str]:
    """Return what is wrong with the imports of a module."""
    own = level(module.name)
    if own is None:
        return [] if module.name in SOURCES else [f"{module.name} has no place in LAYERS"]
    levels = {name: level(name) for name in HOUSE.imports(module.name)}
    return [f"{module.name} imports {name}" for name, other in levels.items() if other is not None and other > own]


@pytest.mark.slow
def test_imports_go_one_way() -> None:
    assert not [problem for module in HOUSE.modules.values() for problem in wrong_imports(module)]


@pytest.mark.slow
def test_neither_files_nor_rooms_import_one_another() -> None:
    assert not HOUSE.cycles()
    assert not HOUSE.room_cycles()


@pytest.mark.slow
def test_no_module_imports_the_package_that_it_is_part_of() -> None:
    assert not [name for name in HOUSE.modules if "toolcell" in HOUSE.imports(name)]


def is_core(module: str) -> bool:
    return module.startswith(tuple(f"toolcell.{folder}." for folder in CORE)) or module in FACES


def names_behind_faces(module: Module) -> list[str]:
    """Return what a module imports of the core that no face offers."""
    imported = sorted(each for each in module.imported_names if is_core(each[0]))
    return [
        f"{module.path.name}: {name} of {base}"
        for base, name in imported
        if base not in FACES or name not in {"", *importlib.import_module(base).__all__}
    ]


FACES = {
    name: module
    for name, module in HOUSE.modules.items()
    if module.is_package and name.startswith("toolcell.") and name.split(".")[1] in CORE
}


def outer_modules() -> list[Module]:
    rooms = tuple(f"toolcell.{room}." for room in OUTER_ROOMS)
    examples = [Module(path.stem, path) for path in (ROOT / "examples").rglob("*.py")]
    return [*(each for each in HOUSE.modules.values() if f"{each.name}.".startswith(rooms)), *examples]


@pytest.mark.slow
def test_outer_rooms_and_examples_import_faces_of_the_core_only() -> None:
    outer = outer_modules()
    assert len({each.name.split(".")[1] for each in outer if "." in each.name}) == len(OUTER_ROOMS)

    assert not [name for module in outer for name in names_behind_faces(module)]


@pytest.mark.slow
def test_each_name_of_a_face_is_used_by_an_outer_room_or_explained_in_a_page() -> None:
    used = {imported for module in outer_modules() for imported in module.imported_names}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    explained = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in pages)))
    offered = [(face, name) for face in FACES for name in getattr(importlib.import_module(face), "__all__", [])]

    assert not [each for each in offered if each not in used and each[1] not in explained]


def test_a_name_behind_a_face_is_found_wherever_the_import_stands(tmp_path: Path) -> None:
    path = tmp_path / "room.py"
    path.write_text(
        "import toolcell.run.conversation\nfrom toolcell.tools import ToolRegistry, registry\n"
        "def late():\n    from toolcell.tools.registry import ToolRegistry\n"
    )

    assert names_behind_faces(Module("room", path)) == [
        "room.py:  of toolcell.run.conversation",
        "room.py: registry of toolcell.tools",
        "room.py: ToolRegistry of toolcell.tools.registry",
    ]


@each_row("name", FACES)
def test_a_face_offers_what_its_module_defines(name: str) -> None:
    face = importlib.import_module(name)
    offered = getattr(face, "__all__", [])
    homes = {name: base for base, name in FACES[name].imported_names if name in offered}
    print(f"{name}: {len(offered)} names")

    assert sorted(homes) == sorted({*offered} - {"__version__"}), (
        "__all__ and the imports under TYPE_CHECKING are the same names"
    )
    for each, home in homes.items():
        if home == name:
            assert getattr(face, each) is importlib.import_module(f"{name}.{each}")
        else:
            assert f"{name}.{each}" not in HOUSE.modules, "a module of this name would hide it"
            assert getattr(face, each) is getattr(importlib.import_module(home), each)


def test_a_cycle_is_found_wherever_the_import_stands(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part" / "__init__.py").write_text("from pkg.part.inner import Inner\n")
    (package / "part" / "inner.py").write_text("def late():\n    from ..outer import Outer\nclass Inner: ...\n")
    (package / "outer.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.part import Inner\nclass Outer: ...\n"
    )
    (package / "other.py").write_text("from . import outer\nimport pkg.part.inner\nclass Inner: ...\n")
    house = House({"pkg": package})

    assert house.cycles() == [["pkg.outer", "pkg.part.inner"]]
    assert house.room_cycles() == [["pkg.outer", "pkg.part"]]
    assert house.imports("pkg.other") == {"pkg.outer", "pkg.part.inner"}


def test_what_a_face_imports_itself_is_part_of_a_cycle(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 1\n")
    (package / "part" / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nfrom pkg.lazy import lazy_names\n"
        "if TYPE_CHECKING:\n    from pkg.part.inner import Inner\n"
    )
    (package / "part" / "inner.py").write_text("from pkg import VERSION\nclass Inner: ...\n")
    (package / "lazy.py").write_text("def lazy_names():\n    from pkg.part import Inner\n    import pkg.part\n")
    house = House({"pkg": package})

    assert house.cycles() == [["pkg.lazy", "pkg.part"]], "not its handing on of Inner"
    assert house.imports("pkg.part.inner") == {"pkg"}


@each_row("name", INDEPENDENT)
def test_a_run_knows_neither_registry_nor_audit_nor_any_one_backend(name: str) -> None:
    strange = ("toolcell.tools", "toolcell.audit", "toolcell.sandbox.process", "toolcell.sandbox.docker")

    imported = HOUSE.imports(f"toolcell.run.{name}") - {"toolcell.tools.stubs", "toolcell.tools.search"}  # list_tools

    assert not [each for each in imported if each.startswith(strange)]


DOCUMENTED = {"_asdict", "_exit", "_getframe", "_replace", "_repr_html_"}
"""Private in their form alone."""


def defined_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def private_names(module: Module, here: set[str], own: set[str]) -> set[str]:
    """Return what a module reads of others by a name that its owner may change at any time.

    `here`: names that the module defines. `own`: all of ours, some of which it inherits; on another object, a name like
    one of them may be somebody else's.
    """
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            names |= {node.attr} - (own if is_own(node.value) else here)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names |= {str(getattr(node.args[1], "value", ""))} - (own if is_own(node.args[0]) else here)
    modules = {base for base, _ in module.imported_names if re.search(r"\._[a-z]", base)}
    return {name for name in names if re.match("_[a-z]", name)} | {base for base in modules if "toolcell" not in base}


@pytest.mark.slow
def test_private_names_of_others_are_those_of_a_short_list() -> None:
    host = [module for name, module in HOUSE.modules.items() if name.startswith("toolcell.")]
    defined = {module.name: defined_names(module.tree) for module in HOUSE.modules.values()}
    own = set().union(*defined.values())
    found = {module.name: private_names(module, defined[module.name], own) - DOCUMENTED for module in host}
    assert {name: names for name, names in found.items() if names} == {
        name: {*names} for name, names in PRIVATE_NAMES.items()
    }


@pytest.mark.slow
def test_the_installed_releases_have_the_private_names_that_are_used() -> None:
    assert missing_private_names() == []


@pytest.mark.slow
def test_every_module_says_what_it_is_for() -> None:
    modules = HOUSE.modules.values()
    silent = [each for each in modules if ast.get_docstring(each.tree) is None]
    assert not [each.name for each in silent if each.path.read_text(encoding="utf-8").count("\n") >= 5]


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_toolcell_loads_next_to_nothing() -> None:
    loaded = fresh("import sys; before = set(sys.modules); import toolcell; print(*sorted(set(sys.modules) - before))")

    heavy = {"pydantic", "anyio", "docker", "typer", "rich", "msgpack", "jsonschema_rs", "RestrictedPython", "asyncio"}
    assert heavy.isdisjoint(loaded.split())


def test_a_runtime_loads_sessions_commits_and_quotas_when_they_are_used_first() -> None:
    later = ["session", "settings", "state", "meter", "journal"]
    names = [f"toolcell.sessions.{name}" for name in later]
    names += ["toolcell.control.commit", "toolcell.control.preflight", "toolcell.control.repair", "toolcell.quotas"]
    assert all(name in HOUSE.modules for name in names)
    code = (
        f"import sys; from toolcell.runtime import Runtime; Runtime(); print([n for n in {names} if n in sys.modules])"
    )
    assert fresh(code) == "[]"


@pytest.mark.slow
def test_a_runtime_with_plain_tools_loads_few_packages_of_others() -> None:
    code = """
import sys
from toolcell import Limits, Runtime
def look(query: str, limit: int = 10, tags: list[str] | None = None) -> dict[str, float]:
    "Look for something and return how often it was found where."
    return {}
Runtime([look], limits=Limits(wall_s=5))
print(*sys.modules)
"""
    loaded = fresh(code).split()
    before = fresh("import sys; print(*sys.modules)").split()
    of_others = set(packages_distributions()) & {name.partition(".")[0] for name in set(loaded) - set(before)}

    few = {"anyio", "sniffio", "msgpack", "typing_extensions", "jsonschema_rs"}
    assert of_others - {"toolcell", "toolcell_bridge"} <= few
    assert "anyio" in of_others


def test_every_public_name_can_be_had() -> None:
    for name in toolcell.__all__:
        assert getattr(toolcell, name) is not None
    assert set(toolcell.__all__) <= set(dir(toolcell))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = toolcell.nothing_like_it


@pytest.mark.slow
@each_row("platform", ["darwin", "win32"])
def test_the_package_imports_elsewhere_and_says_what_to_use_there(platform: str) -> None:
    code = f"""
import sys
import anyio, asyncio, anyio._backends._asyncio, psutil, shutil, sysconfig
sysconfig.get_config_vars()
sys.platform = {platform!r}
for name in ("resource", "fcntl", "pwd", "grp", "termios"): sys.modules[name] = None
import toolcell
from toolcell import Runtime, ToolRegistry, SandboxUnavailable
async def main():
    try:
        async with Runtime(): pass
    except SandboxUnavailable as error: print(error)
try: anyio.run(main)
except ImportError as error: print("import failed:", error)
"""
    assert 'use backend="docker"' in fresh(code)


@pytest.mark.conforms("T1")
def test_the_project_is_laid_out_as_documented() -> None:
    for name in (
        "pyproject.toml",
        "runtime",
        "bridge",
        "sandbox_images",
        "tests",
        "examples",
        "SECURITY.md",
        "README.md",
    ):
        assert (ROOT / name).exists(), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.partition(">")[0].lower() for name in project["dependencies"]}
    assert {"restrictedpython", "msgpack", "psutil", "pydantic", "anyio", "docker"} <= declared


def test_both_packages_carry_one_version() -> None:
    import toolcell_bridge

    guest = tomllib.loads((ROOT / "bridge" / "pyproject.toml").read_text())["project"]["version"]
    host = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {toolcell.__version__, toolcell_bridge.__version__, guest, host} == {host}
