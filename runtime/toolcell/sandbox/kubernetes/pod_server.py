"""`python3 -m toolcell.sandbox.kubernetes.pod_server`: what runs in a pod. It starts sandboxes for the pod's caller.

Sandboxes are those of `Policy(profile="container")`: a pod allows no namespaces. Only a caller who has the key is
served. Who may execute a program in the pod can read it; the pod's scripts cannot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgpack

from toolcell._version import __version__
from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable, ToolcellError
from toolcell.sandbox.kubernetes.relay import ADDRESS_FILE, SOCKET_FILE, pod_directory
from toolcell.sandbox.node.connection import NodeConnection, NodeService
from toolcell.sandbox.process.contained_backend import ContainedBackend
from toolcell.support.files import write_file

END_S: Final = 10.0
CURE: Final = "build the image again, and change the pool's template"
"""What to do about pods of another version."""


@dataclass(frozen=True, slots=True)
class PodAddress:
    """What a pod says about itself to whoever may execute a program in it."""

    version: str
    """Version of its toolcell."""
    key: bytes = field(repr=False)

    def pack(self) -> bytes:
        """Return it as it is sent."""
        packed: bytes = msgpack.packb([self.version, self.key])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> PodAddress:
        """Read what a pod has sent.

        Raises:
            ValueError: it is something else.
        """
        try:
            found = msgpack.unpackb(data)
        except ValueError:  # it may have the key in it
            found = None
        match found:
            case [str(version), bytes(key), *_]:  # other versions may say more
                return cls(version, key)
        raise ValueError(f"{len(data)} bytes that are not the address of a pod of toolcell {__version__}: {CURE}")


def pack_settings(policy: Policy, preload: tuple[str, ...]) -> bytes:
    """Return how a caller wants its sandboxes, as it is sent."""
    packed: bytes = msgpack.packb([policy.model_dump(mode="json", exclude_unset=True), list(preload)])
    return packed


class PodServer:
    """The sandboxes of one pod. One that was not claimed yet is warm for callers with the default settings."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: the pod is for one sandbox, so it may be one that shares the pod's files and signals."""
        self._is_alone = is_alone
        self._backends: dict[bytes, ContainedBackend] = {}
        self._wanted: asyncio.Queue[tuple[bytes, asyncio.Future[ContainedBackend]]] = asyncio.Queue()
        """Settings of backends that connections wait for: one task opens and closes all."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def backend(self, settings: bytes) -> ContainedBackend:
        """Return the backend for these settings.

        Raises:
            ValueError: they are not settings.
            SandboxUnavailable: no sandbox can start here; says why.
        """
        found = self._backends.get(settings)
        if found is None:
            opened: asyncio.Future[ContainedBackend] = asyncio.get_running_loop().create_future()
            self._wanted.put_nowait((settings, opened))
            found = await opened
        return found

    async def _open(self, settings: bytes) -> ContainedBackend:
        if (found := self._backends.get(settings)) is None:
            policy, preload = msgpack.unpackb(settings)
            found = ContainedBackend(policy=Policy(**policy), preload=preload, is_alone=self._is_alone)
            await found.open()
            self._backends[settings] = found
        return found

    async def _open_wanted(self) -> None:
        while True:
            settings, opened = await self._wanted.get()
            try:
                found = await self._open(settings)
            except Exception as exc:
                if not opened.cancelled():
                    opened.set_exception(exc)
            else:
                if not opened.cancelled():
                    opened.set_result(found)

    async def warm(self) -> None:
        """Start a sandbox and end it: the next one is forked, and what does not work here is said before it is used.

        Raises:
            SandboxUnavailable: no sandbox can start here; says why.
        """
        policy = Policy(profile="container")
        try:
            await self._try(policy)
        except SandboxUnavailable:
            if not self._is_alone:
                raise
            await self._try(Policy(profile="container", require=policy.require - {"landlock"}))  # gVisor has none

    async def _try(self, policy: Policy) -> None:
        backend = await self._open(pack_settings(policy, ()))
        sandbox = await backend.start(Limits())
        await sandbox.destroy()

    async def serve(self, directory: str) -> None:
        """Listen until this is cancelled."""
        service = NodeService(self.backend, os.urandom(32), None, self._tasks)
        path = os.path.join(directory, SOCKET_FILE)
        server = await asyncio.get_running_loop().create_unix_server(partial(NodeConnection, service), path)
        try:
            address = PodAddress(__version__, service.key)
            write_file(Path(directory, ADDRESS_FILE), address.pack())  # which a relay reads
            await self._open_wanted()
        finally:
            server.close()

    async def aclose(self) -> None:
        """End every sandbox, and with them the tasks of their connections. In the task that called `warm`."""
        for backend in reversed(self._backends.values()):
            await backend.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_S)


async def run(directory: str, is_alone: bool) -> None:
    """Serve until SIGTERM."""
    server, task = PodServer(is_alone=is_alone), asyncio.current_task()
    assert task is not None
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, task.cancel)
    for name in (ADDRESS_FILE, SOCKET_FILE):  # of a container before, in the same pod
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, name))
    try:
        with suppress(asyncio.CancelledError):
            await server.warm()
            await server.serve(directory)
    finally:
        await server.aclose()


def main() -> int:
    """Run with the settings of the pod's environment; returns the exit code."""
    try:
        asyncio.run(run(pod_directory(), os.environ.get("TOOLCELL_POD_ALONE") == "1"))
    except (ToolcellError, OSError, ValueError) as exc:
        sys.stderr.write(f"toolcell: this pod cannot start sandboxes: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
