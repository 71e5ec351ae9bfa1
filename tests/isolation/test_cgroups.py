"""Cgroups: v1 on this machine if it has them, and v2 with a tree of plain files."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from toolcell.sandbox.backend import Sample
from toolcell.sandbox.process import cgroup_manager
from toolcell.sandbox.process.cgroup import CgroupFiles, V2Cgroup
from toolcell.sandbox.process.cgroup_manager import (
    HOSTS,
    CgroupManager,
    NoLocation,
    V1Location,
    V2Location,
    discover,
    host_directory,
    is_orphan,
)
from toolcell.sandbox.process.probes import is_under_gvisor

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(is_under_gvisor(), reason="gVisor is the kernel here, and has no pidfds to kill a group by"),
]

MIB = 1024 * 1024


@pytest.fixture
def manager() -> Iterator[CgroupManager]:
    found = discover()
    if isinstance(found, NoLocation):
        pytest.skip(f"no cgroup here: {found.reason}; {found.fix}")
    yield found
    assert found.close()


def inside(entries: tuple[str, ...], script: str) -> subprocess.Popen[str]:
    """Start a script that puts itself inside first and says so."""
    join = f"import os\nfor entry in {list(entries)!r}: open(entry, 'w').write('0')\n"
    ready = "print('inside', flush=True)\n"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", join + ready + script],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "inside\n"
    return child


WAIT = "import sys; sys.stdin.read()"
EAT = "blocks = [bytearray(1 << 20) for _ in range(int({}))]"


def test_a_process_that_joins_is_counted_and_killed_with_the_group(manager: CgroupManager) -> None:
    group = manager.create("one", 64 * MIB, 8)
    with inside(group.entries, WAIT) as child:
        assert group.pids() == {child.pid}
        usage = group.usage()
        assert usage.processes == 1
        assert group.destroy()
        assert child.wait() == -signal.SIGKILL
    assert group.destroy(), "twice is once"


def test_memory_past_the_limit_is_an_oom_kill_and_counted(manager: CgroupManager) -> None:
    script = EAT.format("sys.stdin.read()")
    for limit, status in ((256 * MIB, 0), (48 * MIB, -signal.SIGKILL)):
        group = manager.create(f"memory-{limit}", limit, 8)
        with inside(group.entries, "import sys\n" + script) as child:
            child.communicate("100")
            assert child.returncode == status
        usage = group.usage()
        assert (usage.memory_kills > 0) == (status != 0)
        assert 30 * MIB < usage.peak_memory_bytes <= limit
        assert group.destroy()


def test_memory_in_a_tmpfs_and_in_children_counts_too(manager: CgroupManager, tmp_path: Path) -> None:
    group = manager.create("children", 64 * MIB, 8)
    script = """
import mmap
shared = mmap.mmap(-1, 100 << 20)
for _ in range(4):
    if os.fork() == 0:
        private = bytearray(b"x") * (20 << 20)
        sys.stdin.read()
        os._exit(0)
for at in range(0, 100 << 20, 4096): shared[at] = 1
os.wait()
"""
    with inside(group.entries, "import sys" + script) as child:
        child.communicate()
    assert group.usage().memory_kills > 0
    assert group.destroy()


def test_forks_past_the_limit_are_refused_and_counted(manager: CgroupManager) -> None:
    script = """
import sys
made = 0
try:
    for _ in range(20):
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        made += 1
except OSError as error:
    print(error.errno, flush=True)
print(made, flush=True)
sys.stdin.read()
"""
    group = manager.create("forks", 128 * MIB, 6)
    with inside(group.entries, script) as child:
        assert child.stdout is not None
        assert [child.stdout.readline(), child.stdout.readline()] == [f"{errno.EAGAIN}\n", "5\n"]
        usage = group.usage()
        assert usage.processes == 6
        assert usage.peak_processes == 6
        assert usage.refused_processes == 1
        assert group.destroy()


def test_a_fork_bomb_that_ignores_signals_is_ended(manager: CgroupManager) -> None:
    script = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD): signal.signal(number, signal.SIG_IGN)
print("go", flush=True)
while True:
    try: os.fork()
    except OSError: pass
"""
    group = manager.create("bomb", 256 * MIB, 40)
    with inside(group.entries, script) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "go\n"
        assert group.destroy()
        assert child.wait() == -signal.SIGKILL


