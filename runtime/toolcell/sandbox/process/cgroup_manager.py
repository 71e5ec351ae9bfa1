"""Make, find and end every cgroup of one host process. Runs in the host process.

All of them are in one directory named after that process, so that a later host can find and remove what a dead host
left.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from toolcell.sandbox.process.cgroup import Cgroup, CgroupFiles, V1Cgroup, V2Cgroup
from toolcell_bridge.entry.process_usage import BEGAN, read_row
from toolcell_bridge.wire.frozen import frozen

# Find out where on this machine a process may make cgroups. Reads mount tables, asks systemd, changes nothing.
#
# Pure functions over the text of /proc, so that layouts that this machine does not have can be tested.

NEEDED = ("memory", "pids")
"""Without both the cgroup layer is not live: one limit alone would look like both."""

UNITS = (".service", ".scope", ".socket", ".mount", ".swap")
"""Kinds of units of systemd that have processes."""

ANSWER_S = 5.0
"""How long a user's manager may take to answer. Ordinarily 10 ms."""

HOSTS = "toolcell-hosts"
"""Directory into which processes move, because v2 allows no processes beside directories that have controllers."""

DELEGATE = (
    "set Delegate=yes for the service (`systemctl edit`), or start with `systemd-run --scope -p Delegate=yes`, and with"
    " --user if you are not root"
)


@frozen
class Hierarchy:
    """One mounted cgroup tree and this process's place in it."""

    version: int
    controllers: tuple[str, ...]
    """Controllers of the mount for v1; empty for v2, whose controllers are a property of each directory."""

    mount_point: Path
    own: Path
    """This process's directory below the mount point."""


@frozen
class V1Location:
    """Directories, one per controller, under which v1 cgroups may be made."""

    bases: tuple[tuple[str, Path], ...]


@frozen
class V2Location:
    """The directory under which v2 cgroups may be made. Processes that are in it have to move below it first."""

    base: Path


@frozen
class V2Group:
    """What is known of the v2 directory below which cgroups would be made."""

    directory: Path
    unit: str
    """Name of systemd's unit whose directory it is; empty where systemd does not manage it."""
    is_delegated: bool
    """Systemd has handed that unit's directory over: it makes and removes nothing below it."""
    is_writable: bool
    controllers: frozenset[str]
    """Those that directories below it can be given."""


@frozen
class NoLocation:
    """Why no cgroup can be made, and what to do about it."""

    reason: str
    fix: str


def find_location(mountinfo: str, membership: str) -> V1Location | V2Location | NoLocation:
    """Choose where to make cgroups, from the text of /proc/self/mountinfo and /proc/self/cgroup.

    v1 is preferred when it holds the controllers: a machine that mounts both keeps v2 empty of them.
    """
    hierarchies = parse(mountinfo, membership)
    v1 = {name: each.own for each in hierarchies if each.version == 1 for name in each.controllers}
    if all(name in v1 for name in NEEDED):
        return _v1_place(v1)
    unified = next((each for each in hierarchies if each.version == 2), None)
    if unified is None:
        return NoLocation("no cgroup filesystem is mounted", "mount cgroup2 on /sys/fs/cgroup, or run under systemd")
    return v2_place(_v2_group(unified))


def parse(mountinfo: str, membership: str) -> list[Hierarchy]:
    """Match mounted hierarchies with this process's path in each.

    Shape: mountinfo lines are "id parent dev root mountpoint options [tags] - type source superoptions"; membership
    lines are "id:controller,controller:path", with no controllers for v2.
    Source: proc_pid_mountinfo(5), cgroups(7).
    """
    members = [_membership(line) for line in membership.splitlines()]
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(" "), right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        offered = frozenset(options.split(",")) if kind == "cgroup" else frozenset()
        root, mount_point = unescape(fields[3]), Path(unescape(fields[4]))
        for names, path in members:
            if bool(names) == (kind == "cgroup") and names <= offered and (own := _visible(root, mount_point, path)):
                found.append(Hierarchy(1 if names else 2, tuple(sorted(names)), mount_point, own))
    return found


def _membership(line: str) -> tuple[frozenset[str], str]:
    _, names, path = line.split(":", 2)
    return frozenset(names.split(",")) if names else frozenset(), path


