"""The name that was probably meant."""

from __future__ import annotations

import difflib

import pytest

from toolcell.support.checks import closest

pytestmark = pytest.mark.quick


def test_work_is_bounded_whatever_the_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, names, full = list[str](), list[str](), list[str]()

    class Counted(difflib.SequenceMatcher[str]):
        def set_seq1(self, a: str) -> None:  # type: ignore[override]
            compared.append(a)
            super().set_seq1(a)

        def set_seq2(self, b: str) -> None:  # type: ignore[override]
            names.append(b)
            super().set_seq2(b)

        def ratio(self) -> float:
            full.append(compared[-1])
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    assert closest("a" * 1_000_000, [f"{'a' * 60}{number}" for number in range(100_000)])
    assert len(full) == 4 and sum(map(len, compared)) < 21_000
    assert max(map(len, names)) == 80
    assert closest("a" * 1_000_000, ["a" * 10_000]) is None and max(map(len, compared)) < 200
