"""Containers whose host process is gone: telling whose they are, and removing them.

Three nets, each for what the one before lets through. A guest ends when the stream from its host does; a watcher
process removes what its host left when it was killed, also in the middle of creating; and whoever opens a backend next
removes what dead hosts of this machine left when the watcher was killed too. Imports the SDK only when there is
something to remove: a watcher that waits must weigh nothing.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

LABEL_HOST = "io.toolcell.host"
"""Who made the container, as `HostIdentity` writes itself."""

LABEL_BACKEND = "io.toolcell.backend"
"""Which backend of that process."""

PASSED_ON = (
    "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONFIG", "HOME", "PATH", "LANG", "SSH_AUTH_SOCK",
    "XDG_RUNTIME_DIR",
)  # fmt: skip

SWEEP_EVERY_S = 0.25
SWEEPS_EMPTY = 12
"""Looks in a row that must find nothing: a daemon may still be making what its client was killed asking for."""

SWEEP_AT_MOST_S = 60.0
END_S = 5.0


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """A process, told apart from any other that ever had its pid."""

    machine: str
    boot: str
    pid_namespace: int
    pid: int
    started: int
    """Clock ticks after boot."""

    def __str__(self) -> str:
        return f"{self.machine}:{self.boot}:{self.pid_namespace}:{self.pid}:{self.started}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a label; None when it is not one of ours."""
        parts = text.split(":")
        if len(parts) != 5:
            return None
        try:
            return cls(parts[0], parts[1], int(parts[2]), int(parts[3]), int(parts[4]))
        except ValueError:
            return None


def own_identity() -> HostIdentity:
    """Who this process is. Fields that this system does not tell are empty, and then nobody is judged by them."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    machine = _line("/etc/machine-id")
    return HostIdentity(
        machine, _line("/proc/sys/kernel/random/boot_id"), namespace, os.getpid(), start_time(os.getpid()) or 0
    )


def start_time(pid: int) -> int | None:
    """When `pid` began, in clock ticks after boot; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The name in parentheses may hold anything, parentheses too.
            return int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_dead(
    host: HostIdentity, me: HostIdentity, *, is_local: bool, started: Callable[[int], int | None] = start_time
) -> bool:
    """True when `host` is certainly gone. Another machine's, another container's: nobody here can tell.

    `is_local`: the daemon is on this machine, so an earlier boot of this machine is what a foreign boot id means.
    """
    if not me.boot or not host.boot:
        return False
    if host.boot != me.boot:
        return is_local and bool(me.machine) and host.machine == me.machine
    if not me.pid_namespace or host.pid_namespace != me.pid_namespace:
        return False
    return started(host.pid) != host.started


def orphans(
    containers: Sequence[Mapping[str, Any]],
    me: HostIdentity,
    *,
    is_local: bool,
    started: Callable[[int], int | None] = start_time,
) -> list[str]:
    """Ids of those `containers`, as the daemon lists them, whose host is dead."""
    found = []
    for container in containers:
        host = HostIdentity.parse(str((container.get("Labels") or {}).get(LABEL_HOST, "")))
        if host is not None and is_dead(host, me, is_local=is_local, started=started):
            found.append(str(container["Id"]))
    return found


class Watcher:
    """A small process that outlives this one for as long as it takes to remove a backend's containers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def spawn(cls, backend: str, docker_host: str | None) -> Watcher:
        """Start it. `backend`: value of the label that its containers carry."""
        code = f"import sys; sys.path[:] = {list(sys.path)!r}; from {__name__} import main; main(sys.argv[1:])"
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", code, backend, str(os.getpid()), docker_host or ""],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd="/",
            # Not in our process group: what is sent to all of us must leave it to clean up.
            start_new_session=True,
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def dismiss(self) -> None:
        """End it without cleaning up: everything has been removed in order. Safe to call twice."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with suppress(OSError):
                self._process.stdin.write(b"q")
                self._process.stdin.flush()
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)

    def leave_it(self) -> None:
        """Let it clean up, as if we had died."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # Somebody has to take its exit status, and nobody here can wait for it.
        threading.Thread(target=self._process.wait, name="toolcell-watcher", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Life of the watcher: wait for the host's end, then remove what it left."""
    backend, host_pid, docker_host = arguments
    if wait_for_end(0, int(host_pid)):
        sweep(backend, docker_host or None)
    os._exit(0)


def wait_for_end(descriptor: int, host_pid: int) -> bool:
    """Wait until the host dies (True) or dismisses us (False)."""
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    # A child that the host forked may hold our pipe open after its death; the pidfd is the host's alone.
    with suppress(OSError, AttributeError):
        watched.register(os.pidfd_open(host_pid), select.POLLIN)
    if os.getppid() != host_pid:
        return True
    ready = {each for each, _ in watched.poll()}
    return not (descriptor in ready and os.read(descriptor, 1) == b"q")


def sweep(backend: str, docker_host: str | None) -> None:
    """Remove a backend's containers until none has turned up for a while."""
    from toolcell.errors import SandboxUnavailable
    from toolcell.sandbox.docker.client import connect_api, explained, list_labelled

    api: Any = None
    empty, until = 0, time.monotonic() + SWEEP_AT_MOST_S
    while empty < SWEEPS_EMPTY and time.monotonic() < until:
        try:
            api = api or explained(connect_api, docker_host)
            found = explained(list_labelled, api, {LABEL_BACKEND: backend})
            empty = 0 if found else empty + 1
            for container in found:
                with suppress(SandboxUnavailable):
                    explained(api.remove_container, container["Id"], v=True, force=True)
        except SandboxUnavailable:  # it may be coming up again; what it had is found then
            api = None
        time.sleep(SWEEP_EVERY_S)