def unescape(field: str) -> str:
    """Undo the octal escapes of space, tab, newline and backslash in a mountinfo field."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _visible(root: str, mount_point: Path, path: str) -> Path | None:
    """Translate a path of the hierarchy into the mount, which may show only the part below `root`."""
    prefix = root.rstrip("/")
    if ".." in path.split("/") or not f"{path}/".startswith(f"{prefix}/"):
        return None
    return mount_point / path[len(prefix) :].lstrip("/")


def _v1_place(own: dict[str, Path]) -> V1Location | NoLocation:
    for name in NEEDED:
        if not os.access(own[name], os.W_OK | os.X_OK):
            return _not_writable(own[name])
    wanted = (*NEEDED, "cpuacct", "cpu")
    return V1Location(tuple((name, own[name]) for name in wanted if name in own and os.access(own[name], os.W_OK)))


def _v2_group(unified: Hierarchy) -> V2Group:
    """Look at the one directory that serves: that of our unit, and elsewhere our own.

    Never a directory above: limits of a unit bound what is below the unit. The unit is the last part of the path that
    has the name of one; below it is what its processes have made of a delegated unit, such as `HOSTS`.
    """
    path = unified.own.relative_to(unified.mount_point).parts
    unit = next((n for n in range(len(path), 0, -1) if path[n - 1].endswith(UNITS)), None)
    own = unified.own.parent if unified.own.name == HOSTS else unified.own
    directory = own if unit is None else unified.mount_point.joinpath(*path[:unit])
    return V2Group(
        directory=directory,
        unit="" if unit is None else path[unit - 1],
        is_delegated=unit is not None and _is_delegated(directory, path[unit - 1]),
        is_writable=_may_write(directory),
        controllers=frozenset(_words(directory / "cgroup.controllers")),
    )


def v2_place(group: V2Group) -> V2Location | NoLocation:
    """Decide whether cgroups may be made below a directory, or say why not.

    Source: systemd's docs/CGROUP_DELEGATION.md: each directory has one writer; of a unit that is not delegated, it is
    systemd.
    """
    if group.unit and not group.is_delegated:
        return NoLocation(
            f"systemd has not delegated the cgroup of {group.unit}, so nothing may be made in it", DELEGATE
        )
    if not group.is_writable:
        return _not_writable(group.directory)
    if lacks := [name for name in NEEDED if name not in group.controllers]:
        offered = " ".join(sorted(group.controllers)) or "none"
        return NoLocation(
            f"{group.directory} has no controller {' or '.join(lacks)} (it has: {offered})",
            f"{DELEGATE}; without systemd, write '+memory +pids' to the cgroup.subtree_control of the cgroup above",
        )
    return V2Location(group.directory)


def _is_delegated(directory: Path, unit: str) -> bool:
    """Whether systemd has handed it over. It marks units of the system; a user's manager marks nothing and is asked."""
    for name in ("user.delegate", "trusted.delegate"):  # the first since version 250, the second for root only
        with suppress(OSError):
            return os.getxattr(directory, name) == b"1"
    if not any(part.startswith("user@") for part in directory.parent.parts):
        return False
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    try:
        asked = subprocess.run(
            ["systemctl", "--user", "show", "--property=Delegate", "--value", "--", unit],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"XDG_RUNTIME_DIR": runtime},
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == b"yes"


def _may_write(base: Path) -> bool:
    """Making a directory needs the directory; moving a process into it needs the common ancestor's cgroup.procs."""
    return os.access(base, os.W_OK | os.X_OK) and os.access(base / "cgroup.procs", os.W_OK)


def _not_writable(path: Path) -> NoLocation:
    if os.geteuid() == 0:
        return NoLocation(f"{path} is read-only", "mount the cgroup filesystem writable in this container")
    return NoLocation(
        f"{path} is not writable by uid {os.geteuid()}",
        DELEGATE,
    )


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


# The processors that sandboxes may use: a share for all of one runtime, so that their host always has some left.


SHARE = 0.9
"""Share of the processors that the host may use: what all sandboxes of one runtime get together."""

SHARE_PERIOD_US = 20_000
"""Sandboxes that use up their share stand still for a tenth of this at a time, and so may whoever waits for them."""

PROCESS_SHARES, PROCESS_WEIGHT, MAX_WEIGHT = 1024, 100, 10_000
"""What an ordinary process weighs, in `cpu.shares` of v1 and in `cpu.weight` of v2, and the most that v2 takes."""

PERIOD_US = 100_000
"""For `cpu_cores`, as Docker has it: short work at full speed, and no more than so much in a tenth of a second."""


