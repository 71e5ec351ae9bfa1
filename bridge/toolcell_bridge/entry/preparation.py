"""Prepare an interpreter for scripts before the first one runs: descriptors, environment, imports, random state.

Used by both zygotes and by a container with one guest. Libraries are made to do without the system calls that a guest's
filter refuses: many decide what to use when they are imported, which here is before the filter is installed. That is
not isolation: a script may undo it and gains nothing.
"""

from __future__ import annotations

import _random
import fcntl
import importlib
import os
import select
import selectors
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import toolcell_bridge
from toolcell_bridge.guest import errors, surroundings
from toolcell_bridge.isolation.guest_paths import WORKSPACE
from toolcell_bridge.isolation.seccomp_policy import (
    GUEST_POLICY,
    PACKAGES_POLICY,
    PROGRAMS_POLICY,
    SeccompPolicy,
)

BRIDGE = 3
"""Where a guest keeps its bridge: the first descriptor after the standard three."""

INPUT, OUTPUT, ERRORS = 3, 4, 5
"""Where a process in a container keeps its three pipes, out of the way of the standard three."""

FIRST_FREE = 10
"""Descriptors of zygotes and supervisors stay above those that a guest has in place."""

ENVIRONMENT = {"HOME": WORKSPACE, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PATH": "", "TZ": "UTC"}
"""What every script finds set."""

COMMON_MODULES = (
    "asyncio", "json", "re", "datetime", "decimal", "collections", "itertools", "functools", "math",
    "random", "statistics", "string", "textwrap", "typing", "dataclasses", "uuid", "csv", "difflib",
    "traceback",
)  # fmt: skip
"""What scripts import most."""

MERSENNE_WORDS = 624


def move_up(descriptor: int) -> int:
    """Move a descriptor to a number that no guest uses."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
    os.close(descriptor)
    return moved


def occupy_descriptors(last: int) -> None:
    """Open /dev/null on every free descriptor up to `last`, so that nothing else gets these numbers."""
    while os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) < last:
        pass


def set_environment(extra: dict[str, str]) -> None:
    """Replace this process's environment by the one that every script finds, and `extra`."""
    os.environ.clear()
    os.environ.update(ENVIRONMENT | extra)


def preload(names: Iterable[str]) -> dict[str, str]:
    """Import modules by name; returns {name: error} for those that failed."""
    problems = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as exc:
            problems[name] = f"{type(exc).__name__}: {exc}"
    return problems


def preload_all(names: Iterable[str]) -> None:
    """Import modules by name.

    Raises:
        ImportError: names the first module that failed, whatever it raised.
    """
    for name, problem in preload(names).items():
        raise ImportError(f"preloading {name} failed: {problem}")


def reseed() -> None:
    """Give the generators of `random` and of legacy numpy a state that only the next child has.

    Runs before the fork: a child copies each page that it writes to. In the child, numpy's cost 0.2 ms, and 0.5 ms
    with numpy.random.seed().
    """
    if "random" in sys.modules:
        generator = sys.modules["random"]._inst
        _random.Random.seed(
            generator
        )  # this and the next line do what `random.seed()` does, in a third of the page faults
        generator.gauss_next = None
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        key = numpy.frombuffer(os.urandom(MERSENNE_WORDS * 4), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", key, MERSENNE_WORDS, 0, 0.0))


UNBUFFERED = 2
"""_IONBF of glibc and musl."""

SENDMSG = "sendmsg"


def policy_for_imports(*, executes: bool = False) -> SeccompPolicy:
    """Return the filter's policy for what this interpreter can import. `executes`: scripts may execute programs."""
    if executes:
        return PROGRAMS_POLICY
    return PACKAGES_POLICY if has_packages() else GUEST_POLICY


def _own_folders() -> set[str]:
    library = os.path.dirname(os.__file__)
    return {library, os.path.join(library, "lib-dynload"), os.path.dirname(os.path.dirname(toolcell_bridge.__file__))}


@contextmanager
def without_packages() -> Iterator[None]:
    """Import from the standard library and the guest alone.

    The standard library tries to import modules that it need not find, such as `msvcrt`; a package may have one of that
    name, and a zygote is less isolated than a script.
    """
    before, own = sys.path[:], _own_folders()
    sys.path[:] = [path for path in before if path in own]
    try:
        yield
    finally:
        sys.path[:] = before


def has_packages() -> bool:
    """Whether `sys.path` leads to more than the standard library and the guest."""
    known = _own_folders()
    folders = [path for path in sys.path if path and path not in known and os.path.isdir(path)]
    return any(not name.endswith((".pth", ".txt")) for folder in folders for name in os.listdir(folder))


def adapt(policy: SeccompPolicy) -> None:
    """Adapt the standard library to `policy`. Call it before foreign modules are imported, which copy from it."""
    surroundings.install()
    _unbuffer_output()
    setattr(socket.socket, SENDMSG, _Absent(SENDMSG))
    if policy is GUEST_POLICY and hasattr(select, "epoll"):
        # Both modules then choose as where the platform lacks it.
        del select.epoll, selectors.EpollSelector
        selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]
    _unlock_sqlite()


def _unbuffer_output() -> None:
    """Make what C code prints leave the process at once: a sandbox is killed, and its libraries never flush."""
    import ctypes

    library = ctypes.CDLL(None)
    for name in ("stdout", "stderr"):
        library.setvbuf(ctypes.c_void_p.in_dll(library, name), None, UNBUFFERED, ctypes.c_size_t(0))


class _Absent:
    """A method that an object does not have. `hasattr` is False, as where the platform lacks it; asyncio asks that."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None and sys._getframe(1).f_globals.get("__name__") == "trio._socket":
            return errors.refuse  # trio wraps the method when it is imported
        raise AttributeError(f"{owner.__name__}.{self._name} is not available in a sandbox; use send or sendall")


def _unlock_sqlite() -> None:
    """Make SQLite's lock-free file access the default: seccomp refuses record locks, which other runs could see.

    Nobody else can open a sandbox's database, so nothing is lost. Does nothing where SQLite is not a shared library.
    """
    import ctypes

    try:
        library = ctypes.CDLL("libsqlite3.so.0")
        library.sqlite3_vfs_find.restype = ctypes.c_void_p
        library.sqlite3_vfs_register.argtypes = (ctypes.c_void_p, ctypes.c_int)
        library.sqlite3_initialize()
        if found := library.sqlite3_vfs_find(b"unix-none"):
            library.sqlite3_vfs_register(found, 1)
    except (OSError, AttributeError):
        return
