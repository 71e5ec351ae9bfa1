"""A host program inside an ordinary container: it attacks sandboxes of the profile `container` and prints what it saw.

Run by test_container_profile.py as `python contained_host.py`. Writes one JSON document: attack -> what came of it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from contained_scripts import CONTROL, SCRIPTS

from toolcell import Limits, Policy, PoolConfig, SyncRuntime, ToolRegistry

MIB = 1 << 20
LIMITS = Limits(
    wall_s=20, cpu_s=20, memory_bytes=128 * MIB, processes=20, disk_bytes=8 * MIB, inodes=200, open_files=64
)
NEIGHBOUR = "open('kept', 'w').write('kept')\nprint('ready', flush=True)\ntools.stay()\nset_result(open('kept').read())"
SECRET = "the secret of the host"


def described(result: Any) -> dict[str, Any]:
    """Return what a test wants to know of a result."""
    error = result.error
    return {
        "outcome": result.outcome.value,
        "value": result.value,
        "error": f"{error.type}: {error.message}" if error is not None else "",
        "layers": dict(result.isolation.layers),
    }


class Targets:
    """What belongs to the host: a file, a folder, listeners and a program."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="victim-"))
        self.secret = self.folder / "secret"
        self.secret.write_text(SECRET)
        self.before = self.state()
        self.program = (
            subprocess.Popen(["/usr/bin/env", "sleep", "300"]) if os.path.exists("/bin/sleep") else self._idle()
        )
        self.listeners = [self._listen(str(self.folder / "socket")), self._listen("\0abstract-of-the-host")]
        self.tcp = socket.create_server(("127.0.0.1", 0))

    def _idle(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])

    def _listen(self, address: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        return listener

    def state(self) -> list[Any]:
        """Return everything about the file that a script could change."""
        found = self.secret.stat()
        kept = sorted(path.name for path in self.folder.iterdir() if path.name != "socket")
        return [self.secret.read_text(), found.st_mode, found.st_uid, found.st_mtime_ns, found.st_nlink, kept]

    def inputs(self) -> dict[str, Any]:
        """Return what a script is told about them."""
        return {
            "secret": str(self.secret),
            "folder": str(self.folder),
            "pids": [os.getpid(), self.program.pid],
            "port": self.tcp.getsockname()[1],
        }

    def close(self) -> None:
        """End the program."""
        self.program.kill()
        self.program.wait()


def below() -> list[str]:
    """Return the processes that sandboxes left: all below this one but the zygote."""
    return [each.name() for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]


def attack_all(targets: Targets, runtime: SyncRuntime, note: Callable[[str, Any], None]) -> None:
    """Run every attack in a sandbox of its own."""
    for name, (script, changes) in SCRIPTS.items():
        limits = LIMITS.model_copy(update=changes)
        note(name, described(runtime.execute_code(textwrap.dedent(script), inputs=targets.inputs(), limits=limits)))
    note("the host's file", [targets.before, targets.state()])
    note("the host's program", targets.program.poll())


def attack_a_neighbour(runtime: SyncRuntime, note: Callable[[str, Any], None], attacked: threading.Event) -> None:
    """Attack every process and folder while another script runs, which ends when it was `attacked`."""
    ready, results = threading.Event(), []

    def neighbour() -> None:
        results.append(described(runtime.execute_code(NEIGHBOUR, on_log=lambda *_: ready.set())))

    thread = threading.Thread(target=neighbour)
    thread.start()
    ready.wait(30)
    # Folders of sandboxes that ended may vanish meanwhile, which os.walk passes over.
    places = [
        str(Path(folder, "kept"))
        for folder, folders, files in os.walk(tempfile.gettempdir())
        if "kept" in folders + files
    ]
    inputs = {"places": places, "pids": psutil.pids()}
    note("a neighbour attacked", described(runtime.execute_code(CONTROL["neighbour"], inputs=inputs)))
    note("places of the neighbour", len(places))
    attacked.set()
    thread.join()
    note("the neighbour", results[0])


def main() -> None:
    """Attack, and print what came of it."""
    seen: dict[str, Any] = {"uid": os.getuid()}
    targets = Targets()
    control = subprocess.run(
        [sys.executable, "-c", f"inputs = {targets.inputs()!r}; globals().update(inputs)\n" + CONTROL["plain"]],
        capture_output=True,
        text=True,
        check=True,
    )
    seen["without isolation"] = json.loads(control.stdout)
    before = set(os.listdir(tempfile.gettempdir()))
    tools, attacked = ToolRegistry(), threading.Event()

    @tools.tool
    def stay() -> None:
        """Return when the neighbour was attacked."""
        attacked.wait(LIMITS.wall_s)

    with SyncRuntime(tools, policy=Policy(profile="container"), limits=LIMITS, pool=PoolConfig(warm=1)) as runtime:
        attack_all(targets, runtime, seen.__setitem__)
        attack_a_neighbour(runtime, seen.__setitem__, attacked)
    targets.close()
    seen["left running"] = below()
    seen["left in /tmp"] = sorted(set(os.listdir(tempfile.gettempdir())) - before)
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
