"""Arrays and frames cross into containers and out of them, as in the process backend, and so do long ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from toolcell import Limits, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.results import Array, Table
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.images.reference import ImageRef

from .docker_sandboxes import DATA_PACKAGES, MIB

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

pytestmark = pytest.mark.docker

FRAME = pd.DataFrame(
    {
        "word": ["a", None, "é"],
        "kind": pd.Categorical(["x", "y", "x"]),
        "when": pd.to_datetime(["2024", "2025", None]).tz_localize("Europe/Berlin"),
    },
    index=pd.Index([3, 1, 2], name="key"),
)
registry = ToolRegistry()


@registry.tool
def doubled(df: pd.DataFrame) -> pd.DataFrame:
    """Return a frame twice over."""
    return pd.concat([df, df])


@pytest.fixture(scope="module")
def runtime(docker_image: ImageRef) -> Iterator[SyncRuntime]:
    backend = DockerBackend(docker_image.id, packages=DATA_PACKAGES)
    limits = Limits(frame_bytes=64 * MIB, result_bytes=64 * MIB, memory_bytes=1024 * MIB, wall_s=60)
    with SyncRuntime(registry, backend=backend, limits=limits, pool=PoolConfig(warm=0)) as runtime:
        yield runtime


def test_a_frame_goes_into_a_container_through_a_tool_and_out(runtime: SyncRuntime) -> None:
    result = runtime.execute_code("set_result(call_tool('doubled', df=df))", inputs={"df": FRAME})
    assert result.ok, result.error
    assert isinstance(result.value, Table)
    pd.testing.assert_frame_equal(result.value.to_pandas(), pd.concat([FRAME, FRAME]))


def test_long_buffers_arrive_whole_whatever_is_printed_beside_them(runtime: SyncRuntime) -> None:
    array = np.random.default_rng(1).random(4_000_000)
    source = "import os\nos.write(2, b'raw')\nprint('x' * 70_000)\nset_result([a[::-1], a.sum(), a])"
    result = runtime.execute_code(source, inputs={"a": array})
    assert result.ok, result.error
    assert [type(each) for each in result.value] == [Array, float, Array]
    np.testing.assert_array_equal(result.value[0].to_numpy(), array[::-1])
    np.testing.assert_array_equal(result.value[2].to_numpy(), array)


def test_sessions_and_repeatable_runs_import_and_use_pandas(runtime: SyncRuntime) -> None:
    """Both have a clock of their own when pandas is imported, whose classes inherit from the class of times."""
    repeatable = runtime.execute_code(
        "import pandas, gc\ngc.collect()\nset_result(pandas.Timestamp(0).year)", seed=1, clock=1.7e9
    )
    assert repeatable.value == 1970, repeatable.error
    with runtime.session() as session:
        first = session.execute_code("import pandas as pd, gc\ngc.collect()\nkept = df.dropna()", inputs={"df": FRAME})
        assert first.ok, first.error
        assert session.execute_code("set_result(len(kept))").value == len(FRAME.dropna())
        with session.fork() as copy:
            table = copy.execute_code("set_result(kept)").value
            assert isinstance(table, Table)
            pd.testing.assert_frame_equal(table.to_pandas(), FRAME.dropna())