def test_limits_can_be_raised_and_lowered_on_a_live_group(manager: CgroupManager) -> None:
    group = manager.create("changing", 64 * MIB, 8)
    for memory_bytes, processes in ((512 * MIB, 64), (32 * MIB, 4), (128 * MIB, 16)):
        group.set_limits(memory_bytes, processes)
    script = "import sys\n" + EAT.format("sys.stdin.read()")
    with inside(group.entries, script) as child:
        child.communicate("80")
        assert child.returncode == 0
    assert group.destroy()


def test_a_name_is_used_once_and_is_no_path(manager: CgroupManager) -> None:
    group = manager.create("twice", 64 * MIB, 8)
    with pytest.raises(FileExistsError):
        manager.create("twice", 64 * MIB, 8)
    for name in ("", "..", "a/b", "../up", "x" * 65, "-rf", "new\n"):
        with pytest.raises(ValueError, match="not a cgroup name"):
            manager.create(name, 64 * MIB, 8)
    assert group.destroy()


DYING = """
import sys
sys.path.insert(0, sys.argv[1])
from toolcell.sandbox.process.cgroup_manager import discover
import subprocess
group = discover().create("left", 64 << 20, 8)
join = "import sys, signal\\nfor each in sys.argv[1:]: open(each, 'w').write('0')\\nprint(flush=True)\\nsignal.pause()"
command = [sys.executable, "-I", "-S", "-c", join, *group.entries]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_what_a_dead_host_left_behind_is_killed_and_removed(
    manager: CgroupManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = str(Path(__file__).parents[2] / "bridge")
    with subprocess.Popen(
        [sys.executable, "-I", "-c", DYING, home], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as dying:
        assert dying.stdout is not None
        orphan = int(dying.stdout.readline())
        folder = host_directory(dying.pid, 0)
        assert folder not in manager.reap_orphans(), "its host still runs"
        assert any(Path(base, folder).exists() for base in manager.directories[0])
        pinned = os.pidfd_open(orphan)
        dying.kill()
        os.waitid(os.P_PID, dying.pid, os.WEXITED | os.WNOWAIT)  # as a zombie it is no orphan for other managers
        monkeypatch.setattr(cgroup_manager, "is_orphan", lambda name: name == folder)
        assert manager.reap_orphans() == [folder]
        assert select.select([pinned], [], [], 10)[0] == [pinned], "readable once it has ended"
        os.close(pinned)
        assert not any(Path(base, folder).exists() for base in manager.directories[0])
        assert manager.reap_orphans() == []


def test_only_the_directory_of_a_dead_host_of_this_pid_namespace_is_an_orphan() -> None:
    own = host_directory(os.getpid(), 0)
    pid, started, namespace, _ = own.split("-")[1:]
    assert not is_orphan(own)
    assert is_orphan(f"toolcell-{pid}-{int(started) + 1}-{namespace}-0"), "the pid was used again"
    assert is_orphan(f"toolcell-{2**22 + 1}-{started}-{namespace}-0")
    assert not is_orphan(f"toolcell-{2**22 + 1}-{started}-{int(namespace) + 1}-0")
    for other in ("toolcell", "toolcell-1-2", "user.slice", f"{own}x", f"x{own}", "toolcell-a-b-c-d"):
        assert not is_orphan(other)


class PlainFiles(CgroupFiles):
    """A cgroup2 tree of plain files: a new directory comes with its files, and an occupied one cannot be removed."""

    FILES: ClassVar[dict[str, str]] = {
        "cgroup.procs": "",
        "cgroup.kill": "",
        "cgroup.subtree_control": "",
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.oom.group": "0\n",
        "memory.peak": "4096\n",
        "memory.stat": "anon 0\nslab_reclaimable 1048576\n",
        "memory.reclaim": "",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 1\n",
        "pids.max": "max\n",
        "pids.current": "2\n",
        "pids.peak": "5\n",
        "pids.events": "max 7\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n",
    }

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.without = without
        self.written: list[tuple[str, str]] = []

    def make(self, directory: Path | str) -> None:
        super().make(directory)
        for name, text in self.FILES.items():
            if name not in self.without:
                Path(directory, name).write_text(text)

    def remove(self, directory: Path | str) -> None:
        if not os.path.exists(directory):
            raise FileNotFoundError(directory)
        if Path(directory, "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, "busy")
        shutil.rmtree(directory)

    def write(self, file: Path | str, text: str) -> None:
        super().write(file, text)
        self.written.append((os.path.basename(file), text))
        if os.path.basename(file) == "cgroup.kill":
            Path(os.path.dirname(file), "cgroup.procs").write_text("")


@pytest.fixture
def base(tmp_path: Path) -> V2Location:
    """A directory of v2 in which cgroups may be made."""
    PlainFiles().make(tmp_path / "base")
    return V2Location(tmp_path / "base")


def test_two_managers_of_one_process_do_not_meet(base: V2Location) -> None:
    one, two = (CgroupManager(base, PlainFiles()) for _ in range(2))
    one.create("same", 64 * MIB, 8)
    two.create("same", 64 * MIB, 8)
    assert one.close()
    assert (base.base / two.folder / "same").exists()
    assert two.close()


def test_v2_sets_every_limit_and_swap_to_nothing(base: V2Location) -> None:
    files = PlainFiles()
    manager = CgroupManager(base, files)
    group = manager.create("one", 64 * MIB, 9)
    home = base.base / manager.folder

    assert files.written.count(("cgroup.subtree_control", "+memory +pids")) == 2  # of the base, and of the folder in it
    written = dict(files.written)
    assert written["memory.max"] == str(64 * MIB)
    assert (written["memory.swap.max"], written["memory.oom.group"], written["pids.max"]) == ("0", "1", "9")
    assert group.entries == (str(home / "one" / "cgroup.procs"),)
    assert manager.description == "v2 memory+pids"
    assert manager.close()
    assert not home.exists()


def test_processes_of_a_delegated_unit_move_below_it_before_it_hands_controllers_on(base: V2Location) -> None:
    class NoInnerProcesses(PlainFiles):
        def write(self, file: Path | str, text: str) -> None:
            directory, name = Path(file).parent, os.path.basename(file)
            if name == "cgroup.procs":
                if text == "13":
                    raise ProcessLookupError(errno.ESRCH, "it has ended")
                moved.append(int(text))
                if (rest := (base.base / name).read_text().split())[-1] == text:
                    (base.base / name).write_text("15\n" if rest == ["12", "13", "14"] else "")  # forked meanwhile
            elif name == "cgroup.subtree_control" and (directory / "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, "no internal processes", str(file))
            super().write(file, text)

    moved: list[int] = []
    (base.base / "cgroup.procs").write_text("12\n13\n14\n")
    manager = CgroupManager(base, NoInnerProcesses())
    assert moved == [12, 14, 15]
    assert sorted(path.name for path in base.base.iterdir() if path.is_dir()) == sorted([manager.folder, HOSTS])
    (base.base / "cgroup.subtree_control").write_text("cpu memory pids")
    (base.base / "cgroup.procs").write_text("99\n")  # nobody is moved where controllers are handed on already
    assert CgroupManager(base, NoInnerProcesses()).folder != manager.folder


def test_a_process_that_cannot_be_moved_leaves_no_folder(base: V2Location) -> None:
    class Immovable(PlainFiles):
        def write(self, file: Path | str, text: str) -> None:
            if os.path.basename(file) == "cgroup.subtree_control":
                raise OSError(errno.EBUSY, "no internal processes", str(file))
            super().write(file, text)

    (base.base / "cgroup.procs").write_text("0\n")  # of another pid namespace
    with pytest.raises(OSError, match="no internal processes"):
        CgroupManager(base, Immovable())
    assert [path.name for path in base.base.iterdir() if path.is_dir()] == [HOSTS]


def test_v2_usage_is_read_from_the_unified_files(tmp_path: Path) -> None:
    files = PlainFiles()
    files.make(tmp_path / "one")
    group = V2Cgroup("one", str(tmp_path / "one"), files)
    assert group.usage() == Sample(1.5, 4096, 2, 5, 2, 7)


def test_v2_of_an_older_kernel_has_no_peaks_and_no_swap_file(base: V2Location) -> None:
    files = PlainFiles(without=("memory.peak", "pids.peak", "memory.swap.max", "cgroup.kill"))
    manager = CgroupManager(base, files)
    group = manager.create("one", 64 * MIB, 9)
    usage = group.usage()
    assert (usage.peak_memory_bytes, usage.peak_processes) == (0, 2)
    assert group.destroy()
    assert manager.close()


def test_v2_kills_through_its_own_file_and_waits_until_it_is_empty(base: V2Location) -> None:
    files = PlainFiles()
    manager = CgroupManager(base, files)
    group = manager.create("one", 64 * MIB, 9)
    Path(group.entries[0]).write_text("123456789\n")
    assert not group.remove()
    assert group.destroy()
    assert ("cgroup.kill", "1") in files.written
    assert manager.close()


def test_without_a_kill_file_forks_are_forbidden_before_the_first_signal(tmp_path: Path) -> None:
    files = PlainFiles(without=("cgroup.kill",))
    files.make(tmp_path / "one")
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", WAIT], stdin=subprocess.PIPE) as child:
        (tmp_path / "one" / "cgroup.procs").write_text(f"{child.pid}\n")
        V2Cgroup("one", str(tmp_path / "one"), files).kill()
        assert child.wait() == -signal.SIGKILL
    assert files.written == [("pids.max", "0")]


def test_what_does_not_die_in_time_is_reported_and_not_waited_for(tmp_path: Path) -> None:
    class Immortal(PlainFiles):
        def write(self, file: Path | str, text: str) -> None:
            CgroupFiles.write(self, file, text)

    files = Immortal()
    files.make(tmp_path / "one")
    group = V2Cgroup("one", str(tmp_path / "one"), files)
    Path(group.entries[0]).write_text("123456789\n")
    assert not group.destroy(within_s=0.0)


@pytest.mark.parametrize("failing", ["pids.max", "memory.max", "memory.oom.group"])
def test_a_limit_that_cannot_be_set_leaves_no_directory_behind(base: V2Location, failing: str) -> None:
    class Refusing(PlainFiles):
        def write(self, file: Path | str, text: str) -> None:
            if os.path.basename(file) == failing:
                raise OSError(errno.EINVAL, "refused", str(file))
            super().write(file, text)

    manager = CgroupManager(base, Refusing())
    with pytest.raises(OSError, match="refused"):
        manager.create("one", 64 * MIB, 9)
    home = base.base / manager.folder
    assert not (home / "one").exists()


def test_a_host_directory_that_cannot_be_made_everywhere_is_made_nowhere(tmp_path: Path) -> None:
    bases = [tmp_path / name for name in ("memory", "pids", "cpuacct")]
    for base in bases:
        base.mkdir()

    class NoPids(PlainFiles):
        def make(self, directory: Path | str) -> None:
            if Path(directory).parent.name == "pids":
                raise PermissionError(errno.EACCES, "denied", str(directory))
            super().make(directory)

    with pytest.raises(PermissionError):
        CgroupManager(V1Location(tuple((base.name, base) for base in bases)), NoPids())
    assert [os.listdir(base) for base in bases] == [[], [], []]


@pytest.mark.parametrize(("remembered", "reclaimed"), [(1 << 20, []), (64 << 20, [("memory.reclaim", str(64 << 20))])])
def test_names_that_the_kernel_remembers_are_dropped_when_they_are_many(
    tmp_path: Path, remembered: int, reclaimed: list[tuple[str, str]]
) -> None:
    files = PlainFiles()
    files.make(tmp_path / "one")
    (tmp_path / "one" / "memory.stat").write_text(f"anon 0\nslab_reclaimable {remembered}\n")
    V2Cgroup("one", str(tmp_path / "one"), files).drop_names()
    assert files.written == reclaimed
