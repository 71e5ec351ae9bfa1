"""`Policy(profile="container")` in a container with Docker's defaults: what PROMISES.md promises, attacked from inside."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell.sandbox.docker.client import EngineClient

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BASE = "toolcell/debian:bookworm"

# As an ordinary image: /tmp is everybody's, and the interpreter can be reached.
OPEN_UP = (
    "import os; [os.makedirs(p, exist_ok=True) or os.chmod(p, m) for p, m in (('/tmp', 0o1777), ('/root', 0o755))]"
)
DOCKERFILE = f'FROM {BASE}\nRUN ["python3", "-c", "{OPEN_UP}"]\n'

PLACES = {
    "root": [],
    "uid 1000 without capabilities, Landlock of Linux 5.19": [
        *("--user", "1000:1000", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    ],
}
"""With Docker's capabilities, and as docs/containers.md recommends. What a newer Landlock adds can only refuse more."""
OLDER = {"uid 1000 without capabilities, Landlock of Linux 5.19": 2}
"""Places by the newest ABI of Landlock that their kernel owns up to."""

IS_DISPOSABLE = os.environ.get("TOOLCELL_DISPOSABLE") == "1"
"""This whole machine may be attacked, as those of `.ci/machines`: the attacks kill every process that they can."""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def plain_image(docker_client: EngineClient) -> str:
    """An image with nothing of ours in it."""
    if not docker_client.info.is_local:
        pytest.skip("the engine is on another machine, and this tree cannot be mounted there")
    if not docker_client.api.images(name=BASE):
        pytest.skip(f"the engine has no image {BASE}: run .ci/docker")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        row = tarfile.TarInfo("Dockerfile")
        row.size = len(DOCKERFILE)
        tar.addfile(row, io.BytesIO(DOCKERFILE.encode()))
    lines = docker_client.api.build(
        fileobj=io.BytesIO(context.getvalue()),
        custom_context=True,
        rm=True,
        decode=True,
        tag="toolcell/test-container",
        network_mode="none",
    )
    said = "".join(str(line.get("stream", line.get("error", ""))) for line in lines)
    assert "Successfully built" in said, said
    return "toolcell/test-container"


