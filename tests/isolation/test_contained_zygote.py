"""Sandboxes of the profile `container` cannot reach each other, their parents, or later sandboxes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell_bridge.isolation import landlock

from .contained_zygote_host import RLIMITS, Guest, Zygote, becomes_true, running, tree

pytestmark = pytest.mark.isolation

ECHO = "set_result(call_tool('echo', {'q': 1}))"

TRY = """
import errno, os
def refused(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    if landlock.supported_abi() < 6:
        pytest.skip("this kernel's Landlock cannot keep signals inside")
    with running(tmp_path_factory.mktemp("container")) as zygote:
        yield zygote


@pytest.fixture
def pair(shared: Zygote) -> Iterator[tuple[Guest, Guest]]:
    """An attacker and a victim."""
    guests = shared.open(), shared.open()
    yield guests
    for guest in guests:
        shared.kill(guest)


def test_each_sandbox_has_its_own_bridge_and_raw_output(shared: Zygote, pair: Any) -> None:
    first, second = pair
    assert first.run("import os\nos.write(1, b'one')\nos.write(2, b'two')\n" + ECHO) == {"q": 1}
    assert second.run(ECHO) == {"q": 1}
    # Written before the result, so here before it.
    assert first.raw_output() == [b"one", b"two"]
    assert {"landlock", "seccomp", "rlimits", "no_new_privs"} <= first.layers.keys()


def test_no_signal_reaches_a_sibling_a_supervisor_or_the_zygote(shared: Zygote, pair: Any) -> None:
    attacker, victim = pair
    pid, supervisor = victim.run("import os\nset_result([os.getpid(), os.getppid()])")
    targets = [pid, -pid, supervisor, *tree(shared.process.pid), shared.process.pid]
    source = (
        TRY + "import signal\n"
        f"targets = {targets!r}\n"
        "others = [t for t in targets if t != os.getpid()]\n"
        "found = {refused(lambda: os.kill(t, s)) for t in others for s in (0, signal.SIGKILL, signal.SIGSTOP)}\n"
        "found |= {refused(lambda: os.kill(os.getppid(), 9))}\n"
        "set_result(sorted(found))"
    )
    assert attacker.run(source) == ["EPERM"]
    assert victim.run(ECHO) == {"q": 1}


def test_killing_everybody_kills_nobody_else(shared: Zygote, pair: Any) -> None:
    attacker, victim = pair
    attacker.begin("import os\nos.kill(-1, 9)\nos.kill(0, 9)")
    assert shared.end_of(attacker)["status"] == signal.SIGKILL
    assert victim.run(ECHO) == {"q": 1}
    another = shared.open()
    assert another.run(ECHO) == {"q": 1}
    shared.kill(another)


def test_a_siblings_files_are_closed_even_to_one_that_knows_their_names(pair: Any) -> None:
    attacker, victim = pair
    home = victim.run("import os\nopen('secret', 'w').write('s')\nset_result(os.getcwd())")
    source = (
        TRY + f"home = {home!r}\n"
        "set_result([refused(f) for f in (lambda: open(home + '/secret'), lambda: open(home + '/new', 'w'),\n"
        "    lambda: os.listdir(home), lambda: os.unlink(home + '/secret'), lambda: os.rename(home, home + 'x'),\n"
        "    lambda: os.link(home + '/secret', 'mine'), lambda: os.truncate(home + '/secret', 0))])"
    )
    assert set(attacker.run(source)) <= {"EACCES", "EXDEV"}
    assert victim.run("set_result(open('secret').read())") == "s"


def test_the_name_of_a_siblings_directory_cannot_be_found_out(shared: Zygote, pair: Any) -> None:
    attacker, victim = pair
    home = Path(victim.run("import os\nset_result(os.getcwd())"))
    pid = victim.run("import os\nset_result(os.getpid())")
    assert len(home.parent.name) == 32
    places = [str(shared.base), str(home.parent.parent)]
    source = (
        TRY + f"places, pid = {places!r}, {pid}\n"
        "found = [refused(lambda: os.listdir(place)) for place in places]\n"
        "found += [refused(lambda: os.readlink(f'/proc/{pid}/{name}')) for name in ('cwd', 'fd/3', 'root', 'exe')]\n"
        "set_result(sorted(set(found)))"
    )
    assert attacker.run(source) == ["EACCES"]


def test_nothing_of_a_sibling_or_parent_can_be_read_in_proc(shared: Zygote, pair: Any) -> None:
    attacker, victim = pair
    pids = [victim.run("import os\nset_result(os.getpid())"), *tree(shared.process.pid), shared.process.pid]
    names = ["mem", "maps", "environ", "cmdline", "stat", "status", "fdinfo", "fd", "task", "net/unix"]
    source = (
        TRY + f"ways = [f'/proc/{{pid}}/{{name}}' for pid in {pids!r} for name in {names!r}]\n"
        "ways += ['/proc/self/mem', '/proc/self/maps', '/proc/self/mountinfo', '/proc', '/proc/mounts']\n"
        "set_result(sorted({refused(lambda: os.open(way, os.O_RDONLY)) for way in ways}))"
    )
    assert set(attacker.run(source)) <= {"EACCES", "ENOENT"}


def test_of_cgroups_only_their_names_and_limits_can_be_read(shared: Zygote, pair: Any) -> None:
    attacker, victim = pair
    pids = [victim.run("import os\nset_result(os.getpid())"), *tree(shared.process.pid), shared.process.pid]
    source = (
        TRY
        + f"ways = [f'/proc/{{pid}}/cgroup' for pid in {pids!r} if pid != os.getpid()] + ['/sys/fs/cgroup', '/sys/fs', '/sys']\n"
        "groups = [line.rstrip('\\n').split(':', 2) for line in open('/proc/self/cgroup')]\n"
        "names = ['cgroup.procs', 'memory.stat', 'memory.current', 'memory.usage_in_bytes', 'cpu.stat', 'tasks']\n"
        "ways += [f'/sys/fs/cgroup/{kind}{path}/{name}' for _, kind, path in groups for name in names]\n"
        "limits = [f'/sys/fs/cgroup/{kind}{path}/{name}' for _, kind, path in groups for name in\n"
        "          ('memory.max', 'cpu.max', 'memory.limit_in_bytes', 'cpu.cfs_quota_us')]\n"
        "read = {refused(lambda: os.open(way, os.O_RDONLY) > 0) for way in limits}\n"
        "written = {refused(lambda: os.open(way, os.O_WRONLY)) for way in limits}\n"
        "found = {way: refused(lambda: os.open(way, os.O_RDONLY)) for way in ways}\n"
        "set_result([len(groups) > 0, sorted(map(str, read)), sorted(map(str, written)), found])"
    )
    some, read, written, found = attacker.run(source)
    assert some and set(read) == {"True", "ENOENT"}
    assert set(written) <= {"EACCES", "ENOENT", "EROFS"}
    assert {way: end for way, end in found.items() if end not in ("EACCES", "ENOENT")} == {}


def test_a_guest_has_no_descriptor_but_its_own(pair: Any) -> None:
    source = """
import os
found = {}
for number in range(1024):
    try:
        status = os.fstat(number)
    except OSError:
        continue
    found[number] = oct(status.st_mode)[:-4]
set_result(sorted(found))
"""
    assert pair[0].run(source) == [0, 1, 2, 3]  # the standard three, and the bridge


REMEMBERS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
libc.sbrk.restype = ctypes.c_void_p
PAGE = 4096
r, w = os.pipe()
def page(address):
    return os.read(r, PAGE) if libc.write(w, address, PAGE) == PAGE else None
def search(word):
    hits, pages, seen = 0, 0, set()
    keep = [object() for _ in range(50)] + [bytes(600), bytes(70000), bytes(300000)]
    spans = [(libc.sbrk(0) - (48 << 20), 48 << 20)]
    spans += [(max(0, id(each) - (24 << 20)), 48 << 20) for each in keep[::17] + keep[-3:]]
    for start, size in spans:
        for address in range(start // PAGE * PAGE, start + size, PAGE):
            if address in seen:
                continue
            seen.add(address)
            if (found := page(address)) is not None:
                pages += 1
                hits += word in found
    return hits, pages
"""


def test_what_was_sent_to_one_guest_is_not_in_the_memory_of_the_next(shared: Zygote, pair: Any) -> None:
    word = "".join(map(chr, range(ord("a"), ord("z")))) + "-told-to-one"
    first, second = pair
    told = f"for n in range(50): call_tool('echo', {{'q': {word!r} * 20}})\nset_result({word!r} * 1000)"
    first.run(told)
    second.run(told)
    last = shared.open()
    try:
        # Spelled backwards, or the script itself would be found.
        search = f"word = bytes(reversed({word[::-1].encode()!r}))\nhits, pages = search(word)\n"
        hits, pages = last.run(REMEMBERS + search + "set_result([hits - 1, pages])")
        assert pages > 1000, "nothing was searched"
        assert hits <= 0
        planted = "mine = word * 3\n" + "hits, pages = search(word)\nset_result(hits)"
        assert last.run(planted) > 1, "what is there would not have been found"
    finally:
        shared.kill(last)


@each_row(
    "source",
    [
        pytest.param(
            "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(99)", id="daemons"
        ),
        pytest.param("if os.fork() == 0:\n    while os.fork() == 0: pass", id="chain"),
        pytest.param(
            "if os.fork() == 0:\n    os.setsid()\n    while True:\n        if os.fork(): os._exit(0)", id="runner"
        ),
        pytest.param("if os.fork() == 0:\n    os.kill(os.getpid(), signal.SIGSTOP)", id="stopped"),
        pytest.param(
            "libc = ctypes.CDLL(None)\nif libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0: time.sleep(99)",
            id="sibling-of-its-own",
        ),
    ],
)
def test_every_process_of_a_killed_sandbox_is_gone(shared: Zygote, pair: Any, source: str) -> None:
    _, bystander = pair
    before = set(tree(shared.process.pid))
    guest = shared.open()
    guest.run(
        f"import ctypes, os, signal, time\nif os.fork() == 0:\n    {source.replace(chr(10), chr(10) + '    ')}\n    time.sleep(99)"
    )
    report = shared.kill(guest)

    assert report["status"] == signal.SIGKILL
    assert becomes_true(lambda: not set(tree(shared.process.pid)) - before)
    assert bystander.run(ECHO) == {"q": 1}


def test_a_sandbox_that_ends_by_itself_takes_its_processes_along(shared: Zygote) -> None:
    before = set(tree(shared.process.pid))
    guest = shared.open()
    guest.begin("import os, time\nif os.fork() == 0: time.sleep(99)\nos._exit(7)")
    assert shared.end_of(guest)["status"] == 7 << 8
    assert becomes_true(lambda: not set(tree(shared.process.pid)) - before)


LITTER = """
import os
deep = os.getcwd()
for n in range(600):
    os.mkdir('d'); os.chdir('d')
    open('f', 'w').close()
os.chdir(deep)
os.mkdir('closed'); open('closed/f', 'w').close(); os.chmod('closed', 0)
os.symlink('/etc', 'link'); os.mkfifo('fifo')
for place in ('../tmp', '../shm'):
    open(place + '/left', 'w').close(); os.mkdir(place + '/more')
os.chmod('d', 0); os.chmod('../tmp', 0)
"""


def test_whatever_a_run_leaves_is_gone_before_the_next(shared: Zygote) -> None:
    before = set(shared.base.iterdir())
    guest = shared.open()
    guest.run(LITTER)
    assert shared.kill(guest)["is_clean"]
    assert set(shared.base.iterdir()) == before
    assert Path("/etc/passwd").exists()


def test_a_killed_guest_differs_from_one_that_hit_a_lowered_limit(shared: Zygote) -> None:
    guest = shared.open()
    lower = {"cpu_s": 1, "address_space_bytes": 1 << 32, "processes": 9, "open_files": 16, "file_size_bytes": 1}
    shared.send({"lower": guest.number, "rlimits": lower})
    shared.wait_for("lowered")
    assert guest.run("import resource\nset_result(resource.getrlimit(resource.RLIMIT_NOFILE))") == [16, 16]
    guest.begin("while True: pass")
    report = shared.end_of(guest)
    assert report["status"] & 0x7F in (signal.SIGXCPU, signal.SIGKILL)
    assert 0.5 < report["cpu_s"] < 5


def test_a_zygote_that_gets_many_requests_at_once_serves_them_all(shared: Zygote) -> None:
    zygote = shared.process.pid
    for _ in range(8):
        guest = shared.begin()
        os.kill(zygote, signal.SIGSTOP)
        try:
            shared.send({"lower": guest.number, "rlimits": dict(RLIMITS)})
            shared.greet(guest)
        finally:
            os.kill(zygote, signal.SIGCONT)
        shared.wait_for("lowered")
        shared.kill(guest)


def test_everything_ends_with_the_host(tmp_path: Path) -> None:
    with running(tmp_path) as zygote:
        zygote.open().run("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(99)")
        below = tree(zygote.process.pid)
        assert len(below) >= 3
        zygote.control.close()
        assert zygote.process.wait(60) == 0
    assert becomes_true(lambda: not [pid for pid in below if is_alive(pid)])


OLD = "from toolcell_bridge.isolation import landlock; landlock.NEWEST_ABI = 5"


def test_where_landlock_has_no_scopes_a_filter_keeps_signals_inside(tmp_path: Path) -> None:
    with running(tmp_path, before=OLD) as container:
        other = container.open().run("import os\nset_result(os.getpid())")
        attack = f"import os\ntry:\n    set_result(os.kill({other}, 0))\nexcept OSError as exc:\n    set_result(type(exc).__name__)"
        assert container.open().run(attack) == "PermissionError"


def test_where_scopes_are_not_required_it_starts_and_kills_every_descendant(tmp_path: Path) -> None:
    with running(tmp_path, before=OLD, unscoped=True) as container:
        before = set(tree(container.process.pid))
        guest = container.open()
        guest.run(
            "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork(): os._exit(0)\n        time.sleep(99)"
        )
        assert container.kill(guest)["status"] == signal.SIGKILL
        assert becomes_true(lambda: not set(tree(container.process.pid)) - before)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
