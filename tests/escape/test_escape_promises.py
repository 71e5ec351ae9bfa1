"""Every promise in SECURITY.md names an attack, and every attack it names is here."""

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
        for path in (
            *HERE.glob("test_*.py"),
            *HERE.parent.glob("docker/test_*.py"),
            *HERE.parent.glob("hostile/test_*.py"),
        )
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_promise_names_an_attack_that_exists() -> None:
    assert promised() - attacked() == set()
    assert len(promised()) > 60


def test_no_row_of_the_tables_is_without_an_attack() -> None:
    rows = [line for line in SECURITY.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    promises = [row for row in rows if not row.startswith(("|---", "| Promise"))]
    assert [row for row in promises if "::test_" not in row] == []
