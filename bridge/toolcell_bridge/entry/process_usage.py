"""What each sandbox of a container uses, from one look at the table of processes. Knows no limits."""

from __future__ import annotations

import os
from collections.abc import Mapping

from toolcell_bridge.entry.supervisor import process_row

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Fields of /proc/<pid>/stat, counted from the third.
_PARENT, _UTIME, _STIME, _CUTIME, _CSTIME, _THREADS = 1, 11, 12, 13, 14, 17


class ProcessUsage:
    """Remembers what a guest was born with: pages that it shares with the parent are nobody's."""

    def __init__(self) -> None:
        self._base_bytes: dict[int, int] = {}

    def begin(self, sandbox: int) -> None:
        """This process has just forked it: what each of its processes holds from then on is counted."""
        self._base_bytes[sandbox] = _private_bytes(os.getpid())

    def measure(self, wardens: Mapping[int, int]) -> dict[int, tuple[float, int, int]]:
        """(CPU seconds, bytes, processes and threads) of each sandbox; `wardens`: process id to sandbox."""
        rows: dict[int, list[bytes]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (row := process_row(int(name))) is not None:
                rows[int(name)] = row
        members: dict[int, list[int]] = {sandbox: [] for sandbox in wardens.values()}
        owners: dict[int, int] = dict(wardens)
        for pid in rows:
            owner = _owner(pid, rows, owners)
            if owner and pid not in wardens:
                members[owner].append(pid)
        for sandbox in self._base_bytes.keys() - members.keys():
            del self._base_bytes[sandbox]
        return {
            sandbox: self._sum(sandbox, warden, rows, members[sandbox])
            for warden, sandbox in wardens.items()
            if warden in rows
        }

    def _sum(
        self, sandbox: int, warden: int, rows: Mapping[int, list[bytes]], members: list[int]
    ) -> tuple[float, int, int]:
        # What ended below the warden, and for each that lives its own and what ended below it.
        ticks = int(rows[warden][_CUTIME]) + int(rows[warden][_CSTIME])
        held_bytes = threads = 0
        for pid in members:
            row = rows[pid]
            ticks += sum(int(row[field]) for field in (_UTIME, _STIME, _CUTIME, _CSTIME))
            threads += int(row[_THREADS])
            own_bytes = _private_bytes(pid)
            held_bytes += max(0, own_bytes - self._base_bytes.get(sandbox, 0))
        return ticks / TICKS_PER_S, held_bytes, threads


def _owner(pid: int, rows: Mapping[int, list[bytes]], owners: dict[int, int]) -> int:
    """The sandbox that `pid` belongs to, 0 for none; what is found on the way is kept in `owners`."""
    way = []
    while pid not in owners:
        way.append(pid)
        row = rows.get(pid)
        pid = int(row[_PARENT]) if row is not None else 0
        if pid <= 1 or pid in way:
            break
    owner = owners.get(pid, 0)
    owners.update(dict.fromkeys(way, owner))
    return owner


def _private_bytes(pid: int) -> int:
    """Resident memory that is no file's."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            fields = file.read(256).split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * PAGE_BYTES
