"""The two engines that look at whole columns: plain Python, and polars where it is installed. They answer alike.

polars decides about text that is surely a number or surely none. Every other cell, such as a number of 20 digits, a
Boolean or a list, is decided by the plain engine, cell by cell.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

from toolcell.builtin.tables.cells import Condition, Number, number_of
from toolcell.errors import UsageError

if TYPE_CHECKING:
    import polars

EngineName = Literal["auto", "polars", "python"]

NO_POLARS: Final = "this engine needs polars; run: pip install 'toolcell[data]'"
SURELY_A_NUMBER: Final = r"^-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,6})?$"
SURELY_NONE: Final = r"^[A-Za-z_]"
_EXACT: Final = 2**53


class ColumnEngine(Protocol):
    """Decides about all cells of a column."""

    name: str

    def matching(self, cells: Sequence[Any], condition: Condition) -> Sequence[bool]:
        """Return which cells pass the condition."""
        ...

    def numbers(self, cells: Sequence[Any]) -> Sequence[Number | None]:
        """Return each cell as a number, None where it is none."""
        ...


class PythonEngine:
    """Cell by cell."""

    name = "python"

    def matching(self, cells: Sequence[Any], condition: Condition) -> Sequence[bool]:
        """Return which cells pass the condition."""
        return [condition.matches(cell) for cell in cells]

    def numbers(self, cells: Sequence[Any]) -> Sequence[Number | None]:
        """Return each cell as a number."""
        return [number_of(cell) for cell in cells]


class PolarsEngine:
    """Columns of text at once, as CSV has them."""

    name = "polars"

    def __init__(self) -> None:
        import polars

        self._polars = polars
        self._plain = PythonEngine()

    def matching(self, cells: Sequence[Any], condition: Condition) -> Sequence[bool]:
        """Return which cells pass the condition."""
        texts = self._texts(cells)
        if texts is None or condition.op not in _COMPARE or not _is_exact(condition):
            return self._plain.matching(cells, condition)
        [number] = condition.numbers
        is_number = texts.str.contains(SURELY_A_NUMBER)
        values = texts.zip_with(is_number, _nulls(texts)).cast(self._polars.Float64)
        found: list[bool | None] = _COMPARE[condition.op](values, float(number)).to_list()
        return [condition.matches(cell) if hit is None else hit for cell, hit in zip(cells, found, strict=True)]

    def numbers(self, cells: Sequence[Any]) -> Sequence[Number | None]:
        """Return each cell as a number."""
        texts = self._texts(cells)
        if texts is None:
            return self._plain.numbers(cells)
        is_number = texts.str.contains(SURELY_A_NUMBER)
        is_none = texts.str.contains(SURELY_NONE)
        has_point = texts.str.contains(".", literal=True)
        nulls = _nulls(texts)
        whole = texts.zip_with(is_number & ~has_point, nulls).cast(self._polars.Int64).to_list()
        parts = texts.zip_with(is_number & has_point, nulls).cast(self._polars.Float64).to_list()
        return [
            integer if integer is not None else part if part is not None else None if surely_none else number_of(cell)
            for cell, integer, part, surely_none in zip(cells, whole, parts, is_none.to_list(), strict=True)
        ]

    def _texts(self, cells: Sequence[Any]) -> polars.Series | None:
        """Return a column of text; None when anything else is in it."""
        if not cells or not all(type(cell) is str for cell in cells):
            return None
        try:
            return self._polars.Series(cells, dtype=self._polars.String)
        except UnicodeEncodeError:  # a lone surrogate
            return None


def _nulls(texts: polars.Series) -> polars.Series:
    return texts.clear(len(texts))


def _is_exact(condition: Condition) -> bool:
    numbers = condition.numbers
    return len(numbers) == 1 and not condition.texts and not condition.has_null and abs(next(iter(numbers))) < _EXACT


_COMPARE: Final[dict[str, Callable[[Any, float], Any]]] = {
    "==": lambda column, value: column == value,
    "!=": lambda column, value: column != value,
    ">": lambda column, value: column > value,
    "<": lambda column, value: column < value,
    ">=": lambda column, value: column >= value,
    "<=": lambda column, value: column <= value,
}


def check_engine(name: EngineName) -> None:
    """Check that there is such an engine, without importing it: that takes a second.

    Raises:
        UsageError: there is none, or it is not installed.
    """
    if name not in get_args(EngineName):
        raise UsageError(f'engine must be "auto", "polars" or "python", not {name!r:.40}')
    if name == "polars" and importlib.util.find_spec("polars") is None:
        raise UsageError(NO_POLARS)


def engine_of(name: EngineName) -> ColumnEngine:
    """Return an engine; `auto` is polars when it is installed.

    Raises:
        UsageError: there is no such engine, or it is not installed.
    """
    check_engine(name)
    if name == "polars" or (name == "auto" and importlib.util.find_spec("polars") is not None):
        return PolarsEngine()
    return PythonEngine()
