"""Cgroups of version 2 in units of systemd: what bounds a unit bounds its sandboxes, and nothing of theirs is beside it.

Needs systemd as init, as in the virtual machines of `.ci/machines`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

TREE = Path("/sys/fs/cgroup")

pytestmark = [
    pytest.mark.skipif(
        not (Path("/run/systemd/system").exists() and (TREE / "cgroup.controllers").exists()),
        reason="needs systemd as init and cgroup v2; `.ci/machines` has both",
    ),
    pytest.mark.timeout(1800),  # an emulated machine needs minutes for each program
]

HOST = """
import json, sys
from pathlib import Path
from toolcell import Limits, Policy, PoolConfig, SyncRuntime
from toolcell.sandbox.process import zygote

zygote.ANSWER_S = 600  # at its limit of memory, an emulated machine answers nothing for longer than ten seconds
source = sys.argv[1]
held = bytearray(int(sys.argv[2]) << 20)  # the host is larger than its sandboxes, and must outlive them
unit = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().split("::")[1].strip())
limits = Limits(wall_s=600, memory_bytes=1 << 30, processes=64)
with SyncRuntime(policy=Policy(profile="auto"), limits=limits, pool=PoolConfig(warm=1, start_s=600)) as runtime:
    result = runtime.execute_code(source)
    inside = sorted(path.name for path in unit.iterdir() if path.is_dir())
    beside = sorted(path.name for path in unit.parent.iterdir() if path.name.startswith("toolcell-") and path.suffix != ".service")
    if source == "pass":
        print(unit, flush=True)
        sys.stdin.read()
print(json.dumps({"outcome": str(result.outcome), "cgroup": result.isolation.layers.get("cgroup"), "inside": inside,
                  "beside": beside, "error": str(result.error), "value": result.value,
                  "peak": result.usage.peak_memory_bytes}))
"""

ALLOCATE = "data = bytearray(400 << 20)\nset_result(len(data))"

THREADS = """
import threading
held, stop = [], threading.Event()
try:
    for _ in range(60):
        held.append(threading.Thread(target=stop.wait))
        held[-1].start()
except RuntimeError:
    pass
stop.set()
set_result(len(held))
"""


def in_unit(name: str, *properties: str) -> list[str]:
    """Return the start of a command that runs in a service with these properties."""
    manager = [] if os.geteuid() == 0 else ["--user"]
    given = [each for value in properties for each in ("-p", value)]
    return [
        "systemd-run",
        *manager,
        "--quiet",
        "--wait",
        "--collect",
        "--pipe",
        f"--unit={name}",
        *given,
        sys.executable,
        "-c",
        HOST,
    ]


def run(source: str, *properties: str, held_mib: int = 0) -> dict[str, Any]:
    name = f"toolcell-test-{uuid.uuid4().hex[:8]}"
    done = subprocess.run(
        [*in_unit(name, *properties), source, str(held_mib)], capture_output=True, text=True, timeout=900
    )
    assert done.stdout, (done.returncode, done.stderr, journal())
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def journal() -> str:
    """Return the end of what systemd and the kernel said, such as whom it killed when memory was short."""
    said = subprocess.run(["journalctl", "--no-pager", "--lines=60"], capture_output=True, text=True, timeout=900)
    return said.stdout + said.stderr


def test_the_sandboxes_of_a_delegated_unit_are_inside_it_and_bounded_by_its_limits() -> None:
    delegated = run(ALLOCATE, "Delegate=yes", "MemoryMax=250M", "CPUQuota=90%")
    assert delegated["outcome"] == "memory_limit", delegated
    assert delegated["peak"] < 250 << 20
    assert delegated["cgroup"].startswith("v2 memory+pids")
    assert "toolcell-hosts" in delegated["inside"]
    assert any(name.startswith("toolcell-") and name != "toolcell-hosts" for name in delegated["inside"])
    assert delegated["beside"] == []
    if "cpu" in delegated["cgroup"]:
        assert float(delegated["cgroup"].split(", ")[1].split()[0]) <= 0.9
    assert run(THREADS, "Delegate=yes", "TasksMax=40")["value"] in (None, *range(40))


def test_the_sandboxes_of_a_unit_that_is_not_delegated_are_bounded_by_it_and_have_no_cgroup() -> None:
    plain = run(ALLOCATE, "Delegate=no", "MemoryMax=250M", "OOMPolicy=continue", held_mib=150)
    assert plain["outcome"] != "ok", plain
    assert plain["cgroup"] is None
    assert (plain["inside"], plain["beside"]) == ([], [])


def test_nothing_is_left_of_a_unit_whose_host_was_killed() -> None:
    name = f"toolcell-test-{uuid.uuid4().hex[:8]}"
    command = [*in_unit(name, "Delegate=yes"), "pass", "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        unit = Path(host.stdout.readline().strip())  # a search of all groups would meet some that end meanwhile
        assert unit.name == f"{name}.service"
        subprocess.run(
            [*("systemctl", *([] if os.geteuid() == 0 else ["--user"])), "kill", "--signal=KILL", f"{name}.service"],
            check=True,
        )
        host.wait(600)
    assert not unit.exists()
    assert not [
        path
        for path in unit.parent.iterdir()
        if path.name.startswith("toolcell-") and not path.name.endswith(".service")
    ]
