"""Entry point of the guest inside a container: `python3 -P -s -B -m toolcell_bridge.entry.container`.

Standard input and output are the bridge. The first frame on it holds the settings. After it comes the bridge protocol.
Raw writes to descriptors 1 and 2 go to standard error.
"""

from __future__ import annotations

import os
from typing import Any

from toolcell_bridge.entry.preparation import ERRORS, INPUT, OUTPUT

MAX_SETTINGS_BYTES = 1 << 20


def take_standard_streams() -> None:
    """Move the bridge to private descriptors and point the standard ones elsewhere.

    Call it before anything foreign is imported: a library that prints must not print into the bridge.
    """
    for source, target in ((0, INPUT), (1, OUTPUT), (2, ERRORS)):
        os.dup2(source, target, inheritable=False)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read `size` bytes and not one more.

    Raises:
        EOFError: the host hung up first.
    """
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise EOFError("the host hung up before it sent the settings")
        data += piece
    return data


def read_settings(descriptor: int) -> dict[str, Any]:
    """Read the host's first frame.

    Raises:
        EOFError, ValueError: it holds no settings.
    """
    import msgpack

    size = int.from_bytes(read_exactly(descriptor, 4), "big")
    if not 0 < size <= MAX_SETTINGS_BYTES:
        raise ValueError(f"settings of {size} bytes announced")
    settings: dict[str, Any] = msgpack.unpackb(read_exactly(descriptor, size))
    return settings


def main() -> int:
    """Serve one guest; returns the exit code."""
    take_standard_streams()
    try:
        settings = read_settings(INPUT)
        from toolcell_bridge.entry import single_container

        single_container.serve(settings)
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    # No atexit hooks, no threads joined: nothing of the script's is run again.
    os._exit(code)
