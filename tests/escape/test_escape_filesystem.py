"""Ways to the host's files: PROMISES.md, "filesystem"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from escape.attack import BACKEND, HAS_LANDLOCK, IS_CONTAINED, IS_PROCESS, Victim, full_only, outside
from escape.prologues import RAW, raw

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

HOST_PLACES = (
    "/root", "/home", "/proc/1/environ", "/proc/self/mem", "/proc/self/root", "/proc/self/cwd", "/proc/self/fd",
    "/proc/self/mountinfo", "/proc/sys/kernel/core_pattern", "/proc/kcore", "/sys/kernel", "/sys/fs/cgroup", "/boot",
    "/run", "/var", "/opt", "/mnt", "/srv", "/bin", "/sbin", "/etc/shadow", "/etc/hostname", "/etc/ssl",
    "/etc/resolv.conf", "/etc/machine-id", "/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/ptmx", "/dev/pts", "/dev/vda",
    "/dev/sda", "/dev/loop-control", "/dev/fuse", "/dev/kvm", "/dev/net/tun", "/dev/mqueue", "/usr/bin/sh", "/usr/local",
)  # fmt: skip

TO_ASK = "a script can ask whether a path is there, how large a file is and when it was changed"
IMAGES_OWN = ("/bin", "/sbin", "/usr/local", "/opt", "/etc/hostname", "/etc/resolv.conf", "/etc/ssl", "/proc/self/cwd")
"""What a container has of its own by these names, without anything of the host in it: its image's, its workspace."""


@full_only(TO_ASK)
def test_no_place_of_the_host_can_be_opened_or_listed(victim: Victim) -> None:
    source = raw("""
def look(path):
    os.close(os.open(path, flags))
set_result({path: attempt(look, path) for path in places})
""")
    # A path descriptor opens even what may not be read, and moves no device. In a container it opens names that are
    # there, and which are the container's own; to read them is another matter.
    flags = os.O_PATH if IS_PROCESS else os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    opened = outside(source, places=HOST_PLACES, flags=os.O_PATH).value
    assert {"/proc/self/mem", "/proc/self/fd", "/etc/shadow", "/sys/kernel", "/var", "/usr/local", "/dev/tty"} <= {
        path for path, how in opened.items() if how == "ok"
    }
    places = [place for place in HOST_PLACES if IS_PROCESS or place not in IMAGES_OWN]
    assert set(victim.run(source, places=places, flags=flags).value.values()) <= {
        "ENOENT",
        "EACCES",
        "ENOTDIR",
        "EPERM",
    }


@full_only("it has no /etc of its own, and the host's cannot be opened")
def test_what_stands_in_etc_is_not_the_hosts(victim: Victim) -> None:
    source = raw("""
names = ["passwd", "group", "hosts", "nsswitch.conf"]
set_result({name: open("/etc/" + name).read() for name in names if os.path.exists("/etc/" + name)})
""")
    host = outside(source).value
    assert "root:" in host["passwd"]
    inside = victim.run(source).value
    assert all(text == "" or text != host.get(name) for name, text in inside.items())
    if not IS_PROCESS:
        assert all(line.startswith(("root:", "nobody:")) for line in inside["passwd"].splitlines())
        told = victim.run("set_result([open('/etc/' + name).read() for name in ('hostname', 'hosts', 'resolv.conf')])")
        assert told.value == ["sandbox\n", "", ""]
        return
    assert all(line.startswith(("sandbox:", "nobody:")) for line in inside["passwd"].splitlines())
    assert sorted(victim.run("import os\nset_result(os.listdir('/etc'))").value) == sorted(inside)


def test_what_lies_between_the_folders_a_script_needs_cannot_be_listed(victim: Victim) -> None:
    """Only Landlock refuses this: the directories exist, hold no secrets, and their modes allow everybody to read."""
    source = RAW + "set_result([attempt(os.listdir, folder) for folder in ('/', '/dev')] + [attempt(os.stat, '/')])"
    assert outside(source).value == ["ok", "ok", "ok"]
    assert victim.run(source).value == (["EACCES", "EACCES", "ok"] if HAS_LANDLOCK else ["ok"] * 3)


WAYS_IN = """
import glob, shutil, tempfile
tmp = tempfile.mkdtemp(dir=None if isolated else ".")
ways = {
    "open": lambda: open(secret).read(),
    "dotdot": lambda: open("../" * 30 + secret.lstrip("/")).read(),
    "listing": lambda: os.listdir(os.path.dirname(secret)),
    "glob": lambda: glob.glob(os.path.dirname(secret) + "/*")[0],
    "chdir": lambda: (os.chdir(os.path.dirname(secret)), open(os.path.basename(secret)).read()),
    "dirfd": lambda: os.open(secret.lstrip("/"), os.O_RDONLY, dir_fd=os.open("/", os.O_PATH)),
    "path descriptor": lambda: os.open(secret, os.O_PATH),
    "symlink": lambda: (os.symlink(secret, "link"), open("link").read()),
    "symlink in tmp": lambda: (os.symlink("/", os.path.abspath(tmp) + "/link"), open(os.path.abspath(tmp) + "/link" + secret).read()),
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
}
"""


