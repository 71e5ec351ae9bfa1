"""`shell_exec` in containers of the image `toolcell/shell`: the same answers as in processes, the same confinement."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from toolcell import Policy, PoolConfig, Runtime
from toolcell.builtin import Shell
from toolcell.calls.result import Status, ToolResult
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images import build, check, reference
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.tools import ToolRegistry

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.fixture(scope="module")
def shell_image(docker_client: EngineClient) -> ImageRef:
    """The shell's image. One with an older guest is rebuilt on its own base."""
    found = reference.find_image(docker_client, reference.SHELL_IMAGE)
    if found is None:
        pytest.skip(f"the engine has no image {reference.SHELL_IMAGE}: toolcell images build --shell")
    return found if found.is_current else build.build_shell(docker_client, found.base, tag=found.tag)


@pytest.fixture(scope="module")
async def runtime(shell_image: ImageRef) -> AsyncIterator[Runtime]:
    policy = Policy(shell=True)
    backend = DockerBackend(shell_image.id, policy=policy)
    async with Runtime(backend=backend, policy=policy, pool=PoolConfig(warm=1)) as opened:
        yield opened


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def registry(work: Path, runtime: Runtime) -> ToolRegistry:
    return ToolRegistry([Shell(work, runtime)])


async def run(registry: ToolRegistry, command: str, timeout: int = 0) -> ToolResult:
    return await registry.dispatch("shell_exec", {"command": command, "timeout": timeout})


def test_the_image_has_the_programs_of_a_shell_and_no_problem(
    docker_client: EngineClient, shell_image: ImageRef
) -> None:
    assert shell_image.has_programs
    assert check.problems(docker_client, shell_image) == []
    assert "there are programs in it" in str(
        check.problems_inside(
            {
                "guest": "",
                "python": "",
                "compiled": True,
                "links": {},
                "programs": ["sh", "mount"],
                "unusable": {},
                "elevating": [],
                "writable": [],
            },
            shell_image,
        )
    )


@pytest.mark.conforms("S2", "S-b2", "S-b4")
async def test_commands_answer_and_change_the_workspace_as_in_a_process(registry: ToolRegistry, work: Path) -> None:
    (work / "in.txt").write_text("b\na\n")
    result = await run(
        registry, "sort in.txt | awk '{print NR, $1}' > out.txt; rm in.txt; cat out.txt; echo e >&2; exit 3"
    )
    assert result.text == "exit: exit status 3\n1 a\n2 b\n\n--- stderr ---\ne\n"
    assert [path.name for path in work.iterdir()] == ["out.txt"]
    assert (work / "out.txt").read_text() == "1 a\n2 b\n"
    slow = await run(registry, "echo begun; sleep 600", timeout=1)
    assert (slow.status, slow.text) == (Status.TIMEOUT, "command timed out after 1s\nbegun\n")


@pytest.mark.conforms("S-b4")
async def test_a_command_in_a_container_has_no_network_no_rights_and_no_programs_of_its_own(
    registry: ToolRegistry,
) -> None:
    attacks = {
        "python3 -c 'import socket; socket.socket()'": "Operation not permitted",
        "cp /bin/sh own && ./own -c 'echo escaped'": "Permission denied",
        "echo x > /usr/x": "",
        "cat /proc/1/environ": "Permission denied",
        "python3 -c 'import os; os.setuid(0)'": "Operation not permitted",
    }
    command = "; ".join(f"({attack}) 2>&1 && echo SUCCEEDED; echo --" for attack in attacks)
    said = (await run(registry, command)).text.split("--\n")
    assert "SUCCEEDED" not in "".join(said)
    assert "escaped" not in "".join(said)
    for answer, expected in zip(said, attacks.values(), strict=False):
        assert expected in answer


async def test_a_command_that_kills_its_own_sandbox_changes_nothing(registry: ToolRegistry, work: Path) -> None:
    result = await run(registry, "echo x > file; kill -9 -1")
    assert result.text.startswith("the command was ended: killed")
    assert list(work.iterdir()) == []


async def test_the_code_of_a_runtime_without_shell_executes_nothing_even_in_this_image(shell_image: ImageRef) -> None:
    async with Runtime(backend=DockerBackend(shell_image.id), pool=PoolConfig(warm=0)) as plain:
        result = await plain.execute_code(
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n[libc.execv(b'/bin/sh', None), ctypes.get_errno()]"
        )
    assert result.value == [-1, errno.EPERM]
    assert result.ok
