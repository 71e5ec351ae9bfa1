"""Functions over a dataset of Ray Data, each batch in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integrations.conftest import needs, run_example
from toolcell import Limits, ToolRegistry, UsageError

needs("ray.data")

import numpy as np  # noqa: E402
import ray  # noqa: E402

from toolcell.integrations.ray_data import BatchFailed, SandboxedFunction, batch_of, columns_of  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.timeout(600)]

SQUARES = "def transform(batch):\n    return {'id': batch['id'], 'square': [n * n for n in batch['id']]}"


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def mapped(source: str, rows: int = 20, batch_format: str = "default", **options: Any) -> list[dict[str, Any]]:
    dataset = ray.data.range(rows).map_batches(
        SandboxedFunction,
        fn_constructor_args=(source,),
        fn_constructor_kwargs=options,
        concurrency=1,
        batch_size=10,
        batch_format=batch_format,
    )
    return sorted(dataset.take_all(), key=str)


@pytest.mark.parametrize("batch_format", ["default", "pandas", "pyarrow"])
def test_each_batch_goes_through_the_function_in_every_format(batch_format: str) -> None:
    rows = mapped(SQUARES, batch_format=batch_format)

    assert sorted((row["id"], row["square"]) for row in rows) == [(n, n * n) for n in range(20)]


def test_a_function_may_return_rows_and_other_columns() -> None:
    rows = mapped(
        "def odd(batch):\n    return [{'n': n, 'text': f'<{n}>'} for n in batch['id'] if n % 2]", function="odd"
    )

    assert sorted((row["n"], row["text"]) for row in rows) == [(n, f"<{n}>") for n in range(1, 20, 2)]


def test_batches_share_nothing_and_reach_nothing_of_the_node() -> None:
    source = (
        "import os\nSEEN = []\n"
        "def transform(batch):\n"
        "    SEEN.extend(batch['id'])\n"
        "    open('here', 'x').close()\n"
        "    return {'seen': [len(SEEN)], 'ray': [any('RAY' in name for name in os.environ)]}"
    )
    assert [(row["seen"], row["ray"]) for row in mapped(source)] == [(10, False), (10, False)]


def test_a_batch_that_fails_ends_the_dataset_with_what_the_script_said_or_is_left_out() -> None:
    source = "def transform(batch):\n    assert 0 not in batch['id'], 'there is a zero'\n    return batch"

    with pytest.raises(Exception, match="there is a zero"):
        mapped(source)
    assert sorted(row["id"] for row in mapped(source, on_error="skip")) == list(range(10, 20))


def test_limits_hold_for_each_batch() -> None:
    with pytest.raises(BatchFailed, match="timed out"):
        SandboxedFunction("def transform(batch):\n    while True: pass", limits=Limits(wall_s=0.5))(
            {"id": np.arange(3)}
        )


def test_a_function_calls_tools_of_the_registry_it_is_given() -> None:
    registry = ToolRegistry()

    @registry.tool
    def double(n: int) -> int:
        """Return twice the number."""
        return 2 * n

    function = SandboxedFunction(
        "def transform(batch):\n    return {'x': [call_tool('double', n=n) for n in batch['id']]}", registry=registry
    )
    assert function({"id": np.arange(3)}) == {"x": [0, 2, 4]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "return a dict of lists, or a list of dicts"),
        ({"a": [1], "b": [1, 2]}, "different lengths: {'a': 1, 'b': 2}"),
        ([{"a": 1}, {"b": 2}], "different names"),
        ({"a": 1}, "return a dict of lists"),
    ],
)
def test_what_is_no_batch_is_named(value: Any, said: str) -> None:
    with pytest.raises(BatchFailed, match=said):
        batch_of(value)


def test_wrong_arguments_are_refused() -> None:
    for wrong in ({"source": ""}, {"source": SQUARES, "function": "a b"}, {"source": SQUARES, "on_error": "ignore"}):
        with pytest.raises(UsageError):
            SandboxedFunction(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a batch is"):
        columns_of(3)


def test_the_example_prints_what_its_page_says() -> None:
    assert (
        run_example("with_ray_data.py")
        == "{'text': 'the quick brown fox', 'words': 4}\n{'text': 'jumps', 'words': 1}\n"
    )
