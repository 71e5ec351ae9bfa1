"""`toolcell images`: text and JSON output, with a fake engine and without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from rows import each_row
from toolcell.cli import build, doctor_docker, exits
from toolcell.sandbox.docker.client import CAN_LIMIT, DaemonInfo, EngineClient
from toolcell.sandbox.docker.images import check, reference
from toolcell.sandbox.docker.images.reference import ImageRef

CURRENT = {reference.GUEST: reference.VERSION, reference.PYTHON: "3.13.1", reference.ROLE: reference.SANDBOX}


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(["images"]), ["images", *arguments])
    return result.exit_code, result.stdout, result.stderr


def image(tag: str, **labels: str) -> dict[str, Any]:
    return {"Id": f"sha256:{tag:0>64}", "RepoTags": [tag], "Size": 56_700_000, "Config": {"Labels": labels}}


class Engine:
    """Answers the calls that `list` makes."""

    def __init__(self, *known: dict[str, Any]) -> None:
        self.known = {tag: each for each in known for tag in each["RepoTags"]}

    def close(self) -> None:
        """Nothing is open."""

    def images(self, filters: dict[str, Any]) -> list[dict[str, Any]]:
        if f"{reference.ROLE}={reference.SANDBOX}" not in filters["label"]:
            return []
        return list(self.known.values())

    def inspect_image(self, name: str) -> dict[str, Any]:
        import docker.errors

        if name not in self.known:
            raise docker.errors.NotFound("no such image")
        return self.known[name]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with an image of this installation and an older image."""
    current = image(reference.DEFAULT_IMAGE, **CURRENT, **{reference.SOURCES: reference.guest_sources()})
    older = image(
        "toolcell/python:0.0.1", **{**CURRENT, reference.GUEST: "0.0.1", reference.PACKAGES: '{"numpy": "2.4"}'}
    )
    played = Engine(current, older)
    monkeypatch.setattr(EngineClient, "connect_now", lambda: SimpleNamespace(api=played))
    monkeypatch.setenv("DOCKER_HOST", "tcp://engine.invalid:2376")
    return played


def test_images_are_listed_with_sizes_and_versions_of_their_guests(engine: Engine) -> None:
    status, text, _ = invoke("list")
    assert status == exits.OK
    assert reference.DEFAULT_IMAGE in text and "56.7 MB" in text
    assert "0.0.1 (another one)" in text and "numpy 2.4" in text


def test_the_list_as_json_has_the_same_images(engine: Engine) -> None:
    told = {each["tag"]: each for each in json.loads(invoke("list", "--json")[1])["images"]}
    assert told[reference.DEFAULT_IMAGE]["current"] is True
    assert told["toolcell/python:0.0.1"]["current"] is False
    assert told["toolcell/python:0.0.1"]["packages"] == {"numpy": "2.4"}


def test_without_images_the_list_names_the_command_to_build_one(engine: Engine) -> None:
    engine.known.clear()
    assert "toolcell images build" in invoke("list")[1]
    status, _, err = invoke("check")
    assert status == exits.UNAVAILABLE
    assert f"no image {reference.DEFAULT_IMAGE}" in err


def test_a_check_fails_if_one_image_is_bad(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(client: Any, each: ImageRef, runtime: str | None) -> list[str]:
        return [] if each.guest_version == reference.VERSION else ["it is old"]

    monkeypatch.setattr(check, "problems", problems)
    assert invoke("check", reference.DEFAULT_IMAGE)[0] == exits.OK
    status, text, _ = invoke("check")
    assert status == exits.UNAVAILABLE
    assert f"good  {reference.DEFAULT_IMAGE}" in text
    assert "BAD   toolcell/python:0.0.1" in text and "it is old" in text
    assert len(json.loads(invoke("check", "--json")[1])["images"]) == 2


@each_row("command", ["list", "check", "build"])
def test_without_an_engine_every_command_names_the_remedy(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    status, _, err = invoke(command)
    assert status == exits.UNAVAILABLE
    assert "DOCKER_HOST" in err
    status, text, _ = invoke(command, "--json")
    assert (status, json.loads(text)["error"]["code"]) == (exits.UNAVAILABLE, "sandbox_unavailable")


def test_a_build_is_on_one_base() -> None:
    status, _, err = invoke("build", "--debian", "--base", "python:3.13-slim")
    assert status == exits.USAGE
    assert "exclude each other" in err


INFO = DaemonInfo(
    version="20.10.24", api_version="1.41", is_podman=False, is_local=True, cgroup_version="1", cgroup_driver="cgroupfs",
    storage_driver="overlay2", runtimes=("runc", "runsc"), default_runtime="runc", has_init=True,
    security=("name=seccomp,profile=default",), architecture="x86_64",
)  # fmt: skip


def engine_with(info: DaemonInfo) -> EngineClient:
    return EngineClient(cast(Any, None), info, "unix:///x")


IMAGE = ImageRef(
    "sha256:1", reference.DEFAULT_IMAGE, "3.13.1", reference.VERSION, reference.guest_sources(), size_bytes=56_700_000
)


def test_doctor_reports_nothing_missing_on_a_complete_engine() -> None:
    found = doctor_docker.describe("unix:///x", engine_with(INFO), [IMAGE])
    assert found["missing"] == []
    assert dict(doctor_docker.lines(found)) == {
        "docker": "Docker 20.10.24, API 1.41, at unix:///x",
        "  cgroups": "v1 (cgroupfs)",
        "  storage": "overlay2",
        "  runtimes": "runc (default), runsc",
        "  images": f"{reference.DEFAULT_IMAGE} (56.7 MB)",
    }


def test_doctor_names_each_missing_thing_with_its_remedy() -> None:
    info = DaemonInfo(
        **{
            **{name: getattr(INFO, name) for name in INFO.__slots__},
            "runtimes": ("runc",),
            "security": (),
            "has_init": False,
            "cannot_limit": CAN_LIMIT,
        }
    )
    lacks = doctor_docker.missing(engine_with(info), [])
    assert len(lacks) == 7
    assert all(what and fix for what, fix in lacks)
    stale = ImageRef("sha256:1", reference.DEFAULT_IMAGE, "3.13.1", "0.0.1")
    derived = replace(stale, tag=f"{reference.DERIVED_REPOSITORY}:0")
    assert [what for what, _ in doctor_docker.missing(engine_with(INFO), [stale, derived])] == [
        f"another installation's guest in {reference.DEFAULT_IMAGE}"
    ]


def test_doctor_counts_the_images_that_runtimes_made_for_their_packages() -> None:
    made = [replace(IMAGE, tag=f"{reference.DERIVED_REPOSITORY}:{n}", size_bytes=150_000_000) for n in range(3)]
    shown = dict(doctor_docker.lines(doctor_docker.describe("unix:///x", engine_with(INFO), [IMAGE, *made])))[
        "  images"
    ]
    assert shown == f"{reference.DEFAULT_IMAGE} (56.7 MB), 3 with packages (450.0 MB): toolcell images list"


def test_doctor_without_an_engine_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    found = doctor_docker.examine()
    assert found["daemon"] is None
    assert "apt install docker.io" in found["missing"][0]["fix"]
    assert doctor_docker.lines(found) == [("docker", "no engine at unix:///nonexistent/docker.sock")]
