"""Test each layer of a container twice: by the options that the daemon reports, and by an attack from inside.

The attacks run instead of a guest, so the container's own layers stop them and not the guest's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from toolcell import Limits, Policy, SandboxUnavailable
from toolcell.sandbox.docker.backend import DockerBackend
from toolcell.sandbox.docker.hardening import (
    CONTAINER_LAYERS,
    GUEST_LAYERS,
    OWN_PROCESSES,
    Blueprint,
    container_config,
    container_profile,
    daemon_layers,
    live_layers,
    required_layers,
    resources,
)
from toolcell.sandbox.docker.images.reference import ImageRef

from .docker_sandboxes import LIMITS, MIB, bare, greeted, opened

PLAIN = Blueprint("sha256:0")


@pytest.fixture
async def backend(docker_image: ImageRef) -> AsyncIterator[DockerBackend]:
    async with opened(docker_image.id) as backend:
        yield backend


CONFIGURED: list[tuple[str, Callable[[dict[str, Any]], object], object]] = [
    ("no network", lambda c: c["HostConfig"]["NetworkMode"], "none"),
    ("read-only root", lambda c: c["HostConfig"]["ReadonlyRootfs"], True),
    ("all capabilities dropped", lambda c: c["HostConfig"]["CapDrop"], ["ALL"]),
    ("none added", lambda c: c["HostConfig"]["CapAdd"] or [], []),
    ("not privileged", lambda c: c["HostConfig"]["Privileged"], False),
    ("no new privileges", lambda c: c["HostConfig"]["SecurityOpt"][0], "no-new-privileges:true"),
    (
        "our seccomp profile",
        lambda c: json.loads(c["HostConfig"]["SecurityOpt"][1].removeprefix("seccomp=")),
        container_profile(),
    ),
    ("non-root user", lambda c: c["Config"]["User"], "65534:65534"),
    ("memory", lambda c: c["HostConfig"]["Memory"], LIMITS.memory_bytes),
    ("swap counted in", lambda c: c["HostConfig"]["MemorySwap"], LIMITS.memory_bytes),
    ("processes", lambda c: c["HostConfig"]["PidsLimit"], LIMITS.processes + OWN_PROCESSES),
    ("processors", lambda c: c["HostConfig"]["NanoCpus"], 1_000_000_000),
    (
        "ulimits",
        lambda c: {row["Name"]: (row["Soft"], row["Hard"]) for row in c["HostConfig"]["Ulimits"]},
        {"core": (0, 0), "nofile": (64, 64), "memlock": (0, 0), "msgqueue": (0, 0)},
    ),
    ("private ipc", lambda c: c["HostConfig"]["IpcMode"], "private"),
    ("own pids", lambda c: c["HostConfig"]["PidMode"], ""),
    ("own host name", lambda c: c["HostConfig"]["UTSMode"], ""),
    ("own cgroup view", lambda c: c["HostConfig"]["CgroupnsMode"], "private"),
    ("no log driver", lambda c: c["HostConfig"]["LogConfig"]["Type"], "none"),
    ("nothing of the host mounted", lambda c: (c["HostConfig"]["Binds"] or [], c["Mounts"]), ([], [])),
    ("no devices", lambda c: c["HostConfig"]["Devices"] or [], []),
    ("an init", lambda c: c["HostConfig"]["Init"], True),
    ("removes itself", lambda c: c["HostConfig"]["AutoRemove"], True),
    ("never started again", lambda c: c["HostConfig"]["RestartPolicy"]["Name"], "no"),
    (
        "a sized workspace",
        lambda c: c["HostConfig"]["Tmpfs"]["/sandbox"],
        f"rw,noexec,nosuid,nodev,size={LIMITS.disk_bytes * 3 // 4},nr_inodes=64,mode=700,uid=65534,gid=65534",
    ),
    ("stdin ends with its host", lambda c: (c["Config"]["OpenStdin"], c["Config"]["StdinOnce"]), (True, True)),
]


@pytest.mark.docker
@pytest.mark.anyio
async def test_the_daemon_reports_the_options_that_a_live_sandbox_was_created_with(
    backend: DockerBackend, docker_image: ImageRef
) -> None:
    async with greeted(backend) as (_, sandbox):
        inspected = await backend.engine.client.inspect(sandbox.container_id)

    found = {what: look(inspected) for what, look, _ in CONFIGURED}
    assert found == {what: expected for what, _, expected in CONFIGURED}
    assert inspected["Image"] == docker_image.id


ATTACKS: list[tuple[str, str, object]] = [
    ("network interfaces", "[l.split(':')[0].strip() for l in open('/proc/net/dev').readlines()[2:]]", ["lo"]),
    ("a TCP socket", "refused(lambda: socket.socket())", "EPERM"),
    ("a vsock", "refused(lambda: socket.socket(40, socket.SOCK_STREAM))", "EPERM"),
    ("writing to the root", "refused(lambda: open('/usr/lib/x', 'w'))", "EROFS"),
    ("writing below /etc", "refused(lambda: open('/etc/x', 'w'))", "EROFS"),
    ("a device node", "refused(lambda: os.mknod('/sandbox/d', 0o60666, os.makedev(8, 0)))", "EPERM"),
    ("becoming root", "refused(lambda: os.setuid(0))", "EPERM"),
    ("another root", "refused(lambda: os.chroot('/sandbox'))", "EPERM"),
    ("mounting", "call(165, b'x', b'/sandbox', b'tmpfs', 0, None)", "EPERM"),
    ("a user namespace", "call(272, 0x10000000)", "EPERM"),
    ("executable memory by name", "call(319, b'x', 0)", "EPERM"),
    ("io_uring", "call(425, 1, 0)", "EPERM"),
    ("tracing", "call(101, 0, 0, 0, 0)", "EPERM"),
    ("kernel programs", "call(321, 0, None, 0)", "EPERM"),
    ("keyrings", "call(250, 0, 0)", "EPERM"),
    ("typing into a terminal", "call(16, 0, 0x5412, b'x')", "EPERM"),
    ("typing, with a bit that the kernel ignores", "call(16, 0, 1 << 32 | 0x5412, b'x')", "EPERM"),
    ("clone3, whose flags no filter sees", "call(435, None, 0)", "ENOSYS"),
    ("a call newer than our table", "call(600, 0)", "ENOSYS"),
    ("kernel settings", "refused(lambda: open('/proc/sys/kernel/hostname', 'w').write('x'))", "EROFS"),
    ("a cgroup of its own", "refused(lambda: os.mkdir('/sys/fs/cgroup/x'))", ("EROFS", "EACCES", "ENOENT")),
    ("the daemon's socket", "[p for p in ('/run/docker.sock', '/var/run/docker.sock') if os.path.exists(p)]", []),
    ("who it is", "[os.getuid(), os.geteuid(), os.getgid(), os.getgroups()]", [65534, 65534, 65534, [65534]]),
    ("capabilities", "[int(status(n), 16) for n in ('CapEff', 'CapPrm', 'CapInh', 'CapBnd', 'CapAmb')]", [0] * 5),
    ("no_new_privs and seccomp", "[status('NoNewPrivs'), status('Seccomp')]", ["1", "2"]),
    ("core dumps", "__import__('resource').getrlimit(4)", [0, 0]),
    ("the machine's name", "os.uname().nodename", "sandbox"),
    ("other processes", "sorted(int(p) for p in os.listdir('/proc') if p.isdigit())[0]", 1),
    ("a shell or a compiler", "[p for p in ('/bin/sh', '/usr/bin/gcc', '/usr/bin/cc') if os.path.exists(p)]", []),
]


@pytest.mark.docker
@pytest.mark.anyio
async def test_the_containers_own_isolation_stops_attacks_from_inside(backend: DockerBackend) -> None:
    table = ", ".join(f"{name!r}: {expression}" for name, expression, _ in ATTACKS)

    found = await bare(backend.engine, f"print(json.dumps({{{table}}}))")

    wrong = {
        name: found[name]
        for name, _, expected in ATTACKS
        if (found[name] not in expected if isinstance(expected, tuple) else found[name] != expected)
    }
    assert wrong == {}


@pytest.mark.docker
@pytest.mark.anyio
async def test_nothing_written_can_be_executed(backend: DockerBackend) -> None:
    source = """
