"""The parts of building and checking images that need no engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rows import each_row
from toolcell.errors import PackageError, SandboxUnavailable, UsageError
from toolcell.sandbox.docker.images import build, check, debian_base, reference, site
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.images.site import ImagePython, drop_tests
from toolcell.sandbox.process import package_sources
from toolcell.sandbox.process.package_sources import parse_wanted

PYTHON = ImagePython("3.13.1", "cpython", "cpython-313", "cpython-313-x86_64-linux-gnu", "x86_64", "2.36")
IMAGE = ImageRef("sha256:1", reference.DEFAULT_IMAGE, "3.13.1", reference.VERSION, packages={"numpy": "2.4.6"})


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare", build.sources() / "python" / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_row(
    ("name", "kept"),
    [
        ("./lib/x86_64-linux-gnu/libc.so.6", "usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("./lib64/ld-linux-x86-64.so.2", "usr/lib64/ld-linux-x86-64.so.2"),
        ("./usr/bin/python3.11", "usr/bin/python3.11"),
        ("./usr/bin/python3", "usr/bin/python3"),
        ("./usr/share/doc/libc6/copyright", "usr/share/doc/libc6/copyright"),
        ("./etc/services", "etc/services"),
        ("./bin/dd", None),
        ("./usr/bin/py3clean", None),
        ("./usr/sbin/iconvconfig", None),
        ("./usr/share/man/man1/python3.1.gz", None),
        ("./usr/share/doc/libc6/changelog.gz", None),
        ("./", None),
        ("./bin", None),
        ("./usr/lib", None),
    ],
)
def test_a_debian_packages_file_goes_where_the_merged_layout_has_it(name: str, kept: str | None) -> None:
    assert debian_base.target_path(name) == kept


def test_packages_are_merged_without_set_uid_files(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as package:
        for name, mode in (("./usr/lib/tool", 0o4755), ("./usr/lib/shared", 0o666), ("./bin/su", 0o4755)):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.uid = mode, 1000
            package.addfile(entry)
    monkeypatch.setattr(debian_base, "_contents", lambda path: content.getvalue())
    merged = io.BytesIO()

    packages = debian_base.DebianPackages("bookworm", (Path("libx_1%3a2.0-1_amd64.deb"), Path("twice_1_all.deb")))
    debian_base.write_archive(packages, merged)

    with tarfile.open(fileobj=io.BytesIO(merged.getvalue())) as archive:
        found = {entry.name: entry for entry in archive}
        assert len(found) == len(archive.getnames())
        assert "usr/bin/su" not in found
        assert (found["usr/lib/tool"].mode, found["usr/lib/shared"].mode) == (0o755, 0o644)
        assert {entry.uid for entry in found.values()} == {0}
        assert found["lib64"].linkname == "usr/lib64"
        listing = archive.extractfile("usr/share/doc/debian-packages.txt")
        assert listing is not None and listing.read() == b"libx=1:2.0-1\ntwice=1\n"


def test_without_apt_the_error_names_the_other_way_to_get_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    said = pytest.raises(SandboxUnavailable, match=r"apt-get and dpkg-deb.*--base")
    with said, debian_base.download(build.SUITE, build.MIRROR):
        pass


def test_the_same_context_is_the_same_archive(tmp_path: Path) -> None:
    archives = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "guest").mkdir(parents=True)
        (folder / "guest" / "b.py").write_text("x = 1")
        (folder / "Dockerfile").write_text("FROM scratch")
        os.utime(folder / "Dockerfile", (len(archives), len(archives)))
        (folder / "Dockerfile").chmod(0o600 if name == "one" else 0o644)
        archives.append(io.BytesIO())
        build.pack(folder, archives[-1])
    assert archives[0].getvalue() == archives[1].getvalue()


def test_wheels_are_requested_for_the_images_c_library() -> None:
    assert PYTHON.short == "3.13"
    assert PYTHON.platforms[0] == "manylinux_2_36_x86_64"
    assert PYTHON.platforms[-1] == "manylinux1_x86_64"
    assert "manylinux_2_37_x86_64" not in PYTHON.platforms
    assert dataclasses.replace(PYTHON, glibc="").platforms == ["musllinux_1_2_x86_64", "musllinux_1_1_x86_64"]


def test_packages_are_not_copied_for_another_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dataclasses.replace(PYTHON, cache_tag="cpython-399").can_use_ours
    monkeypatch.setattr(site.platform, "libc_ver", lambda: ("glibc", "2.40"))
    monkeypatch.setattr(site.sys.implementation, "cache_tag", PYTHON.cache_tag)
    monkeypatch.setattr(site.sysconfig, "get_config_var", lambda name: PYTHON.soabi)
    monkeypatch.setattr(site.platform, "machine", lambda: PYTHON.machine)
    assert not PYTHON.can_use_ours
    assert dataclasses.replace(PYTHON, glibc="2.41").can_use_ours


def test_the_installer_gets_the_images_interpreter_and_platforms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, command = site.installer(tmp_path, PYTHON)
    assert name == "pip"
    assert {"3.13", ":all:", "manylinux_2_36_x86_64"} <= set(command)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(site.shutil, "which", lambda name: "/usr/bin/uv")
    assert "x86_64-manylinux_2_36" in site.installer(tmp_path, PYTHON)[1]
    monkeypatch.setattr(site.shutil, "which", lambda name: None)
    with pytest.raises(PackageError, match="neither pip nor uv"):
        site.installer(tmp_path, PYTHON)


@each_row(
    ("line", "stays"),
    [
        ("from .tests import test", True),
        ("    from .tests.runner import Runner", True),
        ("from . import tests", True),
        ("from whole.tests import test", True),
        ("import whole.tests", True),
        ("from .tests_of import a", False),
        ("from other.tests import test", False),
        ("# from .tests import test", False),
        ("", False),
    ],
)
def test_a_test_suite_stays_where_its_package_imports_it(tmp_path: Path, line: str, stays: bool) -> None:
    tests = tmp_path / "whole" / "tests"
    tests.mkdir(parents=True)
    (tests.parent / "__init__.py").write_text(f"x = 1\n{line}\n")
    drop_tests(tmp_path)
    assert tests.exists() is stays


def test_packages_that_an_image_has_are_not_added_again(tmp_path: Path) -> None:
    for name, version in (("old_one", "1.0"), ("newer", "2.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
        (tmp_path / f"{name}.py").touch()
    site.drop_distributions(tmp_path, {"old-one": "1.0", "newer": "1.9"})
    assert not (tmp_path / "old_one.py").exists()
    assert (tmp_path / "newer.py").exists()


def test_a_record_with_rows_that_lead_out_deletes_and_copies_nothing_of_this_machine(tmp_path: Path) -> None:
    """The attack: a wheel's RECORD names files of the machine, and its package is in the image already."""
    outside, folder = tmp_path / "precious", tmp_path / "site"
    outside.write_text("of this machine")
    info = folder / "evil-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    (folder / "cached.py").symlink_to(outside)
    (folder / "evil.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    rows = ["../precious", "evil.py", "x/../../precious", str(outside), "link/precious", "link", "cached.py", "", ".", "a\0b",
            f"{info.name}/../../precious", f"{info.name}/METADATA"]  # fmt: skip
    (info / "RECORD").write_text("".join(f"{row},,no size\n" for row in rows))
    (evil,) = package_sources.distributions_in(folder)

    assert package_sources.files_of(evil) == [Path("evil.py"), Path("cached.py"), Path(info.name, "METADATA")]
    package_sources.copy_installed(package_sources.Installed({"evil": evil}), tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()} == {
        "cached.py",
        "evil.py",
        "METADATA",
    }
    site.drop_distributions(folder, {"evil": "1.0"})
    assert outside.read_text() == "of this machine"
    assert not (folder / "cached.py").is_symlink()
    assert not (folder / "evil.py").exists()


