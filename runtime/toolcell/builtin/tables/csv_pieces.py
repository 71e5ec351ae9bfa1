"""Read CSV in pieces of whole rows. polars reads a piece that is as it should be, Python's `csv` any other.

As it should be: all rows are as long as the header, and quotes are around whole cells. Of other files polars would
make other rows than the `csv` module does: it joins lines at a lone quote, and fills short rows up.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import polars as pl

from toolcell.builtin.tables.batches import Batch, FrameBatch, RowBatch
from toolcell.builtin.tables.requests import Record
from toolcell.builtin.tables.text import MAX_LINE_CHARS
from toolcell.errors import ToolError

PIECE_BYTES: Final = 4 * 1024 * 1024
MAX_CELLS: Final = 2 * 1024 * 1024
"""In one piece. A cell takes a byte in the file at least, and in memory 16 each time that it is copied."""
FIRST_PIECE_BYTES: Final = 128 * 1024
"""Most answers need the first rows only."""
ROWS_BYTES: Final = 1024 * 1024
"""Bytes of rows that the `csv` module reads."""
CHUNK_BYTES: Final = 64 * 1024
MAX_COLUMNS: Final = 2000
MAX_HEADER_CHARS: Final = 64 * 1024
_DELIMITERS: Final = ",;\t|"
_SEPARATOR_HINT: Final = re.compile(r"sep=(.)\r?\n?", re.IGNORECASE)


class TextBytes:
    """A file's text as UTF-8, by lines or by pieces of whole rows. Nothing is held but the next piece."""

    def __init__(self, source: io.BufferedIOBase, encoding: str, errors: str) -> None:
        self._source = source
        self._decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)(errors)
        self._errors = errors
        self._buffer = bytearray()
        """One for the whole file: memory that is new to the process takes longer to get than to fill."""
        self._at = self._stop = 0
        """Where in the buffer the text begins and ends that was not taken."""
        self._rows_end = 0
        """End of the rows that `rows_within` returned."""
        self._is_begun = self._is_over = False
        self.line_number = 0
        """Number of the last line that was taken."""

    def fill(self, size: int) -> bool:
        """Read until `size` bytes are held or the file is over; return whether there are any."""
        while self._stop - self._at < size and not self._is_over:
            self._read(max(size - self._stop + self._at, CHUNK_BYTES))
        if not self._is_begun:
            self._is_begun = True
            self._at = len(codecs.BOM_UTF8) if self._buffer.startswith(codecs.BOM_UTF8, 0, self._stop) else 0
        return self._at < self._stop

    def _read(self, size: int) -> None:
        held = self._stop - self._at
        self._buffer[:held] = self._buffer[self._at : self._stop]
        if self._decoder is None:
            self._buffer.extend(bytes(max(0, held + size - len(self._buffer))))
            with memoryview(self._buffer)[held : held + size] as room:
                count = self._source.readinto(room)
            self._is_over = not count
        else:
            data = self._source.read(size)
            self._is_over = not data
            text = self._decoder.decode(data, final=self._is_over).encode("utf-8", "replace")
            count = len(text)
            self._buffer[held : held + count] = text
        self._at, self._stop = 0, held + count

    def line(self) -> str:
        """Take the next line with its end, which is a line feed, a carriage return or both; empty at the end.

        Raises:
            ToolError: it has more than `MAX_LINE_CHARS` characters.
        """
        most = MAX_LINE_CHARS * 4 + 2  # bytes of as many characters
        end = self._line_end(most)
        for size in (CHUNK_BYTES, most):
            if not end:
                self.fill(size)
                end = self._line_end(most)
        taken = self._buffer[self._at : end or min(self._at + most, self._stop)]
        self._at += len(taken)
        self.line_number += bool(taken)
        line = taken.decode("utf-8", self._errors)
        if len(line) > MAX_LINE_CHARS:
            raise ToolError(f"line {self.line_number} has more than {MAX_LINE_CHARS} characters", code="too_large")
        return line

    def _line_end(self, most: int) -> int:
        """Return where the line that is held ends; 0 when its end is not held."""
        last = min(self._at + most, self._stop)
        end = self._buffer.find(b"\n", self._at, last) + 1
        carriage = self._buffer.find(b"\r", self._at, end or last) + 1
        if carriage and carriage + 1 != end:
            return carriage if carriage < self._stop or self._is_over else 0
        return end

    def lines(self) -> Iterator[str]:
        """Take line after line."""
        while True:
            end = self._buffer.rfind(b"\n", self._at, min(self._at + CHUNK_BYTES, self._stop)) + 1
            if not end:
                line = self.line()
                if not line:
                    return
                yield line
                continue
            for taken in self._buffer[self._at : end].splitlines(keepends=True):
                self._at += len(taken)
                self.line_number += 1
                yield taken.decode("utf-8", self._errors)

    def rows_within(self, size: int, heading: bytes) -> bytes:
        """Return the whole rows in the next bytes below a heading, without taking them; empty when not even one row
        ends there.

        A line ends a row when an even number of quotes is before it.
        """
        self.fill(size)
        last = min(self._at + size, self._stop)
        self._rows_end = last if self._is_over and last == self._stop else self._row_end(last)
        if self._rows_end <= self._at:
            return b""
        missing = b"" if self._buffer.endswith(b"\n", self._at, self._rows_end) else b"\n"
        with memoryview(self._buffer)[self._at : self._rows_end] as rows:
            piece = b"".join((heading, rows, missing))
        if piece.isascii() or self._decoder is not None:
            return piece
        return piece.decode("utf-8", self._errors).encode("utf-8", "replace")

    def _row_end(self, last: int) -> int:
        end = self._buffer.rfind(b"\n", self._at, last) + 1
        has_quotes = self._buffer.find(b'"', self._at, end) >= 0
        quotes = self._buffer.count(b'"', self._at, end) if has_quotes else 0
        while end and quotes % 2:
            opening = self._buffer.rfind(b'"', self._at, end)
            before = self._buffer.rfind(b"\n", self._at, opening) + 1
            quotes -= self._buffer.count(b'"', max(before, self._at), end)
            end = before
        return end

    def take_rows(self, lines: int) -> None:
        """Take the rows that `rows_within` returned."""
        self._at = self._rows_end
        self.line_number += lines


