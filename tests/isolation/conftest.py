"""Children in which isolation is applied: most layers cannot be removed again."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import toolcell_bridge

BRIDGE_HOME = Path(toolcell_bridge.__file__).parents[1]

PREAMBLE = f"""
import sys
sys.path.insert(0, {str(BRIDGE_HOME)!r})
sys.path += {[path for path in sys.path if "site-packages" in path]!r}
import errno, os
from toolcell_bridge.isolation.syscalls import syscall

def outcome(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, error.errno)
    return "ok"

def filter_calls():
    from toolcell_bridge.entry import preparation
    from toolcell_bridge.isolation import capabilities, seccomp
    from toolcell_bridge.isolation.seccomp_policy import GUEST_POLICY
    preparation.adapt(GUEST_POLICY)
    capabilities.set_no_new_privileges()
    seccomp.install(seccomp.guest_program(GUEST_POLICY))
"""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    status: int
    out: str
    err: str

    @property
    def killed_by(self) -> signal.Signals | None:
        return signal.Signals(-self.status) if self.status < 0 else None

    @property
    def lines(self) -> list[str]:
        """What it printed; fails when it did not end well."""
        assert self.status == 0, self.err
        return self.out.splitlines()


def child_in(folder: Path) -> Callable[..., Ended]:
    """Return what `child` gives, for this working directory."""

    def run(source: str, *arguments: str, filtered: bool = False) -> Ended:
        script = PREAMBLE + ("filter_calls()\n" if filtered else "") + textwrap.dedent(source)
        done = subprocess.run(
            [sys.executable, "-I", "-c", script, *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., Ended]:
    """Run a script in a clean interpreter, in an empty directory. `filtered` installs the guest's syscall filter."""
    return child_in(tmp_path)
