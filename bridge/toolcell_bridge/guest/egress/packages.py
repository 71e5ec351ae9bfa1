"""Install packages while a script runs: the host sends wheels, and they are unpacked into a folder of this sandbox.

What is in a wheel can harm nothing but this sandbox. The folder comes last on `sys.path`, so nothing in it replaces
another module, and its `.pth` files are not read.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from importlib.metadata import distributions
from pathlib import PurePosixPath
from typing import Any

from toolcell_bridge.guest.egress.connection import Cause, EgressFailed, HostCall, Steps
from toolcell_bridge.guest.egress.host_calls import HostCalls
from toolcell_bridge.guest.errors import full_limit, installed, not_installed
from toolcell_bridge.wire.messages import HTTP_READ, INSTALL_PACKAGE, PART_BYTES

KEPT = frozenset({"purelib", "platlib", "data"})
"""The folders of a wheel's `.data` that are unpacked; scripts and headers are left out."""


def install(calls: HostCalls, name: str) -> None:
    """Install a package and what it depends on; nothing where it can be imported already.

    Raises:
        RuntimeError: it may not be installed, or cannot be; the message says why.
    """
    if installed(name):
        return
    try:
        wheels = calls.run(_received(str(name)))
    except EgressFailed as exc:
        raise not_installed(name, exc.message) from None
    folder = tempfile.mkdtemp(prefix="packages-")
    try:
        for content in wheels:
            unpack_wheel(content, folder)
        _make_read_only(folder)
    except BaseException as exc:
        why = _why_not_unpacked(exc)  # which looks at the disk while the files are there
        shutil.rmtree(folder)
        if not why:
            raise
        raise not_installed(name, why) from None
    sys.path.append(folder)
    importlib.invalidate_caches()


def _why_not_unpacked(error: BaseException) -> str:
    """Return why wheels are not installed; "" when that is not about them."""
    if isinstance(error, zipfile.BadZipFile | zlib.error | EOFError | NotImplementedError | RuntimeError | ValueError):
        return f"a wheel cannot be unpacked: {error}"
    if isinstance(error, OSError):
        is_full = error.errno == errno.ENOSPC
        return f"its files do not fit; the run's limit {full_limit()} is used up" if is_full else str(error)
    return ""


def _received(name: str) -> Steps[list[bytes]]:
    """Have the host find the wheels, and receive them."""
    installed = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"]}
    python, machine = "{}.{}.{}".format(*sys.version_info), os.uname().machine
    asked = {"package": name, "installed": installed, "python": python, "machine": machine}
    answer = yield HostCall(INSTALL_PACKAGE, asked)
    try:
        return (yield from _contents(answer))
    except EgressFailed as exc:
        if exc.cause is not Cause.PROTOCOL:
            raise
    answer = yield HostCall(INSTALL_PACKAGE, asked)  # the run is carried on, and its wheels went with its host
    return (yield from _contents(answer))


def _contents(answer: dict[str, Any]) -> Steps[list[bytes]]:
    wheels = []
    for wheel in answer["wheels"]:
        content = bytearray()
        while (start := len(content)) < wheel["size"]:
            content += yield HostCall(HTTP_READ, {"rest": wheel["rest"], "size": PART_BYTES, "start": start})
        wheels.append(bytes(content))
    return wheels


def unpack_wheel(content: bytes, folder: str) -> None:
    """Unpack a wheel as an installer would, without its scripts and headers. Links become files.

    Raises:
        ValueError: it has a file that belongs outside of `folder`.
        zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError: it is damaged.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            path = PurePosixPath(member.filename)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"it has a file outside of its folder: {member.filename!r:.200}")
            if len(path.parts) > 2 and path.parts[0].endswith(".data"):
                if path.parts[1] not in KEPT:
                    continue
                path = PurePosixPath(*path.parts[2:])
            if not member.is_dir():
                place = os.path.join(folder, path)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with archive.open(member) as packed, open(place, "wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)


def _make_read_only(folder: str) -> None:
    for at, _, names in os.walk(folder, topdown=False):
        for name in names:
            os.chmod(os.path.join(at, name), 0o444)
        os.chmod(at, 0o555)
