"""Read CSV, JSON and JSON lines in batches of records. Only one batch is held: a file of any size fits.

Files of the wild are read as far as they make sense: short and long rows, empty and repeated column names, other
delimiters, damaged lines of JSONL. A file that makes no sense is a `ToolError` that says where.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, Literal, get_args

from toolcell.builtin.encodings import SAMPLE_BYTES, checked_encoding, encoding_of, lenient
from toolcell.errors import ToolError

Record = dict[str, Any]
Format = Literal["csv", "json", "jsonl"]

BATCH_COST = 4 * 1024 * 1024
"""Bytes of one batch in memory, about: its characters, and what Python needs for each cell."""
_CELL_COST: Final = 64
MAX_COLUMNS: Final = 2000
MAX_LINE_CHARS: Final = 1024 * 1024
MAX_HEADER_CHARS: Final = 64 * 1024
MAX_RECORD_CHARS: Final = 512 * 1024
"""Of JSON. A record is parsed in one step, and a megabyte of numbers takes 55 ms in which nothing else of this process
runs."""
CHUNK_CHARS = 256 * 1024
_JSON_SPACE: Final = " \t\r\n"
_DELIMITERS: Final = ",;\t|"
_SEPARATOR_HINT: Final = re.compile(r'sep=([^"\r\n\0])\r?\n?', re.IGNORECASE)


_OTHERS: Final = {
    b"PK\x03\x04": "an Excel workbook or another zip file",
    b"\xd0\xcf\x11\xe0": "an Excel workbook",
    b"PAR1\x15": "Parquet",
    b"ARROW1\0": "Arrow",
    b"\x1f\x8b": "gzip",
    b"(\xb5/\xfd": "Zstandard",
    b"SQLite format 3\0": "an SQLite database",
}
"""What models take for a table of text, by its first bytes."""


def open_text(source: BinaryIO, encoding: str | None = None) -> io.TextIOWrapper:
    """Return the text of a seekable binary file. Line ends stay as they are. `encoding`: None finds it out.

    Raises:
        ToolError: there is no such encoding, or it is a file of another kind.
    """
    sample = source.read(SAMPLE_BYTES)
    if kind := next((kind for mark, kind in _OTHERS.items() if sample.startswith(mark)), None):
        cure = "read it in a script, such as with pandas, and pass records"
        raise ToolError(f"the table is {kind}, and only CSV and JSON are read here; {cure}")
    source.seek(0)
    name = encoding_of(sample) or "utf-8" if encoding is None else checked_encoding(encoding)
    name = "utf-8-sig" if name == "utf-8" else name
    return io.TextIOWrapper(source, encoding=name, errors=lenient(name), newline="")


class Table:
    """A table that is being read. Columns and counts are final when the batches have been read."""

    def __init__(self, text: io.TextIOWrapper, format: str | None = None, delimiter: str | None = None) -> None:
        """Raises: ToolError, when the format is unknown, or the delimiter cannot be one."""
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0' or format in ("json", "jsonl")):
            raise ToolError(
                f"delimiter must be one character between the cells of CSV, such as ';', not {delimiter!r:.40}",
                code="invalid_arguments",
            )
        formats = get_args(Format)
        if format not in (None, *formats):
            raise ToolError(f"format must be one of {', '.join(formats)}, not {format!r:.40}", code="invalid_arguments")
        self._text = text
        self._delimiter = delimiter
        self._format = "csv" if delimiter is not None else format or _format_of(text)
        self._known: dict[str, None] = {}
        self.skipped = 0
        """Lines of JSONL that are not JSON objects."""

    @property
    def columns(self) -> list[str]:
        """Return the columns that have been seen: CSV's in their order, JSON's sorted."""
        return list(self._known) if self._format == "csv" else sorted(self._known)

    def batches(self) -> Iterator[list[Record]]:
        """Return the records, once.

        Raises:
            ToolError: the text is damaged; says where.
        """
        read = {"csv": self._csv, "json": self._json, "jsonl": self._json_lines}[self._format]
        batch: list[Record] = []
        cost = 0
        for record, chars in read():
            batch.append(record)
            cost += chars + _CELL_COST * len(record)
            if cost >= BATCH_COST:
                yield batch
                batch, cost = [], 0
        if batch:
            yield batch

    def _csv(self) -> Iterator[tuple[Record, int]]:
        lines = _lines_of(self._text)
        before, first = next(((n, line) for n, line in enumerate(lines) if line.strip("\r\n \t")), (0, ""))
        delimiter = self._delimiter
        if hint := _SEPARATOR_HINT.fullmatch(first):  # spreadsheets write it above the header
            before, first, delimiter = before + 1, next(lines, ""), delimiter or hint[1]
        header = [first]
        while "".join(header).count('"') % 2 and sum(map(len, header)) < MAX_HEADER_CHARS and (line := next(lines, "")):
            header.append(line)  # a name with a line break
        delimiter = delimiter or _delimiter_of("".join(header))
        reader = csv.reader(itertools.chain(header, lines), delimiter=delimiter)
        try:
            names = self._named(next(reader, []))
            for row in reader:
                if len(row) > len(names):
                    names = self._named([*names, *[""] * (len(row) - len(names))])
                if row:
                    yield dict(zip(names, row, strict=False)), sum(map(len, row))
        except csv.Error as exc:
            raise ToolError(f"line {before + reader.line_num} is not CSV: {exc}; a quote may be open") from exc

    def _named(self, cells: list[str]) -> list[str]:
        """Return a header without empty or repeated names: `column_3`, and `name_2` for the second `name`."""
        if len(cells) > MAX_COLUMNS:
            raise ToolError(f"a row has {len(cells)} columns, and may have {MAX_COLUMNS}", code="too_large")
        names: dict[str, None] = {}
        for position, cell in enumerate(cells, 1):
            base = cell.strip().lstrip("\ufeff") or f"column_{position}"
            others = (f"{base}_{number}" for number in itertools.count(2))
            names[next(name for name in itertools.chain([base], others) if name not in names)] = None
        self._known = names
        return list(names)

    def _json_lines(self) -> Iterator[tuple[Record, int]]:
        for line in _lines_of(self._text, MAX_RECORD_CHARS):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield self._noted(value), len(line)
            else:
                self.skipped += 1

    def _json(self) -> Iterator[tuple[Record, int]]:
        while (start := self._text.read(1)) and start in "\ufeff" + _JSON_SPACE:
            pass
        values = _items(self._text) if start == "[" else [(_whole(self._text, start), 0)]
        for value, chars in values:
            yield self._noted(value if isinstance(value, dict) else {"value": value}), chars

    def _noted(self, record: Record) -> Record:
        self._known.update(dict.fromkeys(record))
        if len(self._known) > MAX_COLUMNS:
            raise ToolError(f"the records have more than {MAX_COLUMNS} different columns", code="too_large")
        return record


def _lines_of(text: io.TextIOWrapper, most: int = MAX_LINE_CHARS) -> Iterator[str]:
    number = 0
    while line := text.readline(most + 1):
        number += 1
        if len(line) > most:
            raise ToolError(f"line {number} has more than {most} characters", code="too_large")
        yield line


def _delimiter_of(header: str) -> str:
    """Return the delimiter that is most often in a header, outside quotes; a comma when there is none."""
    outside = "".join(header.split('"')[0::2])
    return max(_DELIMITERS, key=lambda sign: (outside.count(sign), -_DELIMITERS.index(sign)))


def _format_of(text: io.TextIOWrapper) -> Format:
    """Decide by the beginning: `[` is JSON; `{` is JSON, or JSONL if the next line begins so too; else CSV."""
    start = text.read(CHUNK_CHARS).lstrip("\ufeff" + _JSON_SPACE)
    text.seek(0)
    if start.startswith("["):
        return "json"
    if not start.startswith("{"):
        return "csv"
    lines = [line for line in start.splitlines() if line.strip()]
    return "jsonl" if len(lines) > 1 and lines[1].lstrip().startswith("{") else "json"


def _whole(text: io.TextIOWrapper, start: str) -> Any:
    document = start + text.read(MAX_RECORD_CHARS)
    if len(document) > MAX_RECORD_CHARS:
        cure = "write a list of records, which is read piece by piece"
        raise ToolError(f"one JSON value has more than {MAX_RECORD_CHARS} characters; {cure}", code="too_large")
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
    return ToolError(f"record {index + 1} is not JSON of up to {MAX_RECORD_CHARS} characters: {str(why)[:200]}")


def _more(text: io.TextIOWrapper, buffer: str, position: int) -> tuple[str, int, bool]:
    piece = text.read(CHUNK_CHARS)
    return buffer[position:] + piece, 0, not piece


def _after_space(buffer: str, position: int) -> int:
    while position < len(buffer) and buffer[position] in _JSON_SPACE:
        position += 1
    return position
