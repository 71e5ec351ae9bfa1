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
from pathlib import Path

from toolcell.sandbox.backend import Sample
from toolcell.sandbox.process.process_watch import signal_all

_FIRST_WAIT_S = 0.0005
_LONGEST_WAIT_S = 0.05

MOST_KEPT = 16
"""Sandboxes whose cgroup files stay open, six each: those of sessions whose scripts follow each other."""

MOST_KEPT_AHEAD = 3
"""The same while others wait for their run. Where descriptors are short, these have to fit beside all sandboxes."""

REMEMBERED_BYTES = 8 << 20
"""Names that take less may stay: after an ordinary run the kernel keeps less than 2 MiB."""


class CgroupFiles:
    """The file operations that cgroups need. A test replaces it with a tree in memory or on disk.

    Paths of a sandbox's cgroup are text: a dozen are made for each, and joining `Path`s is slow.

    A cgroup that is removed between open and read answers ENODEV; that is reported as FileNotFoundError.
    """

    def make(self, directory: Path | str) -> None:
        os.mkdir(directory, 0o755)

    def remove(self, directory: Path | str) -> None:
        os.rmdir(directory)

    def children(self, directory: Path) -> list[Path]:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]

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


class KeptFiles(CgroupFiles):
    """Files that are read often stay open: reading one takes a sixth of opening it too."""

    in_use = 0
    """Sandboxes that have such files."""

    def __init__(self, files: CgroupFiles) -> None:
        self._files = files
        self._open: dict[Path | str, int] = {}
        KeptFiles.in_use += 1

    def read(self, file: Path | str) -> str:
        descriptor = self._open.get(file)
        if descriptor is None:
            descriptor = self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, 65536, 0).decode()
        except OSError as error:
            raise _absent(error, file) from error

    def close(self) -> CgroupFiles:
        """Close all; return the files as they were before."""
        KeptFiles.in_use -= 1
        opened, self._open = self._open, {}
        for descriptor in opened.values():
            os.close(descriptor)
        return self._files


