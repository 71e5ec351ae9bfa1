"""A table of data is one test: it compares every row, and names each that differs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., Any]


def each_row(names: str | Sequence[str], rows: Collection[Any], ids: Any = None) -> Callable[[Test], Test]:
    """Run a test for each row, like `pytest.mark.parametrize`, but as one test. Its fixtures are made once for all rows,
    but for `tmp_path` and `monkeypatch`, which each row has anew: those that other fixtures have are not the row's.

    A row that is skipped leaves the other rows to be tried. The test is skipped if every row is.
    """
    if not rows:
        raise pytest.UsageError("a table without rows shows nothing")
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [_row(row, columns, number, ids) for number, row in enumerate(rows) if not _left_out(row)]

    def decorate(test: Test) -> Test:
        def judge(failures: list[BaseException], skipped: list[str]) -> None:
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)
            if len(skipped) == len(table):
                pytest.skip("; ".join(dict.fromkeys(skipped)) or "every row is left out")

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def of_all(*args: Any, **given: Any) -> None:
                failures, skipped = list[BaseException](), list[str]()
                for number, (name, row) in enumerate(table):
                    with _collected(failures, skipped, name), _of_its_own(given, number) as rest:
                        await test(*args, **rest, **row)
                judge(failures, skipped)
        else:

            @functools.wraps(test)
            def of_all(*args: Any, **given: Any) -> None:
                failures, skipped = list[BaseException](), list[str]()
                for number, (name, row) in enumerate(table):
                    with _collected(failures, skipped, name), _of_its_own(given, number) as rest:
                        test(*args, **rest, **row)
                judge(failures, skipped)

        signature = inspect.signature(test)
        rest = [each for each in signature.parameters.values() if each.name not in columns]
        of_all.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]  # pytest asks it for fixtures
        return of_all

    return decorate


@contextmanager
def _collected(failures: list[BaseException], skipped: list[str], name: str) -> Iterator[None]:
    try:
        yield
    except pytest.skip.Exception as exc:
        skipped.append(str(exc))
    except (Exception, pytest.fail.Exception) as exc:
        exc.add_note(f"row: {name}")
        failures.append(exc)


@contextmanager
def _of_its_own(given: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """A row has a folder of its own, and what it patches is undone at its end."""
    with pytest.MonkeyPatch.context() as patch:
        own: dict[str, Any] = {"monkeypatch": patch}
        if "tmp_path" in given:
            own["tmp_path"] = given["tmp_path"] / f"row-{number}"
            own["tmp_path"].mkdir()
        yield given | {name: value for name, value in own.items() if name in given}


def _left_out(row: Any) -> bool:
    return any(mark.name == "skipif" and mark.args[0] for mark in getattr(row, "marks", ()))


def _row(row: Any, columns: list[str], number: int, ids: Any) -> tuple[str, dict[str, Any]]:
    name = None
    if isinstance(row, type(pytest.param())):
        if any(mark.name != "skipif" for mark in row.marks):
            raise pytest.UsageError(f"a row of a table has no mark but skipif: {row}")
        name, values = row.id, row.values
    else:
        values = (row,) if len(columns) == 1 else tuple(row)
    if len(values) != len(columns):
        raise pytest.UsageError(f"{len(values)} values for {', '.join(columns)}: {values!r}")
    if callable(ids):
        name = name or "-".join(str(ids(value)) for value in values)
    elif ids is not None:
        name = name or str(list(ids)[number])
    return name or repr(values)[:200], dict(zip(columns, values, strict=True))
