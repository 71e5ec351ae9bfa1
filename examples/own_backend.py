"""Shows a backend of your own (bubblewrap around toolcell's guest) and checks it against the contract.

python examples/own_backend.py [GROUP ...]    checks only these groups of cases, for example `values limits`
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import anyio
import msgpack
import RestrictedPython

import toolcell_bridge
from toolcell import Limits, SandboxUnavailable
from toolcell.sandbox import Backend, Exit, Sample, Sandbox, SocketStream
from toolcell.sandbox.process import TreeWatch
from toolcell.testing import check_backend

PACKAGES = [Path(package.__file__).parent for package in (toolcell_bridge, msgpack, RestrictedPython)]
PYTHON = f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}"
BWRAP = f"""bwrap --unshare-all --unshare-user --uid 65534 --gid 65534 --cap-drop ALL --die-with-parent
    --setenv LANG C.UTF-8 --setenv HOME /work --setenv PYTHONPATH /guest --ro-bind /usr /usr --symlink usr/lib /lib
    --symlink usr/lib64 /lib64 --ro-bind {sys.base_prefix} {sys.base_prefix} --proc /proc --dev /dev --remount-ro /dev
    {" ".join(f"--ro-bind {path} /guest/{path.name}" for path in PACKAGES)}
    --tmpfs /tmp --tmpfs /dev/shm --tmpfs /work --remount-ro / --chdir /work""".split()


class BubbleSandbox(Sandbox):
    backend = "bubblewrap"

    def __init__(self, ident: str, limits: Limits) -> None:
        self.id, self.limits, self.layers, self.tree = ident, limits, {}, None
        ours, theirs = socket.socketpair()
        self.stream = SocketStream(ours)
        guest = f"{PYTHON} -P -s -B -m toolcell_bridge.entry.plain {theirs.fileno()} {limits.frame_bytes}".split()
        rlimits = f"NOFILE={limits.open_files} AS={limits.memory_bytes + (2 << 30)} CORE=0".split()
        with theirs:  # env={}: scripts can read bubblewrap's own environment in /proc/1/environ
            self.process = subprocess.Popen(
                [*BWRAP, *guest, *rlimits],
                env={},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        self.pipes = (self.process.stdout, self.process.stderr)
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)

    def accept(self, layers: Mapping[str, str]) -> None:
        self.layers = {**layers, "bubblewrap": "own namespaces, read-only root"}
        self.tree = TreeWatch(self.process.pid, self.limits.memory_bytes)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def prepare(self, limits: Limits) -> None:
        self.tree.memory_bytes = limits.memory_bytes

    def read_output(self) -> tuple[bytes, bytes]:
        out, err = (b"" if pipe.closed else pipe.read(1 << 20) or b"" for pipe in self.pipes)
        return out, err

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        return self.tree.look() if self.tree else Sample()

    def kill(self) -> None:
        if self.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)  # also the init of its pid namespace, so everything inside

    kill_now = kill

    def cpu_now(self) -> float | None:
        return self.tree.look().cpu_s if self.tree else None

    async def ended(self) -> Exit:
        with anyio.move_on_after(5, shield=True):
            while self.is_alive():  # noqa: ASYNC110 - the end of a process sets no event
                await anyio.sleep(0.001)
        code = self.process.returncode or 0
        return Exit(code=code) if code >= 0 else Exit(signal=-code)

    async def destroy(self) -> None:
        self.kill()
        self.stream.close()
        await self.ended()
        for pipe in self.pipes:
            pipe.close()


class BubbleBackend(Backend):
    name: ClassVar[str] = "bubblewrap"
    isolates: ClassVar[bool] = True
    fixed: ClassVar = {"open_files"}  # a run with another value gets a new sandbox
    lacks: ClassVar = {
        "limits.disk": "its three writable folders are not sized",
        "limits.inodes": "nothing counts them",
    }
    sandboxes: list[BubbleSandbox] | None = None

    async def open(self) -> None:
        if not shutil.which("bwrap"):
            raise SandboxUnavailable("bubblewrap is not installed: apt-get install bubblewrap")
        self.sandboxes = []

    async def start(self, limits: Limits) -> BubbleSandbox:
        if self.sandboxes is None:
            raise SandboxUnavailable("the bubblewrap backend is not open")
        self.sandboxes.append(BubbleSandbox(f"b{len(self.sandboxes)}", limits))
        return self.sandboxes[-1]

    async def close(self) -> None:
        sandboxes, self.sandboxes = self.sandboxes, None
        for sandbox in sandboxes or ():
            await sandbox.destroy()


if __name__ == "__main__":
    report = anyio.run(partial(check_backend, BubbleBackend, only=sys.argv[1:], on_result=print))
    print(report.summary)
    raise SystemExit(not report.ok)
