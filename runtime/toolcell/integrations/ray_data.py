"""Ray Data: a function that a model wrote, over a dataset. Each batch is a run of its own, in a new sandbox.

dataset.map_batches(SandboxedFunction, fn_constructor_args=(source,), concurrency=4)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

try:
    import numpy as np
    import ray.data  # noqa: F401
except ModuleNotFoundError as exc:
    from toolcell.integrations.base import missing_package

    raise missing_package(exc, "ray-data") from exc

from toolcell.errors import UsageError
from toolcell.results import ExecutionResult
from toolcell.support.checks import brief
from toolcell.support.log import logger_of
from toolcell.sync import SyncRuntime
from toolcell.tools import CodeTool

logger = logger_of("toolcell.ray")

BATCH = "ray_data_batch"
"""Name of the batch in the script."""

Columns = dict[str, list[Any]]


class BatchFailed(RuntimeError):
    """A batch whose run did not succeed; its text is what a model reads of a failed run. `result` has the rest."""

    def __init__(self, text: str, result: ExecutionResult | None = None) -> None:
        super().__init__(text)
        self.result = result

    def __reduce__(self) -> Any:
        """Ray carries it to the caller; what may be in a result has no place there."""
        return type(self), (str(self),)


class SandboxedFunction:
    """A class for `map_batches`. Each of Ray Data's actors has a runtime with process sandboxes on its node.

    The function gets a batch as a dict of lists, one for each column, and returns such a dict, or a list of rows as
    dicts. Batches may come in each of Ray Data's formats: dicts of arrays, data frames and tables.
    """

    def __init__(
        self,
        source: str,
        function: str = "transform",
        *,
        on_error: Literal["raise", "skip"] = "raise",
        **options: Any,
    ) -> None:
        """`source` defines `function`. `on_error="skip"` logs a batch that fails and leaves its rows out. `options` are
        arguments of `SyncRuntime`: `registry`, `limits`, `packages`, `audit` and others.

        Raises:
            UsageError: an argument is wrong.
            SandboxUnavailable: the node can start no sandbox; says why.
        """
        if not isinstance(source, str) or not source.strip():
            raise UsageError(f"source is the text of a script that defines {function}(batch), not {brief(source)}")
        if not isinstance(function, str) or not function.isidentifier():
            raise UsageError(f"function is the name of a function in the source, not {brief(function)}")
        if on_error not in ("raise", "skip"):
            raise UsageError(f"on_error is 'raise' or 'skip', not {brief(on_error)}")
        self._source = f"{source}\n\nset_result({function}({BATCH}))\n"
        self._is_lenient = on_error == "skip"
        self._runtime = SyncRuntime(**options)
        self._runtime.open()

    def __call__(self, batch: Any) -> Columns:
        """Run the function over a batch.

        Raises:
            BatchFailed: its run did not succeed, or what it returned is not a batch.
        """
        result = self._runtime.execute_code(self._source, inputs={BATCH: columns_of(batch)})
        try:
            if not result.ok:
                raise BatchFailed(CodeTool.failure(result), result)
            return batch_of(result.value)
        except BatchFailed as exc:
            if not self._is_lenient:
                raise
            logger.warning("a batch is left out: %s", exc)
            return {}


def columns_of(batch: Any) -> Columns:
    """Return a batch as a dict of lists of plain values.

    Raises:
        UsageError: it is in none of Ray Data's formats.
    """
    if isinstance(batch, Mapping):
        return {str(name): np.asarray(column).tolist() for name, column in batch.items()}
    if hasattr(batch, "to_pydict"):
        return dict(batch.to_pydict())
    if hasattr(batch, "to_dict"):
        return dict(batch.to_dict("list"))
    raise UsageError(f"a batch is a dict of arrays, a data frame or a table, not {brief(batch)}")


def batch_of(value: Any) -> Columns:
    """Return what a function returned as a dict of lists.

    Raises:
        BatchFailed: it is neither a dict of columns of one length nor a list of rows with the same names.
    """
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        names = list(value[0]) if value else []
        if any(row.keys() != set(names) for row in value):
            raise BatchFailed(f"the rows have different names: the first has {names!r:.200}")
        return {name: [row[name] for row in value] for name in names}
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        if len({len(column) for column in value.values()}) > 1:
            sizes = {name: len(column) for name, column in value.items()}
            raise BatchFailed(f"the columns have different lengths: {sizes!r:.200}")
        return value
    raise BatchFailed(f"the function returned {brief(value)}: return a dict of lists, or a list of dicts")
