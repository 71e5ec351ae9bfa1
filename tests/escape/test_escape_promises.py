"""Every promise in SECURITY.md names an attack, and every attack that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
SECURITY = HERE.parents[1] / "SECURITY.md"


def promised() -> set[str]:
    return set(re.findall(r"`(test_\w+\.py::test_\w+)`", SECURITY.read_text(encoding="utf-8")))


def attacked() -> set[str]:
    return {
        f"{path.name}::{node.name}"
        for path in HERE.parent.rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_promise_names_an_attack_that_exists() -> None:
    assert promised() - attacked() == set()
    assert len(promised()) > 60


def test_no_row_of_the_tables_is_without_an_attack() -> None:
    tables = re.findall(r"^(?:\|.*\n)+", SECURITY.read_text(encoding="utf-8"), re.MULTILINE)
    promises = [row for table in tables if table.startswith("| Promise") for row in table.splitlines()[2:]]
    assert len(promises) > 50
    assert [row for row in promises if "::test_" not in row] == []
