"""Plan the root file system of a guest: one interpreter, the libraries it needs, the guest package, wanted packages.

Builds what has to be built in the cache and returns a `RootPlan`. The launcher mounts it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import programs
from toolcell.sandbox.process.cache import (
    copy_file,
    default_cache_dir,
    entry_key,
    facts_of,
    made_entry,
    private_directory,
)
from toolcell.sandbox.process.libraries import libraries_of, needed_by
from toolcell.support.files import link_or_copy
from toolcell_bridge.isolation.guest_paths import GROUP, GUEST_ID, IDENTITY_LINKS, LINKS, PASSWD, SCRATCH
from toolcell_bridge.wire.frozen import frozen

# Copies for guests, made once: of an interpreter, seen as /usr without the path it came from, and of the guest.
#
# An interpreter carries the path it was built or installed under in its compiled modules, its build settings and its
# own binary, and that path often names a person. The copy replaces the private part of the path by one of the same
# length. The copy is also one directory: binding each shared library would make the mount namespace of every sandbox
# five times as large.


FORMAT = 7
"""Part of the key: goes up when the content of a copy changes."""

LEFT_OUT = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3",
})  # fmt: skip
"""Folders of the standard library that are of no use without screen, pip and test suite."""

USELESS = ("_tkinter", "nis", "ossaudiodev", "_test", "_ctypes_test", "xxlimited")
"""Extension modules for a screen, a network directory, a sound card and the test suite."""

LIBRARY = re.compile(r"\.so(\.\d+)*$")
"""The end of a library's name. pyarrow brings a file called `x.some-named-index.parquet`."""

PUBLIC = b"/usr"
ZONES = Path("/usr/share/zoneinfo")
LOCALES = (Path("/usr/lib/locale/C.utf8"), Path("/usr/lib/locale/C.UTF-8"))
"""The locale that scripts are set to, by the names that distributions give it."""
OPENED_BY_NAME = ("libgcc_s.so.1", "libstdc++.so.6")
"""Libraries that the interpreter does not link and compiled packages need."""


@frozen
class InterpreterCopy:
    """Where the copy is, and where its parts belong."""

    root: Path
    """To be seen as /usr."""
    libraries: str
    """The loader's own directory; it searches below it for everything: /lib/x86_64-linux-gnu."""
    loader: str
    """Where programs expect the loader: /lib64/ld-linux-x86-64.so.2."""


