"""Find out where on this machine a process may make cgroups. Reads mount tables, asks systemd, changes nothing.

Pure functions over the text of /proc, so that layouts that this machine does not have can be tested.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from toolcell_bridge.wire.frozen import frozen

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