class Cgroup(abc.ABC):
    """The limits of one sandbox."""

    _pids: str
    """The directory of the pids controller."""
    _oom_file: str
    """Counts the processes that were killed because memory ran out."""

    def __init__(self, name: str, directories: tuple[str, ...], files: CgroupFiles) -> None:
        self.name = name
        self.directories = directories
        """One in each hierarchy that it is in."""
        self._files = files
        self.processors: str | None = None
        """The directory whose cpu controller bounds it, if there is one."""

    @property
    @abc.abstractmethod
    def entries(self) -> tuple[str, ...]:
        """Files to which a single-threaded process writes `0` to move itself, and its later children, into the cgroup.

        A process without rights may write to a file that the host opened: the kernel checks the rights of the opener.
        """

    @abc.abstractmethod
    def set_limits(self, memory_bytes: int, processes: int) -> None:
        """Set both limits and forbid swap. Also works while processes are inside.

        Raises:
            OSError: EBUSY when more than `memory_bytes` is in use and cannot be reclaimed (v1).
        """

    @abc.abstractmethod
    def consumed(self) -> tuple[float | None, int | None]:
        """Read only what every result reports: (CPU seconds, peak memory in bytes)."""

    def usage(self) -> Sample:
        """Read what has been used since the cgroup was made; 0 of what this kernel does not count."""
        cpu_s, peak_memory_bytes = self.consumed()
        processes = self.count_processes()
        return Sample(
            cpu_s or 0.0,
            peak_memory_bytes or 0,
            processes=processes,
            peak_processes=_optional_number(self._files, f"{self._pids}/pids.peak") or processes,
            memory_kills=_field(self._files.read(self._oom_file), "oom_kill"),
            refused_processes=self.count_refused(),
        )

    def count_refused(self) -> int:
        """Count the processes and threads that were refused for the limit of this cgroup."""
        return _field(self._files.read(f"{self._pids}/pids.events"), "max")

    def keep_open(self, is_kept: bool, most: int = MOST_KEPT) -> None:
        """Keep the files that measurements read open, or close them. Not while another thread measures."""
        if isinstance(self._files, KeptFiles):
            if not is_kept:
                self._files = self._files.close()
        elif is_kept and type(self._files) is CgroupFiles and KeptFiles.in_use < most:
            self._files = KeptFiles(self._files)

    def count_processes(self) -> int:
        return int(self._files.read(f"{self._pids}/pids.current"))

    def drop_names(self) -> None:
        """Make the kernel forget the names that were looked up inside. Blocks: about 3 us a name.

        The kernel remembers each name that was looked up in a directory of a disk and was not there. A name takes 448
        bytes, which are charged to this cgroup. Names that are left when the cgroup is removed are charged to nobody,
        and stay until memory is short.
        """
        if (remembered := self._kernel_bytes()) > REMEMBERED_BYTES:
            try:
                self._reclaim(remembered)
            except OSError:  # a kernel that cannot, or could only in part
                return

    @abc.abstractmethod
    def _kernel_bytes(self) -> int: ...

    @abc.abstractmethod
    def _reclaim(self, size: int) -> None: ...

    def pids(self) -> set[int]:
        """Return the processes inside, as pids in our own namespace."""
        found: set[int] = set()
        for directory in self.directories:
            try:
                listed = self._files.read(f"{directory}/cgroup.procs").split()
            except FileNotFoundError:
                continue
            found.update(int(pid) for pid in listed if pid != "0")  # 0: its namespace is not visible to us
        return found

    def freeze(self, is_frozen: bool) -> bool:
        """Have the kernel stop every process inside, or let them go on; False where it cannot and signals must do.

        Not with the freezer of v1: what it has stopped cannot be killed, and stays for ever if the host dies.
        """
        return False

    def kill(self) -> None:
        """Send SIGKILL to every process inside. `destroy` also waits until they have ended."""
        try:
            self._files.write(f"{self.directories[0]}/cgroup.kill", "1")
        except FileNotFoundError:  # v1, or v2 before Linux 5.14
            self._kill_one_by_one()

    def _kill_one_by_one(self) -> None:
        """Forbid forks, so that the number of processes is finite. Then send each process one signal."""
        try:
            self._files.write(f"{self._pids}/pids.max", "0")
        except FileNotFoundError:  # that directory was removed, so it was empty
            pass
        while not signal_all(self.pids, signal.SIGKILL):
            pass

    def remove(self) -> bool:
        """Remove the directories; False if a process is still inside."""
        self.keep_open(False)
        for directory in self.directories:
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
        """Kill all processes, wait, and remove. Blocks up to `within_s`; False if some did not die in that time.

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
    """One directory in each of the memory, pids, cpuacct and cpu hierarchies. Some may be mounted together."""

    def __init__(self, name: str, directories: dict[str, str], files: CgroupFiles) -> None:
        super().__init__(name, tuple(dict.fromkeys(directories.values())), files)
        self.processors = directories.get("cpu")
        self._memory, self._pids, self._cpu = directories["memory"], directories["pids"], directories.get("cpuacct")
        self._oom_file = f"{self._memory}/memory.oom_control"

    @property
    def entries(self) -> tuple[str, ...]:
        # `tasks`, not `cgroup.procs`: a thread that moves itself alone needs no lock on every fork of the machine
        # (kernel/cgroup/cgroup.c, cgroup_procs_write_start).
        return tuple([f"{directory}/tasks" for directory in self.directories])

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        self._files.write(f"{self._pids}/pids.max", str(processes))
        limit, with_swap = f"{self._memory}/memory.limit_in_bytes", f"{self._memory}/memory.memsw.limit_in_bytes"
        try:
            self._files.write(limit, str(memory_bytes))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The limit grows. Memory plus swap must not be below memory, so it is raised first.
            self._files.write(with_swap, str(memory_bytes))
            self._files.write(limit, str(memory_bytes))
        try:
            self._files.write(with_swap, str(memory_bytes))
        except FileNotFoundError:  # the kernel does not account swap: this is the nearest it has
            self._files.write(f"{self._memory}/memory.swappiness", "0")

    def consumed(self) -> tuple[float | None, int | None]:
        read = self._files.read
        cpu_s = None if self._cpu is None else int(read(f"{self._cpu}/cpuacct.usage")) / 1e9
        return cpu_s, int(read(f"{self._memory}/memory.max_usage_in_bytes"))

    def _kernel_bytes(self) -> int:
        return _optional_number(self._files, f"{self._memory}/memory.kmem.usage_in_bytes") or 0

    def _reclaim(self, size: int) -> None:
        self._files.write(f"{self._memory}/memory.force_empty", "0")


class V2Cgroup(Cgroup):
    """One directory in the unified hierarchy."""

    def __init__(self, name: str, directory: str, files: CgroupFiles) -> None:
        super().__init__(name, (directory,), files)
        self.processors = self._pids = directory
        self._oom_file = f"{directory}/memory.events"
        self.directory = directory
        """For clone3 with CLONE_INTO_CGROUP, which starts a process inside."""

    @property
    def entries(self) -> tuple[str, ...]:
        return (f"{self.directory}/cgroup.procs",)

    def set_limits(self, memory_bytes: int, processes: int) -> None:
        self._files.write(f"{self.directory}/pids.max", str(processes))
        self._files.write(f"{self.directory}/memory.max", str(memory_bytes))
        # Kill all processes, not one: the others would run on without it.
        self._files.write(f"{self.directory}/memory.oom.group", "1")
        try:
            self._files.write(f"{self.directory}/memory.swap.max", "0")
        except FileNotFoundError:  # no swap on this machine
            pass

    def consumed(self) -> tuple[float | None, int | None]:
        cpu_s = _field(self._files.read(f"{self.directory}/cpu.stat"), "usage_usec") / 1e6
        return cpu_s, _optional_number(self._files, f"{self.directory}/memory.peak")

    def freeze(self, is_frozen: bool) -> bool:
        try:
            self._files.write(f"{self.directory}/cgroup.freeze", "1" if is_frozen else "0")
        except FileNotFoundError:  # before Linux 5.2
            return False
        return True

    def _kernel_bytes(self) -> int:
        return _field(self._files.read(f"{self.directory}/memory.stat"), "slab_reclaimable")

    def _reclaim(self, size: int) -> None:
        self._files.write(f"{self.directory}/memory.reclaim", str(size))  # since Linux 5.19


def _absent(error: OSError, file: Path | str) -> OSError:
    return FileNotFoundError(errno.ENOENT, "removed meanwhile", str(file)) if error.errno == errno.ENODEV else error


def _field(text: str, key: str) -> int:
    """Read one of the lines "key number"."""
    return int(dict(map(str.split, text.splitlines()))[key])


def _optional_number(files: CgroupFiles, file: Path | str) -> int | None:
    try:
        return int(files.read(file))
    except FileNotFoundError:
        return None
