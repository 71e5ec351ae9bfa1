"""`DataTools`: `data_parse`, `data_filter`, `data_aggregate` and `data_transform`. How tables are read is in `tables/`.

With a workspace, each of them also takes the path of a file, which is read in pieces: its size does not matter.
"""

from __future__ import annotations

import importlib.util
import io
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field
from typing_extensions import TypedDict

from toolcell.builtin.file import Roots
from toolcell.builtin.package import ToolPackage, offered
from toolcell.builtin.tables.requests import (
    MAX_CONDITIONS,
    MAX_METRICS,
    Format,
    Metric,
    Transform,
    condition,
)
from toolcell.builtin.tables.text import open_text
from toolcell.builtin.workspace import Workspace
from toolcell.errors import ToolError, UsageError
from toolcell.tools import ToolContext, ToolDefinition, ToolOptions, ToolResult, ToolSpec, run_in_thread

if TYPE_CHECKING:
    from toolcell.builtin.tables.batches import Batch

PARSE_LIMIT: Final = 1000
TIMEOUT_S: Final = 600.0
"""Seconds of one call. A gigabyte takes about a minute."""
_OF_FILES: Final = ("path", "encoding")
"""Parameters that only a package with a workspace has."""

Records = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file with a table, and what the caller says about it."""

    path: str
    format: str | None
    delimiter: str | None


class CellCondition(TypedDict):
    """A comparison of a column with a value."""

    column: str
    op: Literal["==", "!=", ">", "<", ">=", "<=", "contains", "in"]
    value: Any


class Aggregate(TypedDict):
    """A column of the answer, called `<op>_<column>`."""

    column: str
    op: Literal["sum", "count", "avg", "min", "max"]


def _value(rows: str, **more: Any) -> dict[str, Any]:
    properties = {
        rows: {"type": "array", "items": {"type": "object"}},
        **more,
        "count": {"type": "integer", "description": f"of all {rows}, also of those that are cut"},
        "truncated": {"type": "boolean", "description": f"some {rows} are not in the answer"},
        "total": {"type": "integer"},
    }
    return {"type": "object", "properties": properties, "required": [rows, *more, "count"]}


class DataTools(ToolPackage):
    """Reads and evaluates tables."""

    package = "data"
    extra = "data"

    def __init__(
        self,
        workspace: str | os.PathLike[str] | Workspace | None = None,
        *,
        per_user: bool = False,
    ) -> None:
        """`workspace`: lets the tools read files in it. `per_user`: each user of a run has a directory in it.

        Raises:
            UsageError: polars is not installed, or the directory cannot be made.
        """
        if importlib.util.find_spec("polars") is None:  # importing it takes a second
            raise UsageError("the data tools need polars; run: pip install 'toolcell[data]'")
        self._roots = None if workspace is None else Roots(workspace, per_user=per_user)

    def _spec(self, name: str, options: ToolOptions) -> ToolSpec:
        spec = super()._spec(name, options)
        if self._roots is not None:
            return spec
        parameters = spec.definition.checked_parameters
        content = "content" if "content" in parameters["properties"] else "records"
        dropped = (*_OF_FILES, "format", "delimiter") if content == "records" else _OF_FILES
        for each in dropped:
            parameters["properties"].pop(each, None)
        parameters["properties"][content].pop("default", None)
        parameters["required"] = [content, *parameters.get("required", ())]
        return replace(spec, definition=ToolDefinition(name, spec.definition.description, parameters))

    @offered(
        read_only=True,
        idempotent=True,
        timeout_s=TIMEOUT_S,
        returns=_value("records", columns={"type": "array", "items": {"type": "string"}}),
    )
    async def data_parse(
        self,
        ctx: ToolContext,
        content: str | bytes = "",
        format: Format | None = None,
        limit: Annotated[int, Field(ge=1)] = PARSE_LIMIT,
        path: str = "",
        encoding: str | None = None,
        delimiter: str | None = None,
    ) -> ToolResult:
        """Read CSV, JSON or JSON lines as records. Returns records, columns and the number of all rows.

        Args:
            content: The text.
            format: csv, json or jsonl; found out when it is left out.
            limit: How many records to return at most.
            path: A file of the workspace, in place of content. It may be large.
            encoding: Of the file's characters; found out when it is left out.
            delimiter: Between the cells of CSV; found out when it is left out.
        """
        if not path and not content.strip():
            raise ToolError("content is required", code="invalid_arguments")

        def work(text: io.TextIOWrapper, check: _Check) -> dict[str, Any]:
            from toolcell.builtin.tables import operations, readers

            table = readers.TextTable(text, format, delimiter)
            return operations.parsed(table, check(table.batches(())), limit)

        return await self._over(ctx, content, path, work, encoding)

    @offered(read_only=True, idempotent=True, timeout_s=TIMEOUT_S, returns=_value("records"))
    async def data_filter(
        self,
        ctx: ToolContext,
        where: list[CellCondition],
        records: Records | None = None,
        path: str = "",
        format: Format | None = None,
        delimiter: str | None = None,
    ) -> ToolResult:
        """Keep the records that meet all conditions. Numbers in text are compared as numbers.

        Args:
            where: The conditions. contains ignores case; in takes a list. A record without the column never passes.
            records: The records, as data_parse returns them.
            path: A file of the workspace, in place of records. It may be large.
            format: Of the file: csv, json or jsonl; found out when it is left out.
            delimiter: Between the cells of a CSV file; found out when it is left out.
        """
        if not where:
            raise ToolError("where conditions are required", code="invalid_arguments")
        if len(where) > MAX_CONDITIONS:
            raise ToolError(f"where has {len(where)} conditions, and may have {MAX_CONDITIONS}")
        conditions = [condition(each["column"], each["op"], each["value"]) for each in where]
        file = TableFile(path, format, delimiter)
        columns = [each.column for each in conditions]

        def work(batches: Iterator[Batch]) -> dict[str, Any]:
            from toolcell.builtin.tables import operations

            return operations.filtered(batches, conditions)

        return await self._of_rows(ctx, records, file, columns, work)

    @offered(read_only=True, idempotent=True, timeout_s=TIMEOUT_S, returns=_value("groups"))
    async def data_aggregate(
        self,
        ctx: ToolContext,
        metrics: list[Aggregate],
        records: Records | None = None,
        group_by: list[str] | None = None,
        path: str = "",
        format: Format | None = None,
        delimiter: str | None = None,
    ) -> ToolResult:
        """Compute sum, count, avg, min or max of columns, for all records or for each group.

        Args:
            metrics: What to compute. count counts cells that have a value; its column "*" counts records.
            records: The records, as data_parse returns them.
            group_by: Columns whose values make a group.
            path: A file of the workspace, in place of records. It may be large.
            format: Of the file: csv, json or jsonl; found out when it is left out.
            delimiter: Between the cells of a CSV file; found out when it is left out.
        """
        if not metrics:
            raise ToolError("metrics are required", code="invalid_arguments")
        if len(metrics) > MAX_METRICS:
            raise ToolError(f"there are {len(metrics)} metrics, and may be {MAX_METRICS}")
        wanted = [Metric(each["column"], each["op"]) for each in metrics]
        groups = list(dict.fromkeys(group_by or ()))
        file = TableFile(path, format, delimiter)

        def work(batches: Iterator[Batch]) -> dict[str, Any]:
            from toolcell.builtin.tables import operations

            return operations.aggregated(batches, wanted, groups)

        return await self._of_rows(ctx, records, file, [*groups, *(each.column for each in wanted)], work)

    @offered(read_only=True, idempotent=True, timeout_s=TIMEOUT_S, returns=_value("records"))
    async def data_transform(
        self,
        ctx: ToolContext,
        records: Records | None = None,
        select: list[str] | None = None,
        rename: dict[str, str] | None = None,
        sort_by: str | None = None,
        sort_desc: bool = False,
        limit: Annotated[int, Field(ge=0)] | None = None,
        path: str = "",
        format: Format | None = None,
        delimiter: str | None = None,
    ) -> ToolResult:
        """Select columns, rename them, sort and limit records, in this order.

        Args:
            records: The records, as data_parse returns them.
            select: The columns to keep, in this order.
            rename: New names by old names.
            sort_by: A column, under its new name. Numbers come before text, empty cells last.
            sort_desc: True sorts from large to small.
            limit: How many records to return at most.
            path: A file of the workspace, in place of records. It may be large.
            format: Of the file: csv, json or jsonl; found out when it is left out.
            delimiter: Between the cells of a CSV file; found out when it is left out.
        """
        renamed = rename or {}
        if len(set(renamed.values())) < len(renamed):
            raise ToolError("rename gives two columns the same name", code="invalid_arguments")
        how = Transform(select, renamed, sort_by, sort_desc, limit)
        file = TableFile(path, format, delimiter)

        def work(batches: Iterator[Batch]) -> dict[str, Any]:
            from toolcell.builtin.tables import operations

            return operations.transformed(batches, how)

        return await self._of_rows(ctx, records, file, None if sort_by is not None else (), work)

    async def _of_rows(
        self,
        ctx: ToolContext,
        records: Records | None,
        file: TableFile,
        columns: Sequence[str] | None,
        work: Callable[[Iterator[Batch]], dict[str, Any]],
    ) -> ToolResult:
        if records is not None and file.path:
            raise ToolError("give records or a path, not both", code="invalid_arguments")
        if records is None and not file.path:
            raise ToolError("records are required", code="invalid_arguments")

        def over(text: io.TextIOWrapper, check: _Check) -> dict[str, Any]:
            from toolcell.builtin.tables import batches, readers

            if records is not None:
                return work(check(batches.batches_of(records)))
            return work(check(readers.TextTable(text, file.format, file.delimiter).batches(columns)))

        return await self._over(ctx, b"", file.path, over)

    async def _over(
        self,
        ctx: ToolContext,
        content: str | bytes,
        path: str,
        work: Callable[[io.TextIOWrapper, _Check], dict[str, Any]],
        encoding: str | None = None,
    ) -> ToolResult:
        """Do the work in a thread, which ends soon after the call does."""
        if content and path:
            raise ToolError("give content or a path, not both", code="invalid_arguments")
        workspace = await self._roots.of(ctx) if path and self._roots is not None else None
        is_over = threading.Event()

        def run() -> Mapping[str, Any]:
            def check(batches: Generator[Batch, None, None]) -> Iterator[Batch]:
                for batch in opened.enter_context(closing(batches)):
                    if is_over.is_set():
                        raise ToolError("the call is over", code="cancelled")
                    yield batch

            data = content.encode() if isinstance(content, str) else content
            with (
                io.BytesIO(data) if workspace is None else workspace.open(path) as source,
                open_text(source, encoding) as text,
                ExitStack() as opened,
            ):
                return _answered(work, text, check)

        try:
            return ToolResult.of(await run_in_thread(run, ctx.call.give_up))
        finally:
            is_over.set()


_Check = Callable[[Generator["Batch", None, None]], Iterator["Batch"]]


def _answered(
    work: Callable[[io.TextIOWrapper, _Check], dict[str, Any]], text: io.TextIOWrapper, check: _Check
) -> dict[str, Any]:
    """Do the work; what polars cannot do with a strange table is the table's error."""
    from polars.exceptions import PanicException, PolarsError

    try:
        return work(text, check)
    except (PolarsError, PanicException) as exc:
        raise ToolError(f"the table cannot be evaluated: {str(exc)[:200]}") from exc
