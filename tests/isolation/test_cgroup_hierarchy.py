"""The place for cgroups, found from the text of /proc on many kinds of machines."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from toolcell.sandbox.process.cgroup_manager import (
    NoLocation,
    V1Location,
    V2Group,
    V2Location,
    find_location,
    parse,
    v2_place,
)

pytestmark = pytest.mark.quick

V1_LINE = "{id} 31 0:{id} {root} {at} rw,relatime shared:9 - cgroup cgroup rw,{names}\n"
V2_LINE = "41 31 0:38 {root} {at} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(base: Path, controllers: str = "memory pids", procs: str = "") -> None:
    base.mkdir(parents=True, exist_ok=True)
    (base / "cgroup.subtree_control").write_text(controllers)
    (base / "cgroup.controllers").write_text("cpu io memory pids")
    (base / "cgroup.procs").write_text(procs)


@pytest.mark.parametrize("names", ["cpu,cpuacct", "cpuacct"])
def test_v1_takes_each_controller_where_the_process_is(tmp_path: Path, names: str) -> None:
    own = {"memory": "/box/7", "pids": "/", names: "/acct"}
    mounts = "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
    membership = "1:name=systemd:/init\n0::/\n"
    for number, (each, path) in enumerate(own.items()):
        (tmp_path / each / path[1:]).mkdir(parents=True)
        mounts += V1_LINE.format(id=50 + number, root="/", at=tmp_path / each, names=each)
        membership += f"{number + 2}:{each}:{path}\n"

    processors = ((name, tmp_path / names / "acct") for name in ("cpuacct", "cpu") if name in names.split(","))
    assert find_location(mounts + V2_LINE.format(root="/", at=tmp_path), membership) == V1Location(
        (("memory", tmp_path / "memory/box/7"), ("pids", tmp_path / "pids"), *processors)
    )


def test_a_mount_that_shows_only_a_containers_part_is_read_relative_to_it(tmp_path: Path) -> None:
    mounts = V1_LINE.format(id=50, root="/docker/abc", at="/cg/memory", names="memory")
    mounts += V1_LINE.format(id=51, root="/docker/abc", at="/cg/pids", names="pids")
    found = parse(mounts, "3:memory:/docker/abc/inner\n4:pids:/docker/abcd\n")
    assert [(each.controllers, each.own) for each in found] == [(("memory",), Path("/cg/memory/inner"))]


def test_a_process_outside_the_visible_part_has_no_place(tmp_path: Path) -> None:
    found = find_location(V2_LINE.format(root="/", at=tmp_path), "0::/../other\n")
    assert isinstance(found, NoLocation)


def test_spaces_in_mount_points_are_unescaped() -> None:
    found = parse(V2_LINE.format(root="/", at="/my\\040cgroups"), "0::/a\n")
    assert found[0].own == Path("/my cgroups/a")


DELEGATED = {"/u.slice/run.scope", "/u.slice/user@7.service"}
PLACES = {
    # This process's directory, and where cgroups are made; None where that is refused.
    "/": "/",  # a container that owns its part of the tree, or a machine without systemd
    "/ours": "/ours",
    "/toolcell-hosts": "/",  # moved there by another host of the same group
    "/ours/toolcell-hosts": "/ours",
    "/u.slice/run.scope": "/u.slice/run.scope",  # as `systemd-run --scope -p Delegate=yes`
    "/u.slice/run.scope/toolcell-hosts": "/u.slice/run.scope",
    "/u.slice/run.scope/sub": "/u.slice/run.scope",  # as DelegateSubgroup=sub
    "/u.slice/a.service": None,
    "/u.slice/session-1.scope": None,  # a login
    "/u.slice/user@7.service/app.slice/a.service": None,  # what is above is delegated to the user's manager, not to it
    "/u.slice/user@7.service/app.slice/b.scope": "/u.slice/user@7.service/app.slice/b.scope",
    "/u.slice/user@7.service/init.scope": None,
}


def test_v2_cgroups_are_made_inside_a_delegated_unit_and_nowhere_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marks(path: Path, _: str) -> bytes:
        if path in marked:
            return b"1"
        raise OSError(errno.ENODATA, "no such attribute")

    marked = {tmp_path / path[1:] for path in DELEGATED}
    monkeypatch.setattr(os, "getxattr", marks)
    manager = tmp_path / "bin" / "systemctl"  # of the user, whose units carry no mark
    manager.parent.mkdir()
    manager.write_text(
        '#!/bin/sh\n[ "$*" = "--user show --property=Delegate --value -- b.scope" ] && echo yes || echo no\n'
    )
    manager.chmod(0o755)
    monkeypatch.setenv("PATH", str(manager.parent))
    found = {}
    for own in PLACES:
        tree(tmp_path / own[1:])
    for own in PLACES:
        place = find_location(V2_LINE.format(root="/", at=tmp_path), f"0::{own}\n")
        if isinstance(place, NoLocation):
            assert Path(own).name in place.reason
            assert "Delegate=yes" in place.fix
        found[own] = f"/{place.base.relative_to(tmp_path)}".rstrip(".") if isinstance(place, V2Location) else None
    assert found == PLACES


def test_v2_decides_by_the_unit_its_rights_and_its_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    good = V2Group(Path("/cg/a.service"), "a.service", True, True, frozenset({"cpu", "memory", "pids"}))
    assert v2_place(good) == V2Location(good.directory)
    assert v2_place(replace(good, unit="", is_delegated=False)) == V2Location(good.directory)
    for other, word in {
        replace(good, is_delegated=False): "delegated",
        replace(good, is_writable=False): "read-only",  # as in a container with Docker's defaults
        replace(good, controllers=frozenset({"cpu", "memory"})): "pids",
    }.items():
        found = v2_place(other)
        assert isinstance(found, NoLocation)
        assert word in found.reason


def test_v2_that_cannot_be_written_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = find_location(V2_LINE.format(root="/", at=tmp_path), "0::/\n")
    assert isinstance(found, NoLocation)
    assert str(tmp_path) in found.reason


def test_a_machine_without_cgroups_is_no_place() -> None:
    found = find_location("22 1 8:1 / / rw - ext4 /dev/sda rw\n", "")
    assert isinstance(found, NoLocation)
    assert "no cgroup filesystem" in found.reason


def test_half_the_controllers_are_no_layer(tmp_path: Path) -> None:
    found = find_location(V1_LINE.format(id=50, root="/", at=tmp_path, names="memory"), "3:memory:/\n")
    assert isinstance(found, NoLocation)
