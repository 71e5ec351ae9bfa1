"""One cgroup: memory and process limits of a whole process tree, enforced by the kernel and set from outside.

A cgroup is used once: making one costs less than emptying and resetting one (measured on v1: 200 us against 290).

Source: Linux Documentation/admin-guide/cgroup-v1/{memory,pids,cpuacct}.rst and cgroup-v2.rst.
"""

from __future__ import annotations

import abc
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_FIRST_WAIT_S = 0.0005
_LONGEST_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class CgroupUsage:
    """What everything that ran in one cgroup has used. None where this kernel keeps no such number."""

    cpu_s: float | None
    peak_memory_bytes: int | None
    current_processes: int
    peak_processes: int | None
    oom_kills: int
    processes_refused: int
    """Forks and threads refused because of the process limit."""


class CgroupFiles:
    """The file operations that cgroups need. A test replaces it with a tree in memory or on disk.

    A cgroup that is removed between open and read answers ENODEV; that is reported as FileNotFoundError.
    """

    def make(self, directory: Path) -> None:
        directory.mkdir(mode=0o755)

    def remove(self, directory: Path) -> None:
        directory.rmdir()

    def children(self, directory: Path) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]

    def read(self, file: Path | str) -> str:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 65536).decode()
        except OSError as error:
            raise _absent(error, file) from error
        finally:
            os.close(descriptor)

    def write(self, file: Path | str, text: str) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        except OSError as error:
            raise _absent(error, file) from error
        finally:
            os.close(descriptor)


