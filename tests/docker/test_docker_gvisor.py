"""The same sandbox on gVisor, where the daemon has it: another kernel, the same results.

gVisor has no Landlock, does not count inodes of a tmpfs, and does not report a refused fork, so none of these is tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.plain_python import LIBRARIES
from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, SyncRuntime
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images.reference import ImageRef

from .docker_sandboxes import DATA_PACKAGES, LIMITS, MIB

pytestmark = pytest.mark.docker

SMALL = LIMITS.model_copy(update={"memory_bytes": 256 * MIB, "processes": 8, "wall_s": 15})
"""Few processes: each one costs gVisor several megabytes, which count towards the memory limit."""


@pytest.fixture(scope="module")
def image(docker_client: EngineClient, docker_image: ImageRef) -> str:
    if "runsc" not in docker_client.info.runtimes:
        pytest.skip("the daemon offers no runsc")
    return docker_image.id


@pytest.fixture(scope="module")
def gvisor(image: str) -> Iterator[SyncRuntime]:
    backend = DockerBackend(image, runtime="runsc")
    with SyncRuntime(backend=backend, limits=SMALL, pool=PoolConfig(warm=1)) as runtime:
        yield runtime


def assert_outcome(result: ExecutionResult, outcome: Outcome) -> None:
    assert result.outcome is outcome, (result.error, result.usage)


def test_a_script_runs_under_a_kernel_of_its_own(gvisor: SyncRuntime) -> None:
    result = gvisor.execute_code("import os\nprint('x')\nos.write(1, b'raw')\nset_result(os.uname().release)")

    assert_outcome(result, Outcome.OK)
    assert (result.logs.stdout, result.logs.stderr) == ("x\n", "raw")
    assert {"seccomp", "capabilities", "no_new_privs", "rlimits", "net", "cgroup"} <= result.isolation.layers.keys()
    assert "landlock" not in result.isolation.layers


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("import ctypes; ctypes.string_at(0)", Outcome.KILLED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", Outcome.KILLED),
        ("import os\nos.write(4, b'\\xff' * 8)\nimport time; time.sleep(9)", Outcome.PROTOCOL_ERROR),
    ],
)
def test_each_kind_of_end_has_its_outcome(gvisor: SyncRuntime, script: str, outcome: Outcome) -> None:
    assert_outcome(gvisor.execute_code(script), outcome)


def test_processes_are_refused_past_the_limit(gvisor: SyncRuntime) -> None:
    script = "import os, signal\nfor _ in range(60):\n    if os.fork() == 0: signal.pause()"

    result = gvisor.execute_code(script)

    assert result.error is not None
    assert result.error.type == "BlockingIOError"


def test_a_frame_and_an_array_go_in_and_out_as_they_are(image: str) -> None:
    np, pd = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {"word": pd.Categorical(["a", None, "é"]), "when": pd.to_datetime(["2024", None, "2025"]).tz_localize("UTC")},
        index=pd.Index([3, 1, 2], name="key"),
    )
    array = np.random.default_rng(1).random((1000, 1000))
    backend = DockerBackend(image, runtime="runsc", packages=DATA_PACKAGES)
    limits = Limits(frame_bytes=16 * MIB, result_bytes=16 * MIB, wall_s=60)
    with SyncRuntime(backend=backend, limits=limits, pool=PoolConfig(warm=0)) as runtime:
        result = runtime.execute_code("set_result([df.loc[[3, 1, 2]], a.T.copy()])", inputs={"df": frame, "a": array})
        libraries = runtime.execute_code(LIBRARIES)
    assert result.ok, result.error
    pd.testing.assert_frame_equal(result.value[0].to_pandas(), frame)
    np.testing.assert_array_equal(result.value[1].to_numpy(), array.T)
    assert (libraries.value, "physical cores" in libraries.logs.stderr) == (2, False), libraries.error