class CsvPieces:
    """The rows of a CSV file, in batches. `names` is final when they have been read."""

    def __init__(self, text: TextBytes, delimiter: str | None) -> None:
        self._text = text
        first = next((line for line in text.lines() if line.strip("\r\n \t")), "")
        header = [first]
        if hint := _SEPARATOR_HINT.fullmatch(first):  # spreadsheets write it above the header
            delimiter, header = delimiter or hint[1], [text.line()]
        while "".join(header).count('"') % 2 and sum(map(len, header)) < MAX_HEADER_CHARS and (line := text.line()):
            header.append(line)  # a name with a line break
        self._delimiter = delimiter or delimiter_of("".join(header))
        self._header = header
        self.names: list[str] = []
        """Columns in the order of the header, then those of cells beyond it."""

    def batches(self, wanted: Sequence[str] | None) -> Iterator[Batch]:
        """Return the rows, once. `wanted` columns are read; None reads all of them.

        Raises:
            ToolError: the text is damaged; says where.
        """
        with self._errors():
            self.names = column_names(next(self._reader(self._header), []))
        layout = _Layout(list(self.names), self._delimiter)
        size = FIRST_PIECE_BYTES
        while self._text.fill(1):
            piece = self._text.rows_within(size, layout.heading)
            lines = _count(piece, "\n") if piece else 0
            if lines * len(self.names) > MAX_CELLS and size > FIRST_PIECE_BYTES:
                size //= 2
                continue
            plain = layout.plain(piece, lines) if piece and not _has_long_line(piece) else None
            frame = None if plain is None else layout.read(plain, wanted)
            if plain is None or frame is None:
                yield from self._by_row(max(len(piece), ROWS_BYTES))
            else:
                self._text.take_rows(lines - 1)
                if frame.height:
                    yield FrameBatch(frame, layout.reader(plain, frame))
            size = min(size * 4, PIECE_BYTES)

    def _by_row(self, size: int) -> Iterator[Batch]:
        """Return the rows in the next `size` characters, and those that begin there."""
        taken = 0

        def lines() -> Iterator[str]:
            nonlocal taken
            for line in self._text.lines():
                taken += len(line)
                yield line

        reader = self._reader(lines())
        rows: list[list[str]] = []
        begun = 0
        while True:
            with self._errors():
                row = next(reader, None)
            if row:
                rows.append(row)
                if len(row) > len(self.names):
                    self._widen(len(row))
            is_last = row is None or taken >= size
            if rows and (is_last or taken - begun >= ROWS_BYTES):
                yield RowBatch(list(self.names), rows)
                rows, begun = [], taken
            if is_last:
                return

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self._delimiter)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except csv.Error as exc:
            raise ToolError(f"line {self._text.line_number} is not CSV: {exc}; a quote may be open") from exc

    def _widen(self, count: int) -> None:
        if count > MAX_COLUMNS:
            raise ToolError(f"a row has {count} cells, and may have {MAX_COLUMNS}", code="too_large")
        self.names = column_names([*self.names, *[""] * (count - len(self.names))])


