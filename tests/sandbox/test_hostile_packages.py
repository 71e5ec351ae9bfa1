"""Wheels whose modules have names that a zygote imports: none of their code runs outside a sandbox."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from toolcell import Limits, Policy, SyncRuntime

SPY = """
import os
text = f"{os.getpid()} {os.getuid()}"
try:
    with open(%r, "w") as file:
        file.write(text)
except OSError:
    pass
"""
NAMES = (
    "msgpack/__init__.py",
    "toolcell_bridge/__init__.py",
    "RestrictedPython/__init__.py",
    "msvcrt.py",
    "org/__init__.py",
)


def hostile_wheel(folder: Path, trace: Path) -> Path:
    path = folder / "evil-1.0-py3-none-any.whl"
    files = dict.fromkeys(NAMES, SPY % str(trace)) | {
        "evil.py": "x = 42\n",
        "evil-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
        "evil-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, "evil-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in (files | {"evil-1.0.dist-info/RECORD": record}).items():
            wheel.writestr(name, text)
    return path


@pytest.mark.parametrize("profile", ["full", "container"])
@pytest.mark.parametrize("lint", ["off", "strict"])
def test_no_module_of_a_package_runs_in_a_zygote(profile: str, lint: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    wheel = hostile_wheel(tmp_path, trace)
    policy = Policy(profile=profile, lint=lint)  # type: ignore[arg-type]

    with SyncRuntime(packages=[str(wheel)], policy=policy, limits=Limits(wall_s=20)) as runtime:
        results = [runtime.execute_code("set_result(6 * 7)") for _ in range(3)]
        found = runtime.execute_code(
            "import evil, sys\nset_result([evil.x, sys.modules['msgpack'].__file__])", lint="off"
        )

    assert [each.value for each in results] == [42] * 3
    assert found.value is not None and found.value[0] == 42 and "packages" not in found.value[1]
    assert not trace.exists()
