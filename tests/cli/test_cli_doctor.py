"""`toolcell doctor`: a line for each layer, the remedy for a missing one, and an exit status for scripts."""

import json
import os
import py_compile
import re
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolcell import Policy
from toolcell.cli import build, doctor, doctor_apparmor, doctor_docker, doctor_profiles, exits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import probes
from toolcell.sandbox.process.child_probe import Probe

pytestmark = pytest.mark.quick

EXAMINE = doctor_docker.examine


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(["doctor"]), ["doctor", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool | None]:
    """Layers by name; a test makes some of them missing, or unknown."""
    live: dict[str, bool | None] = dict.fromkeys(probes.NAMES, True)

    def probe_all() -> tuple[Probe, ...]:
        return tuple(
            Probe(name, is_live, "\x1b[31mdetail", "" if is_live else "turn it on") for name, is_live in live.items()
        )

    monkeypatch.setattr("toolcell.sandbox.process.probe_all", probe_all)

    def why_no_script_runs(required: frozenset[str], profile: str) -> str:
        missing = sorted(name for name in required if live[name] is False)
        return f"not live: {', '.join(missing)}" if missing else ""

    monkeypatch.setattr(doctor_profiles, "why_no_script_runs", why_no_script_runs)
    monkeypatch.setattr(doctor_docker, "examine", lambda: doctor_docker.no_engine("unix:///nowhere", "it is off"))
    return live


def test_a_machine_with_every_layer_passes(machine: dict[str, bool | None]) -> None:
    status, text, _ = invoke()
    assert status == exits.OK
    assert "every required layer is live" in text
    assert all(f"\n{name:<14}live" in text for name in probes.NAMES)
    assert "\x1b" not in text


def test_a_missing_required_layer_fails_and_says_how_to_get_it(machine: dict[str, bool | None]) -> None:
    machine["landlock"] = False
    status, text, _ = invoke()
    assert status == exits.UNAVAILABLE
    assert "landlock      MISSING" in text
    assert "to get it: turn it on" in text
    assert "not live: landlock; no script runs in the profile full" in text


def test_a_missing_layer_that_nobody_requires_is_only_mentioned(machine: dict[str, bool | None]) -> None:
    machine["cgroup"] = False
    status, text, _ = invoke()
    assert status == exits.OK
    assert "cgroup        absent" in text
    assert "to get it: turn it on" in text


def test_where_the_probes_fail_no_layer_is_called_missing_and_a_script_decides(machine: dict[str, bool | None]) -> None:
    machine.update(dict.fromkeys(machine))
    status, text, _ = invoke()
    assert (status, text.count(" unknown "), "MISSING" in text) == (exits.OK, len(probes.NAMES), False)
    assert json.loads(invoke("--json")[1])["missing"] == []


def test_what_is_required_can_be_chosen(machine: dict[str, bool | None]) -> None:
    machine["user"] = machine["cgroup"] = False
    assert invoke("--require", "landlock,seccomp")[0] == exits.OK
    assert invoke("--require", "cgroup")[0] == exits.UNAVAILABLE
    status, _, err = invoke("--require", "moat")
    assert status == exits.USAGE
    assert "no such layer: moat; there are user, pid" in err


def test_json_says_the_same_as_data(machine: dict[str, bool | None]) -> None:
    machine["pid"] = False
    status, text, _ = invoke("--json")
    told: dict[str, Any] = json.loads(text)
    assert status == exits.UNAVAILABLE
    assert (told["ok"], told["missing"]) == (False, ["pid"])
    assert set(told["machine"]) == {"kernel", "python", "user", "heap", "bytecode", "memory"}
    assert re.fullmatch(
        r"[\d.]+ [MG]iB of [\d.]+ [MG]iB available; a sandbox may take 512 MiB", told["machine"]["memory"]
    )
    assert told["docker"]["daemon"] is None
    assert {layer["name"]: layer["live"] for layer in told["layers"]} == machine


