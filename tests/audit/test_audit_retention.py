"""Retention of chains that nobody writes, and dry runs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from audit.ledger import Ledger
from toolcell.audit import records
from toolcell.audit.config import AuditConfig
from toolcell.audit.format import PRUNE_FILE, segment_files
from toolcell.audit.keys import save_private
from toolcell.audit.query import Index
from toolcell.audit.retention import expired_segments
from toolcell.cli import build

SMALL = {"segment_bytes": 4096, "checkpoint_s": 0.01}
CALM = {"segment_bytes": 4096, "checkpoint_s": 60}
"""Without checkpoints that depend on the time: they fill segments too."""
KEEP_LITTLE = {"keep_bytes": 6000}


def two_chains(ledger: Ledger) -> tuple[Path, Path]:
    """A chain that nobody writes any more, and a newer one: both were open at once."""
    with ledger.log(settings=SMALL) as first, ledger.log(settings=SMALL) as second:
        from toolcell.audit.recorder import Recorder

        for number in range(12):
            ledger.run(Recorder(first), f"# first {number}")
            ledger.run(Recorder(second), f"# second {number}")
        return ledger.directory / first.chain, ledger.directory / second.chain


def sources(ledger: Ledger) -> list[str]:
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        return [index.load(run).source or "" for run in index.runs()]


def test_chains_that_nobody_reopens_are_pruned_and_verify_afterwards(ledger: Ledger) -> None:
    chains = two_chains(ledger)
    before = [len(segment_files(chain)) for chain in chains]
    with ledger.opened(settings=SMALL | KEEP_LITTLE) as recorder:
        recorder.log.prune()
        removed = ledger.fields(records.PRUNED)
        ledger.run(recorder, "# third")

    after = [len(segment_files(chain)) for chain in chains]
    assert all(now < then for now, then in zip(after, before, strict=True))
    assert min(after) >= 1
    report = ledger.verify()
    assert report.ok, report.findings
    assert {each["more"].get("chain") for each in removed} & {chain.name for chain in chains}
    assert "# third" in sources(ledger)


def test_a_chain_that_another_process_writes_or_that_does_not_verify_is_left_alone(ledger: Ledger) -> None:
    idle, other = two_chains(ledger)
    first = next(iter(segment_files(idle).values()))
    first.write_bytes(first.read_bytes()[:-200] + bytes(200))
    before = len(segment_files(idle))
    with ledger.log(settings=SMALL), ledger.log(settings=SMALL | KEEP_LITTLE) as log:
        log.prune()

    assert len(segment_files(idle)) == before
    assert other.is_dir()


def test_an_idle_chain_is_pruned_without_being_asked(ledger: Ledger) -> None:
    chains = two_chains(ledger)
    before = sum(len(segment_files(chain)) for chain in chains)
    with ledger.opened(settings=SMALL | KEEP_LITTLE) as recorder:
        ledger.run(recorder)
        deadline = time.monotonic() + 20
        while sum(len(segment_files(chain)) for chain in chains) >= before - 3 and time.monotonic() < deadline:
            time.sleep(0.01)

    assert sum(len(segment_files(chain)) for chain in chains) < before - 3
    assert ledger.verify().ok


def test_a_dry_run_removes_nothing_and_names_what_would_go(ledger: Ledger) -> None:
    two_chains(ledger)
    before = ledger.bytes_on_disk()
    config = AuditConfig(**KEEP_LITTLE)
    planned = {(each.chain, each.segment.number) for each in expired_segments(ledger.directory, config, [ledger.key])}

    assert ledger.bytes_on_disk() == before
    assert len({chain for chain, _ in planned}) == 2
    assert list(expired_segments(ledger.directory, AuditConfig(keep_s=3600), [ledger.key])) == []


def run_cli(*arguments: Any) -> Any:
    words = ["audit", *map(str, arguments)]
    return CliRunner().invoke(build(words), words)


def test_prune_as_a_command(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_chains(ledger)
    key = tmp_path / "key"
    save_private(key, ledger.key.to_text())
    monkeypatch.setenv("TOOLCELL_AUDIT_KEY", str(key))
    log = ledger.directory

    assert run_cli("prune", log).exit_code == 2
    dry = json.loads(run_cli("prune", log, "--keep-bytes", 6000, "--dry-run", "--json").stdout)
    assert len(dry) > 3
    done = run_cli("prune", log, "--keep-bytes", 6000)
    assert done.exit_code == 0, done.output
    assert "were removed" in done.output
    assert json.loads(run_cli("prune", log, "--older-than", "1d", "--json").stdout) == []
    assert ledger.verify().ok


@pytest.mark.parametrize("with_older_record", [True, False])
def test_segments_that_retention_removed_and_somebody_put_back_are_found(
    ledger: Ledger, tmp_path: Path, with_older_record: bool
) -> None:
    ledger.fill(20, settings=CALM)
    if with_older_record:
        with ledger.log(settings=CALM | KEEP_LITTLE) as log:
            assert log.prune() > 0
        ledger.fill(20, settings=CALM)
    shutil.copytree(ledger.chain(), tmp_path / "old")
    with ledger.log(settings=CALM | KEEP_LITTLE) as log:
        assert log.prune() > 0
    assert ledger.verify(strict=True).ok
    newest = max(segment_files(ledger.chain()).values())
    for path in (tmp_path / "old").iterdir():
        if path.name < newest.name or path.name == PRUNE_FILE:
            shutil.copyfile(path, ledger.chain() / path.name)
    if not with_older_record:
        (ledger.chain() / PRUNE_FILE).unlink()

    assert [each.kind for each in ledger.verify().findings] == ["bad_stub"]