@pytest.fixture(scope="module")
def in_container(plain_image: str) -> Command:
    """Run this interpreter in a container that has this tree, read-only; `flags` are docker run's."""
    mounted = {str(ROOT), sys.base_prefix, sysconfig.get_path("purelib")} - {"/usr"}
    mounts = [part for path in sorted(mounted) for part in ("-v", f"{path}:{path}:ro")]

    def run(flags: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            # Some machines of tests have no bridge. A network of its own, or none, changes nothing that the profile uses.
            ["docker", "run", "--rm", "--network=none", *flags, *mounts, plain_image, sys.executable, "-B", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
        )

    tried = run([], "-c", "import toolcell.runtime")
    if tried.returncode:
        pytest.skip(f"this interpreter does not run in {BASE}: {tried.stderr[-300:]}")
    return run


def places() -> Iterator[Any]:
    if IS_DISPOSABLE:
        yield pytest.param("this machine", marks=pytest.mark.contained)
    else:
        yield from (pytest.param(place, marks=pytest.mark.docker) for place in PLACES)


@pytest.fixture(scope="module", params=places())
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What came of every attack in one kind of container."""
    command = [str(HERE / "contained_host.py")]
    if IS_DISPOSABLE:
        return json.loads(subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True).stdout)
    in_container: Command = request.getfixturevalue("in_container")
    if (abi := OLDER.get(request.param)) is not None:
        lesser = str(HERE.parent / "sandbox" / "lesser_machine.py")
        command = [lesser, json.dumps({"abi": abi}), sys.executable, "-B", *command]
    done = in_container(PLACES[request.param], *command)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def value(seen: dict[str, Any], attack: str) -> Any:
    assert seen[attack]["outcome"] == "ok", (attack, seen[attack])
    return seen[attack]["value"]


def test_the_attacks_are_real(seen: dict[str, Any]) -> None:
    found = seen["without isolation"]

    assert found.pop("read") == "the secret of the host"
    assert found.pop("listed") is True
    assert found == {"signal": ["None", "None"], "socket": "None", "abstract": "None", "named": "None"}


def test_every_result_names_the_layers(seen: dict[str, Any]) -> None:
    layers = seen["reading"]["layers"]

    assert set(layers) == {"landlock", "seccomp", "capabilities", "no_new_privs", "rlimits"}
    assert (
        "signals and abstract sockets kept inside" in layers["landlock"] or "signals kept inside" in layers["seccomp"]
    )


def test_no_file_of_the_container_can_be_read_or_listed(seen: dict[str, Any]) -> None:
    found = value(seen, "reading")

    assert set(found["read"]) <= {"EACCES", "ENOENT"}
    assert found["listed"] == ["EACCES"]
    assert value(seen, "links") == ["EACCES"]


def test_nothing_outside_the_workspace_can_be_changed(seen: dict[str, Any]) -> None:
    assert set(value(seen, "changing")) <= {"EACCES", "EBUSY", "EPERM", "EXDEV"}
    before, after = seen["the host's file"]
    assert after == before


def test_no_other_process_can_be_signalled_or_changed(seen: dict[str, Any]) -> None:
    assert set(value(seen, "signals")) <= {"EPERM", "ESRCH"}
    assert {each.strip("'") for each in value(seen, "other processes")} == {"EPERM"}
    assert seen["the host's program"] is None


def test_a_concurrent_sandbox_cannot_be_reached(seen: dict[str, Any]) -> None:
    found = value(seen, "a neighbour attacked")

    assert seen["places of the neighbour"] == 1
    assert set(found.pop("signalled")) <= {"EPERM", "ESRCH"}
    assert {answer for answers in found.values() for answer in answers} == {"EACCES"}
    assert value(seen, "the neighbour") == "kept"


def test_no_connection_can_be_made(seen: dict[str, Any]) -> None:
    assert value(seen, "sockets") == ["EPERM"]


def test_there_is_no_privilege_and_no_way_to_one(seen: dict[str, Any]) -> None:
    found = value(seen, "privileges")

    assert found["capabilities"] == [0] * 6
    assert found["no_new_privs"] == 1
    assert {each.strip("'") for each in found["refused"]} == {"EPERM"}


def test_the_only_descriptors_are_the_standard_three_and_the_bridge(seen: dict[str, Any]) -> None:
    assert value(seen, "descriptors") == [3]


def test_nothing_outlives_its_run_or_its_host(seen: dict[str, Any]) -> None:
    assert value(seen, "a daemon") == 1
    assert sorted(value(seen, "files that are left")) == ["folder", "left"]
    assert value(seen, "files of the run before") == []
    assert seen["left running"] == []
    assert [name for name in seen["left in /tmp"] if not name.startswith("toolcell-cache")] == []


@each_row(
    "attack, outcome",
    [
        ("wall clock", "timeout"),
        ("processor", "cpu_limit"),
        ("memory", "memory_limit"),
        ("shared memory", "memory_limit"),
        ("fork bomb", "process_limit, memory_limit"),  # whichever the watch finds first
        ("threads", "process_limit"),
        ("many large files", "killed"),
        ("many files", "killed"),
    ],
)
def test_a_limit_ends_the_run(seen: dict[str, Any], attack: str, outcome: str) -> None:
    assert seen[attack]["outcome"] in outcome.split(", "), seen[attack]


def test_a_file_larger_than_the_limit_is_refused(seen: dict[str, Any]) -> None:
    large = seen["one large file"]  # the watch on its files may be first
    assert large["value"] == "EFBIG" or "disk_bytes" in large["error"]
    assert "disk_bytes" in seen["many large files"]["error"]
    assert "inodes" in seen["many files"]["error"]


def test_everyday_file_work_goes_on(seen: dict[str, Any]) -> None:
    assert value(seen, "everyday file work") == ["a", [[1]], "sandbox"]


COMMAND = ("-c", "import sys; from toolcell.cli import main; sys.exit(main())")

AS_ROOT = ["--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined"]
AS_USER = ["--user", "1000:1000", "--security-opt", "seccomp=unconfined", "--security-opt", "systempaths=unconfined"]
READ_ONLY = ["--read-only", "--tmpfs", "/tmp:exec", "--cap-drop", "ALL", "--user", "1000:1000"]


@pytest.mark.docker
@pytest.mark.parametrize(
    ("flags", "profiles"),
    [
        (READ_ONLY, {"container"}),
        (AS_ROOT, {"full", "container"}),
        (AS_USER, {"full", "container"}),
    ],
    ids=["read-only as uid 1000", "full as root", "full as uid 1000"],
)
def test_doctor_says_which_profile_runs_and_what_the_other_lacks(
    in_container: Command, flags: list[str], profiles: set[str]
) -> None:
    done = in_container(flags, *COMMAND, "doctor", "--profile", "container", "--json")
    told = json.loads(done.stdout)

    assert {each["name"] for each in told["profiles"] if each["runs"]} == {*profiles, "auto"}, told["profiles"]
    assert done.returncode == 0
    for each in told["profiles"]:
        assert each["runs"] or any("docker run" in fix for fix in each["fixes"])


@pytest.mark.docker
def test_the_command_line_says_a_weaker_profile_and_refuses_where_full_is_asked_for(in_container: Command) -> None:
    script = str(ROOT / "tests" / "docker" / "contained_one.py")

    chosen = in_container([], *COMMAND, "run", script)
    assert (chosen.returncode, chosen.stdout) == (0, "1\n")
    assert "profile container" in chosen.stderr
    refused = in_container([], *COMMAND, "run", "--profile", "full", script)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "toolcell doctor" in refused.stderr


@pytest.mark.docker
def test_a_cache_from_which_nothing_can_be_executed_is_named(in_container: Command) -> None:
    script = str(ROOT / "tests" / "docker" / "contained_one.py")
    flags = ["--read-only", "--tmpfs", "/tmp:noexec", "--user", "1000:1000"]

    assert "noexec" in in_container(flags, *COMMAND, "run", "--profile", "container", script).stderr
