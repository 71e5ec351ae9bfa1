"""Whom the kernel kills first where memory is short: guests, and not their host."""

from __future__ import annotations

import errno
import os

OOM_SCORE = b"1000"
"""The highest: like all memory there is. Children inherit it. Who raises it needs no privilege."""


def prefer_in_oom_killer(who: str, proc: int | None = None) -> None:
    """Have process `who`, a folder of a procfs, killed before others; nothing where the kernel lets nobody choose."""
    try:
        descriptor = os.open(f"{who}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(descriptor, OOM_SCORE)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise
