"""Whatever the machine is short of fails one start, says what is short and what raises it, and the next start works.

Each host is a process of its own, tests/hostile/short_host.py. A run beside the shortage must not notice it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from toolcell.config import PoolConfig

pytestmark = [pytest.mark.isolation]

HOST = Path(__file__).with_name("short_host.py")
MEMORY_BYTES = 256 << 20
SLACK_S = 10.0
"""For a busy machine. What is tested is that something ends at all."""


def host(shortage: str, *arguments: str, backend: str = "process", within: str = "", **environment: str) -> Any:
    """Run a host, in the cgroup directory `within` if one is given."""

    def enter() -> None:
        Path(within, "cgroup.procs").write_text("0", encoding="ascii")

    done = subprocess.run(
        [sys.executable, "-W", "error", str(HOST), shortage, backend, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
        preexec_fn=enter if within else None,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@contextmanager
def cgroup(controller: str) -> Iterator[Path]:
    """Make a cgroup for a host below our own."""
    rows = [row.split(":") for row in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()]
    own = next((path for _, names, path in rows if controller in names.split(",")), None)
    folder = Path(f"/sys/fs/cgroup/{controller}{own}", f"short-{os.getpid()}")
    if own is None or not os.access(folder.parent, os.W_OK):
        pytest.skip(f"no v1 {controller} cgroup can be made here")
    folder.mkdir()
    try:
        yield folder
    finally:
        folder.rmdir()


def assert_each_fails_alone(seen: Any, name: str, remedy: str) -> None:
    failed = [each for each in seen["during"] if each != "ok"]
    assert failed
    for each in failed:
        assert each.startswith("sandbox_unavailable: ")
        assert name in each
        assert remedy in each
    assert (seen["after"], seen["beside"]) == ("ok", "ok")


def test_a_full_table_of_open_files_fails_one_start_at_whichever_step() -> None:
    seen = host("descriptors")

    assert_each_fails_alone(seen, "EMFILE", "ulimit -n")
    assert seen["during"][0] != "ok"
    assert seen["during"][-1] == "ok"


def test_an_answer_whose_descriptor_finds_no_place_fails_one_start() -> None:
    assert_each_fails_alone(host("unreceived"), "EMFILE", "ulimit -n")


@pytest.mark.docker
@pytest.mark.usefixtures("engine")
def test_a_full_table_of_open_files_fails_one_start_of_a_container() -> None:
    assert_each_fails_alone(host("descriptors", backend="docker"), "EMFILE", "ulimit -n")


def test_a_full_table_of_open_files_in_the_zygote_fails_one_start() -> None:
    seen = host("zygote_descriptors")

    assert seen["during"][0] != "ok"
    assert seen["during"][-1] == "ok"
    assert {each for each in seen["during"] if "Too many open files" not in each} <= {"ok"}
    assert (seen["after"], seen["beside"]) == ("ok", "ok")


def test_with_few_open_files_the_cap_is_lowered_with_a_warning_and_every_run_works() -> None:
    seen = host("many")

    assert seen["during"] == ["ok"] * 100
    (warning,) = seen["warnings"]
    assert "each sandbox needs 4 open files" in warning
    assert f"PoolConfig.cap = {PoolConfig().cap}" in warning


def test_a_process_without_open_files_for_one_sandbox_is_refused_with_the_number() -> None:
    seen = host("few")

    assert seen["open"].startswith("sandbox_unavailable: each sandbox needs 4 open files")
    assert "raise it to at least" in seen["open"]


def test_a_full_table_of_watches_fails_nothing() -> None:
    """The kernel counts watches of all processes of a user, so a sandbox could fill the table for its neighbours."""
    seen = host("watches")

    assert seen == {"during": ["ok"] * 3, "after": "ok", "beside": "ok"}


def test_a_request_that_the_kernel_does_not_send_fails_one_start() -> None:
    seen = host("refused_sends")

    for each, name in zip(seen["during"], ("ETOOMANYREFS", "ENOBUFS", "ENOMEM", "ENFILE"), strict=True):
        assert each.startswith("sandbox_unavailable: ")
        assert name in each
    assert (seen["after"], seen["beside"]) == ("ok", "ok")


def test_an_answer_that_there_is_no_memory_for_is_received_later() -> None:
    seen = host("refused_receives")

    assert seen == {"during": ["ok", "ok"], "after": "ok", "beside": "ok"}


def test_a_limit_of_processes_that_is_reached_fails_one_start() -> None:
    if os.geteuid() != 0:
        assert_each_fails_alone(host("processes", ""), "EAGAIN", "ulimit -u")
        return
    with cgroup("pids") as folder:  # RLIMIT_NPROC does not bind root
        assert_each_fails_alone(host("processes", str(folder), within=str(folder)), "EAGAIN", "pids limit")


@pytest.mark.slow
def test_a_host_with_little_memory_loses_the_run_that_wants_it_and_no_other() -> None:
    with cgroup("memory") as folder:
        (folder / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES), encoding="ascii")
        seen = host("memory", within=str(folder))

    (hog,) = seen["during"]
    assert hog.startswith("memory_limit: the kernel killed it for memory at ")
    assert "container, service or machine is used up" in hog
    assert (seen["after"], seen["beside"]) == ("ok", "ok")


def test_a_host_that_may_map_no_more_memory_loses_runs_that_want_it_and_works_on() -> None:
    seen = host("address_space")

    assert seen["during"][0] != "ok"
    assert all(each == "ok" or "ENOMEM" in each for each in seen["during"])
    assert seen["beside"] == "ok" or "ENOMEM" in seen["beside"]  # it may ask for memory just then
    assert seen["after"] == "ok"


@pytest.mark.parametrize("umask", ["077", "027"])
def test_sandboxes_start_whatever_the_umask_of_the_host_and_scripts_have_one_of_their_own(
    umask: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    seen = host("mask", umask, XDG_CACHE_HOME=str(tmp_path))

    assert seen == {"during": ["ok"], "mode": "0o644"}


def test_a_stopped_zygote_fails_a_start_in_time_and_is_replaced() -> None:
    seen = host("stopped")

    (first,) = seen["during"]
    assert first.startswith("sandbox_unavailable: ")
    assert "within 1 s (PoolConfig.start_s)" in first
    assert seen["took_s"] < 1 + SLACK_S
    assert seen["after"] == "ok"
    assert not seen["same"], "the stopped one is gone"


@pytest.mark.slow
def test_a_run_ends_in_time_when_its_zygote_is_stopped() -> None:
    seen = host("stopped_during_a_run")

    assert seen["during"] == ["timeout: execution timed out after 1 s"]
    assert seen["took_s"] < 1 + SLACK_S


@pytest.mark.slow
def test_a_destroyed_sandbox_is_never_signalled_again() -> None:
    assert host("destroyed") == {"is_alive": False, "victim": "untouched"}


def test_a_killed_zygote_ends_its_runs_clearly_and_is_replaced() -> None:
    seen = host("killed")

    assert seen == {"during": ["lost: the sandbox was lost: the zygote is gone"], "after": "ok"}


def test_a_sandbox_that_is_asked_for_just_after_its_zygote_died_is_started_by_the_next() -> None:
    assert host("killed_unnoticed") == {"is_alive": True}