class _Layout:
    """The columns of a file, and the delimiter between them: how polars reads its pieces."""

    def __init__(self, names: Sequence[str], delimiter: str) -> None:
        self._names = names
        self._delimiter = delimiter
        self.heading = ",".join(map(str, range(len(names)))).replace(",", delimiter).encode() + b"\n"
        """Above each piece: positions. polars would unpack a piece that begins like a compressed file."""
        sign = f"\\x{{{ord(delimiter):x}}}"
        cell = rf'(?:"[^"]*(?:""[^"]*)*"|[^"{sign}\r\n]*)'
        self._rows_of_cells = rf"\A(?:{cell}(?:{sign}|\r?\n|\z))*\z"

    def plain(self, piece: bytes, lines: int) -> bytes | None:
        """Return a piece as polars reads it like the `csv` module; None when that cannot be."""
        if not self._delimiter.isascii() or self._delimiter.isalnum():
            return None
        if b'"' in piece:
            is_plain = pl.Series([piece.decode()]).str.contains(self._rows_of_cells)[0]
            return piece if is_plain and lines * len(self._names) <= len(piece) else None
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            lines = _count(piece, "\n")
        if len(self._names) > 1 and self._is_whole(piece, lines):
            return piece
        while b"\n\n" in piece:  # polars takes blank lines for rows
            piece = piece.replace(b"\n\n", b"\n")
        return piece if self._is_whole(piece, _count(piece, "\n")) else None

    def _is_whole(self, piece: bytes, rows: int) -> bool:
        """True when the rows of a piece without quotes have as many cells as the header, taken together."""
        return _count(piece, self._delimiter) == rows * (len(self._names) - 1)

    def read(self, piece: bytes, wanted: Sequence[str] | None) -> pl.DataFrame | None:
        """Return the wanted columns and the last one; None when a row is longer or shorter than the header."""
        count = len(self._names)
        last = str(count - 1)
        if b'"' in piece:
            frame = self._frame(piece)
            if frame is None or count == 1:  # of one column, null is a blank line, and "" is not
                return None if frame is None else self._named(frame.drop_nulls())
            if frame[last].null_count():
                outside = pl.Series([piece.decode()]).str.replace_all('"[^"]*"', "q")[0]
                if outside.count(self._delimiter) != (frame.height + 1) * (count - 1):
                    return None
            return self._named(frame)
        at = {self._names.index(name) for name in wanted if name in self._names} if wanted is not None else range(count)
        frame = self._frame(piece, [str(index) for index in sorted({count - 1, *at})])
        if frame is not None and count > 1 and frame[last].null_count() and len(frame.columns) < count:
            frame = self._frame(piece)  # a short row may make up for a long one, of which polars says so only then
        return None if frame is None else self._named(frame)

    def reader(self, piece: bytes, frame: pl.DataFrame) -> Callable[[Sequence[int]], list[Record]] | None:
        """Return what reads rows with all columns; None when the frame has all of them."""
        return None if frame.width == len(self._names) else partial(self._records, piece)

    def _records(self, piece: bytes, indexes: Sequence[int]) -> list[Record]:
        frame = self._frame(piece, rows=indexes[-1] + 1) if indexes else None
        return [] if frame is None else self._named(frame)[list(indexes)].rows(named=True)

    def _frame(self, piece: bytes, columns: list[str] | None = None, rows: int | None = None) -> pl.DataFrame | None:
        """Return a piece with positions as names. A cell is null where nothing is in it."""
        try:
            return pl.read_csv(
                piece,
                schema={str(index): pl.String for index in range(len(self._names))},
                columns=columns
                if columns and len(columns) < len(self._names)
                else None,  # only so it tells of long rows
                n_rows=rows,
                separator=self._delimiter,
                quote_char='"' if b'"' in piece else None,
                empty_string_is_null=True,
            )
        except pl.exceptions.PolarsError:
            return None

    def _named(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame.select(pl.all().fill_null("")).rename(lambda index: self._names[int(index)])


def _count(piece: bytes, sign: str) -> int:
    """Return how often a sign is in a piece, which polars counts many times faster than `bytes.count` does."""
    parts = pl.scan_csv(piece, eol_char=sign, schema={"": pl.String}, has_header=False, quote_char=None)
    return int(parts.select(pl.len()).collect().item()) - (not piece.endswith(sign.encode()))


def _has_long_line(piece: bytes) -> bool:
    at = 0
    while len(piece) - at > MAX_LINE_CHARS:
        end = piece.rfind(b"\n", at, at + MAX_LINE_CHARS) + 1
        if not end:
            return True
        at = end
    return False


def delimiter_of(header: str) -> str:
    """Return the delimiter that is most often in a header, outside quotes; a comma when there is none."""
    outside = "".join(header.split('"')[0::2])
    return max(_DELIMITERS, key=lambda sign: (outside.count(sign), -_DELIMITERS.index(sign)))


def column_names(header: list[str]) -> list[str]:
    """Return a header without empty or repeated names: `column_3`, and `name_2` for the second `name`.

    Raises:
        ToolError: there are too many.
    """
    if len(header) > MAX_COLUMNS:
        raise ToolError(f"the header has {len(header)} columns, and may have {MAX_COLUMNS}", code="too_large")
    names: dict[str, None] = {}
    for position, cell in enumerate(header, 1):
        base = cell.strip().lstrip("\ufeff") or f"column_{position}"
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names[name] = None
    return list(names)
