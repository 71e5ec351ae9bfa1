"""Read CSV, JSON and JSON lines in batches. Nothing is held but the batch: a file of any size fits.

Files of the wild are read as far as they make sense: short and long rows, empty and repeated column names, other
delimiters, damaged lines of JSONL. A file that makes no sense is a `ToolError` that says where.
"""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from toolcell.builtin.tables.batches import BATCH_ROWS, Batch, RecordBatch
from toolcell.builtin.tables.csv_pieces import MAX_COLUMNS, CsvPieces, TextBytes
from toolcell.builtin.tables.requests import FORMATS, Format, Record
from toolcell.builtin.tables.text import lines_of
from toolcell.errors import ToolError

MAX_RECORD_CHARS = 1024 * 1024
MAX_DOCUMENT_CHARS = 16 * 1024 * 1024
"""Most characters of a JSON text that is one object: it is one record, and decoded as a whole."""
BATCH_CHARS = 4 * 1024 * 1024
CHUNK_CHARS = 256 * 1024
_JSON_SPACE = " \t\r\n"


class TextTable:
    """A table that is being read. Columns and counts are final when the batches have been read."""

    def __init__(self, text: io.TextIOWrapper, format: str | None = None, delimiter: str | None = None) -> None:
        """Raises: ToolError, when the format is unknown, or the delimiter cannot be one."""
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0' or format in ("json", "jsonl")):
            raise ToolError(
                f"delimiter must be one character between the cells of CSV, such as ';', not {delimiter!r:.40}",
                code="invalid_arguments",
            )
        self._delimiter = delimiter
        format = "csv" if delimiter is not None else format
        if format not in (None, *FORMATS):
            raise ToolError(f"format must be one of {', '.join(FORMATS)}, not {format!r:.40}", code="invalid_arguments")
        self._text = text
        self.format: str = format or detect_format(text)
        self._csv: CsvPieces | None = None
        self._known: dict[str, None] = {}
        self.skipped = 0
        """Lines of JSONL that are not JSON objects."""

    @property
    def columns(self) -> list[str]:
        """Return the columns that have been seen: CSV's in their order, JSON's sorted."""
        return sorted(self._known) if self._csv is None else list(self._csv.names)

    def batches(self, wanted: Sequence[str] | None = None) -> Generator[Batch, None, None]:
        """Return the rows, once. `wanted`: the columns that are looked at in whole; None is all of them.

        Raises:
            ToolError: the text is damaged; says where.
        """
        if self.format == "json":
            return self._json()
        if self.format == "jsonl":
            return self._json_lines()
        encoding = "utf-8" if self._text.encoding == "utf-8-sig" else self._text.encoding
        source = cast(io.BufferedIOBase, self._text.buffer)
        self._csv = CsvPieces(TextBytes(source, encoding, self._text.errors or "strict"), self._delimiter)
        return _read_ahead(self._csv.batches(wanted))

    # JSON

    def _json_lines(self) -> Generator[Batch, None, None]:
        records: list[Record] = []
        size = 0
        for line in lines_of(self._text):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self.skipped += 1
                continue
            records.append(self._noted(value))
            size += len(line)
            if len(records) >= BATCH_ROWS or size >= BATCH_CHARS:
                yield RecordBatch(records)
                records, size = [], 0
        if records:
            yield RecordBatch(records)

    def _json(self) -> Generator[Batch, None, None]:
        start = _first_char(self._text)
        if start != "[":
            yield RecordBatch([self._noted(_record(_whole(self._text, start)))])
            return
        records: list[Record] = []
        size = 0
        for value, chars in _items(self._text):
            records.append(self._noted(_record(value)))
            size += chars
            if len(records) >= BATCH_ROWS or size >= BATCH_CHARS:
                yield RecordBatch(records)
                records, size = [], 0
        if records:
            yield RecordBatch(records)

    def _noted(self, record: Record) -> Record:
        self._known.update(dict.fromkeys(record))
        if len(self._known) > MAX_COLUMNS:
            raise ToolError(f"the records have more than {MAX_COLUMNS} different columns", code="too_large")
        return record


def _read_ahead(batches: Iterator[Batch]) -> Generator[Batch, None, None]:
    """Return batches, each of which is read while the one before it is worked on."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="toolcell-table") as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch


def detect_format(text: io.TextIOWrapper) -> Format:
    """Decide by the beginning: `[` is JSON; `{` is JSON, or JSONL if the second line begins so too; else CSV."""
    start = text.read(CHUNK_CHARS).lstrip("\ufeff \t\r\n")
    text.seek(0)
    if start.startswith("["):
        return "json"
    if not start.startswith("{"):
        return "csv"
    lines = start.splitlines()
    return "jsonl" if len(lines) > 1 and lines[1].lstrip().startswith("{") else "json"


def _record(value: Any) -> Record:
    return value if isinstance(value, dict) else {"value": value}


def _first_char(text: io.TextIOWrapper) -> str:
    while (char := text.read(1)) and char in "\ufeff" + _JSON_SPACE:
        pass
    return char


def _whole(text: io.TextIOWrapper, start: str) -> Any:
    document = start + text.read(MAX_DOCUMENT_CHARS)
    if len(document) > MAX_DOCUMENT_CHARS:
        cure = "write a list of records, which is read piece by piece"
        raise ToolError(f"one JSON value has more than {MAX_DOCUMENT_CHARS} characters; {cure}", code="too_large")
    try:
        return json.loads(document)
    except (ValueError, RecursionError) as exc:
        raise ToolError(f"content is not JSON: {str(exc)[:200]}") from exc


def _items(text: io.TextIOWrapper) -> Iterator[tuple[Any, int]]:
    """Return the items of a list whose `[` has been read, each with its length in characters."""
    decode = json.JSONDecoder().raw_decode
    buffer, position, done, index = "", 0, False, 0
    while True:
        while not done and len(buffer) - position < 2:
            buffer, position, done = _more(text, buffer, position)
        position = _after_space(buffer, position)
        if position >= len(buffer) and not done:
            continue
        if buffer[position : position + 1] == "]" and index == 0:
            return
        try:
            value, end = decode(buffer, position)
        except (ValueError, RecursionError) as exc:
            if done or len(buffer) - position > MAX_RECORD_CHARS or isinstance(exc, RecursionError):
                raise _damaged(index, exc) from exc
            buffer, position, done = _more(text, buffer, position)
            continue
        after = _after_space(buffer, end)
        if after >= len(buffer) and not done:  # a number may go on in the next piece
            buffer, position, done = _more(text, buffer, position)
            continue
        yield value, end - position
        index += 1
        if buffer[after : after + 1] == "]":
            return
        if buffer[after : after + 1] != ",":
            raise _damaged(index, "a comma or ] is missing")
        position = after + 1


def _damaged(index: int, why: object) -> ToolError:
    return ToolError(f"record {index + 1} is not JSON: {str(why)[:200]}")


def _more(text: io.TextIOWrapper, buffer: str, position: int) -> tuple[str, int, bool]:
    piece = text.read(CHUNK_CHARS)
    return buffer[position:] + piece, 0, not piece


def _after_space(buffer: str, position: int) -> int:
    while position < len(buffer) and buffer[position] in _JSON_SPACE:
        position += 1
    return position
