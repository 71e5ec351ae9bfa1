"""One model says what a record keeps: on the command line as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audit.test_audit_commands import invoke
from toolcell import PoolConfig, SyncRuntime
from toolcell.audit import AuditLog, RecordConfig
from toolcell.cli import exits
from toolcell.cli.builtin import BuiltinFlags
from toolcell.cli.run import RuntimeFlags
from toolcell.errors import UsageError

pytestmark = pytest.mark.isolation

TOOLS = '''
from toolcell import ToolRegistry
registry = ToolRegistry()

@registry.tool
def big() -> str:
    """Return a text that is longer than what a record keeps without being told to."""
    return "x" * 100_000
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("tools.py").write_text(TOOLS)


def log_of(*lines: str) -> AuditLog:
    """The record that `toolcell run --record runs.db --record-config FILE` writes."""
    Path("record.toml").write_text("\n".join(lines))
    log = RuntimeFlags(record="runs.db", record_config=Path("record.toml")).options(BuiltinFlags())["record"]
    assert isinstance(log, AuditLog)
    return log


@pytest.mark.parametrize(("lines", "status"), [((), exits.FAILED), (("value_bytes = 200_000",), exits.OK)])
def test_a_run_with_a_long_answer_can_be_replayed_if_the_record_keeps_it(lines: tuple[str, ...], status: int) -> None:
    from toolcell.tools import load_tools

    with SyncRuntime(load_tools("tools.py"), record=log_of(*lines), pool=PoolConfig(warm=1)) as runtime:
        assert runtime.execute_code("set_result(len(call_tool('big')))").value == 100_000
    found, said, _ = invoke("replay", "runs.db", "last", "--check")

    assert found == status
    assert ("--record-config" in said) is (status != exits.OK)


def test_the_file_has_every_setting_and_a_mistake_in_it_is_named(tmp_path: Path) -> None:
    assert invoke("keygen", tmp_path / "own.key", "--hmac")[0] == exits.OK
    log = log_of(
        f'key = "{tmp_path / "own.key"}"', "keep_s = 60", "keep_bytes = 1000", 'fsync = "always"',
        'redact_patterns = ["order-\\\\d+"]', '[tools."mail_*"]', 'args = "omit"',
    )  # fmt: skip
    assert (log.config.keep_s, log.config.keep_bytes, log.config.fsync) == (60, 1000, "always")
    assert log.config.content_of("mail_send").args == "omit"
    with log:
        pass
    assert invoke("verify", "runs.db", "--key", tmp_path / "own.key")[0] == exits.OK
    with pytest.raises(UsageError, match=r"record\.toml.*valeu_bytes"):
        log_of("valeu_bytes = 1")
    with pytest.raises(UsageError, match="--record-config needs --record"):
        RuntimeFlags(record_config=Path("record.toml")).options(BuiltinFlags())


def test_prune_takes_the_retention_of_the_file_and_says_why_the_rest_stays() -> None:
    with SyncRuntime(
        record=AuditLog("runs.db", config=RecordConfig(fsync="never")), pool=PoolConfig(warm=1)
    ) as runtime:
        runtime.execute_code("1")
    Path("record.toml").write_text("keep_s = 3600")
    status, said, summed = invoke("prune", "runs.db", "--record-config", "record.toml")
    assert (status, "stays: " in said, "0 events" in summed) == (exits.OK, True, True)
    Path("record.toml").write_text("keep_s = 1e-9")
    assert "(age)" in invoke("prune", "runs.db", "--record-config", "record.toml")[1]
    assert json.loads(invoke("list", "runs.db", "--json")[1]) == []
    assert invoke("prune", "runs.db")[0] == exits.USAGE
