"""What a guest may see of this machine's files: one interpreter, the libraries it needs, wanted packages.

Makes the `RootPlan`; carries nothing out.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack

import toolcell_bridge
from toolcell.errors import SandboxUnavailable
from toolcell_bridge.isolation import elf
from toolcell_bridge.isolation.root import RootPlan
from toolcell_bridge.isolation.walls import GUEST_ID, LINKS, SCRATCH

PACKAGES = "/packages"
HARNESS = "/toolcell"

PASSWD = f"sandbox:x:{GUEST_ID}:{GUEST_ID}::/work:/usr/sbin/nologin\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
GROUP = f"sandbox:x:{GUEST_ID}:\nnobody:x:65534:\n"
USELESS = frozenset({"_tkinter", "nis", "ossaudiodev"})
"""Extension modules for a screen, a network directory and a sound card: what they need is not brought in."""

ZONES = "/usr/share/zoneinfo"


@dataclass(frozen=True, slots=True)
class View:
    """A root plan and how to start the interpreter inside it."""

    root: RootPlan
    executable: str
    """The same interpreter on the host, for the launcher."""
    interpreter: str
    sys_path: tuple[str, ...]


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
def _shared_objects(folder: Path) -> tuple[Path, ...]:
    """Every extension module and bundled library below `folder`, but for those no sandbox has a use for."""
    found = (path for path in folder.rglob("*.so*") if path.is_file())
    return tuple(sorted(path for path in found if path.name.partition(".")[0] not in USELESS))


@functools.cache
def view(packages: Path | None = None, harness_extras: tuple[str, ...] = ()) -> View:
    """What a guest sees; `packages` is a finished package environment.

    Raises:
        SandboxUnavailable: the interpreter or one of its libraries cannot be found.
    """
    executable, library = interpreter_files()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lib = f"/usr/{sys.platlibdir}/{version}"
    interpreter = f"/usr/bin/{version}"
    objects = [executable, *_shared_objects(library / "lib-dynload")]
    objects += _harness_objects()
    if packages is not None:
        objects += _shared_objects(packages)
    binds = [(str(executable), interpreter), (str(library), lib), *library_binds(objects, packages)]
    binds += [(folder, f"{HARNESS}/{name}") for name, folder in _harness_folders(harness_extras)]
    if os.path.isdir(ZONES):
        binds.append((ZONES, ZONES))
    if packages is not None:
        binds.append((str(packages), PACKAGES))
    masked = ("site-packages", "dist-packages")
    root = RootPlan(
        binds=tuple(binds),
        masks=tuple(f"{lib}/{name}" for name in masked if (library / name).is_dir()),
        files=(("/etc/passwd", PASSWD), ("/etc/group", GROUP), ("/etc/hosts", ""), ("/etc/nsswitch.conf", "")),
        links=LINKS,
        directories=(SCRATCH,),
    )
    paths = (lib, f"{lib}/lib-dynload", *((PACKAGES,) if packages is not None else ()), HARNESS)
    return View(root, str(executable), interpreter, paths)


def library_binds(objects: Iterable[Path], inside: Path | None = None) -> list[tuple[str, str]]:
    """Binds for the loader and every shared library `objects` need, all in the loader's default directory.

    One directory, because a library found through a run path of the host would have no such path inside. Libraries
    below `inside` come along with their package, which finds them by a path relative to itself.
    """
    try:
        closure = elf.closure(objects)
    except (OSError, ValueError) as exc:
        raise SandboxUnavailable(f"the interpreter's shared libraries cannot be resolved: {exc}") from exc
    libc = next((path for soname, path in closure.libs.items() if soname.startswith("libc.so")), None)
    if libc is None or closure.interp is None:
        raise SandboxUnavailable("the interpreter is not a dynamic executable of a glibc system")
    home = os.path.dirname(libc)
    binds = [(os.path.realpath(closure.interp), str(closure.interp))]
    binds += [(os.path.realpath(path), f"{home}/{soname}") for soname, path in sorted(closure.libs.items())]
    return [(source, target) for source, target in binds if inside is None or not source.startswith(f"{inside}/")]


def _harness_folders(extras: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name, folder) of the modules the guest's own half needs."""
    folders = [
        ("toolcell_bridge", os.path.dirname(toolcell_bridge.__file__)),
        ("msgpack", os.path.dirname(msgpack.__file__)),
    ]
    for name in extras:
        module = __import__(name)
        folders.append((name, os.path.dirname(str(module.__file__))))
    return folders


def _harness_objects() -> list[Path]:
    return list(_shared_objects(Path(msgpack.__file__).parent))