open('/sandbox/p', 'w').write('#!/usr/bin/python3')
os.chmod('/sandbox/p', 0o6755)
print(json.dumps([refused(lambda: os.execv('/sandbox/p', ['p'])), os.statvfs('/sandbox').f_flag & 14]))
"""
    assert await bare(backend.engine, source) == ["EACCES", 14]  # nosuid, nodev, noexec


@pytest.mark.docker
@pytest.mark.anyio
async def test_calls_by_another_architectures_numbers_end_the_thread(backend: DockerBackend) -> None:
    if backend.engine.client.info.architecture not in ("x86_64", "amd64"):
        pytest.skip("int 0x80 is x86's")
    source = r"""
child = os.fork()
if child == 0:
    import mmap
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    os._exit(0)
print(json.dumps(os.waitpid(child, 0)[1]))
"""
    assert await bare(backend.engine, source) == 31  # SIGSYS


@pytest.mark.docker
@pytest.mark.anyio
async def test_memory_processes_disk_and_inodes_end_at_the_containers_limits(backend: DockerBackend) -> None:
    source = f"""
def disk(path):
    with open(path, 'wb', 0) as file:
        for _ in range(64):
            file.write(bytes({MIB}))
def inodes():
    for n in range(1000):
        open(f'/sandbox/{{n}}', 'w').close()
