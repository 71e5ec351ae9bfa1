"""Images on a real engine: their contents, images that are refused, and packages that are added once."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolcell.errors import PackageError, SandboxUnavailable
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import build, check, reference
from toolcell.sandbox.docker.images.reference import ImageRef

pytestmark = pytest.mark.docker


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package that is not published anywhere."""
    path = tmp_path / "answer_box-1.0-py3-none-any.whl"
    files = {
        "answer_box.py": "ANSWER = 42\n",
        "answer_box-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: answer-box\nVersion: 1.0\n",
        "answer_box-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={hashlib.sha256(text.encode()).hexdigest()},{len(text)}\n" for name, text in files.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, "answer_box-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def scraps(docker_client: EngineClient) -> Iterator[list[str]]:
    """Tags that a test makes; removed after the test."""
    tags: list[str] = []
    yield tags
    for tag in tags:
        docker_client.api.remove_image(tag, force=True)


def test_the_image_contains_this_guest_and_nothing_to_misuse(
    docker_client: EngineClient, docker_image: ImageRef
) -> None:
    assert docker_image.is_current
    assert check.problems(docker_client, docker_image) == []


def test_the_guest_finds_what_it_needs_on_its_path(docker_client: EngineClient, docker_image: ImageRef) -> None:
    code = "import json, sys, toolcell_bridge as b, os; print(json.dumps([b.__file__, os.getuid(), os.getgid(), sys.path]))"
    file, uid, gid, path = json.loads(check.run_python(docker_client, docker_image.id, code))
    assert file == "/usr/lib/toolcell/guest/toolcell_bridge/__init__.py"
    assert (uid, gid) == (65534, 65534)
    assert "" not in path


def test_modules_are_compiled_in_the_image(docker_client: EngineClient, docker_image: ImageRef) -> None:
    """The root is read-only, so a module without bytecode would be compiled again in every sandbox."""
    code = "import asyncio, json, toolcell_bridge.wire.messages as m; from os.path import exists; print(exists(m.__cached__), exists(asyncio.__cached__))"
    assert check.run_python(docker_client, docker_image.id, code).split() == ["True", "True"]


def test_an_image_is_found_by_tag_and_pinned_by_id(docker_client: EngineClient, docker_image: ImageRef) -> None:
    found = build.ensure_image(docker_client)
    assert found.id.startswith("sha256:")
    assert reference.require_image(docker_client, docker_image.id).id == docker_image.id
    assert (found.guest_version, found.tag) == (reference.VERSION, reference.DEFAULT_IMAGE)
    assert 10e6 < docker_image.size_bytes < 400e6
    assert docker_image.tag in {each.tag for each in reference.list_images(docker_client)}


def test_a_missing_image_is_named_with_the_way_to_get_it(docker_client: EngineClient) -> None:
    """Our command builds our own images only. The message for another name says to pull it, build it or leave it out."""
    with pytest.raises(SandboxUnavailable, match=r"no image nope:1; docker pull or docker build it") as caught:
        build.ensure_image(docker_client, "nope:1")
    assert "toolcell images check nope:1" in str(caught.value)
    assert f"leave the image out for {reference.DEFAULT_IMAGE}, which `toolcell images build` makes" in str(
        caught.value
    )
    assert reference.how_to_get(reference.DEFAULT_IMAGE) == f"build it: {reference.HOW_TO_BUILD}"
    assert reference.how_to_get(reference.DATA_IMAGE) == "build it: toolcell images build --data"


def test_another_versions_guest_is_refused(
    docker_client: EngineClient, docker_image: ImageRef, scraps: list[str]
) -> None:
    other = relabelled(docker_client, docker_image, scraps, "old", {reference.GUEST: "0.0.1"})
    with pytest.raises(SandboxUnavailable, match=r"guest in \S+ is toolcell 0\.0\.1, this is toolcell .* images build"):
        build.ensure_image(docker_client, other)


def test_an_image_without_a_guest_is_refused(
    docker_client: EngineClient, docker_image: ImageRef, scraps: list[str]
) -> None:
    other = relabelled(docker_client, docker_image, scraps, "foreign", {reference.GUEST: ""})
    with pytest.raises(SandboxUnavailable, match=r"not a sandbox image .* images build --base"):
        build.ensure_image(docker_client, other)


def test_wrong_labels_are_found(docker_client: EngineClient, docker_image: ImageRef, scraps: list[str]) -> None:
    other = relabelled(docker_client, docker_image, scraps, "liar", {reference.PYTHON: "3.99.0"})
    found = reference.require_image(docker_client, other)
    assert any("labels say otherwise" in problem for problem in check.problems(docker_client, found))


def relabelled(client: EngineClient, image: ImageRef, scraps: list[str], name: str, labels: dict[str, str]) -> str:
    """Tag the same image with other labels."""
    made = client.api.create_container_from_config({"Image": image.id, "Labels": {reference.ROLE: "test"}})["Id"]
    try:
        changes = [f"LABEL {key}={value}" for key, value in {**labels, reference.ROLE: "test"}.items()]
        client.api.commit(made, repository="toolcell/test", tag=name, changes=changes)
    finally:
        client.api.remove_container(made)
    scraps.append(f"toolcell/test:{name}")
    return scraps[-1]


def test_packages_are_built_into_an_image_once(
    docker_client: EngineClient, docker_image: ImageRef, wheel: Path, scraps: list[str]
) -> None:
    derived = build.ensure_image(docker_client, docker_image.id, [str(wheel)])
    scraps.append(derived.tag)

    assert derived.packages == {"answer-box": "1.0"}
    assert derived.guest_version == docker_image.guest_version
    assert check.problems(docker_client, derived) == []
    code = "import answer_box, os; print(answer_box.ANSWER, os.path.exists(answer_box.__cached__))"
    assert check.run_python(docker_client, derived.id, code).split() == ["42", "True"]
    assert build.ensure_image(docker_client, docker_image.id, [str(wheel)]).id == derived.id
    assert build.ensure_image(docker_client, derived.id, ["answer-box>=1"]).id == derived.id


def test_no_package_replaces_a_module_of_the_guest(
    docker_client: EngineClient, docker_image: ImageRef, tmp_path: Path, scraps: list[str]
) -> None:
    wheel = tmp_path / "usurper-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toolcell_bridge/__init__.py", "raise SystemExit(7)\n")
        archive.writestr("usurper-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: usurper\nVersion: 1.0\n")
        archive.writestr(
            "usurper-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("usurper-1.0.dist-info/RECORD", "toolcell_bridge/__init__.py,,\n")
    derived = build.ensure_image(docker_client, docker_image.id, [str(wheel)])
    scraps.append(derived.tag)

    told = check.run_python(docker_client, derived.id, "import toolcell_bridge; print(toolcell_bridge.__file__)")
    assert told.startswith("/usr/lib/toolcell/guest/")


def test_a_package_that_cannot_be_installed_leaves_no_image(
    docker_client: EngineClient, docker_image: ImageRef, tmp_path: Path
) -> None:
    before = {each.tag for each in reference.list_images(docker_client)}
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    with pytest.raises(PackageError, match=r"could not install .*broken-1\.0"):
        build.ensure_image(docker_client, docker_image.id, [str(broken)])
    assert {each.tag for each in reference.list_images(docker_client)} == before


def test_building_again_changes_nothing(docker_client: EngineClient, docker_image: ImageRef, scraps: list[str]) -> None:
    """With the same guest and base, every step comes from the engine's cache."""
    scraps.append("toolcell/test:again")
    one = build.build_python(docker_client, docker_image.base, tag="toolcell/test:again")
    assert build.build_python(docker_client, docker_image.base, tag="toolcell/test:again").id == one.id


def test_of_what_builds_leave_the_old_images_without_a_tag_go(
    docker_client: EngineClient, docker_image: ImageRef, scraps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "ROLE", "io.toolcell.test-of-leftovers")
    first = reference.find_image(docker_client, relabelled(docker_client, docker_image, scraps, "leftover", {}))
    tag = relabelled(docker_client, docker_image, scraps[1:], "leftover", {"other": "1"})  # it takes the tag
    second = docker_client.api.inspect_image(tag)["Id"]

    def left() -> set[str]:
        return {str(each["Id"]) for each in docker_client.api.images(filters={"label": reference.ROLE})}

    before = left()
    build.remove_leftovers(docker_client)
    assert left() == before  # they are not old
    monkeypatch.setattr(build, "KEPT", "0s")
    assert first is not None and first.id in before
    for _ in range(100):  # the engine refuses while it removes for another build
        build.remove_leftovers(docker_client)
        if first.id not in left():
            break
        time.sleep(0.1)
    assert first.id not in left() and second in left()


def test_a_base_that_cannot_be_had_is_answered_with_the_way_that_needs_no_registry(docker_client: EngineClient) -> None:
    with pytest.raises(SandboxUnavailable, match=r"cannot pull it .* images build --debian"):
        build.find_base(docker_client, "localhost:1/nothing:0", lambda text: None)


def test_a_probe_of_an_image_leaves_no_container(docker_client: EngineClient, docker_image: ImageRef) -> None:
    with pytest.raises(SandboxUnavailable, match=r"(?s)exit status 1.*ZeroDivisionError"):
        check.run_python(docker_client, docker_image.id, "1/0")
    assert (
        docker_client.api.containers(all=True, filters={"label": f"{reference.ROLE}={reference.PROBE}", "exited": 1})
        == []
    )