class Cgroup(abc.ABC):
    """The limits of one sandbox."""

    def __init__(self, name: str, directories: tuple[Path, ...], files: CgroupFiles) -> None:
        self.name = name
        self._directories = directories
        self._files = files

    @property
    @abc.abstractmethod
    def entries(self) -> tuple[Path, ...]:
        """Files to which a single-threaded process writes `0` to put itself inside, and its children with it.

        A file opened by the host may be written by a process without rights: the kernel asks the opener's.
        """

    @abc.abstractmethod
    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Set both limits, and no swap. Works on a live cgroup, too.

        Raises:
            OSError: EBUSY when more than `memory_bytes` is in use and cannot be reclaimed (v1).
        """

    @abc.abstractmethod
    def usage(self) -> CgroupUsage:
        """Read what has been used since the cgroup was made."""

    @abc.abstractmethod
    def consumed(self) -> tuple[float | None, int | None]:
        """Read only what every result reports: (CPU seconds, peak memory in bytes)."""

    @abc.abstractmethod
    def count_processes(self) -> int:
        """How many processes and threads are inside now."""

    @abc.abstractmethod
    def _forbid_forks(self) -> None: ...

    def add(self, pid: int) -> None:
        """Put process `pid` inside from outside. Slow: the kernel waits for every fork under way on the machine.

        Measured on Linux 6.18: 7 to 17 ms when no such move happened lately; a process that writes `0` to `entries`
        of a v1 cgroup itself pays 25 us each.
        """
        for directory in self._directories:
            self._files.write(directory / "cgroup.procs", str(pid))

    def pids(self) -> set[int]:
        """Processes inside, as pids of our own namespace."""
        found: set[int] = set()
        for directory in self._directories:
            try:
                listed = self._files.read(directory / "cgroup.procs").split()
            except FileNotFoundError:
                continue
            found.update(int(pid) for pid in listed if pid != "0")  # 0: of a namespace we cannot see into
        return found

    def kill(self) -> None:
        """Send SIGKILL to everything inside. `destroy` also waits for the end."""
        try:
            self._files.write(self._directories[0] / "cgroup.kill", "1")
        except FileNotFoundError:  # v1, or v2 before Linux 5.14
            self._kill_one_by_one()

    def _kill_one_by_one(self) -> None:
        """Forbid forks first, so that the number of processes is finite, and send each one signal."""
        try:
            self._forbid_forks()
        except FileNotFoundError:  # that directory is gone already, so it was empty
            pass
        signalled: set[int] = set()
        while fresh := self.pids() - signalled:
            self._signal(fresh)
            signalled |= fresh

    def _signal(self, victims: set[int]) -> None:
        """Kill processes through pidfds, and only if they are still inside: a pid alone may have been reused."""
        pinned = {pid: fd for pid in victims if (fd := _pin(pid)) is not None}
        try:
            for pid in self.pids() & pinned.keys():
                try:
                    signal.pidfd_send_signal(pinned[pid], signal.SIGKILL)
                except ProcessLookupError:
                    continue
        finally:
            for fd in pinned.values():
                os.close(fd)

    def remove(self) -> bool:
        """Remove the directories if nothing is inside; False when something still is."""
        for directory in self._directories:
            try:
                self._files.remove(directory)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise
                return False
        return True

    def destroy(self, within_s: float = 5.0) -> bool:
        """Kill, wait until empty, remove. Blocks up to `within_s`; False when processes did not die in that time.

        Safe to call twice.
        """
        deadline = time.monotonic() + within_s
        wait_s = _FIRST_WAIT_S
        while not self.remove():
            self.kill()
            if time.monotonic() > deadline:
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return True


class V1Cgroup(Cgroup):
    """One directory in each of the memory, pids and cpuacct hierarchies."""

    def __init__(self, name: str, directories: dict[str, Path], files: CgroupFiles) -> None:
        super().__init__(name, tuple(directories.values()), files)
        memory, pids, cpu = directories["memory"], directories["pids"], directories.get("cpuacct")
        # Text, joined once: these are opened a dozen times in a sandbox's short life.
        self._memory, self._pids, self._cpu = str(memory), str(pids), None if cpu is None else str(cpu)

    @property
    def entries(self) -> tuple[Path, ...]:
        # `tasks`, not `cgroup.procs`: a thread that moves itself alone needs no lock on every fork of the machine
        # (kernel/cgroup/cgroup.c, cgroup_procs_write_start).
        return tuple(directory / "tasks" for directory in self._directories)

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        self._files.write(f"{self._pids}/pids.max", str(processes))
        limit, with_swap = f"{self._memory}/memory.limit_in_bytes", f"{self._memory}/memory.memsw.limit_in_bytes"
        try:
            self._files.write(limit, str(memory_bytes))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Growing: memory plus swap may never be below memory, so it goes first.
            self._files.write(with_swap, str(memory_bytes))
            self._files.write(limit, str(memory_bytes))
        try:
            self._files.write(with_swap, str(memory_bytes))
        except FileNotFoundError:  # no swap accounting: keep to memory as well as can be
            self._files.write(f"{self._memory}/memory.swappiness", "0")

    def usage(self) -> CgroupUsage:
        read = self._files.read
        cpu_s, peak_memory_bytes = self.consumed()
        return CgroupUsage(
            cpu_s=cpu_s,
            peak_memory_bytes=peak_memory_bytes,
            current_processes=self.count_processes(),
            peak_processes=_optional_number(self._files, f"{self._pids}/pids.peak"),
            oom_kills=_field(read(f"{self._memory}/memory.oom_control"), "oom_kill"),
            processes_refused=_field(read(f"{self._pids}/pids.events"), "max"),
        )

    def consumed(self) -> tuple[float | None, int | None]:
        read = self._files.read
        cpu_s = None if self._cpu is None else int(read(f"{self._cpu}/cpuacct.usage")) / 1e9
        return cpu_s, int(read(f"{self._memory}/memory.max_usage_in_bytes"))

    def count_processes(self) -> int:
        return int(self._files.read(f"{self._pids}/pids.current"))

    def _forbid_forks(self) -> None:
        self._files.write(f"{self._pids}/pids.max", "0")


class V2Cgroup(Cgroup):
    """One directory in the unified hierarchy."""

    def __init__(self, name: str, directory: Path, files: CgroupFiles) -> None:
        super().__init__(name, (directory,), files)
        self.directory = directory
        """For clone3 with CLONE_INTO_CGROUP, which starts a process inside without moving any."""

    @property
    def entries(self) -> tuple[Path, ...]:
        return (self.directory / "cgroup.procs",)

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        self._files.write(self.directory / "pids.max", str(processes))
        self._files.write(self.directory / "memory.max", str(memory_bytes))
        # One victim is not enough: the rest would go on in a state nobody designed.
        self._files.write(self.directory / "memory.oom.group", "1")
        try:
            self._files.write(self.directory / "memory.swap.max", "0")
        except FileNotFoundError:  # no swap on this machine
            pass

    def consumed(self) -> tuple[float | None, int | None]:
        cpu_s = _field(self._files.read(self.directory / "cpu.stat"), "usage_usec") / 1e6
        return cpu_s, _optional_number(self._files, self.directory / "memory.peak")

    def usage(self) -> CgroupUsage:
        read = self._files.read
        cpu_s, peak_memory_bytes = self.consumed()
        return CgroupUsage(
            cpu_s=cpu_s,
            peak_memory_bytes=peak_memory_bytes,
            current_processes=self.count_processes(),
            peak_processes=_optional_number(self._files, self.directory / "pids.peak"),
            oom_kills=_field(read(self.directory / "memory.events"), "oom_kill"),
            processes_refused=_field(read(self.directory / "pids.events"), "max"),
        )

    def count_processes(self) -> int:
        return int(self._files.read(self.directory / "pids.current"))

    def _forbid_forks(self) -> None:
        self._files.write(self.directory / "pids.max", "0")


def _absent(error: OSError, file: Path | str) -> OSError:
    return FileNotFoundError(errno.ENOENT, "removed meanwhile", str(file)) if error.errno == errno.ENODEV else error


def _pin(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _field(text: str, key: str) -> int:
    """Read one of the lines "key number"."""
    return next(int(number) for name, _, number in (line.partition(" ") for line in text.splitlines()) if name == key)


def _optional_number(files: CgroupFiles, file: Path | str) -> int | None:
    try:
        return int(files.read(file))
    except FileNotFoundError:
        return None
