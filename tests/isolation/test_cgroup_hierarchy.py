"""The place for cgroups, found from the text of /proc on many kinds of machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolcell.sandbox.process.cgroup_hierarchy import NoLocation, V1Location, V2Location, find_location, parse

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


def test_v2_uses_the_parent_when_its_own_directory_holds_processes(tmp_path: Path) -> None:
    """As under `systemd-run --user --scope`: the slice above hands the controllers on."""
    tree(tmp_path / "app.slice")
    tree(tmp_path / "app.slice/run.scope", controllers="", procs="123\n")
    mounts = V2_LINE.format(root="/", at=tmp_path)
    assert find_location(mounts, "0::/app.slice/run.scope\n") == V2Location(tmp_path / "app.slice")


def test_v2_uses_its_own_directory_when_that_hands_the_controllers_on(tmp_path: Path) -> None:
    tree(tmp_path)
    assert find_location(V2_LINE.format(root="/", at=tmp_path), "0::/\n") == V2Location(tmp_path)


def test_v2_without_controllers_handed_on_is_no_place_and_says_how_to_get_one(tmp_path: Path) -> None:
    tree(tmp_path, controllers="cpu")
    found = find_location(V2_LINE.format(root="/", at=tmp_path), "0::/\n")
    assert isinstance(found, NoLocation)
    assert "memory" in found.reason
    assert "Delegate=yes" in found.fix


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
