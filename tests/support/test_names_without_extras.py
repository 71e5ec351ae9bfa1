"""Without the extras, every public name is there, and one that needs a package says so when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toolcell import service

pytestmark = pytest.mark.quick

SCRIPT = """
import sys

PACKAGES = {"httpx", "starlette", "cryptography", "numpy", "polars", "openai", "anthropic", "mcp", "yaml"}

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if (package := name.partition(".")[0]) in PACKAGES:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)

sys.meta_path.insert(0, NotInstalled())
import toolcell
from toolcell import *
from toolcell import egress, service
from toolcell.errors import MissingPackage

rooms = (toolcell, egress, service)
assert all(hasattr(room, name) for room in rooms for name in room.__all__)
assert {*toolcell.__all__} <= {*dir(toolcell)} & {*globals(), "__version__"}
for use in (lambda: Egress(), lambda: Egress.of_texts([]), lambda: service.Client("http://a.test")):
    try:
        use()
    except MissingPackage as exc:
        print(exc)
"""


def test_a_missing_module_of_toolcell_itself_is_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(service), "Client", raising=False)
    monkeypatch.setitem(sys.modules, "toolcell.service.client", None)
    with pytest.raises(ModuleNotFoundError, match=r"toolcell\.service\.client"):
        _ = service.Client


@pytest.mark.slow
def test_every_public_name_is_there_without_extras_and_using_one_names_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(
        "pip install" in line and extra in line
        for line, extra in zip(lines, ["egress", "egress", "service"], strict=True)
    )
