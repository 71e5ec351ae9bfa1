"""Find out where on this machine a process may make cgroups. Reads mount tables, changes nothing.

Pure functions over the text of /proc, so that layouts that this machine does not have can be tested.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolcell_bridge.wire.frozen import frozen

NEEDED = ("memory", "pids")
"""Without both the cgroup layer is not live: one limit alone would look like both."""


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
    """The directory under which v2 cgroups may be made; its children have the controllers."""

    base: Path


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
    return _v2_place(unified)


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


def _v2_place(unified: Hierarchy) -> V2Location | NoLocation:
    """Choose a base whose children have the controllers already.

    Processes and controllers do not share a directory in v2 ("no internal processes"), so our own directory serves
    only when it is the root or holds no process; else the parent, as systemd's delegated units have it. Nothing is
    switched on here and the host process is not moved: its cgroup is not ours to rearrange.
    """
    candidates = [unified.own]
    if unified.own != unified.mount_point:
        candidates.append(unified.own.parent)
    enabled = [base for base in candidates if set(NEEDED) <= set(_words(base / "cgroup.subtree_control"))]
    if not enabled:
        offered = " ".join(_words(unified.own / "cgroup.controllers")) or "none"
        return NoLocation(
            f"memory and pids are not handed on below {unified.own} (controllers here: {offered})",
            "start under `systemd-run --user --scope -p Delegate=yes`, or write '+memory +pids' to the"
            " cgroup.subtree_control of an empty cgroup you own",
        )
    writable = (base for base in enabled if _may_write(base))
    return next((V2Location(base) for base in writable), _not_writable(enabled[0]))


def _may_write(base: Path) -> bool:
    """Making a directory needs the directory; moving a process into it needs the common ancestor's cgroup.procs."""
    return os.access(base, os.W_OK | os.X_OK) and os.access(base / "cgroup.procs", os.W_OK)


def _not_writable(path: Path) -> NoLocation:
    if os.geteuid() == 0:
        return NoLocation(f"{path} is read-only", "mount the cgroup filesystem writable in this container")
    return NoLocation(
        f"{path} is not writable by uid {os.geteuid()}",
        "run as root, or under `systemd-run --user --scope -p Delegate=yes`",
    )


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