def forks():
    for n in range(200):
        if os.fork() == 0:
            __import__('signal').pause()
found = dict(disk=refused(lambda: disk('/sandbox/d')), inodes=refused(inodes), forks=refused(forks))
print(json.dumps(found), flush=True)
"""
    assert await bare(backend.engine, source) == {"disk": "ENOSPC", "inodes": "ENOSPC", "forks": "EAGAIN"}


@pytest.mark.docker
@pytest.mark.anyio
async def test_a_process_that_exceeds_the_memory_limit_is_killed(backend: DockerBackend) -> None:
    source = f"""
child = os.fork()
if child == 0:
    hog = bytearray(2 * {LIMITS.memory_bytes})
    for at in range(0, len(hog), 4096):
        hog[at] = 1
    os._exit(0)
print(json.dumps(os.waitpid(child, 0)[1]))
"""
    assert await bare(backend.engine, source) == 9


@pytest.mark.docker
@pytest.mark.anyio
async def test_the_guest_applies_its_own_layers_inside(backend: DockerBackend) -> None:
    async with greeted(backend) as (_, sandbox):
        layers = sandbox.layers

    assert layers.keys() >= CONTAINER_LAYERS
    assert layers["landlock"].startswith("ABI")
    assert "inside the container's profile" in layers["seccomp"]


def test_a_container_asked_for_less_gets_less() -> None:
    config = container_config(PLAIN, Limits(memory_bytes=64 * MIB, processes=100, disk_bytes=MIB, inodes=99))

    assert config["HostConfig"]["Memory"] == config["HostConfig"]["MemorySwap"] == 64 * MIB
    assert config["HostConfig"]["PidsLimit"] == 100 + OWN_PROCESSES
    assert f"size={MIB - MIB // 4},nr_inodes=99," in config["HostConfig"]["Tmpfs"]["/sandbox"]
    assert "Runtime" not in config["HostConfig"]


def test_gvisor_is_asked_for_by_name_and_given_room_for_its_own_threads() -> None:
    gvisor = Blueprint("sha256:0", runtime="runsc")

    assert container_config(gvisor, Limits())["HostConfig"]["Runtime"] == "runsc"
    for blueprint in (gvisor, PLAIN):
        mounts = container_config(blueprint, Limits(disk_bytes=MIB))["HostConfig"]["Tmpfs"].values()
        assert sum(int(each.partition("size=")[2].partition(",")[0]) for each in mounts) == MIB
    assert resources(gvisor, Limits())["PidsLimit"] > 8 * resources(PLAIN, Limits())["PidsLimit"]


def inspection(**changes: object) -> dict[str, Any]:
    config = container_config(PLAIN, Limits())
    return {"HostConfig": config["HostConfig"] | changes, "Config": config}


def test_layers_are_read_from_what_the_daemon_made_not_from_what_was_asked() -> None:
    whole = daemon_layers(inspection())

    assert whole.keys() | GUEST_LAYERS >= CONTAINER_LAYERS
    for change, lost in [
        ({"NetworkMode": "bridge"}, "net"),
        ({"PidMode": "host"}, "pid"),
        ({"IpcMode": "host"}, "ipc"),
        ({"UTSMode": "host"}, "uts"),
        ({"ReadonlyRootfs": False}, "mount"),
        ({"Binds": ["/:/host"]}, "mount"),
        ({"CgroupnsMode": "host"}, "cgroup_ns"),
        ({"MemorySwap": -1}, "cgroup"),
        ({"PidsLimit": 0}, "cgroup"),
        ({"PidsLimit": None}, "cgroup"),
    ]:
        assert whole.keys() - daemon_layers(inspection(**change)).keys() == {lost}, change
    assert daemon_layers(inspection(Privileged=True)) == {}
    assert daemon_layers(inspection(CapAdd=["SYS_ADMIN"])) == {}


def test_a_guest_cannot_claim_layers_of_the_daemon() -> None:
    with pytest.raises(SandboxUnavailable, match="net"):
        live_layers(frozenset({"net"}), {}, {"net": "trust me"})


def test_a_guest_without_a_required_layer_is_refused() -> None:
    from_guest = dict.fromkeys(GUEST_LAYERS - {"landlock"}, "up")

    with pytest.raises(SandboxUnavailable, match="landlock"):
        live_layers(required_layers(Policy(), None), daemon_layers(inspection()), from_guest)
    assert live_layers(required_layers(Policy(), "runsc"), daemon_layers(inspection()), from_guest)


def test_the_policys_own_requirement_replaces_the_default() -> None:
    assert required_layers(Policy(require=frozenset({"user", "net"})), None) == {"user", "net"}
