"""Capabilities on a real kernel: they are gone and cannot be regained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.quick, pytest.mark.isolation]
Child = Callable[..., Any]

# An ordinary user has capabilities to lose only inside a user namespace of its own.
ENTER = """
import pathlib
from toolcell_bridge.isolation import capabilities
from toolcell_bridge.isolation.syscalls import *

def status(field):
    return next(line.split()[1] for line in open("/proc/thread-self/status") if line.startswith(field + ":"))

def enter():
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        pathlib.Path("/proc/self", file).write_text(text)

enter()
"""
FIELDS = "('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs')"


def test_dropping_everything_empties_all_five_sets(child: Child) -> None:
    script = (
        ENTER + f"print(capabilities.held_capabilities() != 0)\ncapabilities.drop_all()\nprint(*map(status, {FIELDS}))"
    )
    none = "0" * 16
    assert child(script).lines == ["True", f"{none} {none} {none} {none} {none} 1"]


@pytest.mark.conforms("Q-b1")
def test_what_needed_a_capability_fails_afterwards(child: Child) -> None:
    action = "print(outcome(unshare, CLONE_NEWUTS))\n"
    assert child(ENTER + action).lines == ["ok"]
    assert child(ENTER + "capabilities.drop_all()\n" + action).lines == ["EPERM"]


def test_securebits_are_locked_so_uid_0_means_nothing(child: Child) -> None:
    script = ENTER + "capabilities.drop_all()\nprint(prctl(PR_GET_SECUREBITS), outcome(prctl, PR_SET_SECUREBITS, 0))"
    assert child(script).lines == [f"{0xEF} EPERM"]


def test_an_undumpable_process_cannot_be_read_by_its_equal(child: Child) -> None:
    script = (
        ENTER
        + """
reader, writer = os.pipe()
ready, told = os.pipe()
capabilities.drop_capabilities()
pid = os.fork()
if pid == 0:
    if sys.argv[1] == "drop":
        capabilities.set_undumpable()
    os.write(told, b"x")
    os.read(reader, 1)
    os._exit(0)
os.read(ready, 1)
print(outcome(os.open, f"/proc/{pid}/mem", os.O_RDONLY))
os.write(writer, b"x")
"""
    )
    assert child(script, "keep").lines == ["ok"]
    assert child(script, "drop").lines[0] in ("EACCES", "EPERM")


def test_a_new_user_namespace_fills_the_bounding_set_again(child: Child) -> None:
    """Why a sandbox with a user namespace of its own drops the set itself, though its parent has."""
    script = f"""{ENTER}
capabilities.drop_bounding()
pid = os.fork()
if pid == 0:
    inherited = status("CapBnd")
    enter()
    print(int(inherited, 16), int(status("CapBnd"), 16) != 0, flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    assert child(script).lines == ["0 True"]


def test_the_highest_capability_is_the_one_the_kernel_names(child: Child) -> None:
    script = ENTER + "print(capabilities.last_capability() == int(open('/proc/sys/kernel/cap_last_cap').read()))"
    assert child(script).lines == ["True"]


def test_a_drop_without_the_right_to_drop_is_an_error(child: Child) -> None:
    script = ENTER + "capabilities.drop_capabilities()\nprint(outcome(capabilities.drop_all))"
    assert child(script).lines == ["EPERM"]
