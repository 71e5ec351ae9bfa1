"""Guests of another Python than the host's: every CPython from 3.11 on that this machine has."""

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell import PoolConfig, SandboxUnavailable, SyncRuntime

VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def interpreter(version: str) -> str | None:
    """Find a Python of this version: pyenv's, or one on the path."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    versions = os.path.join(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"), "versions")
    found = [*glob.glob(f"{versions}/{version}.*/bin/python3"), shutil.which(f"python{version}")]
    return next(
        (each for each in found if each and not subprocess.run([each, "-c", ""], capture_output=True).returncode), None
    )


def each_version() -> Iterator[Any]:
    for version in VERSIONS:
        if python := interpreter(version):
            yield pytest.param(version, python, id=version, marks=pytest.mark.isolation)
        else:
            missing = pytest.mark.skip(reason=f"there is no Python {version} on this machine")
            yield pytest.param(version, "", id=version, marks=missing)


@pytest.mark.parametrize(("version", "python"), list(each_version()))
def test_a_guest_may_be_another_python_than_the_host(version: str, python: str) -> None:
    with SyncRuntime([double], python=python, pool=PoolConfig(warm=1)) as runtime:
        result = runtime.execute_code(
            "import sys, sqlite3, ssl, json, asyncio, decimal\n"
            "async def both(): return [await call_tool_async('double', number=n) for n in (1, 2)]\n"
            "set_result({'version': '%d.%d' % sys.version_info[:2], 'doubled': await both(), 'bytes': b'x', 'big': 2**60})"
        )
        assert result.ok, result.error
        assert result.value == {"version": version, "doubled": [2, 4], "bytes": b"x", "big": 2**60}

        failed = runtime.execute_code("def f(x):\n    return 1 / x\n\nf(0)")
        assert (failed.error and failed.error.type, failed.error and failed.error.line) == ("ZeroDivisionError", 2)
        failed = runtime.execute_code("exec('1 / 0')")  # its code is named as that of `python -c`
        assert failed.error is not None
        assert "toolcell" not in failed.error.traceback
        blocked = runtime.execute_code("import os\nset_result(os.listdir('/root'))")
        assert (blocked.outcome, blocked.error and blocked.error.type) in (
            ("error", "PermissionError"),
            ("error", "FileNotFoundError"),
        )


def double(number: int) -> int:
    """Return twice the number that was given."""
    return 2 * number


@pytest.mark.isolation
def test_an_interpreter_without_a_folder_is_looked_up_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "python-of-mine").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")
    with SyncRuntime(python="python-of-mine", pool=PoolConfig(warm=0)) as runtime:
        assert runtime.execute_code("6 * 7").value == 42


@each_row("wrong", ["/nonexistent/python", "/bin/true", "no-such-python"])
def test_what_is_no_python_is_named(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=wrong), SyncRuntime(python=wrong):
        pass