def test_a_record_that_is_no_table_is_an_error_of_its_package(tmp_path: Path) -> None:
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "RECORD").write_bytes(b"\xff\xfe,,\n")
    with pytest.raises(PackageError, match="RECORD of 'odd'"):
        site.drop_distributions(tmp_path, {"odd": "1.0"})


def test_a_package_that_a_layer_below_has_leaves_nothing_that_is_taken_for_one(tmp_path: Path) -> None:
    """An honest wheel in two layers: its emptied .dist-info has no METADATA."""
    for name in ("same", "other"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    site.drop_distributions(tmp_path, {"same": "1.0"})
    (tmp_path / "same-1.0.dist-info" / "WHEEL").touch()

    assert site.versions_in(tmp_path) == {"other": "1.0"}
    site.drop_distributions(tmp_path, {"same": "1.0"})


def test_derived_images_have_a_repository_of_ours() -> None:
    assert reference.DERIVED_REPOSITORY == "toolcell/packages"


def test_requirements_are_read_without_comments() -> None:
    assert site.read_requirements(["# all", "", "numpy  # arrays", "pandas>=2"]) == ["numpy", "pandas>=2"]


def test_a_derived_image_is_addressed_by_its_content() -> None:
    wanted = parse_wanted(["pandas>=2", "polars"])
    assert build.content_address(IMAGE, wanted) == build.content_address(IMAGE, wanted[::-1])
    assert build.content_address(IMAGE, wanted) != build.content_address(IMAGE, wanted[:1])
    assert build.content_address(dataclasses.replace(IMAGE, id="sha256:2"), wanted) != build.content_address(
        IMAGE, wanted
    )


def test_an_image_that_has_the_packages_is_used_as_it_is() -> None:
    client: Any = None  # never used
    assert build.derive(client, IMAGE, ["NumPy>=2"]) is IMAGE
    assert not build.provides(IMAGE, parse_wanted(["numpy>=3"])[0])
    assert not build.provides(IMAGE, parse_wanted(["numpy[extra]"])[0])
    with pytest.raises(UsageError):
        build.derive(client, IMAGE, ["--index-url=http://evil"])


def test_a_derived_image_that_is_built_says_so_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def built(*_: object, report: Callable[[str], None], **__: object) -> ImageRef:
        report("fetching polars")
        return IMAGE

    monkeypatch.setattr(build.reference, "find_image", lambda *_: None)
    monkeypatch.setattr(build, "build_with_packages", built)
    client: Any = None  # never used
    with caplog.at_level("INFO", "toolcell.sandbox.process.package_sources"):
        assert build.derive(client, IMAGE, ["polars"]) is IMAGE
    assert caplog.messages == ["fetching polars"]


def test_malformed_labels_are_read_without_an_error() -> None:
    told = {
        "Id": "sha256:9",
        "Config": {"Labels": {reference.GUEST: "9.9", reference.PACKAGES: "[not json"}},
        "RepoTags": [],
    }
    found = reference.read_image(told)
    assert (found.tag, found.packages, found.is_current) == ("sha256:9", {}, False)
    assert "toolcell 9.9" in str(reference.why_unusable(found))
    assert "not a sandbox image" in str(
        reference.why_unusable(reference.read_image({"Id": "x", "Config": {"Labels": None}}))
    )


def test_an_older_guest_of_the_same_version_is_not_current() -> None:
    assert not IMAGE.is_current
    assert dataclasses.replace(IMAGE, sources=reference.guest_sources()).is_current


def test_the_digest_of_sources_covers_names_and_contents_and_no_caches(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = reference.digest_of(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").touch()
    assert reference.digest_of(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert reference.digest_of(tmp_path) != first


SOUND = {
    "guest": IMAGE.guest_version,
    "python": IMAGE.python,
    "compiled": True,
    "links": check.LINKS,
    "elevating": [],
    "writable": [],
    "programs": ["python3", "python3.13"],
    "unusable": {},
}


@each_row(
    ("change", "said"),
    [
        ({"guest": "0"}, "labels say otherwise"),
        ({"compiled": False}, "pure Python"),
        ({"links": {"/work": "/sandbox/work", "/tmp": None}}, "do not lead into /sandbox"),
        ({"programs": ["gcc", "sh"]}, "programs in it: gcc, sh"),
        ({"unusable": {"numpy": "no libgomp.so.1"}}, "its numpy cannot be imported: no libgomp"),
        ({"elevating": ["/bin/su"]}, "set-uid or set-gid files in it: /bin/su"),
        ({"writable": [f"/{n}" for n in range(9)]}, "may write in it: /0, /1, /2, /3, /4 and 4 more$"),
        ({"writable": [f"/{n}" for n in range(5)]}, "may write in it: /0, /1, /2, /3, /4$"),
    ],
)
def test_each_problem_inside_an_image_is_named(change: dict[str, Any], said: str) -> None:
    assert check.problems_inside(SOUND, IMAGE) == []
    [problem] = check.problems_inside({**SOUND, **change}, IMAGE)
    assert re.search(said, problem)


def test_the_check_of_an_image_agrees_with_its_dockerfile(prepare: ModuleType) -> None:
    text = (build.sources() / "python" / "Dockerfile").read_text()
    entry = re.search(r"^ENTRYPOINT \[(.*)\]$", text, re.MULTILINE)
    assert entry is not None
    config = {"User": "65534:65534", "Entrypoint": [part.strip(' "') for part in entry[1].split(",")]}
    assert f"USER {config['User']}" in text
    assert check.problems_of_config(config) == []
    assert len(check.problems_of_config({"User": "", "Entrypoint": ["sh"], "Volumes": {"/data": {}}})) == 3
    # There are more links below /sandbox. A single container mounts its tmpfs there, so only a shared one sees them.
    made = {f"/{name}": target for name, target in prepare.LINKS.items()}
    assert {name: target for name, target in made.items() if not name.startswith("/sandbox/")} == check.LINKS


def test_build_files_pin_what_they_build_on() -> None:
    for name in ("python", "shell", "python-data"):
        text = (build.sources() / name / "Dockerfile").read_text()
        assert "ARG BASE_IMAGE=" in text
        assert "latest" not in text and "ADD http" not in text
    assert f"ARG BASE_IMAGE={reference.DEFAULT_IMAGE}\n" in text


def test_programs_are_removed_and_the_interpreter_stays(prepare: ModuleType, tmp_path: Path) -> None:
    for name in ("bin/sh", "usr/bin/gcc", "usr/bin/python3.13", "usr/bin/python3-config", "usr/local/bin/pip"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    prepare.keep_programs(tmp_path, frozenset())
    left = {path.name for path in tmp_path.rglob("*") if not path.is_dir()}
    assert left == {"python3.13", "python3"}


def test_the_programs_of_a_shell_stay_and_their_links_lead_to_them(prepare: ModuleType, tmp_path: Path) -> None:
    for name in ("usr/bin/dash", "usr/bin/mawk", "usr/bin/cat", "usr/bin/mount", "usr/bin/python3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "usr/bin/awk").symlink_to("/etc/alternatives/awk")
    prepare.keep_programs(tmp_path, frozenset({"sh", "awk", "cat"}))
    left = {path.name: path for path in (tmp_path / "usr/bin").iterdir()}
    assert set(left) == {"dash", "mawk", "cat", "python3", "sh", "awk"}
    assert (left["sh"].readlink(), left["awk"].readlink()) == (Path("dash"), Path("mawk"))


def test_programs_are_unpacked_for_a_shell_only() -> None:
    assert debian_base.target_path("./bin/cat") is None
    assert debian_base.target_path("./bin/cat", has_programs=True) == "usr/bin/cat"
    assert debian_base.target_path("./usr/share/man/man1/cat.1", has_programs=True) is None
    files = (Path(__file__),)
    plain, shell = (debian_base.DebianPackages("x", files, has_programs=each) for each in (False, True))
    assert plain.digest != shell.digest


def test_a_bare_tree_has_no_set_uid_and_no_world_writable_file(prepare: ModuleType, tmp_path: Path) -> None:
    for name, mode in (("tool", 0o6755), ("shared", 0o666), ("plain", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "drop").mkdir()
    (tmp_path / "drop").chmod(0o1777)
    prepare.close_permissions(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"tool": 0o755, "shared": 0o644, "plain": 0o644, "drop": 0o755}


def test_the_links_for_scripts_lead_to_the_one_writable_mount(prepare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "left").touch()
    prepare.make_links(tmp_path)
    assert os.readlink(tmp_path / "tmp") == "/sandbox/tmp"
    assert os.readlink(tmp_path / "var" / "tmp") == "/sandbox/tmp"
    assert (tmp_path / "sandbox").is_dir()


def test_package_managers_and_documentation_are_removed(prepare: ModuleType, tmp_path: Path) -> None:
    gone = ("var/lib/dpkg/status", "usr/share/man/man1/x.1", "usr/lib/apt/solvers/x", "etc/shadow", "root/.bashrc")
    kept = ("usr/share/doc/libc6/copyright", "usr/lib/x86_64-linux-gnu/libz.so.1", "etc/ld.so.cache")
    for name in (*gone, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for path in prepare.matching(tmp_path, prepare.UNUSED):
        prepare.remove(path)
    assert not [name for name in gone if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in kept)