def test_modules_that_each_start_compiles_anew_come_with_a_remedy(
    machine: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert "compileall -q " in json.loads(invoke("--json")[1])["machine"]["bytecode"]
    py_compile.compile(doctor.__file__)
    assert json.loads(invoke("--json")[1])["machine"]["bytecode"] == "kept"


def test_an_engine_that_cannot_be_reached_comes_with_one_remedy(
    machine: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_docker, "examine", EXAMINE)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nope.sock")
    _, text, _ = invoke()
    assert text.count("install Docker") == 1
    assert "there is no container engine at" in text
    assert "to get it: install Docker" in text


def test_who_may_not_use_the_socket_is_not_told_to_install_an_engine(
    machine: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def knock(address: str) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "theirs.sock").touch()
    monkeypatch.setattr(doctor_docker, "examine", EXAMINE)
    monkeypatch.setattr("toolcell.sandbox.docker.client.check_socket", knock)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/theirs.sock")
    _, text, _ = invoke()
    assert text.count("join the group of its socket") == 1
    assert "to get it:" not in text
    assert "install Docker" not in text


def test_every_layer_has_its_purpose() -> None:
    assert set(doctor.PURPOSE) == set(probes.NAMES)


def test_a_machine_where_no_script_runs_fails_although_every_layer_is_live(
    machine: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_profiles, "why_no_script_runs", lambda required, profile: "EMFILE: too many open files")
    status, text, _ = invoke()
    assert status == exits.UNAVAILABLE
    assert "EMFILE: too many open files; no script runs in the profile full" in text
    assert json.loads(invoke("--json")[1])["problem"] == "EMFILE: too many open files"


@pytest.mark.isolation
def test_a_script_is_run_for_real_before_doctor_says_that_one_runs() -> None:
    assert doctor_profiles.why_no_script_runs(Policy().require, "full") == ""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
        assert "open files" in doctor_profiles.why_no_script_runs(frozenset(), "full")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_profile_runs_if_a_script_does_whatever_the_probes_say(
    machine: dict[str, bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["capabilities"] = False
    monkeypatch.setattr(doctor_profiles, "why_no_script_runs", lambda required, profile: "")
    status, text, _ = invoke("--profile", "container")
    assert status == exits.OK
    assert "capabilities  MISSING" in text


@pytest.mark.slow
@pytest.mark.isolation
def test_the_real_machine_is_described_layer_by_layer() -> None:
    _, text, _ = invoke("--json")
    assert [layer["name"] for layer in json.loads(text)["layers"]] == list(probes.NAMES)


def test_a_socket_in_a_folder_that_is_closed_is_for_the_client_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolcell.cli import engine
    from toolcell.sandbox.docker.client import EngineClient

    def closed(path: Path, **options: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    def refuse(docker_host: str | None = None) -> EngineClient:
        raise SandboxUnavailable("this user may not")

    monkeypatch.setenv("DOCKER_HOST", "unix:///closed/docker.sock")
    monkeypatch.setattr(Path, "exists", closed)
    monkeypatch.setattr(EngineClient, "connect_now", refuse)
    with pytest.raises(SandboxUnavailable, match="this user may not"), engine.engine():
        pass


def test_fix_writes_the_profile_that_grants_user_namespaces_to_this_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ubuntu's kernels have the switch, and only root may write to AppArmor's folder."""
    switch, program = tmp_path / "switch", os.path.realpath(sys.executable)
    monkeypatch.setattr(doctor_apparmor, "SWITCH", switch)
    monkeypatch.setattr(doctor_apparmor, "PROFILES", tmp_path / "apparmor.d")
    for text in (None, "0\n"):
        if text is not None:
            switch.write_text(text)
        status, _, told = invoke("--fix")
        assert status == exits.USAGE and str(switch) in told

    switch.write_text("1\n")
    status, _, told = invoke("--fix")
    assert status == exits.USAGE and f"sudo {sys.executable} -m toolcell doctor --fix" in told.replace("\n", " ")

    (tmp_path / "apparmor.d").mkdir()
    status, text, _ = invoke("--fix")
    (file,) = (tmp_path / "apparmor.d").iterdir()
    assert status == exits.OK and f"sudo apparmor_parser --replace {file}" in text
    profile = [line.strip() for line in file.read_text().splitlines()]
    assert f"profile {file.name} {program} flags=(unconfined) {{" in profile and "userns," in profile
