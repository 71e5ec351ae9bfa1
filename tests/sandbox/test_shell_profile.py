"""`Policy(shell=True)`: where it works, what it changes, and that nothing else may execute programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolcell import Policy, Runtime
from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.docker.backend import DockerBackend
from toolcell.sandbox.docker.hardening import Blueprint, ulimits
from toolcell.sandbox.interpreter import plan_rlimits
from toolcell.sandbox.process import programs

pytestmark = pytest.mark.anyio

EXECUTE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    libc.execv(b"/bin/sh", (ctypes.c_char_p * 4)(b"sh", b"-c", b"exit 7", None))
    os._exit(ctypes.get_errno())
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.mark.isolation
@pytest.mark.parametrize(("shell", "code"), [(False, 1), (True, 7)], ids=["plain", "shell"])
async def test_a_script_executes_a_program_only_where_the_policy_says_so(shell: bool, code: int) -> None:
    async with Runtime(policy=Policy(shell=shell)) as runtime:
        result = await runtime.execute_code(EXECUTE)
    assert result.value == code
    assert ("programs of a shell may be executed" in result.isolation.layers["seccomp"]) is shell


async def test_a_profile_or_backend_that_cannot_confine_programs_refuses() -> None:
    with pytest.raises(UsageError, match='shell=True needs profile="full" or Docker'):
        await Runtime(policy=Policy(shell=True, profile="container")).open()
    with pytest.raises(UsageError, match="packages= does not go with shell=True"):
        DockerBackend(packages=["numpy"], policy=Policy(shell=True))


def test_a_program_that_crashes_writes_no_core_file_and_tells_no_program() -> None:
    # 1 stops a dump to a program too, which 0 does not; a program is dumpable again when it starts.
    assert dict(plan_rlimits(Limits(), 1, is_counted=True, executes=True).rows())["RLIMIT_CORE"] == 1
    assert dict(plan_rlimits(Limits(), 1, is_counted=True).rows())["RLIMIT_CORE"] == 0
    for executes, core in ((True, 1), (False, 0)):
        row = next(
            each for each in ulimits(Limits(), Blueprint("x", executes=executes).executes) if each["Name"] == "core"
        )
        assert row == {"Name": "core", "Soft": core, "Hard": core}


def test_the_copy_of_the_programs_has_no_rights_and_is_made_once(tmp_path: Path) -> None:
    made = programs.build(tmp_path, "/usr/bin/python3.x")
    assert {"sh", "cat", "grep"} <= set(os.listdir(made / "bin")) <= {*programs.NAMES, "python3"}
    assert os.readlink(made / "bin" / "python3") == "/usr/bin/python3.x"
    for path in made.rglob("*"):
        mode = path.lstat().st_mode & 0o7777
        assert path.is_symlink() or mode == (0o755 if path.is_dir() else 0o555), path
    before = made.stat().st_ino
    assert programs.build(tmp_path, "/usr/bin/python3.x").stat().st_ino == before
    of_another = programs.build(tmp_path, "/usr/bin/python3.y")
    assert os.readlink(of_another / "bin" / "python3") == "/usr/bin/python3.y"


def test_a_machine_without_a_shell_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PLACES", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"Policy\(shell=True\) needs the program sh"):
        programs.build(tmp_path, "/usr/bin/python3.x")
