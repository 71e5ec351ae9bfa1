"""Pipes between the host and a sandbox that is about to be forked."""

from __future__ import annotations

import os
from contextlib import ExitStack


def open_pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends belong to two sides, and return (reading end, writing end). Reading never blocks."""
    read, write = os.pipe2(os.O_CLOEXEC)
    readers.callback(os.close, read)
    writers.callback(os.close, write)
    os.set_blocking(read, False)
    return read, write
