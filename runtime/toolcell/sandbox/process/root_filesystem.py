"""Plan the root file system of a guest: one interpreter, the libraries it needs, the guest package, wanted packages.

Builds what has to be built in the cache and returns a `RootPlan`. The launcher mounts it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import guest_copies, programs
from toolcell.sandbox.process.cache import default_cache_dir, private_directory
from toolcell.sandbox.process.guest_copies import InterpreterCopy
from toolcell_bridge.isolation.guest_paths import GROUP, GUEST_ID, IDENTITY_LINKS, LINKS, PASSWD, SCRATCH
from toolcell_bridge.wire.frozen import frozen

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
    copy = guest_copies.interpreter_copy(own.executable, own.library, own.platlibdir, packages, _compiled(), cache)
    modules = {name: _folder_of(name) for name in ("toolcell_bridge", "msgpack", *extras)}
    return GuestParts(own, copy, guest_copies.guest_copy(modules, cache), packages)


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
    libraries = f"/usr/{guest_copies.below_usr(copy.libraries)}"
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
    libraries = f"{usr}/{guest_copies.below_usr(made.copy.libraries)}"
    loader = f"{libraries}/{os.path.basename(made.copy.loader)}"
    shared = (str(path) for path in (guest_copies.ZONES, *guest_copies.LOCALES))
    return InPlace(
        command=(loader, "--library-path", libraries, f"{usr}/bin/{made.own.library.name}"),
        home=usr,
        sys_path=made.sys_path(usr, str(packages), guest),
        readable=(usr, guest, *((str(packages),) if packages is not None else ()), *shared),
    )


def _compiled() -> list[Path]:
    """List the extension modules of the guest package. Without their libraries msgpack falls back to Python code."""
    return guest_copies.shared_objects(Path(msgpack.__file__).parent)


def _folder_of(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SandboxUnavailable(f"{name} cannot be found next to toolcell; install toolcell again")
    return Path(spec.origin).parent
