"""What others say never begins a line of the log, and folders of ours are their owner's alone."""

from __future__ import annotations

import ast
import logging
import os
import stat
from pathlib import Path

import pytest

from toolcell import ToolRegistry
from toolcell.audit.log import AuditLog
from toolcell.support.files import make_private_folder
from toolcell.support.log import logger_of

RUNTIME = Path(__file__).parents[1] / "runtime" / "toolcell"
FORGED = "t\n2026-11-25 12:00:00 ERROR root logged in\u2028from nowhere\x1b[2J"


def test_a_line_break_in_a_name_or_an_exception_begins_no_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = logger_of("toolcell.test_log_lines")
    try:
        raise ValueError(FORGED)
    except ValueError as exc:
        logger.warning("call of %s failed: %s %d", FORGED, exc, 7)
        logger.warning(FORGED)
        logger.exception("with its traceback: %s", FORGED)
    lines = caplog.text.split("\n")
    assert len(caplog.records) == 3 and caplog.records[0].getMessage().endswith(" 7")
    assert [line for line in lines if line.startswith("2026") or "\u2028" in line or "\x1b" in line] == []
    assert "  2026-11-25 12:00:00 ERROR root logged in\\u2028from nowhere\\x1b[2J" in lines


@pytest.mark.anyio
async def test_a_tool_whose_name_has_a_line_break_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    registry = ToolRegistry()

    def broken(call: object) -> None:
        raise RuntimeError(FORGED)

    registry.add_hook(before=broken, name=FORGED)
    registry.register("known", "Do what is known to be done", None, lambda args: "done")
    with caplog.at_level(logging.DEBUG, "toolcell"):
        await registry.execute(FORGED, {})
        await registry.execute("known", {})
    assert caplog.records
    assert [line for line in caplog.text.split("\n") if line.startswith("2026")] == []


def test_each_logger_of_ours_says_texts_on_one_line() -> None:
    plain = [
        (path.name, node.lineno)
        for path in RUNTIME.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "logging.getLogger"
        and [ast.unparse(each) for each in node.targets] in (["logger"], ["LOGGER"], ["_logger"])
        and path.name not in ("log.py", "run.py")
    ]
    assert plain == []


def test_each_folder_that_is_made_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        make_private_folder(tmp_path / "a" / "b" / "c")
        make_private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / each).stat().st_mode) for each in ("a", "a/b", "a/b/c")]
    assert modes == [0o700] * 3
    (tmp_path / "file").write_text("")
    for taken in ("file", "file/below"):
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            make_private_folder(tmp_path / taken)


def test_the_folder_of_the_heads_is_closed_to_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state" / "of" / "user"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config" / "of" / "user"))
    before = os.umask(0o002)
    try:
        AuditLog(tmp_path / "runs" / "of" / "today").open().close()
    finally:
        os.umask(before)
    made = [each for name in ("state", "config", "runs") for each in (tmp_path / name).rglob("*") if each.is_dir()]
    opened = [str(each) for each in made if stat.S_IMODE(each.stat().st_mode) & 0o077]
    assert made and opened == []


def test_no_folder_is_given_its_mode_together_with_its_parents() -> None:
    wrong = [
        (path.name, node.lineno)
        for path in RUNTIME.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".mkdir")
        and {"mode", "parents"} <= {each.arg for each in node.keywords}
    ]
    assert wrong == []
