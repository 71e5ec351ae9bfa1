"""What a guest may see of this machine's files: one interpreter, the libraries it needs, wanted packages.

Makes the `RootPlan`; carries nothing out.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import msgpack

import toolcell_bridge
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import harness, snapshot
from toolcell.sandbox.process.packages import default_cache_dir
from toolcell_bridge.isolation.root import RootPlan
from toolcell_bridge.isolation.walls import GUEST_ID, LINKS, SCRATCH

PACKAGES = "/packages"
HARNESS = "/toolcell"

PASSWD = f"sandbox:x:{GUEST_ID}:{GUEST_ID}::/work:/usr/sbin/nologin\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
GROUP = f"sandbox:x:{GUEST_ID}:\nnobody:x:65534:\n"


@dataclass(frozen=True, slots=True)
class View:
    """A root plan and how to start the interpreter inside it."""

    root: RootPlan
    executable: str
    """The same interpreter on the host, for the launcher."""
    interpreter: str
    sys_path: tuple[str, ...]
    launcher: str
    """Step one of starting, on the host, next to its bytecode."""


@functools.cache
def interpreter_files() -> tuple[Path, Path]:
    """(executable, standard library) of the interpreter behind this one, never a virtual environment's.

    Raises:
        SandboxUnavailable: it cannot be located.
    """
    executable = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    if not executable.is_file() or not (library / "os.py").is_file():
        raise SandboxUnavailable(
            f"the standard library of {executable} is not a plain directory ({library}): a zipped or frozen "
            "interpreter cannot be shown to a guest; use a regular CPython build"
        )
    return executable, library


@functools.cache
def view(packages: Path | None = None, harness_extras: tuple[str, ...] = ()) -> View:
    """What a guest sees; `packages` is a finished package environment.

    Raises:
        SandboxUnavailable: the interpreter or one of its libraries cannot be found, or the cache cannot be written.
    """
    executable, library = interpreter_files()
    taken = snapshot.take(executable, library, packages, default_cache_dir())
    version = library.name
    lib = f"/usr/{sys.platlibdir}/{version}"
    libraries = f"/usr/{snapshot.below_usr(taken.libraries)}"
    half = harness.take(_harness(harness_extras), default_cache_dir())
    binds = [(str(taken.root), "/usr"), (str(half), HARNESS)]
    if packages is not None:
        binds.append((str(packages), PACKAGES))
    loader = os.path.basename(taken.loader)
    links = ((taken.libraries, libraries), (taken.loader, f"{libraries}/{loader}"))
    root = RootPlan(
        binds=tuple(binds),
        files=(("/etc/passwd", PASSWD), ("/etc/group", GROUP), ("/etc/hosts", ""), ("/etc/nsswitch.conf", "")),
        links=(*LINKS, *((old, new) for old, new in links if not old.startswith("/usr/"))),
        directories=(SCRATCH,),
    )
    paths = (lib, f"{lib}/lib-dynload", *((PACKAGES,) if packages is not None else ()), HARNESS)
    return View(root, str(executable), f"/usr/bin/{version}", paths, f"{half}/toolcell_bridge/launcher.py")


def _harness(extras: tuple[str, ...]) -> dict[str, Path]:
    """Name and folder of the packages the guest's own half needs."""
    modules = {"toolcell_bridge": toolcell_bridge, "msgpack": msgpack} | {name: __import__(name) for name in extras}
    return {name: Path(str(module.__file__)).parent for name, module in modules.items()}