def interpreter_copy(
    executable: Path, library: Path, platlibdir: str, packages: Path | None, extensions: Sequence[Path], cache: Path
) -> InterpreterCopy:
    """Return a copy of an interpreter with the system libraries that it, `packages` and `extensions` need.

    A copy for `packages` consists of hard links to the one without, and of the libraries that only they need.

    Raises:
        SandboxUnavailable: the cache cannot be written, or a library cannot be found.
    """
    base = interpreter_copy(executable, library, platlibdir, None, extensions, cache) if packages is not None else None
    target = cache / "interpreters" / _key(executable, library, packages, extensions)

    def fill(building: Path) -> None:
        if base is not None:
            shutil.copytree(base.root, building / "usr", copy_function=link_or_copy)
        compiled = [*(shared_objects(packages) if packages is not None else ()), *extensions]
        manifest = _fill(building, executable, library, platlibdir, compiled)
        manifest |= {"python": f"Python {library.name.removeprefix('python')}"}
        manifest |= {"packages": str(packages)} if packages is not None else {}
        (building / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    made_entry(target, "the copy of the interpreter", fill)
    try:
        manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    except OSError as exc:
        raise SandboxUnavailable(f"the copy of the interpreter {target} cannot be read: {exc}") from exc
    return InterpreterCopy(target / "usr", manifest["libraries"], manifest["loader"])


def _key(executable: Path, library: Path, packages: Path | None, extensions: Sequence[Path]) -> str:
    """Return a key that changes with the interpreter, the system's libraries and the wanted packages."""
    watched = [
        executable,
        library,
        library / "lib-dynload",
        library / "os.py",
        Path("/etc/ld.so.cache"),
        ZONES,
        *LOCALES,
        *extensions,
        *((packages,) if packages is not None else ()),
    ]
    return entry_key([FORMAT, str(packages), sys.version, *facts_of(watched)])


def _fill(building: Path, executable: Path, library: Path, platlibdir: str, compiled: Sequence[Path]) -> dict[str, str]:
    # The parent of the installation: the linker may have merged the installation's own name with a version string.
    scrub = functools.partial(_scrub, private=str(library.parent.parent.parent).encode())
    version = library.name
    for source in _standard_library(library):
        _copy(source, building / "usr" / platlibdir / version / source.relative_to(library), scrub)
    _copy(executable, building / "usr" / "bin" / version, scrub)
    # A library inside a package is found there, by a path relative to the package.
    names = needed_by(compiled) - {path.name for path in compiled}
    needed = libraries_of(executable, shared_objects(library / "lib-dynload"), names.union(OPENED_BY_NAME))
    libraries, loader = _loader_home(needed)
    for soname, path in needed.items():
        _copy(Path(os.path.realpath(path)), building / "usr" / below_usr(libraries) / soname, scrub)
    for folder in (ZONES, *LOCALES):
        for source in folder.rglob("*"):
            if source.is_file() and "posix" not in source.parts and "right" not in source.parts:
                _copy(source, building / "usr" / below_usr(str(source)), None)
    return {"libraries": libraries, "loader": loader}


def _standard_library(library: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        for name in names:
            if ".opt-" in name or name.endswith((".a", ".exe")) or name.startswith(USELESS):
                continue
            yield Path(folder, name)


def _copy(source: Path, target: Path, scrub: functools.partial[bytes] | None) -> None:
    if target.exists():  # a link to the copy without packages
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    target.write_bytes(data if scrub is None else scrub(data))
    # A compiled module is valid for the time and size of its source.
    status = source.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.chmod(target, 0o555 if status.st_mode & 0o100 else 0o444)


def _scrub(data: bytes, private: bytes) -> bytes:
    """Replace every occurrence of a private path by a public one of the same length."""
    if private == PUBLIC or len(private) < len(PUBLIC):
        return data
    rest = len(private) - len(PUBLIC)
    public = PUBLIC + (b"/" if rest % 2 else b"") + b"/." * (rest // 2)
    return data.replace(private, public)


def below_usr(path: str) -> str:
    """Return the place of a system path inside the copy, where /lib/x and /usr/lib/x are the same."""
    return path.removeprefix("/usr").lstrip("/")


def shared_objects(folder: Path) -> list[Path]:
    """List the extension modules and bundled libraries below `folder` that a sandbox may need."""
    found = (path for path in folder.rglob("*.so*") if LIBRARY.search(path.name))
    return sorted(path for path in found if not path.name.startswith(USELESS))


def _loader_home(found: Mapping[str, Path]) -> tuple[str, str]:
    """Return the directory that the loader searches by default, where libc is, and the loader's own path."""
    libc = next((path for soname, path in found.items() if soname.startswith("libc.so")), None)
    if libc is None:
        raise SandboxUnavailable("the interpreter is not a dynamic executable of a glibc system")
    return os.path.dirname(libc), str(next(iter(found.values())))


# Build the guest package: one directory with everything a guest imports from us, compiled to bytecode.
#
# A guest cannot write bytecode. Without it every cold start compiles the same modules again: 45 ms where the host's
# copy has none, as in an editable install. One directory is also one mount instead of three.

GUEST_FORMAT = 1
"""Part of the key: goes up when the content of the directory changes."""

SUFFIXES = (".py", ".so")


def guest_copy(packages: Mapping[str, Path], cache: Path) -> Path:
    """Return a directory with these packages and their bytecode. It is built once for each version of their files.

    Raises:
        SandboxUnavailable: the cache cannot be written.
    """
    sources = {
        name: sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
        for name, folder in sorted(packages.items())
    }
    facts = facts_of(path for paths in sources.values() for path in paths)
    entry = cache / "guest" / entry_key([GUEST_FORMAT, sys.version, *facts])
    return made_entry(entry, "the guest package", lambda building: _fill_guest(building, packages, sources))


def _fill_guest(building: Path, packages: Mapping[str, Path], sources: Mapping[str, list[Path]]) -> None:
    import compileall  # only where there is no copy yet
    import py_compile

    for name, paths in sources.items():
        for path in paths:
            copy_file(
                path, building / name / path.relative_to(packages[name]), 0o555 if path.suffix == ".so" else 0o444
            )
    # Unchecked: nobody changes this copy, and a check is a system call per module.
    how = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(building, quiet=2, stripdir=str(building), prependdir="/toolcell", invalidation_mode=how)


PACKAGES = "/packages"
GUEST_PACKAGE = "/toolcell"


@frozen
class RootPlan:
    """What the new root holds. Every path is absolute; targets are paths inside the new root."""

    binds: tuple[tuple[str, str], ...] = ()
    """(source on the host, target). Files and directories, read-only, nosuid, nodev."""

    files: tuple[tuple[str, str], ...] = ()
    """(target, text) of small files written into the root itself."""

    links: tuple[tuple[str, str], ...] = ()
    """(target, where it points)."""

    directories: tuple[str, ...] = ()
    """Empty directories: mount points for what each sandbox brings."""


@frozen
class RootFilesystem:
    """A root plan, and how to start the interpreter inside it."""

    root: RootPlan
    executable: str
    """The same interpreter on the host, for the launcher."""
    interpreter: str
    sys_path: tuple[str, ...]
    launcher: str
    """Path of the launcher script on the host, next to its bytecode."""
    loader: str
    """The dynamic loader, inside: the kernel executes it for each program."""


@frozen
class Interpreter:
    """A CPython of this machine."""

    executable: Path
    library: Path
    """Its standard library."""
    platlibdir: str
    """The folder below the prefix that holds it: lib, on some systems lib64."""


ASK = """\
import json, os, sys, sysconfig
print(json.dumps([os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
                  sysconfig.get_path("stdlib"), sys.platlibdir, list(sys.version_info[:2]), sys.implementation.name]))
"""


@functools.cache
def interpreter(python: str | None = None) -> Interpreter:
    """Find the interpreter behind `python`, or behind this process. A virtual environment is resolved to its base.

    Raises:
        SandboxUnavailable: it cannot be located, or is not a CPython that guests can use.
    """
    if python is None:
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        library, platlibdir = sysconfig.get_path("stdlib"), sys.platlibdir
        version, implementation = sys.version_info[:2], sys.implementation.name
    else:
        executable, library, platlibdir, version, implementation = _ask(python)
    if implementation != "cpython" or version < (3, 11):
        raise SandboxUnavailable(f"{python} is {implementation} {version}; guests need CPython 3.11 or newer")
    if not os.path.isfile(executable) or not os.path.isfile(os.path.join(library, "os.py")):
        raise SandboxUnavailable(
            f"the standard library of {executable} is not a plain directory ({library}): a zipped or frozen "
            "interpreter cannot be shown to a guest; use a regular CPython build"
        )
    return Interpreter(Path(executable), Path(library), platlibdir)


def _ask(python: str) -> tuple[str, str, str, tuple[int, int], str]:
    named = os.fspath(python)
    if os.sep not in named and (found := shutil.which(named)) is not None:
        python = found
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", ASK], capture_output=True, text=True, check=True, timeout=30, env={}
        )
        executable, library, platlibdir, (major, minor), implementation = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise SandboxUnavailable(f"{python!r} does not run as a Python interpreter: {exc}") from exc
    return executable, library, platlibdir, (major, minor), implementation


@frozen
class GuestParts:
    """The directories in the cache that a guest is made from."""

    own: Interpreter
    copy: InterpreterCopy
    guest: Path
    packages: Path | None

    def sys_path(self, usr: str, packages: str, guest: str) -> tuple[str, ...]:
        """Return the guest's module path, given where it sees each part. No package replaces a module of the guest."""
        library = f"{usr}/{self.own.platlibdir}/{self.own.library.name}"
        return library, f"{library}/lib-dynload", guest, *((packages,) if self.packages is not None else ())


@functools.cache
def parts(packages: Path | None = None, extras: tuple[str, ...] = (), python: str | None = None) -> GuestParts:
    """Build what a guest is made from, or find it in the cache.

    `packages` is a finished package environment. `extras` names modules of the host's interpreter that go into the
    guest package.

    Raises:
        SandboxUnavailable: the interpreter or one of its libraries cannot be found, or the cache cannot be written.
    """
    own = interpreter(python)
    # The files here run as this user: refuse a directory in which others could place some.
    cache = private_directory(default_cache_dir())
    copy = interpreter_copy(own.executable, own.library, own.platlibdir, packages, _compiled(), cache)
    modules = {name: _folder_of(name) for name in ("toolcell_bridge", "msgpack", *extras)}
    return GuestParts(own, copy, guest_copy(modules, cache), packages)


@functools.cache
def build(
    packages: Path | None = None, extras: tuple[str, ...] = (), python: str | None = None, shell: bool = False
) -> RootFilesystem:
    """Build the root file system of a guest from its `parts`. `shell`: with programs that scripts may execute.

    Raises:
        SandboxUnavailable: as `parts`.
    """
    made = parts(packages, extras, python)
    own, copy, guest = made.own, made.copy, made.guest
    libraries = f"/usr/{below_usr(copy.libraries)}"
    binds = [(str(copy.root), "/usr"), (str(guest), GUEST_PACKAGE)]
    if packages is not None:
        binds.append((str(packages), PACKAGES))
    executable = f"/usr/bin/{own.library.name}"
    if shell:
        binds.append((str(programs.build(private_directory(default_cache_dir()), executable)), programs.PROGRAMS))
    loader = os.path.basename(copy.loader)
    links = ((copy.libraries, libraries), (copy.loader, f"{libraries}/{loader}"))
    # An ordinary user has one id for all sandboxes, so one passwd and group; `id_block` in zygote.py says the same.
    has_own_ids = os.geteuid() == 0
    identity = () if has_own_ids else (("/etc/passwd", PASSWD.format(GUEST_ID)), ("/etc/group", GROUP.format(GUEST_ID)))
    root = RootPlan(
        binds=tuple(binds),
        files=(("/etc/hosts", ""), ("/etc/nsswitch.conf", ""), *identity),
        links=(
            *LINKS,
            *(IDENTITY_LINKS if has_own_ids else ()),
            # Programs start others by these paths: `#!/bin/sh`, system() of C.
            *((("/bin", f"{programs.PROGRAMS}/bin"),) if shell else ()),
            *((old, new) for old, new in links if not old.startswith("/usr/")),
        ),
        directories=(SCRATCH,),
    )
    return RootFilesystem(
        root,
        str(own.executable),
        interpreter=executable,
        sys_path=made.sys_path("/usr", PACKAGES, GUEST_PACKAGE),
        launcher=f"{guest}/toolcell_bridge/entry/launcher.py",
        loader=f"{libraries}/{loader}",
    )


@frozen
class InPlace:
    """How to start the interpreter of a guest that sees the host's file system."""

    command: tuple[str, ...]
    home: str
    """Its prefix."""
    sys_path: tuple[str, ...]
    readable: tuple[str, ...]
    """All that a script may read."""


def in_place(packages: Path | None = None, extras: tuple[str, ...] = (), python: str | None = None) -> InPlace:
    """Use the `parts` of a guest where they are in the cache.

    Raises:
        SandboxUnavailable: as `parts`.
    """
    made = parts(packages, extras, python)
    usr, guest = str(made.copy.root), str(made.guest)
    libraries = f"{usr}/{below_usr(made.copy.libraries)}"
    loader = f"{libraries}/{os.path.basename(made.copy.loader)}"
    shared = (str(path) for path in (ZONES, *LOCALES))
    return InPlace(
        command=(loader, "--library-path", libraries, f"{usr}/bin/{made.own.library.name}"),
        home=usr,
        sys_path=made.sys_path(usr, str(packages), guest),
        readable=(usr, guest, *((str(packages),) if packages is not None else ()), *shared),
    )


def _compiled() -> list[Path]:
    """List the extension modules of the guest package. Without their libraries msgpack falls back to Python code."""
    return shared_objects(Path(msgpack.__file__).parent)


def _folder_of(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SandboxUnavailable(f"{name} cannot be found next to toolcell; install toolcell again")
    return Path(spec.origin).parent
