"""Wheels whose modules have names that a zygote imports: none of their code runs outside a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolcell import Limits, Policy, SyncRuntime
from wheels import make_wheel

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


@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
@pytest.mark.parametrize("lint", ["off", "strict"])
def test_no_module_of_a_package_runs_in_a_zygote(profile: str, lint: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    spies = dict.fromkeys(NAMES, SPY % str(trace))
    wheel = make_wheel(tmp_path, "evil", "1.0", spies | {"evil.py": "x = 42\n"})
    policy = Policy(profile=profile, lint=lint)  # type: ignore[arg-type]

    with SyncRuntime(packages=[str(wheel)], policy=policy, limits=Limits(wall_s=20)) as runtime:
        results = [runtime.execute_code("set_result(6 * 7)") for _ in range(3)]
        found = runtime.execute_code(
            "import evil, sys\nset_result([evil.x, sys.modules['msgpack'].__file__])", lint="off"
        )

    assert [each.value for each in results] == [42] * 3
    assert found.value is not None and found.value[0] == 42 and "packages" not in found.value[1]
    assert not trace.exists()