@pytest.mark.parametrize(
    "way",
    ["open", "dotdot", "listing", "glob", "chdir", "dirfd",
     pytest.param("path descriptor", marks=full_only(TO_ASK)), "symlink", "symlink in tmp", "hard link",
     "hard link of a link", "rename", pytest.param("stat", marks=full_only(TO_ASK)), "copy", "append", "create beside",
     "make folder beside", "truncate", "chmod", "times", "remove", "proc of another", "cwd of another"],
)  # fmt: skip
def test_a_file_of_the_host_cannot_be_reached(way: str, victim: Victim, tmp_path: Path) -> None:
    """The workspace of the plain process is on the same filesystem as the file, so that links can be made."""
    plain, secret = tmp_path / "plain" / "secret", tmp_path / "isolated" / "secret"
    for each in (plain, secret):
        each.parent.mkdir()
        each.write_text("secret")
    source = RAW + WAYS_IN + "set_result(attempt(ways[way]))"
    moved = f"import os\nos.chdir({str(tmp_path)!r})\n{source}"
    assert outside(moved, way=way, secret=str(plain), host=os.getpid()).value == "ok"
    before = secret.stat()
    inside = victim.run(source, way=way, secret=str(secret), host=victim.pid)
    answered = ("ok",) if IS_CONTAINED and way in ("chmod", "times") else ()  # and not made
    assert inside.value in ("ENOENT", "EACCES", "EPERM", "EXDEV", "EROFS", "IndexError", *answered)
    after = secret.stat()
    assert secret.read_text() == "secret"
    assert (before.st_mode, before.st_mtime_ns, before.st_nlink) == (after.st_mode, after.st_mtime_ns, after.st_nlink)
    assert [each.name for each in secret.parent.iterdir()] == ["secret"]


def test_only_the_standard_three_and_the_bridge_are_open(victim: Victim) -> None:
    source = raw("""
import fcntl
if not isolated:
    os.dup2(os.open("/", os.O_RDONLY), 234)
found = {}
for descriptor in range(4097):
    if attempt(os.fstat, descriptor) == "ok":
        found[str(descriptor)] = oct(os.fstat(descriptor).st_mode >> 12)
set_result(found)
""")
    assert "234" in outside(source).value
    inside = victim.run(source, limits={"open_files": 8192}).value
    bridge = {"3": oct(0o14)}
    if BACKEND == "docker":  # two pipes, and what raw output leaves by
        bridge = {"3": oct(0o01), "4": oct(0o01), "5": oct(0o01)}
    assert inside == {"0": oct(0o02), "1": oct(0o01), "2": oct(0o01), **bridge}


@full_only("no folder can be walked there; test_container_profile.py names the paths")
def test_nothing_outside_the_workspace_can_be_written(victim: Victim, tmp_path: Path) -> None:
    source = raw("""
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
""")
    (tmp_path / "file").touch()
    assert len(outside(source, tops=[str(tmp_path)]).value) > 4
    inside = victim.run(
        source, tops=["/", "/usr", "/lib", "/lib64", "/etc", "/dev", "/toolcell", "/packages", "/sandbox/.."]
    )
    *written, tried = inside.value
    paths = {os.path.normpath(each[each.index("/") :]) for each in written}
    if not HAS_LANDLOCK:  # which refuses this a second time, or alone: its own disk, and devices that keep nothing
        own = {"/sandbox", "/dev/full", "/dev/random", "/dev/urandom"}
        paths = {path for path in paths if path not in own and not path.startswith("/sandbox/")}
    assert paths == set()
    assert tried > 100


@full_only("files in the workspace can be mapped as executable")
def test_what_is_in_the_workspace_cannot_be_executed(victim: Victim) -> None:
    """A written file cannot be executed as a program, loaded as a library or mapped executable."""
    source = raw("""
import mmap, shutil, sysconfig
library = next(path for path in libraries if os.path.exists(path))
tried = {}
for place in places if isolated else ["."]:
    here = os.path.join(place, "copied.so")
    shutil.copyfile(library, here)
    tried["mode " + place] = attempt(os.chmod, here, 0o6755)
    tried["load " + place] = attempt(ctypes.CDLL, os.path.abspath(here))
    tried["map " + place] = attempt(mmap.mmap, os.open(here, os.O_RDONLY), 4096, flags=mmap.MAP_PRIVATE,
                                    prot=mmap.PROT_READ | mmap.PROT_EXEC)
    plain = mmap.mmap(os.open(here, os.O_RDWR), 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(plain))
    tried["protect " + place] = attempt(lambda: call(10, address, 4096, 5) == 0 or 1 / 0)
set_result(tried)
""")
    libraries = ["/lib/x86_64-linux-gnu/libm.so.6", "/usr/lib64/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"]
    assert set(outside(source, libraries=libraries).value.values()) == {"ok"}
    inside = victim.run(source, libraries=libraries, places=["/sandbox/work", "/tmp", "/dev/shm"]).value
    assert {how for name, how in inside.items() if not name.startswith("mode")} <= {
        "OSError",
        "EPERM",
        "EACCES",
        "ZeroDivisionError",
    }


