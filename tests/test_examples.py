"""Every example runs. One of them is run by `make test`, the others by `.ci/run`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from house import ROOT

ARGUMENTS = {"own_backend.py": [] if os.environ.get("CI") == "true" else ["values", "output", "isolation", "usage"]}
"""The whole contract takes half a minute; CI checks all of it."""

QUICK = "first_script.py"
"""The one that `make test` runs."""


def each_example() -> list[object]:
    found = sorted((ROOT / "examples").glob("*.py"))
    marks = {path: () if path.name == QUICK else (pytest.mark.thorough,) for path in found}
    return [pytest.param(path, id=path.name, marks=marks[path]) for path in found]


@pytest.mark.parametrize("path", each_example())
@pytest.mark.isolation
def test_every_example_runs(path: Path) -> None:
    if "bwrap" in path.read_text() and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap, which this example wraps, is not installed: apt-get install bubblewrap")
    command = [sys.executable, str(path), *ARGUMENTS.get(path.name, [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
