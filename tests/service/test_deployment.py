"""The files of docs/service/deployment.md: settings, unit, compose files and manifest, and the image with its quick start."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rows import each_row
from toolcell.errors import StoreError
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import reference
from toolcell.service import ServiceConfig, create_app
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase
from toolcell.support import sqlite

ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "sandbox_images" / "service"
PAGE = (ROOT / "docs" / "service" / "deployment.md").read_text(encoding="utf-8")
BASE = "toolcell/debian:bookworm"
CANCEL_S = 10


def drain_s() -> float:
    return ServiceConfig.from_toml(FILES / "service.toml").drain_s


@each_row(("name", "profile", "backend"), [("service", "container", "process"), ("siblings", "full", "docker")])
def test_the_settings_of_the_image_are_settings_and_demand_tokens(name: str, profile: str, backend: str) -> None:
    config = ServiceConfig.from_toml(FILES / f"{name}.toml")

    assert config.tokens is not None
    assert (config.defaults.policy.profile, config.defaults.backend) == (profile, backend)
    places = (config.state, config.tokens, config.defaults.record)
    assert all(Path("/var/lib/toolcell") in Path(str(place)).parents for place in places)


def test_a_byte_order_mark_before_settings_does_no_harm(tmp_path: Path) -> None:
    marked = tmp_path / "service.toml"
    marked.write_text("connections = 4\n", encoding="utf-8-sig")
    assert ServiceConfig.from_toml(marked).connections == 4


# systemd


def test_the_recipe_for_systemd_is_for_this_machine_alone_and_makes_a_token_before_the_start(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"## systemd\n\n((?:    .+\n)+)", PAGE)
    lines = [line.strip() for line in recipe.splitlines()]
    (edit,) = (line for line in lines if line.startswith("sed "))
    copy = shutil.copyfile(FILES / "service.toml", tmp_path / "service.toml")
    subprocess.run(edit.replace("/etc/toolcell/service.toml", str(copy)), shell=True, check=True)

    config = ServiceConfig.from_toml(copy)
    assert (config.host, config.defaults.policy.profile) == ("127.0.0.1", "full")
    assert str(config.tokens) in "".join(line for line in lines if "tokens create" in line)
    steps = ["service.toml", "tokens create", "systemctl enable"]
    places = [next(at for at, line in enumerate(lines) if step in line) for step in steps]
    assert places == sorted(places)


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((FILES / "toolcell.service").read_text(encoding="utf-8"))
    return parser["Service"]


def test_the_unit_gives_runs_their_time_and_takes_all_privileges() -> None:
    service = unit()

    assert int(service["TimeoutStopSec"]) > drain_s() + CANCEL_S
    assert service["KillSignal"] == "SIGTERM"
    assert (service["CapabilityBoundingSet"], service["NoNewPrivileges"], service["ProtectSystem"]) == (
        "",
        "yes",
        "strict",
    )
    assert service["User"] not in ("", "root")


def test_the_unit_leaves_what_sandboxes_are_made_of() -> None:
    service = unit()
    denied = service["SystemCallFilter"].removeprefix("~").split()

    assert not {"RestrictNamespaces", "PrivateUsers", "MemoryDenyWriteExecute", "ProtectProc", "ProcSubset"} & set(
        service
    )
    assert {"@mount", "@privileged", "@process", "@sandbox"}.isdisjoint(denied)
    assert service["SystemCallErrorNumber"] == "EPERM"


def test_systemd_finds_no_mistake_in_the_unit_and_calls_it_hardened(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    text = (FILES / "toolcell.service").read_text(encoding="utf-8")
    for there, here in (("/opt/toolcell/bin/toolcell", "/bin/true"), ("User=toolcell", "User=daemon")):
        assert there in text
        text = text.replace(there, here)
    copy = tmp_path / "toolcell.service"
    copy.write_text(text.replace("Group=toolcell", "Group=daemon"))

    verified = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=40", str(copy)], capture_output=True, text=True, timeout=60
    )

    assert (verified.returncode, verified.stderr) == (0, "")
    assert rated.returncode == 0, rated.stdout[-300:]


SIMULATED = """
set -e
mount --make-rprivate /
mount --bind "$STATE" "$STATE"
mkdir "$STATE/tree"  # the tree may be in a folder that this hides, or that only root can enter
mount --bind "$TREE" "$STATE/tree"
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -o remount,ro,bind /
exec setpriv --reuid 12345 --regid 12345 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \\
    env -i HOME="$STATE" XDG_CACHE_HOME="$STATE/cache" PATH=/usr/bin PYTHONPATH="$PATHS" "$PYTHON" -c "$CODE"