def test_no_node_in_the_workspace_is_a_device(victim: Victim) -> None:
    """A whiteout is the only character device that everybody may make."""
    source = raw("""
import stat
open("covered", "w").close()
old, new = ctypes.create_string_buffer(b"covered"), ctypes.create_string_buffer(b"moved")
kinds = {
    "whiteout": call(316, -100, ctypes.addressof(old), -100, ctypes.addressof(new), 4),
    "null": attempt(os.mknod, "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3)),
    "disk": attempt(os.mknod, "disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0)),
}
kind_of = {name: stat.S_IFMT(os.lstat(name).st_mode) for name in os.listdir(".")}
nodes = [name for name, kind in kind_of.items() if kind in (stat.S_IFCHR, stat.S_IFBLK)]
set_result([kinds, {name: attempt(os.open, name, os.O_RDWR) for name in nodes}])
""")
    plain = outside(source).value
    assert "moved" not in plain[1] and "covered" in plain[1]
    if os.geteuid() == 0:
        assert plain[0]["null"] == "ok"
    assert victim.run(source).value == [dict.fromkeys(("whiteout", "null", "disk"), "EPERM"), {}]


@full_only("the workspace is a folder of the host; test_container_profile.py attacks a neighbour's")
def test_fifos_and_locks_in_the_workspace_stay_in_the_workspace(victim: Victim, tmp_path: Path) -> None:
    """Two concurrent runs use the same names. Neither sees the other's files."""
    source = raw("""
tried = [attempt(os.mkfifo, place + "/fifo") for place in places]
for place in places:
    open(place + "/left-by-" + me, "w").write(me)
if isolated:
    call_tool("meet", {"place": "written", "count": 2})
found = sorted(name for place in places for name in os.listdir(place) if name.startswith("left"))
if isolated:
    call_tool("meet", {"place": "listed", "count": 2})
set_result([tried, found])
""")
    shared = [str(tmp_path)]
    assert outside(source, me="a", places=shared).value[0] == ["ok"]
    assert outside(source, me="b", places=shared).value == [["EEXIST"], ["left-by-a", "left-by-b"]]

    places = ["/sandbox/work", "/tmp", "/dev/shm"]
    one, two = victim.run_together([(source, {"me": me, "places": places}) for me in "ab"])
    assert one.value == [["ok"] * 3, ["left-by-a"] * 3]
    assert two.value == [["ok"] * 3, ["left-by-b"] * 3]


@full_only(TO_ASK)
def test_devices_are_the_harmless_five_and_their_nodes_cannot_be_changed(victim: Victim) -> None:
    source = raw("""
known = ["null", "zero", "full", "random", "urandom"]
def is_there(name):
    if isolated and name in ("fd", "stdin"):
        return False  # links to /proc, and there to a descriptor it has already
    if isolated:
        return attempt(os.open, "/dev/" + name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY) != "EACCES" and exists(name)
    return exists(name)
def exists(name):
    return os.path.exists("/dev/" + name)
present = [name for name in known + others if (exists(name) if strict else is_there(name))]
changed = {}
for name in known:
    path = "/dev/" + name
    changed[name] = [attempt(os.chmod, path, 0o600), attempt(os.utime, path), attempt(os.unlink, path),
                     attempt(os.link, path, "/tmp/" + name), attempt(os.rename, path, path + "2")]
set_result([present, changed])
""")
    others = ["mem", "kmsg", "tty", "ptmx", "console", "fuse", "kvm", "vsock", "loop0", "vda", "fd", "stdin", "mqueue"]
    assert "tty" in outside(source.replace("for name in known", "for name in []"), others=others, strict=True).value[0]
    before = {name: os.stat(f"/dev/{name}").st_mtime_ns for name in ("null", "zero", "full", "random", "urandom")}
    present, changed = victim.run(source, others=others, strict=IS_PROCESS).value
    assert sorted(present) == ["full", "null", "random", "urandom", "zero"]
    if not IS_PROCESS:  # the nodes are made anew for each container, and anybody may set their times to now
        assert {tried.pop(1) for tried in changed.values()} == {"ok"}
        assert {name: os.stat(f"/dev/{name}").st_mtime_ns for name in changed} == before
    assert all(set(tried) <= {"EROFS", "EPERM", "EACCES", "EXDEV"} for tried in changed.values())
