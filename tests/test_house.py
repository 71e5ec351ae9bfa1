"""The shape of the house: imports go one way, names are light, what is written down is true."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import toolcell

ROOT = Path(__file__).parent.parent
SOURCES = {"toolcell": ROOT / "runtime" / "toolcell", "toolcell_bridge": ROOT / "bridge" / "toolcell_bridge"}

LAYERS = (
    ("toolcell_bridge.wire",),
    ("toolcell_bridge.guest", "toolcell_bridge.isolation"),
    ("toolcell_bridge.entry",),
    ("toolcell.errors", "toolcell.config", "toolcell.results", "toolcell.text"),
    ("toolcell.audit", "toolcell.sandbox", "toolcell.tools"),
    ("toolcell.run",),
    ("toolcell.runtime", "toolcell.sync"),
    ("toolcell.agents",),
    ("toolcell.cli", "toolcell.testing"),
)
"""Lowest first; a module may import its own row and those above it in this table."""

INDEPENDENT = ("calls", "connection", "ending", "outcome", "output", "run", "session")
"""Modules of `toolcell.run` that a run goes through, whatever its tools, its log and its backend are."""


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join([package, *(part for part in parts if part != "__init__")]), path))
    return found


def level(module: str) -> int | None:
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return index
    return None


def imported(path: Path, module: str) -> set[str]:
    names: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}".rstrip(".")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    own = level(module)
    if own is None:
        assert module in SOURCES, f"{module} has no place in LAYERS"
        return
    wrong = sorted(name for name in imported(path, module) if (other := level(name)) is not None and other > own)
    assert not wrong, f"{module} imports {', '.join(wrong)}"


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_run_knows_neither_registry_nor_audit_nor_any_one_backend(name: str) -> None:
    module, path = f"toolcell.run.{name}", SOURCES["toolcell"] / "run" / f"{name}.py"
    strange = ("toolcell.tools", "toolcell.audit", "toolcell.sandbox.process", "toolcell.sandbox.docker")

    assert not [each for each in imported(path, module) if each.startswith(strange)]


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_every_module_says_what_it_is_for(module: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)) or text.count("\n") < 5


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_toolcell_loads_next_to_nothing() -> None:
    loaded = fresh("import sys; before = set(sys.modules); import toolcell; print(*sorted(set(sys.modules) - before))")

    heavy = {"pydantic", "anyio", "docker", "typer", "rich", "msgpack", "jsonschema_rs", "RestrictedPython", "asyncio"}
    assert heavy.isdisjoint(loaded.split())


def test_every_public_name_can_be_had() -> None:
    for name in toolcell.__all__:
        assert getattr(toolcell, name) is not None
    assert set(toolcell.__all__) <= set(dir(toolcell))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = toolcell.nothing_like_it


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_package_imports_elsewhere_and_says_what_to_use_there(platform: str) -> None:
    code = f"""
import sys
import anyio, asyncio, anyio._backends._asyncio, psutil, sysconfig
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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
@pytest.mark.isolation
def test_every_example_runs(path: Path) -> None:
    if "bwrap" in path.read_text() and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap, which this example wraps, is not installed: apt-get install bubblewrap")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
