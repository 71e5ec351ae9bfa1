"""`Policy(profile="auto")`, and what the other profiles say, on machines that give less isolation.

The machine is made lesser by a seccomp filter around a whole program: see lesser_machine.py.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from toolcell import Policy, SyncRuntime
from toolcell.config import AUTO_FLOOR, DEFAULT_LAYERS, PROFILES
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process.probes import GVISOR_HAS_NOT

from .lesser_machine import answers, on

PRELUDE = """
import json, logging
from toolcell import Policy, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.config import DEFAULT_LAYERS
from toolcell.errors import SandboxUnavailable
logging.disable()
def attempt(policy, source="set_result(1)"):
    try:
        with SyncRuntime(policy=policy, pool=PoolConfig(warm=0)) as runtime:
            result = runtime.execute_code(source)
    except SandboxUnavailable as exc:
        return {"refused": str(exc)}
    told = result.to_dict()["isolation"]
    return {"value": result.value, "error": result.error and result.error.message, **told, "layers": sorted(told["layers"])}
"""

EVERY_PROFILE = (
    PRELUDE
    + """
print(json.dumps({name: attempt(Policy(profile=name)) for name in ("full", "container", "auto")}))
"""
)

NAMESPACES = ["cgroup_ns", "ipc", "mount", "net", "pid", "user", "uts"]


def test_the_floor_of_auto_is_written_down() -> None:
    assert AUTO_FLOOR["full"] == DEFAULT_LAYERS - {"landlock"}
    assert AUTO_FLOOR["container"] == PROFILES["container"]
    assert Policy(profile="auto").require == {"seccomp", "capabilities", "no_new_privs", "rlimits"}
    assert Policy().profile == "full"


@pytest.mark.isolation
def test_auto_is_full_where_full_runs_and_the_result_and_the_log_say_so(tmp_path: Path) -> None:
    from toolcell.audit import Index

    with SyncRuntime(policy=Policy(profile="auto"), record=tmp_path / "runs.db") as runtime:
        result = runtime.execute_code("set_result(1)")

    assert (result.isolation.profile, result.isolation.missing) == ("full", ())
    with Index(tmp_path / "runs.db") as index:
        recorded = index.load(index.find(result.run_id)).isolation
    assert (recorded["profile"], tuple(recorded["missing"])) == ("full", ())


@pytest.mark.contained
def test_without_namespaces_auto_is_container_and_full_names_the_line_that_runs() -> None:
    found = answers(EVERY_PROFILE, without=["namespaces"])

    assert (found["auto"]["value"], found["auto"]["profile"], found["auto"]["missing"]) == (1, "container", NAMESPACES)
    assert found["container"]["layers"] == found["auto"]["layers"]
    assert "unshare: Operation not permitted" in found["full"]["refused"]
    assert 'Policy(profile="container") runs here' in found["full"]["refused"]


@pytest.mark.isolation
def test_without_landlock_auto_is_full_without_it_and_full_names_the_line_that_runs() -> None:
    found = answers(EVERY_PROFILE, without=["landlock"])

    assert (found["auto"]["value"], found["auto"]["profile"]) == (1, "full")
    assert found["auto"]["missing"] == ["landlock"]
    assert "not live: landlock (" in found["full"]["refused"]
    assert 'Policy(require=DEFAULT_LAYERS - {"landlock"}) runs here' in found["full"]["refused"]
    assert "Landlock" in found["container"]["refused"]


def test_below_its_floor_auto_refuses_and_says_why_for_each_profile() -> None:
    found = answers(EVERY_PROFILE, without=["namespaces", "landlock"])

    refused = found["auto"]["refused"]
    assert "full: " in refused
    assert "container: " in refused
    assert "unshare: Operation not permitted" in refused
    assert "neither runs" in found["full"]["refused"]


def test_where_gvisor_is_the_kernel_every_profile_is_refused_with_one_sentence() -> None:
    kernel = ("Linux", "here", "4.4.0", "#1 SMP Sun Jan 10 15:06:54 PST 2016", "x86_64")
    found = answers(f"import os\nos.uname = lambda: {kernel}\n" + EVERY_PROFILE, without=["namespaces", "landlock"])

    assert {each["refused"] for each in found.values()} == {GVISOR_HAS_NOT}


@pytest.mark.isolation
def test_a_layer_that_is_required_beside_the_floor_is_required_of_auto_too() -> None:
    script = PRELUDE + "print(json.dumps(attempt(Policy(profile='auto', require=['landlock']))))"

    assert "landlock" in answers(script, without=["landlock"])["refused"]


@pytest.mark.isolation
def test_a_shortage_is_no_reason_for_a_weaker_profile() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    runtime = SyncRuntime(policy=Policy(profile="auto"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, before[1]))
        with pytest.raises(SandboxUnavailable, match=r"open.*files|EMFILE|descriptors") as caught, runtime:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "container" not in str(caught.value)


ROUTES = (
    PRELUDE
    + """
