"""Every example runs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from house import ROOT

pytestmark = pytest.mark.quick

ARGUMENTS = {
    "agent_loop.py": ["--stream"],
    # What such a backend does itself; the example runs the whole contract.
    "own_backend.py": ["isolation", "life", "output", "usage"],
}


QUICK = {
    "files_and_limits",
    "first_script",
    "hooks_and_approval",
    "read_audit_log",
    "session",
    "weather_tool",
}
"""What a newcomer opens first. Each example starts a Python and a sandbox of its own, so `make test` runs these."""


def each_example() -> list[object]:
    found = sorted((ROOT / "examples").glob("*.py"))
    return [pytest.param(path, id=path.name, marks=[pytest.mark.slow] * (path.stem not in QUICK)) for path in found]


def modules_of(path: Path) -> set[str]:
    """Return the modules that an example imports: those of the standard library and of a plain install are left out."""
    named = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Import | ast.ImportFrom)]
    found = {
        name.partition(".")[0]
        for each in named
        for name in ([each.module or ""] if isinstance(each, ast.ImportFrom) else [alias.name for alias in each.names])
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in project["dependencies"]}
    return found - sys.stdlib_module_names - plain - {"toolcell", "toolcell_bridge"}


def test_an_example_that_needs_more_than_a_plain_install_says_what_to_install() -> None:
    needy = {
        path: ast.get_docstring(ast.parse(path.read_text()))
        for path in (ROOT / "examples").glob("*.py")
        if modules_of(path)
    }
    assert len(needy) > 3
    assert [path.name for path, about in needy.items() if "pip install" not in (about or "")] == []


@pytest.mark.quick(every_row=True)
@pytest.mark.parametrize("path", each_example())
@pytest.mark.isolation
def test_every_example_runs(path: Path) -> None:
    if "bwrap" in path.read_text() and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap, which this example wraps, is not installed: apt-get install bubblewrap")
    for name in modules_of(path):
        pytest.importorskip(name)
    command = [sys.executable, str(path), *ARGUMENTS.get(path.name, [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
