"""A missing layer means that nothing runs: PROMISES.md, "layers"."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import anyio
import pytest

from escape.attack import BACKEND, IS_PROCESS, OWN_LAYERS, PATIENCE_S, HostHung, Victim, outside, process_only
from escape.prologues import RAW
from rows import each_row
from toolcell import Policy, Runtime, ToolRegistry, UsageError
from toolcell.config import DEFAULT_LAYERS

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

WITHOUT = """
import ctypes, struct
def without(number, argument=None, bits=0, value=0):
    '''From now on, here and in all children, this system call fails with EPERM (for one value of an argument).'''
    libc = ctypes.CDLL(None, use_errno=True)
    load, jump, masked, end = 0x20, 0x15, 0x54, 0x06
    rules = [(load, 0, 0, 0)]
    if argument is None:
        rules += [(jump, 0, 1, number)]
    else:
        rules += [(jump, 0, 4, number), (load, 0, 0, 16 + 8 * argument), (masked, 0, 0, bits), (jump, 0, 1, value)]
    rules += [(end, 0, 0, 0x00050000 | 1), (end, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    header = ctypes.create_string_buffer(struct.pack("=H6xQ", len(rules), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0) == 0, ctypes.get_errno()
"""

ALL = 0xFFFFFFFF
BROKEN = {
    "landlock_create_ruleset": "444",
    "landlock_add_rule": "445",
    "landlock_restrict_self": "446",
    "seccomp": "317",
    "unshare": "272",
    "a new user namespace": "56, 0, 0x10000000, 0x10000000",
    "pivot_root": "155",
    "mount": "165",
    "capset": "126",
    "prlimit64": "302",
    "close_range": "436",
    "no_new_privs": f"157, 0, {ALL}, 38",
    "dropping the bounding set": f"157, 0, {ALL}, 24",
    "locking securebits": f"157, 0, {ALL}, 28",
    "being undumpable": f"157, 0, {ALL}, 4",
    "setresuid": "117",
}


ON_THIS_SIDE = "a container's isolation does not depend on the host's system calls: tests/docker has it refuse"


HOSTS = f"""{WITHOUT}
import json, os, sys
import anyio
from toolcell import Runtime

async def start():
    async with Runtime() as runtime:
        return f"it started: {{await runtime.execute_code('1')}}"

for layer, refused in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        try:
            exec(f"without({{refused}})")
            said = anyio.run(start)
        except BaseException as exc:
            said = f"{{type(exc).__name__}}: {{exc}}"
        print(json.dumps([layer, said]), flush=True)
        os._exit(0)
    os.wait()
"""
"""A host for each broken machine, one after the other. To import toolcell takes longer than to fail."""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """How a host ended on each broken machine."""
    command = [sys.executable, "-c", HOSTS, json.dumps(BROKEN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.slow
@process_only(ON_THIS_SIDE)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's")
@each_row("layer", BROKEN)
def test_a_wall_that_will_not_go_up_means_no_sandbox(layer: str, said: dict[str, str]) -> None:
    """The machine refuses one call. The result is SandboxUnavailable, not a sandbox without that layer."""
    number, *rest = (int(each, 0) for each in BROKEN[layer].split(","))
    argument = rest[2] if rest else 0
    source = f"{RAW}{WITHOUT}\nwithout({BROKEN[layer]})\nset_result(call({number}, {argument}, 1, 0, 0, 0))"
    assert outside(source).value == "EPERM"
    assert said[layer].startswith("SandboxUnavailable")


@process_only("a container's cgroup is the daemon's; a layer that it does not give is required below", on_nodes=False)
def test_a_required_layer_that_cannot_be_had_means_no_sandbox() -> None:
    """A machine without a place for cgroups. For root, a mount namespace hides the tree."""
    covered = """
import ctypes, os
if os.geteuid() == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0
    assert libc.mount(None, b"/", None, 0x44000, None) == 0
    assert libc.mount(b"tmpfs", b"/sys/fs/cgroup", b"tmpfs", 0, None) == 0
"""
    if os.geteuid() == 0:
        assert outside(covered + "set_result(os.listdir('/sys/fs/cgroup'))").value == []
    host = Victim(before=covered, policy={"require": [*DEFAULT_LAYERS, "cgroup"]})
    try:
        with pytest.raises(HostHung, match=r"SandboxUnavailable.*cgroup"):
            host.start()
    finally:
        host.kill()


@pytest.mark.slow
def test_a_layer_that_this_backend_has_not_is_never_taken_as_given() -> None:
    """A daemon gives containers user namespaces only if it was set up for that. The process backend makes its own."""
    host = Victim(policy={"require": [*OWN_LAYERS, "user"]})
    try:
        if IS_PROCESS:
            assert "user" in host.run("set_result(1)").result.isolation.layers
        else:
            with pytest.raises(HostHung, match=r"SandboxUnavailable.*user"):
                host.start()
    finally:
        host.kill()


@process_only("a container's cgroup is the daemon's, whatever the host's process sees", on_nodes=False)
def test_without_a_cgroup_the_result_says_so() -> None:
    uncovered = Victim(
        before=(
            "import ctypes, os\n"
            "if os.geteuid() == 0:\n"
            "    libc = ctypes.CDLL(None, use_errno=True)\n"
            "    assert libc.unshare(0x00020000) == 0 and libc.mount(None, b'/', None, 0x44000, None) == 0\n"
            "    assert libc.mount(b'tmpfs', b'/sys/fs/cgroup', b'tmpfs', 0, None) == 0\n"
        )
    )
    try:
        layers = uncovered.run("set_result(1)").result.isolation.layers
        assert "cgroup" not in layers
        assert layers.keys() >= DEFAULT_LAYERS
    finally:
        uncovered.close()


def test_a_layer_nobody_knows_is_refused_before_anything_starts() -> None:
    async def attempt() -> None:
        async with Runtime(ToolRegistry(), policy=Policy(require=frozenset({"moat"}))):  # type: ignore[arg-type]
            pass

    with pytest.raises(UsageError, match="moat"):
        anyio.run(attempt)


def test_every_result_carries_the_layers_that_were_up(victim: Victim) -> None:
    """The same holds for a run that sent false data, died or was killed."""
    sources = [
        "set_result(1)",
        "1 / 0",
        "import os\nos._exit(1)",
        "import time\ntime.sleep(60)",
        "import os\nfor number in (3, 4):\n    try:\n        os.write(number, b'x' * 99)\n    except OSError:\n        pass",
    ]
    for source in sources:
        result = victim.run(source, limits={"wall_s": 0.3}).result
        assert result.isolation.backend == (BACKEND if IS_PROCESS else "docker")
        assert result.isolation.layers.keys() >= OWN_LAYERS