"""
SCRIPT = (
    "from toolcell import SyncRuntime\nwith SyncRuntime() as runtime: result = runtime.execute_code('6 * 7')\n"
    "print(result.outcome, result.value, *sorted(result.isolation.layers))"
)


def test_a_user_without_privileges_on_a_read_only_system_has_the_full_profile() -> None:
    python = "/usr/bin/python3"
    if os.geteuid() != 0 or sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("what the unit does to the service is done here by root, with unshare and setpriv")
    same = subprocess.run(
        [python, "-c", "import sys; print(sys.implementation.cache_tag)"], capture_output=True, text=True
    )
    if same.stdout.strip() != sys.implementation.cache_tag:
        pytest.skip(f"{python}, which every user can read, is another Python")
    state = Path("/var/lib") / f"toolcell-test-{os.getpid()}"
    state.mkdir(mode=0o700)
    os.chown(state, 12345, 12345)
    paths = [
        str(ROOT / "runtime"),
        str(ROOT / "bridge"),
        *(each for each in sys.path if each.endswith("site-packages")),
    ]
    there = ":".join(paths).replace(str(ROOT), f"{state}/tree")
    env = {"STATE": str(state), "TREE": str(ROOT), "PATHS": there, "PYTHON": python, "CODE": SCRIPT}
    env["PATH"] = os.environ["PATH"]
    try:
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", SIMULATED], env=env, capture_output=True, text=True, timeout=60
        )
    finally:
        shutil.rmtree(state)

    assert done.stdout.startswith("ok 42 "), done.stderr[-2000:]
    assert {"user", "pid", "mount", "net", "landlock", "seccomp"} <= set(done.stdout.split())


# Containers


@each_row("name", ["compose.yaml", "compose.siblings.yaml"])
def test_the_compose_files_take_all_privileges_and_give_runs_their_time(name: str) -> None:
    service: dict[str, Any] = yaml.safe_load((FILES / name).read_text(encoding="utf-8"))["services"]["toolcell"]

    assert service["image"] == reference.SERVICE_IMAGE
    assert (service["read_only"], service["cap_drop"], service["init"]) == (True, ["ALL"], True)
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ports"] == ["127.0.0.1:8700:8700"]
    assert service["mem_limit"] == service["memswap_limit"]
    assert int(service["stop_grace_period"].rstrip("s")) > drain_s() + CANCEL_S
    assert any("docker.sock" in each for each in service["volumes"]) is (name == "compose.siblings.yaml")


def manifest() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {each["kind"]: each for each in documents}


@each_row("version", ["1.30", "1.33"])
def test_the_manifest_follows_the_schemas_of_kubernetes(version: str) -> None:
    objects = manifest()

    assert set(objects) == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy"}
    for each in objects.values():
        kubernetes_validate.validate(each, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Deployment"] | {"spec": {"replicas": "one"}}, version, strict=True)


def test_the_pod_has_no_privileges_and_time_to_drain() -> None:
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    own, containers = pod["securityContext"], [*pod["initContainers"], *pod["containers"]]
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    waits_s = int(re.findall(r"sleep\((\d+)\)", hook)[0])

    assert own["runAsNonRoot"]
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for each in containers:
        assert each["image"] == reference.SERVICE_IMAGE
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in each["resources"]["limits"]
    assert pod["terminationGracePeriodSeconds"] > waits_s + drain_s() + CANCEL_S


def test_the_manifest_has_the_settings_of_the_image_and_probes_that_exist(tmp_path: Path) -> None:
    objects = manifest()
    settings = tomllib.loads(objects["ConfigMap"]["data"]["service.toml"])
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    routes = {getattr(each, "path", "") for each in create_app(ServiceConfig(state=tmp_path / "s")).routes}

    assert settings == tomllib.loads((FILES / "service.toml").read_text(encoding="utf-8"))
    assert container["ports"][0]["containerPort"] == settings["port"]
    assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")} <= routes


def test_the_pod_makes_its_store_in_a_folder_of_its_own_in_a_volume_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = manifest()["Deployment"]["spec"]["template"]["spec"]
    (first,) = pod["initContainers"]
    mounts = [
        {each["name"]: each["mountPath"] for each in found["volumeMounts"]} for found in (first, *pod["containers"])
    ]
    assert {each["state"] for each in mounts} == {"/var/lib"}
    given, volume = tmp_path / "secret" / "tokens.sqlite", tmp_path / "volume"
    path = volume / "toolcell" / "tokens.sqlite"
    store = TokenDatabase(given)
    made = store.create("acme", [Scope.READ])
    store.close()
    volume.mkdir()
    volume.chmod(0o2775)
    monkeypatch.setattr(sqlite, "_is_own_group", lambda _: False)

    script = first["args"][0].replace("/etc/toolcell/tokens", str(given.parent)).replace("/var/lib", str(volume))
    for _ in range(2):  # the pod starts again
        subprocess.run([sys.executable, "-c", script], check=True)
        copy = TokenDatabase(path)
        assert [each.id for each in copy.list()] == [made.record.id]
        copy.close()
        killed = f"import os\nfrom toolcell.service.tokens import TokenDatabase\nstore = TokenDatabase({str(path)!r})\n"
        subprocess.run([sys.executable, "-c", f"{killed}store.create('other', ['read'])\nos._exit(0)"], check=True)
        assert path.with_name("tokens.sqlite-wal").stat().st_size
    with pytest.raises(StoreError, match="others may put files beside"):
        TokenDatabase(volume / "tokens.sqlite").list()


def test_the_network_policy_lets_named_pods_in_and_nothing_out() -> None:
    spec = manifest()["NetworkPolicy"]["spec"]

    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []
    assert [each["podSelector"]["matchLabels"] for each in spec["ingress"][0]["from"]] == [{"toolcell-client": "true"}]


# The image


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    client = EngineClient.connect_now()
    if not client.info.is_local:
        pytest.skip("the engine is on another machine")
    if not client.api.images(name=BASE):
        pytest.skip(f"the engine has no image {BASE}: run .ci/docker")
    yield client
    client.api.close()


def quick_start(tag: str) -> str:
    """Return the commands of the page, with names and a port of this test; the base is there, so nothing is downloaded."""
    block = PAGE.partition("## Quick start")[2].partition("```bash\n")[2].partition("```")[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    replaced = {
        "toolcell images build --service --debian": f"{sys.executable} -m toolcell images build --service --base {BASE}",
        "-v toolcell:": f"-v {tag}:",
        "--name toolcell ": f"--name {tag} ",
        "docker stop --time 60 toolcell": f"docker stop --time 60 {tag}",
        "docker rm toolcell": f"docker rm {tag}",
        "docker volume rm toolcell": f"docker volume rm {tag}",
        # Some machines of tests have no bridge, so the service listens on the machine's own loopback.
        "-p 127.0.0.1:8700:8700": "--network=host",
        "docker run --rm": "docker run --rm --network=none",
        f"--pids-limit 1024 {reference.SERVICE_IMAGE}": f"--pids-limit 1024 {reference.SERVICE_IMAGE} serve "
        f"--config /etc/toolcell/service.toml --host 127.0.0.1 --port {port}",
        "http://127.0.0.1:8700": f"http://127.0.0.1:{port}",
    }
    for there, here in replaced.items():
        assert there in block, there
        block = block.replace(there, here)
    return block


def answers(text: str) -> list[Any]:
    """Return the JSON objects in a text; curl ends none of them with a line."""
    found, at = [], text.find("{")
    while at >= 0:
        document, end = json.JSONDecoder().raw_decode(text, at)
        found.append(document)
        at = text.find("{", end)
    return found


@pytest.mark.docker
def test_the_quick_start_works_as_written_and_leaves_nothing(engine: EngineClient, tmp_path: Path) -> None:
    tag = f"toolcell-test-{os.getpid()}"
    script = f"set -euo pipefail\n{quick_start(tag)}"
    try:
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    finally:
        subprocess.run(["docker", "rm", "-f", tag], capture_output=True, timeout=60)
        subprocess.run(["docker", "volume", "rm", "-f", tag], capture_output=True, timeout=60)

    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    ready, result = answers(done.stdout)
    assert ready == {"status": "ready"}
    assert (result["outcome"], result["value"]) == ("ok", 45)
    assert set(result["isolation"]["layers"]) == {"landlock", "seccomp", "capabilities", "no_new_privs", "rlimits"}
    assert not engine.api.containers(all=True, filters={"name": tag})
    assert not engine.api.volumes(filters={"name": tag})["Volumes"]


@pytest.mark.docker
def test_the_image_has_no_shell_no_set_uid_file_and_an_ordinary_user(engine: EngineClient) -> None:
    found = engine.api.inspect_image(reference.SERVICE_IMAGE)["Config"]
    look = (
        "import os, shutil, stat; print(shutil.which('sh'), [p for d, _, names in os.walk('/') if not d.startswith('/proc') "
        "for n in names if os.path.lexists(p := os.path.join(d, n)) and os.lstat(p).st_mode & (stat.S_ISUID | stat.S_ISGID)])"
    )
    command = [
        "docker",
        "run",
        "--rm",
        "--network=none",
        "--entrypoint",
        "python3",
        reference.SERVICE_IMAGE,
        "-c",
        look,
    ]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert found["User"] == "10001:10001"
    assert seen.stdout == "None []\n", seen.stderr


@pytest.mark.docker
def test_the_container_without_a_token_store_has_no_way_in(engine: EngineClient) -> None:
    command = ["docker", "run", "--rm", "--network=none", reference.SERVICE_IMAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "there is no store of tokens /var/lib/toolcell/tokens.sqlite" in done.stderr
