"""Remove what a sandbox does not need from an image, and compile the rest. Runs once, inside the image's build.

A script may not execute programs, so every program except the interpreter is removed. Libraries stay, for compiled
packages. Uses the standard library only, and works with CPython 3.11 or newer on any base image.
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

UNUSED = (
    "boot", "home", "media", "mnt", "opt/*", "root/.[!.]*", "root/*", "srv", "usr/include", "usr/libexec", "usr/src",
    # Package managers: programs, data and caches.
    "etc/apt", "etc/apk", "etc/dpkg", "etc/yum*", "etc/debconf.conf", "lib/apk", "usr/lib/apt", "usr/lib/dpkg",
    "usr/lib/*/libapt-*", "usr/lib/rpm", "var/cache/*", "var/lib/*", "var/log/*", "var/backups",
    "var/mail", "var/spool",
    # Perl, logins, services.
    "usr/lib/*/perl*", "usr/lib/perl*", "usr/share/perl*", "etc/perl", "etc/pam*", "etc/security", "usr/lib/*/security",
    "usr/lib/*/libpam*", "etc/shadow*", "etc/gshadow*", "etc/passwd-", "etc/group-", "etc/sub[ug]id*", "etc/cron*",
    "etc/init.d", "etc/rc*.d", "etc/systemd", "etc/default", "etc/skel", "etc/profile*", "etc/bash*", "etc/login.defs",
    "etc/alternatives", "etc/update-motd.d", "etc/logrotate.d", "etc/kernel", "usr/lib/systemd", "usr/lib/udev",
    "usr/lib/init", "usr/lib/tmpfiles.d", "usr/lib/sysusers.d",
    # Documentation; licences stay.
    "usr/share/doc/*/[!c]*", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/i18n",
    "usr/local/share/man",
    "usr/share/bash-completion", "usr/share/lintian", "usr/share/bug", "usr/share/debconf", "usr/share/menu",
    "usr/share/common-licenses/*.gz", "usr/share/pixmaps", "usr/share/applications", "usr/share/zsh", "usr/share/dpkg",
    "usr/share/gcc", "usr/share/gdb", "usr/share/apport", "usr/share/python3/runtime.d", "usr/share/python3/debpython",
    "usr/lib/*/gconv", "usr/lib/*/audit", "usr/lib/*/e2fsprogs", "usr/lib/gcc",
)  # fmt: skip
"""Globs below the root. /var/lib/dpkg is removed too: the label of the base image and doc/ list the packages."""

UNUSED_IN_STDLIB = (
    "test", "tests", "*/tests", "*/test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data",
    "config-*",
    "lib-dynload/_tkinter*", "lib-dynload/_test*", "lib-dynload/_ctypes_test*", "lib-dynload/xx*",
    "site-packages/pip*", "site-packages/setuptools*", "site-packages/wheel*", "site-packages/_distutils_hack",
    "site-packages/distutils-precedence.pth", "site-packages/pkg_resources",
)  # fmt: skip

MODULE_FOLDERS = ("guest", "packages")
"""Folders below /usr/lib/toolcell, in the order of the search path: no package can replace a module of the guest."""

SCRATCH = "sandbox"
"""Mount point of a container's one writable file system."""

LINKS = {"work": "/sandbox/work", "tmp": "/sandbox/tmp", "var/tmp": "/sandbox/tmp"}

PASSWD = "root:x:0:0:root:/:/nologin\nnobody:x:65534:65534:nobody:/work:/nologin\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"

KERNELS = ("proc", "sys", "dev")
"""Mounted by the engine while this runs."""


LISTED = Path("/toolcell-programs.txt")
"""In the image of a shell: the names of the programs that stay, one in a line."""

ALTERNATIVES = {"sh": ("dash", "bash"), "awk": ("mawk", "gawk")}
"""What a package's maintainer script would have linked."""


def make_bare(root: Path, programs: Iterable[str] = ()) -> None:
    """Reduce a file system with a Python to a sandbox's: interpreter, libraries and links, without set-uid files.

    `programs`: names of those that stay.
    """
    add_search_path(root, Path(site.getsitepackages()[0]))
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in matching(stdlib, UNUSED_IN_STDLIB):
        remove(path)
    compile_tree(stdlib)
    keep_programs(root, frozenset(programs))
    for path in matching(root, UNUSED):
        remove(path)
    make_links(root)
    write_identities(root)
    close_permissions(root)


def add_search_path(root: Path, packages: Path) -> None:
    """Put `MODULE_FOLDERS` on the interpreter's search path, also those that are still empty."""
    packages.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"/usr/lib/toolcell/{folder}\n" for folder in MODULE_FOLDERS)
    (packages / "toolcell.pth").write_text(lines, encoding="ascii")
    (root / "usr/lib/toolcell").mkdir(parents=True, exist_ok=True)


def keep_programs(root: Path, programs: frozenset[str]) -> None:
    """Remove every program except the interpreter and `programs`, and make it available as `python3`."""
    own = Path(os.path.realpath(sys.executable))
    kept = programs | {each for name in programs for each in ALTERNATIVES.get(name, ())}
    for directory in PROGRAM_DIRECTORIES:
        for path in matching(root / directory, ("*",)):
            if path.name not in kept and not any(fnmatch.fnmatchcase(path.name, name) for name in INTERPRETERS):
                remove(path)
    for name in sorted(programs & ALTERNATIVES.keys()):
        link_alternative(root, name)
    if not any((root / folder / "python3").exists() for folder in ("usr/local/bin", "usr/bin")):
        (root / "usr/bin").mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/python3").symlink_to(own)


def link_alternative(root: Path, name: str) -> None:
    """Make `name` a link to a program that is there: links through /etc/alternatives break when that is removed."""
    for other in ALTERNATIVES[name]:
        if (root / "usr/bin" / other).is_file():
            remove(root / "usr/bin" / name)
            (root / "usr/bin" / name).symlink_to(other)
            return


def make_links(root: Path) -> None:
    """Make the mount point and the links that lead to writable directories."""
    (root / SCRATCH).mkdir(exist_ok=True)
    for name, target in LINKS.items():
        link = root / name
        remove(link)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def write_identities(root: Path) -> None:
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(PASSWD, encoding="ascii")
    (root / "etc/group").write_text(GROUP, encoding="ascii")


def close_permissions(root: Path) -> None:
    """Remove set-uid, set-gid and the write permission of group and others from every file and directory."""
    for path in walk(root):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if not path.is_symlink() and mode & 0o7022:
            path.chmod(mode & 0o755)


def compile_tree(tree: Path) -> None:
    """Write bytecode that does not depend on file times. Files that do not compile are skipped."""
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
        case ["shell"]:
            make_bare(Path("/"), LISTED.read_text(encoding="ascii").split())
            remove(LISTED)
        case ["compile", tree]:
            compile_tree(Path(tree))
            close_permissions(Path(tree))
    remove(Path(__file__))
