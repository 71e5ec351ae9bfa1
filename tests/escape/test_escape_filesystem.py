"""The host's files, from every side: SECURITY.md, "filesystem"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from escape.attack import Victim, outside
from escape.prologues import RAW

pytestmark = pytest.mark.isolation

HOST_PLACES = (
    "/root", "/home", "/proc/1/environ", "/proc/self/mem", "/proc/self/root", "/proc/self/cwd", "/proc/self/fd",
    "/proc/self/mountinfo", "/proc/sys/kernel/core_pattern", "/proc/kcore", "/sys/kernel", "/sys/fs/cgroup", "/boot",
    "/run", "/var", "/opt", "/mnt", "/srv", "/bin", "/sbin", "/etc/shadow", "/etc/hostname", "/etc/ssl",
    "/etc/resolv.conf", "/etc/machine-id", "/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/ptmx", "/dev/pts", "/dev/vda",
    "/dev/sda", "/dev/loop-control", "/dev/fuse", "/dev/kvm", "/dev/net/tun", "/dev/mqueue", "/usr/bin/sh", "/usr/local",
)  # fmt: skip


def test_no_place_of_the_host_can_be_opened_or_listed(victim: Victim) -> None:
    source = RAW + """
def look(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.close(descriptor)
set_result({path: attempt(look, path) for path in places})
"""
    opened = outside(source, places=HOST_PLACES).value
    assert {"/proc/self/mem", "/proc/self/root", "/sys/kernel", "/var", "/usr/local"} <= {
        path for path, how in opened.items() if how == "ok"
    }
    assert set(victim.run(source, places=list(HOST_PLACES)).value.values()) <= {"ENOENT", "EACCES", "ENOTDIR"}


def test_what_stands_in_etc_is_not_the_hosts(victim: Victim) -> None:
    source = RAW + """
found = {}
for folder, _, names in os.walk("/etc"):
    for name in names:
        path = os.path.join(folder, name)
        if attempt(open, path) == "ok" and len(found) < 200:
            found[path] = open(path, errors="replace").read(4096)
set_result(found)
"""
    host = outside(source).value
    assert len(host) > 10
    inside = victim.run(source).value
    assert {"/etc/passwd", "/etc/group"} <= inside.keys()
    assert all(text == "" or text != host.get(path) for path, text in inside.items())
    assert all(line.startswith(("sandbox:", "nobody:")) for line in inside["/etc/passwd"].splitlines())


WAYS_IN = """
import glob, mmap, shutil
ways = {
    "open": lambda: open(secret).read(),
    "dotdot": lambda: open("../" * 30 + secret.lstrip("/")).read(),
    "listing": lambda: os.listdir(os.path.dirname(secret)),
    "glob": lambda: glob.glob(os.path.dirname(secret) + "/*")[0],
    "chdir": lambda: (os.chdir(os.path.dirname(secret)), open(os.path.basename(secret)).read()),
    "dirfd": lambda: os.open(secret.lstrip("/"), os.O_RDONLY, dir_fd=os.open("/", os.O_PATH)),
    "path descriptor": lambda: os.open(secret, os.O_PATH),
    "symlink": lambda: (os.symlink(secret, "link"), open("link").read()),
    "symlink in tmp": lambda: (os.symlink("/", "/tmp/link"), open("/tmp/link" + secret).read()),
    "hard link": lambda: (os.link(secret, "hard"), open("hard").read()),
    "hard link of a link": lambda: (os.symlink(secret, "l2"), os.link("l2", "h2", follow_symlinks=True), open("h2").read()),
    "rename": lambda: os.rename(secret, "mine"),
    "stat": lambda: os.stat(secret),
    "copy": lambda: shutil.copy(secret, "copy"),
    "append": lambda: open(secret, "a").write("x"),
    "create beside": lambda: open(secret + ".new", "w"),
    "make folder beside": lambda: os.mkdir(secret + ".folder"),
    "truncate": lambda: os.truncate(secret, 0),
    "chmod": lambda: os.chmod(secret, 0o777),
    "times": lambda: os.utime(secret),
    "remove": lambda: os.remove(secret),
    "proc of another": lambda: open(f"/proc/{host}/root" + secret).read(),
    "cwd of another": lambda: os.listdir(f"/proc/{host}/cwd"),
    "own old root": lambda: os.fchdir(os.open("/proc/1/root", os.O_PATH)),
}
"""


@pytest.mark.parametrize(
    "way",
    ["open", "dotdot", "listing", "glob", "chdir", "dirfd", "path descriptor", "symlink", "symlink in tmp", "hard link",
     "hard link of a link", "rename", "stat", "copy", "append", "create beside", "make folder beside", "truncate",
     "chmod", "times", "remove", "proc of another", "cwd of another"],
)  # fmt: skip
def test_a_file_of_the_host_cannot_be_reached(way: str, victim: Victim, tmp_path: Path) -> None:
    """The workspace of the plain process is on the same filesystem as the file, so that links can be made."""
    secret = tmp_path / "secret"
    source = RAW + WAYS_IN + "set_result(attempt(ways[way]))"
    secret.write_text("secret")
    in_same_place = f"os.chdir({str(tmp_path)!r})\n"
    moved = source.replace("import glob", f"import os\n{in_same_place}import glob", 1)
    assert outside(moved, way=way, secret=str(secret), host=os.getpid()).value == "ok"
    Path("/tmp/link").unlink(missing_ok=True)

    secret.write_text("secret")
    before = secret.stat()
    inside = victim.run(source, way=way, secret=str(secret), host=victim.pid)
    assert inside.value in ("ENOENT", "EACCES", "EPERM", "EXDEV", "EROFS", "IndexError")
    after = secret.stat()
    assert secret.read_text() == "secret"
    assert (before.st_mode, before.st_mtime_ns, before.st_nlink) == (after.st_mode, after.st_mtime_ns, after.st_nlink)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("secret")] == ["secret"]


def test_only_the_standard_three_and_the_bridge_are_open(victim: Victim) -> None:
    source = RAW + """
import fcntl
if not walled:
    os.dup2(os.open("/", os.O_RDONLY), 1234)
found = {}
for descriptor in range(4097):
    if attempt(os.fstat, descriptor) == "ok":
        found[str(descriptor)] = oct(os.fstat(descriptor).st_mode >> 12)
set_result(found)
"""
    assert "1234" in outside(source).value
    inside = victim.run(source, limits={"open_files": 8192}).value
    assert inside == {"0": oct(0o02), "1": oct(0o01), "2": oct(0o01), "3": oct(0o14)}


def test_nothing_outside_the_workspace_can_be_written(victim: Victim) -> None:
    source = RAW + """
tried = {}
for top in tops:
    for folder, folders, names in os.walk(top):
        tried["create in " + folder] = attempt(open, os.path.join(folder, "planted"), "w")
        tried["folder in " + folder] = attempt(os.mkdir, os.path.join(folder, "planted.d"))
        for name in names[:3]:
            path = os.path.join(folder, name)
            tried["append to " + path] = attempt(open, path, "ab")
            tried["remove " + path] = attempt(os.unlink, path)
            tried["touch " + path] = attempt(os.utime, path)
            tried["chmod " + path] = attempt(os.chmod, path, 0o777)
            tried["rename " + path] = attempt(os.rename, path, path + "2")
        if len(tried) > 3000:
            break
set_result(sorted(path for path, how in tried.items() if how == "ok")[:20] + [len(tried)])
"""
    with outside_folder() as folder:
        assert len(outside(source, tops=[folder]).value) > 4
    inside = victim.run(source, tops=["/", "/usr", "/lib", "/lib64", "/etc", "/dev", "/toolcell", "/packages", "/sandbox/.."])
    assert len(inside.value) == 1
    assert inside.value[0] > 100


def outside_folder():  # type: ignore[no-untyped-def]
    """A folder that a plain process may write to, with one file."""
    import contextlib
    import tempfile

    @contextlib.contextmanager
    def made():  # type: ignore[no-untyped-def]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "file").touch()
            yield folder

    return made()
