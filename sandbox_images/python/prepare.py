"""Runs once inside an image that is being built: takes away what a sandbox has no use for, and compiles the rest.

A script may not execute programs, so every program but the interpreter goes; libraries stay, for compiled packages.
Standard library only, any CPython from 3.11, any base that has one.
"""

from __future__ import annotations

import compileall
import fnmatch
import os
import py_compile
import shutil
import site
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

PROGRAM_DIRECTORIES = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "usr/games")
INTERPRETERS = ("python3", "python3.[0-9]*[0-9]", "python")

USELESS = (
    "boot", "home", "media", "mnt", "opt/*", "root/.[!.]*", "root/*", "srv", "usr/include", "usr/libexec", "usr/src",
    # Package managers: what they run, know and cache.
    "etc/apt", "etc/apk", "etc/dpkg", "etc/yum*", "etc/debconf.conf", "lib/apk", "usr/lib/apt", "usr/lib/dpkg",
    "usr/lib/*/libapt-*", "usr/lib/rpm", "var/cache/*", "var/lib/*", "var/log/*", "var/backups",
    "var/mail", "var/spool",
    # Perl, logins, services.
    "usr/lib/*/perl*", "usr/lib/perl*", "usr/share/perl*", "etc/perl", "etc/pam*", "etc/security", "usr/lib/*/security",
    "usr/lib/*/libpam*", "etc/shadow*", "etc/gshadow*", "etc/passwd-", "etc/group-", "etc/sub[ug]id*", "etc/cron*",
    "etc/init.d", "etc/rc*.d", "etc/systemd", "etc/default", "etc/skel", "etc/profile*", "etc/bash*", "etc/login.defs",
    "etc/alternatives", "etc/update-motd.d", "etc/logrotate.d", "etc/kernel", "usr/lib/systemd", "usr/lib/udev",
    "usr/lib/init", "usr/lib/tmpfiles.d", "usr/lib/sysusers.d",
    # Papers; licences stay.
    "usr/share/doc/*/[!c]*", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/i18n",
    "usr/local/share/man",
    "usr/share/bash-completion", "usr/share/lintian", "usr/share/bug", "usr/share/debconf", "usr/share/menu",
    "usr/share/common-licenses/*.gz", "usr/share/pixmaps", "usr/share/applications", "usr/share/zsh", "usr/share/dpkg",
    "usr/share/gcc", "usr/share/gdb", "usr/share/apport", "usr/share/python3/runtime.d", "usr/share/python3/debpython",
    "usr/lib/*/gconv", "usr/lib/*/audit", "usr/lib/*/e2fsprogs", "usr/lib/gcc",
)  # fmt: skip
"""Globs below the root. /var/lib/dpkg goes too: what there is to know is in the base image's label and in doc/."""

USELESS_IN_STDLIB = (
    "test", "tests", "*/tests", "*/test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data",
    "config-*",
    "lib-dynload/_tkinter*", "lib-dynload/_test*", "lib-dynload/_ctypes_test*", "lib-dynload/xx*",
    "site-packages/pip*", "site-packages/setuptools*", "site-packages/wheel*", "site-packages/_distutils_hack",
    "site-packages/distutils-precedence.pth", "site-packages/pkg_resources",
)  # fmt: skip

PLACES = ("guest", "packages")
"""Below /usr/lib/toolcell, in the order the interpreter looks: no package can stand in for the guest's own."""

SCRATCH = "sandbox"
"""Where the one writable file system of a container is mounted."""

LINKS = {"work": "/sandbox/work", "tmp": "/sandbox/tmp", "var/tmp": "/sandbox/tmp"} | {
    f"sandbox/{name}": f"/proc/self/fd/4/{name}" for name in ("work", "tmp", "shm")
}
"""The second half is for a container of many sandboxes, where no file system is mounted over it: behind each link a
process finds its own directory, which it keeps open as descriptor 4."""

PASSWD = "root:x:0:0:root:/:/nologin\nnobody:x:65534:65534:nobody:/work:/nologin\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"

KERNELS = ("proc", "sys", "dev")
"""Mounted by the engine while this runs."""


def make_bare(root: Path) -> None:
    """Turn any file system with a Python into a sandbox's: interpreter, libraries, links, nothing to elevate with."""
    find_modules_in(root, Path(site.getsitepackages()[0]))
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in matching(stdlib, USELESS_IN_STDLIB):
        remove(path)
    compile_tree(stdlib)
    keep_interpreter(root)
    for path in matching(root, USELESS):
        remove(path)
    lay_links(root)
    write_identities(root)
    close_permissions(root)


def find_modules_in(root: Path, packages: Path) -> None:
    """Put the places on the interpreter's path, whether there is something in them yet or not."""
    packages.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"/usr/lib/toolcell/{place}\n" for place in PLACES)
    (packages / "toolcell.pth").write_text(lines, encoding="ascii")
    (root / "usr/lib/toolcell").mkdir(parents=True, exist_ok=True)


def keep_interpreter(root: Path) -> None:
    """Remove every program but the interpreter, which is `python3` on the path whatever the base called it."""
    own = Path(os.path.realpath(sys.executable))
    for directory in PROGRAM_DIRECTORIES:
        for path in matching(root / directory, ("*",)):
            if not any(fnmatch.fnmatchcase(path.name, name) for name in INTERPRETERS):
                remove(path)
    if not any((root / place / "python3").exists() for place in ("usr/local/bin", "usr/bin")):
        (root / "usr/bin").mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/python3").symlink_to(own)


def lay_links(root: Path) -> None:
    """Where scripts write, beside the mount that makes it writable."""
    (root / SCRATCH).mkdir(exist_ok=True)
    for name, target in LINKS.items():
        place = root / name
        remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


def write_identities(root: Path) -> None:
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(PASSWD, encoding="ascii")
    (root / "etc/group").write_text(GROUP, encoding="ascii")


def close_permissions(root: Path) -> None:
    """Take set-uid, set-gid and everybody's right to write from every file and directory."""
    for path in walk(root):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if not path.is_symlink() and mode & 0o7022:
            path.chmod(mode & 0o755)


def compile_tree(tree: Path) -> None:
    """Write bytecode that stays valid whatever the files' times become; what does not compile is its own matter."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for cache in list(tree.rglob("__pycache__")):
        remove(cache)
    compileall.compile_dir(tree, quiet=2, workers=0, invalidation_mode=mode)


def matching(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from list(root.glob(pattern))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in KERNELS]
        yield from (Path(folder, name) for name in (*folders, *names))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bare"]:
            make_bare(Path("/"))
        case ["compile", tree]:
            compile_tree(Path(tree))
            close_permissions(Path(tree))
    remove(Path(__file__))
