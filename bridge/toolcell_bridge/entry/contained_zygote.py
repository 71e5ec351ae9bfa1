"""The zygote of the process backend's profile `container`: for places that allow no namespaces.

The host starts it directly. It forks a supervisor and a guest for each sandbox, as the zygote of a shared container
does. Without a pid namespace nothing ends with it by itself, so it adopts every orphan and ends what it leaves.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress

import msgpack

from toolcell_bridge.entry import standard_library
from toolcell_bridge.entry.preparation import FIRST_FREE, move_up, occupy_descriptors
from toolcell_bridge.entry.process_usage import descendants
from toolcell_bridge.entry.shared_zygote import SharedZygote, prepare
from toolcell_bridge.entry.slot_directories import FreshDirectories
from toolcell_bridge.entry.supervisor import SCOPES_SINCE, adopt_orphans, empty
from toolcell_bridge.isolation import landlock
from toolcell_bridge.isolation.apply_in_container import ContainerIsolation, beside_other_files
from toolcell_bridge.isolation.syscalls import PR_SET_PDEATHSIG, prctl

SETTINGS_BYTES = 256 * 1024

NEEDS_SCOPES = (
    "the profile container needs Landlock ABI 6 (Linux 6.12), which keeps signals inside a sandbox; this kernel has {}"
)

SUPERVISORS_S = 2.0
"""How long the supervisors may take to end their sandboxes."""

KILL_PASSES = 1000
KILL_INTERVAL_S = 0.005


def main(control_fd: int) -> None:
    """Entry point: read the settings and serve until the host hangs up. Never returns."""
    control = socket.socket(fileno=move_up(control_fd))
    settings = msgpack.unpackb(control.recv(SETTINGS_BYTES))
    sys.path[:] = settings["sys_path"]
    base: str = settings["base"]
    try:
        adopt_orphans(is_needed=not settings.get("unscoped"))
        occupy_descriptors(FIRST_FREE - 1)
        prepare(settings)
        policy = beside_other_files(standard_library.policy_for_imports())
        isolation = ContainerIsolation.prepare(policy, [(path, landlock.READ) for path in settings["readable"]])
        if isolation.abi < SCOPES_SINCE and not settings.get("unscoped"):
            raise OSError(NEEDS_SCOPES.format(isolation.abi))
        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # if it is stopped when the host is killed, it goes on, to clean up
        zygote = SharedZygote(settings, control, isolation, FreshDirectories(base), adopts=not settings.get("unscoped"))
        gc.enable()  # it was off since the interpreter's start
        zygote.serve()
        zygote.release()
    except BaseException as exc:
        with suppress(OSError):
            control.send(msgpack.packb({"error": f"{type(exc).__name__}: {exc}"}))
    finally:
        # Only when nothing is alive: a script could put a link in the way of what is removed.
        if _end_all() and empty(base):
            os.rmdir(base)
        os._exit(0)


def _end_all() -> bool:
    """Wait for the supervisors, which end when their host does, and kill whatever is left; True when nothing is."""
    signal.set_wakeup_fd(-1)
    for number in range(KILL_PASSES):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if number * KILL_INTERVAL_S > SUPERVISORS_S:
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        select.select((), (), (), KILL_INTERVAL_S)
    return False
