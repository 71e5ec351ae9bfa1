"""Every promise names an attack that exists, and SECURITY.md names every kind of promise that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PROMISES = (HERE / "PROMISES.md").read_text(encoding="utf-8")
SECURITY = (HERE.parent / "SECURITY.md").read_text(encoding="utf-8")

MOST_BYTES = 12_000
"""Most bytes of SECURITY.md: what a reader can hold."""


def promised() -> set[str]:
    return set(re.findall(r"`(test_\w+\.py::test_\w+)`", PROMISES))


def attacked() -> set[str]:
    return {
        f"{path.name}::{node.name}"
        for path in HERE.rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def kinds(page: str) -> set[str]:
    """Return the sections of PROMISES.md: of a sandbox, and those with a heading."""
    whole, _, _ = page.partition("\n## What is not promised")
    of_a_sandbox = re.findall(r"^\*\*([^*]+)\*\*", whole, re.MULTILINE)
    return {*of_a_sandbox, *re.findall(r"^## (.+)", whole, re.MULTILINE)} - {"What is promised"}


def lines(page: str) -> set[str]:
    """Return the kinds of which SECURITY.md has a line."""
    _, _, whole = page.partition("\n## What is promised")
    return set(re.findall(r"^- \*\*([^*]+)\*\*:", whole.partition("\n## What is not promised")[0], re.MULTILINE))


def open_ends(page: str) -> list[str]:
    """Return what a page says is not promised, by its first words."""
    return re.findall(r"^- \*\*([^*]+?)\.?\*\*", page.partition("\n## What is not promised")[2], re.MULTILINE)


def test_every_promise_names_an_attack_that_exists() -> None:
    assert promised() - attacked() == set()
    assert len(promised()) > 60


def test_no_row_of_the_tables_is_without_an_attack() -> None:
    tables = re.findall(r"^(?:\|.*\n)+", PROMISES, re.MULTILINE)
    promises = [row for table in tables if table.startswith("| Promise") for row in table.splitlines()[2:]]
    assert len(promises) > 50
    assert [row for row in promises if "::test_" not in row] == []


def test_each_kind_of_promise_has_its_line_and_each_line_its_promises() -> None:
    assert kinds(PROMISES) == lines(SECURITY)


def test_the_short_page_has_no_table_of_promises_and_stays_short() -> None:
    assert "| Promise" not in SECURITY
    assert "::test_" not in SECURITY
    assert len(SECURITY.encode()) < MOST_BYTES


def test_what_is_left_open_stands_on_the_short_page() -> None:
    shared = {
        "Counters that stay shared": "Side channels",
        "Other processes on the host": "Other processes of the host",
    }
    told = " ".join(open_ends(SECURITY))
    assert [each for each in open_ends(PROMISES) if shared.get(each, each) not in told and each not in SECURITY] == [
        "Other processors"
    ]
    assert "other processors than x86-64" in SECURITY
