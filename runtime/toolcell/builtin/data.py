"""`DataTools`: `data_parse`, `data_filter`, `data_aggregate` and `data_transform`. How tables are read is in `tables/`.

With a workspace, each of them also takes the path of a file, which is read in pieces: its size does not matter.
"""

from __future__ import annotations

import importlib.util
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from typing_extensions import TypedDict

from toolcell.builtin.file import Roots
from toolcell.builtin.package import ToolPackage, offered
from toolcell.builtin.tables.reading import Format, Record, Table, open_text
from toolcell.builtin.workspace import Workspace
from toolcell.calls.concurrency import run_in_thread
from toolcell.errors import ToolError, UsageError
from toolcell.tools import ToolContext, ToolDefinition, ToolOptions, ToolResult, ToolSpec

PARSE_LIMIT: Final = 1000
TIMEOUT_S: Final = 600.0
"""Seconds of one call. A gigabyte takes minutes."""
MAX_CONDITIONS: Final = 100
MAX_METRICS: Final = 100
_OF_FILES: Final = ("path", "encoding")
"""Parameters that only a package with a workspace has."""

Records = list[Record]
_Batches = Iterator[Sequence[Record]]
Evaluate = Callable[[Any, Table, _Batches], dict[str, Any]]
"""Takes the module `evaluation`, whose import takes a second, the table and its rows."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file with a table, and what the caller says about it."""

    path: str
    format: str | None
    delimiter: str | None
    encoding: str | None = None


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

        if content and path:
            raise ToolError("give content or a path, not both", code="invalid_arguments")
        return await self._over(
            ctx,
            content,
            TableFile(path, format, delimiter, encoding),
            lambda it, table, rows: it.parsed(table, rows, limit),
        )

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

        return await self._over(
            ctx, records, TableFile(path, format, delimiter), lambda it, _, rows: it.filtered(rows, where)
        )

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
        groups = list(dict.fromkeys(group_by or ()))

        file = TableFile(path, format, delimiter)
        return await self._over(ctx, records, file, lambda it, _, rows: it.aggregated(rows, metrics, groups))

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

        how, file = (select, renamed, sort_by, sort_desc, limit), TableFile(path, format, delimiter)
        return await self._over(ctx, records, file, lambda it, _, rows: it.transformed(rows, it.Transform(*how)))

    async def _over(
        self,
        ctx: ToolContext,
        given: Records | str | bytes | None,
        file: TableFile,
        evaluate: Evaluate,
    ) -> ToolResult:
        """Do the work in a thread, which ends soon after the call does."""
        if isinstance(given, list) and file.path:
            raise ToolError("give records or a path, not both", code="invalid_arguments")
        if given is None and not file.path:
            raise ToolError("records are required", code="invalid_arguments")
        workspace = await self._roots.of(ctx) if file.path and self._roots is not None else None
        is_over = threading.Event()

        def checked(batches: Iterable[Sequence[Record]]) -> _Batches:
            for batch in batches:
                if is_over.is_set():
                    raise ToolError("the call is over", code="cancelled")
                yield batch

        def run() -> Mapping[str, Any]:
            from polars.exceptions import PanicException, PolarsError

            from toolcell.builtin.tables import evaluation

            data = given.encode() if isinstance(given, str) else given if isinstance(given, bytes) else b""
            with (
                io.BytesIO(data) if workspace is None else workspace.open(file.path) as source,
                open_text(source, file.encoding) as text,
            ):
                table = Table(text, file.format, file.delimiter)
                try:
                    rows = checked([given] if isinstance(given, list) else table.batches())
                    return evaluate(evaluation, table, rows)
                except (PolarsError, PanicException) as exc:  # of a table that is too strange for polars
                    raise ToolError(f"the table cannot be evaluated: {str(exc)[:200]}") from exc

        try:
            return ToolResult.of(await run_in_thread(run, ctx.call.give_up))
        finally:
            is_over.set()
