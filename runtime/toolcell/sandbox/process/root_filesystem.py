"""Plan the root file system of a guest: one interpreter, the libraries it needs, the guest package, wanted packages.

Builds what has to be built in the cache and returns a `RootPlan`. The launcher mounts it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import msgpack

import toolcell_bridge
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import guest_package, interpreter_copy
from toolcell.sandbox.process.packages import default_cache_dir, private_directory
from toolcell_bridge.isolation.apply import GUEST_ID, LINKS, SCRATCH
from toolcell_bridge.isolation.root import RootPlan

PACKAGES = "/packages"
GUEST_PACKAGE = "/toolcell"

PASSWD = f"sandbox:x:{GUEST_ID}:{GUEST_ID}::/work:/usr/sbin/nologin\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
GROUP = f"sandbox:x:{GUEST_ID}:\nnobody:x:65534:\n"


@dataclass(frozen=True, slots=True)
class RootFilesystem:
    """A root plan, and how to start the interpreter inside it."""

    root: RootPlan
    executable: str
    """The same interpreter on the host, for the launcher."""
    interpreter: str
    sys_path: tuple[str, ...]
    launcher: str
    """Path of the launcher script on the host, next to its bytecode."""


@dataclass(frozen=True, slots=True)
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
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", ASK], capture_output=True, text=True, check=True, timeout=30, env={}
        )
        executable, library, platlibdir, (major, minor), implementation = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as exc:
        raise SandboxUnavailable(f"{python!r} does not run as a Python interpreter: {exc}") from exc
    return executable, library, platlibdir, (major, minor), implementation


@functools.cache
def build(packages: Path | None = None, extras: tuple[str, ...] = (), python: str | None = None) -> RootFilesystem:
    """Build the root file system of a guest.

    `packages` is a finished package environment. `extras` names modules of the host's interpreter that go into the
    guest package.

    Raises:
        SandboxUnavailable: the interpreter or one of its libraries cannot be found, or the cache cannot be written.
    """
    own = interpreter(python)
    # The files here run as this user: refuse a directory in which others could place some.
    cache = private_directory(default_cache_dir())
    copy = interpreter_copy.build(own.executable, own.library, own.platlibdir, packages, _compiled(), cache)
    version = own.library.name
    lib = f"/usr/{own.platlibdir}/{version}"
    libraries = f"/usr/{interpreter_copy.below_usr(copy.libraries)}"
    guest = guest_package.build(_guest_modules(extras), cache)
    binds = [(str(copy.root), "/usr"), (str(guest), GUEST_PACKAGE)]
    if packages is not None:
        binds.append((str(packages), PACKAGES))
    loader = os.path.basename(copy.loader)
    links = ((copy.libraries, libraries), (copy.loader, f"{libraries}/{loader}"))
    root = RootPlan(
        binds=tuple(binds),
        files=(("/etc/passwd", PASSWD), ("/etc/group", GROUP), ("/etc/hosts", ""), ("/etc/nsswitch.conf", "")),
        links=(*LINKS, *((old, new) for old, new in links if not old.startswith("/usr/"))),
        directories=(SCRATCH,),
    )
    paths = (lib, f"{lib}/lib-dynload", *((PACKAGES,) if packages is not None else ()), GUEST_PACKAGE)
    return RootFilesystem(
        root, str(own.executable), f"/usr/bin/{version}", paths, f"{guest}/toolcell_bridge/entry/launcher.py"
    )


def _compiled() -> list[Path]:
    """List the extension modules of the guest package. Without their libraries msgpack falls back to Python code."""
    return interpreter_copy.shared_objects(Path(msgpack.__file__).parent)


def _guest_modules(extras: tuple[str, ...]) -> dict[str, Path]:
    """Return name and folder of each package that goes into the guest package."""
    modules = {"toolcell_bridge": toolcell_bridge, "msgpack": msgpack} | {name: __import__(name) for name in extras}
    return {name: Path(str(module.__file__)).parent for name, module in modules.items()}
