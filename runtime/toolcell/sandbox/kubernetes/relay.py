"""What is executed in a pod for each connection through the API server: it passes bytes on to the pod's server.

Its standard output begins with what the pod says about itself (`ADDRESS_FILE`): four bytes of length, and that many
bytes. Its standard input is cut into pieces, each with its length before it; a piece of no bytes is the end of what the
caller has to say. An executed program cannot be sent such an end otherwise. Only the standard library is imported.
"""

from __future__ import annotations

import os
import socket
import threading

DIRECTORY = "/run/toolcell"
ADDRESS_FILE = "address"
SOCKET_FILE = "server.sock"

READ_BYTES = 1 << 16


def pod_directory() -> str:
    """Return where a pod's server keeps its socket and what it tells about itself."""
    return os.environ.get("TOOLCELL_POD_DIRECTORY", DIRECTORY)


def write_all(descriptor: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read that many bytes; fewer at the end."""
    data = b""
    while len(data) < size and (piece := os.read(descriptor, size - len(data))):
        data += piece
    return data


def pass_in(server: socket.socket) -> None:
    """Pass on what the caller sends. Without a caller this program ends, and the sandbox with it."""
    try:
        while len(head := read_exactly(0, 4)) == 4:
            if not (left := int.from_bytes(head, "big")):
                server.shutdown(socket.SHUT_WR)
                continue
            while left and (piece := os.read(0, min(left, READ_BYTES))):
                server.sendall(piece)
                left -= len(piece)
    except OSError:
        pass  # the server has ended the connection
    else:
        os._exit(0)


def main() -> None:
    """Tell about the pod; then pass bytes on until one end hangs up."""
    directory = pod_directory()
    with open(os.path.join(directory, ADDRESS_FILE), "rb") as file:
        address = file.read()
    write_all(1, len(address).to_bytes(4, "big") + address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.path.join(directory, SOCKET_FILE))
        threading.Thread(target=pass_in, args=(server,), daemon=True).start()
        while data := server.recv(READ_BYTES):
            write_all(1, data)
    os._exit(0)


if __name__ == "__main__":
    main()
