"""Probes: every layer is tried, and each missing one is reported with a remedy."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell.sandbox.process import probes
from toolcell.sandbox.process.child_probe import ChildProbe, Probe
from toolcell_bridge.isolation import landlock

pytestmark = pytest.mark.quick

OPEN = probes.MachineFacts(
    unprivileged_clone=1, apparmor_restricts=0, max_user_namespaces=1000, filtered=False, root=False
)


def privileges() -> tuple[str, dict[str, str]]:
    """Capabilities, no_new_privs and seccomp as /proc states them, and every namespace."""
    status = Path("/proc/self/status").read_text().partition("CapInh")[2].partition("Cpus")[0]
    return status, {each.name: os.readlink(each) for each in Path("/proc/self/ns").iterdir()}


@pytest.mark.isolation
def test_every_layer_is_probed_once_in_the_agreed_order() -> None:
    found = probes.probe_all()
    assert tuple(probe.name for probe in found) == probes.NAMES
    assert all(probe.detail for probe in found)
    assert all(probe.live is not None and bool(probe.fix) != probe.live for probe in found), found


@pytest.mark.isolation
def test_probing_leaves_a_threaded_process_as_it_was() -> None:
    before = privileges()
    found: list[tuple[Probe, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(probes.probe_all())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.live for p in found[0]] == [p.live for p in found[1]]
    assert privileges() == before


@pytest.mark.isolation
def test_behind_a_filter_like_a_containers_the_namespaces_are_missing_and_the_filter_named(
    child: Callable[..., Any],
) -> None:
    script = """
        from toolcell_bridge.isolation import capabilities, seccomp
        from toolcell_bridge.isolation.seccomp_policy import *
        from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS
        every = frozenset().union(*SYSCALL_NUMBERS.values())
        container = SeccompPolicy((Group("all", tuple(every - {"unshare", "landlock_create_ruleset"})),), (),
                           (Group("namespaces", ("unshare", "landlock_create_ruleset")),), ())
        capabilities.set_no_new_privileges()
        seccomp.install(seccomp.prepare(seccomp.compile_filter(container, os.uname().machine)))
        from toolcell.sandbox.process.probes import probe_all
        for probe in probe_all():
            print(probe.name, probe.live, "seccomp" in probe.fix)
    """
    lines = dict(line.split(" ", 1) for line in child(script).lines)
    for name in ("user", "pid", "mount", "net", "ipc", "uts", "cgroup_ns", "landlock"):
        assert lines[name] == "False True"
    for name in ("seccomp", "no_new_privs", "rlimits"):
        assert lines[name] == "True False"


@each_row(
    ("code", "change", "remedy"),
    [
        (errno.EPERM, {"unprivileged_clone": 0}, "kernel.unprivileged_userns_clone=1"),
        (errno.EPERM, {"apparmor_restricts": 1}, "doctor --fix"),
        (errno.EPERM, {"filtered": True}, 'profile="container"'),
        (errno.ENOSPC, {}, "user.max_user_namespaces"),
        (errno.EPERM, {"max_user_namespaces": 0}, "user.max_user_namespaces"),
        (errno.EINVAL, {}, "CONFIG_USER_NS"),
        (errno.EPERM, {}, "chroot"),
        (errno.EPERM, {"unprivileged_clone": 0, "root": True}, "chroot"),
    ],
)
def test_the_remedy_fits_the_reason(code: int, change: dict[str, int], remedy: str) -> None:
    facts = dataclasses.replace(OPEN, **change)  # type: ignore[arg-type]
    assert remedy in probes.user_namespace_fix(ChildProbe(False, "", code), facts)


def test_without_user_namespaces_no_other_namespace_is_tried() -> None:
    def explode() -> str:
        raise AssertionError("tried")

    found = probes.probe_namespace("net", explode, ChildProbe(False, "denied", errno.EPERM), "the remedy")
    assert (found.live, found.fix) == (False, "the remedy")


def test_off_linux_nothing_is_live_and_docker_is_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = probes.probe_all()
    assert {(probe.live, probe.fix) for probe in found} == {(False, "use the Docker backend")}


@pytest.mark.parametrize("executable", ["/nonexistent/python", "/bin/false", "/bin/true"])
def test_of_an_interpreter_that_does_not_answer_no_layer_is_called_live_or_missing(
    monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    found = probes.probe_all()
    assert tuple(probe.name for probe in found) == probes.NAMES
    assert {probe.live for probe in found} == {None}


def test_the_package_is_imported_where_there_is_no_linux() -> None:
    """No module may touch libc, /proc or Linux-only names before it is called."""
    script = """
import sys, os, signal
sys.path[:0] = sys.argv[1:]
sys.platform = "win32"
for module in ("resource", "fcntl", "termios", "pwd", "grp"): sys.modules[module] = None
for name in ("uname", "fork", "pidfd_open", "O_PATH", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "geteuid"):
    delattr(os, name)
delattr(signal, "pidfd_send_signal")
import ctypes
ctypes.CDLL = None
from toolcell.sandbox.process import cgroup_manager, probes
from toolcell_bridge.isolation import capabilities, landlock, rlimits, seccomp, syscalls
print(probes.probe_all()[0].live)
"""
    homes = [str(Path(module.__file__ or "").parents[depth]) for module, depth in ((probes, 3), (landlock, 2))]
    done = subprocess.run([sys.executable, "-I", "-c", script, *homes], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.isolation
def test_a_probe_in_a_child_distinguishes_success_failure_death_and_no_report(child: Callable[..., Any]) -> None:
    script = """
        from toolcell.sandbox.process.child_probe import attempt
        def fail(): raise PermissionError(errno.EPERM, "no")
        def crash(): os.kill(os.getpid(), 11)
        def vanish(): os._exit(3)
        def break_(): return 1 / 0
        for action in (lambda: "fine thing", fail, crash, vanish, break_):
            tried = attempt(action)
            print(tried.ok, tried.code, tried.detail)
    """
    assert child(script).lines == [
        "True 0 fine thing",
        f"False {errno.EPERM} no",
        "False 0 killed by SIGSEGV",
        f"False {errno.EIO} ended without a word",
        f"False {errno.EIO} ZeroDivisionError: division by zero",
    ]