def double(number: int) -> int:
    "Return twice the number."
    return 2 * number

registry = ToolRegistry([double])
with SyncRuntime(registry, policy=Policy(profile="auto")) as runtime:
    profiles = [runtime.execute_code("set_result(call_tool('double', number=2))").isolation.profile]
    profiles += [each.result.isolation.profile for each in runtime.map("set_result(n)", [{"n": 1}, {"n": 2}])]
    with runtime.session() as session:
        session.execute_code("x = 40")
        profiles.append(session.execute_code("x + 2").isolation.profile)
    rows = runtime.execute_plan([{"tool": "double", "args": {"number": 5}}])
print(json.dumps([profiles, [row["status"] for row in rows]]))
"""
)


@pytest.mark.contained
def test_code_maps_sessions_and_plans_run_in_the_profile_that_auto_chose() -> None:
    profiles, rows = answers(ROUTES, without=["namespaces"])

    assert set(profiles) == {"container"}
    assert rows == ["ok"]


COMMANDS = """
import subprocess, sys, json
def ran(*words):
    done = subprocess.run([sys.executable, "-m", "toolcell", *words], capture_output=True, text=True)
    return [done.returncode, done.stdout, done.stderr]
print(json.dumps({" ".join(words): ran(*words) for words in (
    ("run", "-c", "1 + 1"), ("run", "--profile", "full", "-c", "1 + 1"), ("run", "--profile", "container", "-c", "1 + 1"),
    ("demo",), ("demo", "--json"), ("doctor", "--profile", "auto"))}))
"""


@pytest.mark.contained
def test_commands_use_auto_and_print_one_line_when_it_is_not_full() -> None:
    found: dict[str, Any] = answers(COMMANDS, without=["namespaces"])

    assert found["run -c 1 + 1"][:2] == [0, "2\n"]
    assert found["run -c 1 + 1"][2].count("\n") == 1
    assert "profile container, not full" in found["run -c 1 + 1"][2]
    assert found["run --profile container -c 1 + 1"] == [0, "2\n", ""]
    status, _, said = found["run --profile full -c 1 + 1"]
    assert status != 0
    assert 'Policy(profile="container") runs here' in said
    assert found["demo"][0] == 0
    assert "held by landlock" in found["demo"][1]
    assert "held by seccomp" in found["demo"][1]
    assert "the profile container" in found["demo"][1]
    assert "profile container, not full" in found["demo"][2]
    assert found["demo --json"][0] == 0
    assert found["doctor --profile auto"][0] == 0


ESCAPES = {
    "a file of the host": "open('/etc/shadow')",
    "the host's home": "__import__('os').listdir('/root')",
    "the root": "open('/new', 'w')",
    "the interpreter": "open(__import__('os').__file__, 'a')",
    "its own root, moved": "__import__('os').rename('/usr', '/work/usr')",
    "every process": "[__import__('os').kill(pid, 0) for pid in range(2, 400)]",
    "a socket": "__import__('socket').socket()",
    "an abstract socket": "__import__('socket').socket(1).connect(chr(0) + 'x')",
    "a program": "__import__('os').execv('/usr/bin/env', ['env'])",
    "a program of its own": "open('x', 'w').write('#!/bin/sh'); __import__('os').chmod('x', 0o755); __import__('os').execv('x', ['x'])",
    "a device": "__import__('os').mknod('device', 0o020666, 261)",
    "a mount": "__import__('os').unshare(0x20000) if hasattr(__import__('os'), 'unshare') else open('/proc/self/ns/mnt')",
}

ATTACKS = f"""{PRELUDE}
policy = Policy(require=DEFAULT_LAYERS - {{"landlock"}})
escapes = {ESCAPES!r}
with SyncRuntime(policy=policy, pool=PoolConfig(warm=1)) as runtime:
    results = {{name: runtime.execute_code(source) for name, source in escapes.items()}}
print(json.dumps([[name for name, each in results.items() if each.error is None],
                  sorted({{layer for each in results.values() for layer in each.isolation.layers}}),
                  sorted({{each.error.type for each in results.values() if each.error}})]))
"""


@pytest.mark.isolation
def test_the_other_layers_of_full_hold_without_landlock() -> None:
    escaped, layers, errors = answers(ATTACKS, without=["landlock"])

    assert escaped == []
    assert "landlock" not in layers
    assert set(errors) <= {"FileNotFoundError", "PermissionError", "ProcessLookupError", "OSError"}


def test_the_machine_is_really_lesser() -> None:
    script = """
        import os
        from toolcell_bridge.isolation.syscalls import CLONE_NEWUSER, unshare
        from toolcell_bridge.isolation import landlock
        for attempt in (lambda: unshare(CLONE_NEWUSER), landlock.abi_version):
            try:
                attempt()
            except OSError as error:
                print(error.errno)
    """
    assert on(script, without=["namespaces", "landlock"]).stdout.split() == ["1", "38"]
