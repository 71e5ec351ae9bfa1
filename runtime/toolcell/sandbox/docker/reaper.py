"""Remove containers whose host process is gone.

There are three steps, each for what the step before misses. A guest ends when the stream from its host ends. A watcher
process removes the containers of a host that was killed, also of one that was just creating some. The next host that
opens a backend removes the containers of dead hosts of this machine, for when the watcher was killed too.
The SDK is imported only when there is something to remove: a waiting watcher must use little memory.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

LABEL_HOST = "io.toolcell.host"
"""Label of the process that made the container: a `HostIdentity` as text."""

LABEL_BACKEND = "io.toolcell.backend"
"""Label of the backend, within that process, that made the container."""

WATCHER_ENVIRONMENT = (
    "DOCKER_HOST",
    "DOCKER_TLS_VERIFY",
    "DOCKER_CERT_PATH",
    "DOCKER_CONFIG",
    "HOME",
    "PATH",
    "LANG",
    "SSH_AUTH_SOCK",
    "XDG_RUNTIME_DIR",
)

SWEEP_EVERY_S = 0.25
SWEEPS_EMPTY = 12
"""Sweeps in a row that must find nothing: the daemon may still be creating a container for the killed host."""

SWEEP_AT_MOST_S = 60.0
END_S = 5.0


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Identifies a process among all that ever had its pid."""

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
        """Read a label; return None when it is not ours."""
        parts = text.split(":")
        if len(parts) != 5:
            return None
        try:
            return cls(parts[0], parts[1], int(parts[2]), int(parts[3]), int(parts[4]))
        except ValueError:
            return None


def own_identity() -> HostIdentity:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    machine = _stripped("/etc/machine-id")
    return HostIdentity(
        machine, _stripped("/proc/sys/kernel/random/boot_id"), namespace, os.getpid(), start_time(os.getpid()) or 0
    )


def start_time(pid: int) -> int | None:
    """Return when `pid` began, in clock ticks after boot; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The name in parentheses may hold anything, parentheses too.
            return int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _stripped(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_dead(
    host: HostIdentity, me: HostIdentity, *, is_local: bool, started: Callable[[int], int | None] = start_time
) -> bool:
    """Return True when `host` is certainly gone. For a host of another machine or container, that is not known here.

    `is_local`: the daemon is on this machine, so a foreign boot id of this machine means an earlier boot.
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
    """Return the ids of those `containers`, as the daemon lists them, whose host is dead."""
    found = []
    for container in containers:
        host = HostIdentity.parse(str((container.get("Labels") or {}).get(LABEL_HOST, "")))
        if host is not None and is_dead(host, me, is_local=is_local, started=started):
            found.append(str(container["Id"]))
    return found


class Watcher:
    """A small process that removes a backend's containers when this process dies first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def spawn(cls, backend: str, docker_host: str | None) -> Watcher:
        code = f"import sys; sys.path[:] = {list(sys.path)!r}; from {__name__} import main; main(sys.argv[1:])"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", code, backend, str(os.getpid()), docker_host or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in WATCHER_ENVIRONMENT if name in os.environ},
            cwd="/",
            # Not in our process group: a signal to the whole group must not end the watcher, which has to clean up.
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """End the watcher without a sweep: every container has been removed already. Safe to call twice."""
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

    def detach(self) -> None:
        """Let the watcher sweep, as if this process had died."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # The exit status has to be collected, and no caller can wait for it.
        threading.Thread(target=self._process.wait, name="toolcell-watcher", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Run the watcher: wait until the host ends, then remove its containers."""
    backend, host_pid, docker_host = arguments
    if sys.platform == "linux":
        from toolcell_bridge.isolation.syscalls import PR_SET_PDEATHSIG, prctl

        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # if it is stopped when the host is killed, it goes on, to clean up
    if wait_for_end(0, int(host_pid)):
        sweep(backend, docker_host or None)
    os._exit(0)


def wait_for_end(descriptor: int, host_pid: int) -> bool:
    """Wait until the host dies (True) or dismisses the watcher (False)."""
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    # A child of the host may hold our pipe open after the host's death; the pidfd belongs to the host alone.
    with suppress(OSError, AttributeError):
        watched.register(os.pidfd_open(host_pid), select.POLLIN)
    if os.getppid() != host_pid:
        return True
    ready = {each for each, _ in watched.poll()}
    return not (descriptor in ready and os.read(descriptor, 1) == b"q")


def sweep(backend: str, docker_host: str | None) -> None:
    """Remove a backend's containers until no new one has appeared for a while."""
    from toolcell.errors import SandboxUnavailable
    from toolcell.sandbox.docker.client import call_api, connect_api, list_labelled

    api: Any = None
    empty, until = 0, time.monotonic() + SWEEP_AT_MOST_S
    while empty < SWEEPS_EMPTY and time.monotonic() < until:
        try:
            api = api or call_api(connect_api, docker_host)
            found = call_api(list_labelled, api, {LABEL_BACKEND: backend})
            empty = 0 if found else empty + 1
            for container in found:
                with suppress(SandboxUnavailable):
                    call_api(api.remove_container, container["Id"], v=True, force=True)
        except SandboxUnavailable:  # the daemon may be restarting; its containers are found afterwards
            api = None
        time.sleep(SWEEP_EVERY_S)