def available_processors(directory: Path, files: CgroupFiles) -> float:
    """Return how many processors this process may use: by its affinity, and by the quotas of its cgroups."""
    quotas = (_quota(each, files) for each in (directory, *directory.parents))
    return min([float(len(os.sched_getaffinity(0))), *(quota for quota in quotas if quota is not None)])


def _quota(directory: Path, files: CgroupFiles) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = files.read(directory / "cpu.max").split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int(files.read(directory / "cpu.cfs_quota_us"))
        return None if quota_us < 0 else quota_us / int(files.read(directory / "cpu.cfs_period_us"))
    return None


def set_quota(directory: Path | str, cores: float | None, period_us: int, files: CgroupFiles) -> None:
    """Bound a cgroup to so many processors; None lifts the bound.

    Raises:
        OSError: ENOENT, there is no cpu controller; EINVAL, a cgroup above has less (v1).
    """
    quota_us = None if cores is None else int(cores * period_us)
    try:
        files.write(f"{directory}/cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}")
    except FileNotFoundError:
        files.write(f"{directory}/cpu.cfs_period_us", str(period_us))
        files.write(f"{directory}/cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us))


def share_processors(base: Path, directory: Path, files: CgroupFiles) -> float | None:
    """Give `directory`, below `base`, the share of all sandboxes; return it, or None where it cannot be had."""
    cores = SHARE * available_processors(base, files)
    try:
        set_quota(directory, cores, SHARE_PERIOD_US, files)
    except OSError:
        return None
    _set_weight(directory, math.ceil(cores), files)
    return cores


def _set_weight(directory: Path, processors: int, files: CgroupFiles) -> None:
    """Let all sandboxes together weigh as much as one process on each processor. The default is one process in all:
    on a busy machine with two processors, runs then took half as long again (measured)."""
    in_v1, in_v2 = PROCESS_SHARES * processors, min(MAX_WEIGHT, PROCESS_WEIGHT * processors)
    for name, weight in (("cpu.shares", in_v1), ("cpu.weight", in_v2)):
        with suppress(OSError):
            files.write(f"{directory}/{name}", str(weight))


__all__ = ["Cgroup", "CgroupManager", "NoLocation", "discover"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST_DIRECTORY = re.compile(r"toolcell-(\d+)-(\d+)-(\d+)-\d+")
_serials = itertools.count()


class CgroupManager:
    """Makes cgroups for one runtime of one host process, and ends all it made."""

    def __init__(self, location: V1Location | V2Location, files: CgroupFiles | None = None) -> None:
        """Make the host's own directory.

        Raises:
            OSError: the location is not writable; nothing is left behind.
        """
        self._files = files or CgroupFiles()
        self._location = location
        self.folder = host_directory(os.getpid(), next(_serials))
        """Name of the directory, in each hierarchy, that holds everything made here."""
        made: list[Path] = []
        try:
            if isinstance(location, V2Location):
                self._hand_on(location.base)
            for base in self._bases():
                self._files.make(base / self.folder)
                made.append(base / self.folder)
            if isinstance(location, V2Location):
                self._hand_on(location.base / self.folder)
        except OSError:
            for directory in made:
                self._files.remove(directory)
            raise
        found = self._at(self.folder).processors
        self.processors = None if found is None else share_processors(Path(found).parent, Path(found), self._files)
        """What all sandboxes made here may use together; None where there is no cpu controller."""
        self.description = self._describe()
        """Version and controllers for results and doctor: "v1 memory+pids+cpuacct+cpu, 1.8 processors for all"."""

    def _hand_on(self, directory: Path) -> None:
        """Give directories below a v2 directory their controllers, and move processes that are in it below it.

        A delegated unit is its processes' to arrange. Systemd removes all of it when they have ended, so the directory
        of these processes needs no end of its own.

        Raises:
            OSError: EBUSY when processes stay that this process does not see or may not move.
        """
        control, hosts = directory / "cgroup.subtree_control", directory / HOSTS
        if set(NEEDED) <= set(self._files.read(control).split()):
            return
        for is_last in (False, False, False, True):
            try:
                self._files.write(control, "+memory +pids")
                break
            except OSError as error:
                if error.errno != errno.EBUSY or is_last:
                    raise
            with suppress(FileExistsError):
                self._files.make(hosts)
            for pid in self._files.read(directory / "cgroup.procs").split():
                with suppress(ProcessLookupError):  # it has ended; one that was started meanwhile is moved next time
                    self._files.write(hosts / "cgroup.procs", pid)
        with suppress(OSError):  # offered less often than the two that are needed
            self._files.write(control, "+cpu")

    def _describe(self) -> str:
        bound = "" if self.processors is None else f", {self.processors:.3g} processors for all"
        match self._location:
            case V1Location(bases):
                return "v1 " + "+".join(name for name, _ in bases) + bound
            case V2Location():
                return "v2 memory+pids" + ("" if self.processors is None else "+cpu") + bound

    @property
    def directories(self) -> tuple[list[str], str]:
        """(base directories, name of our folder in each), for the launcher, which cleans up after a killed host."""
        return [str(base) for base in self._bases()], self.folder

    def create(self, name: str, memory_bytes: int, processes: int, cpu_cores: float | None = None) -> Cgroup:
        """Make one cgroup with its limits set.

        Raises:
            OSError: EEXIST when `name` is taken; whatever was made is removed again.
            ValueError: `name` is not a plain name.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"not a cgroup name: {name!r}")
        cgroup = self._at(self.folder, name)
        made: list[str] = []
        try:
            for directory in cgroup.directories:
                self._files.make(directory)
                made.append(directory)
            cgroup.set_limits(memory_bytes, processes)
            if cpu_cores is not None:
                self.set_processors(cgroup, cpu_cores)
        except OSError:
            for directory in made:
                self._files.remove(directory)
            raise
        return cgroup

    def set_processors(self, cgroup: Cgroup, cpu_cores: float | None) -> None:
        """Bound one cgroup to `cpu_cores`. Above the share of all, or None, only that share bounds it."""
        if cgroup.processors is not None and self.processors is not None:
            cores = None if cpu_cores is None or cpu_cores >= self.processors else cpu_cores
            set_quota(cgroup.processors, cores, PERIOD_US, self._files)

    def close(self, within_s: float = 5.0) -> bool:
        """End every cgroup made here and the host's directory; False when a process does not die in time."""
        return self._end(self.folder, within_s)

    def reap_orphans(self) -> list[str]:
        """Kill and remove what dead hosts left behind; returns the directories that are gone."""
        found = {child.name for base in self._bases() for child in self._files.children(base)}
        orphans = sorted(name for name in found if is_orphan(name))
        return [name for name in orphans if self._end(name, within_s=1.0)]

    def _bases(self) -> tuple[Path, ...]:
        match self._location:
            case V1Location(bases):
                return tuple(dict.fromkeys(base for _, base in bases))
            case V2Location(base):
                return (base,)

    def _at(self, *names: str) -> Cgroup:
        """The cgroup of this name in a folder, or a folder itself."""
        below = "/".join(names)
        match self._location:
            case V1Location(bases):
                return V1Cgroup(names[-1], {kind: f"{base}/{below}" for kind, base in bases}, self._files)
            case V2Location(base):
                return V2Cgroup(names[-1], f"{base}/{below}", self._files)

    def _end(self, folder: str, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        homes = [base / folder for base in self._bases()]
        names = {child.name for home in homes if home.exists() for child in self._files.children(home)}
        gone = [self._at(folder, name).destroy(max(0.0, deadline - time.monotonic())) for name in sorted(names)]
        return all(gone) and self._at(folder).destroy(max(0.0, deadline - time.monotonic()))


def discover() -> CgroupManager | NoLocation:
    """Find where this process may make cgroups and make its directory there, or say why it cannot."""
    try:
        location = find_location(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        return location if isinstance(location, NoLocation) else CgroupManager(location)
    except OSError as error:
        return NoLocation(str(error), DELEGATE)


def host_directory(pid: int, serial: int) -> str:
    """Name a directory of host process `pid`: its pid, start time and pid namespace are together never reused."""
    return f"toolcell-{pid}-{int(read_row(pid)[BEGAN])}-{_pid_namespace()}-{serial}"


def is_orphan(folder: str) -> bool:
    """Is `folder` the directory of a host that no longer runs? Never for one of another pid namespace."""
    match = _HOST_DIRECTORY.fullmatch(folder)
    if match is None or int(match[3]) != _pid_namespace():
        return False
    try:
        return int(read_row(int(match[1]))[BEGAN]) != int(match[2])
    except (FileNotFoundError, ProcessLookupError):
        return True


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
