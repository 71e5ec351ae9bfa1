"""Attacks on legal holds and on the names of logs, by somebody who has the log's directory and not the key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from audit.ledger import Ledger
from audit.test_audit_retention import KEEP_LITTLE, SMALL, sources, two_chains
from toolcell.audit import holds, records
from toolcell.audit.config import AuditConfig
from toolcell.audit.format import LOG_FILE, Frame, segment_files, split_segment
from toolcell.audit.keys import HmacKey
from toolcell.audit.query import Index, RunSummary
from toolcell.audit.redaction import redact
from toolcell.audit.retention import expired_segments
from toolcell.audit.signatures import default_heads_dir
from toolcell.errors import AuditError, UsageError

HELD = "# first 2"


def held(ledger: Ledger, **options: object) -> tuple[Path, RunSummary]:
    """Hold a run of one chain in another; return the chain in which the hold is recorded, and the run."""
    two_chains(ledger)
    before = {path for path in ledger.directory.iterdir() if path.is_dir()}
    with ledger.log(settings=SMALL), ledger.log(settings=SMALL), ledger.opened(settings=SMALL, **options) as recorder:
        with Index(ledger.directory, [ledger.key]) as index:
            index.refresh()
            (run,) = (run for run in index.runs() if run.title == HELD.removeprefix("# ") or run.title == HELD)
        holds.hold(recorder.log, run, by="ada")
        (chain,) = {path for path in ledger.directory.iterdir() if path.is_dir()} - before
        return chain, run


def pieces(path: Path, kind: str) -> list[Frame]:
    found = [each for each in split_segment(path.read_bytes()) if isinstance(each, Frame)]
    return [each for each in found if records.parse(each.body).kind == kind]


def flip(path: Path, piece: Frame) -> None:
    data = bytearray(path.read_bytes())
    data[piece.offset + 60] ^= 1
    path.write_bytes(data)


def edit_the_hold(path: Path) -> None:
    flip(path, pieces(path, records.HELD)[0])


def spoil_all_signatures(path: Path) -> None:
    for piece in pieces(path, records.CHECKPOINT):
        flip(path, piece)


def cut_before_the_hold(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: pieces(path, records.HELD)[0].offset])


def remove_the_chain(path: Path) -> None:
    shutil.rmtree(path.parent)


def empty_the_chain(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "attack", [edit_the_hold, spoil_all_signatures, cut_before_the_hold, remove_the_chain, empty_the_chain]
)
def test_a_hold_that_was_damaged_or_removed_makes_retention_remove_nothing(
    ledger: Ledger, attack: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    chain, _ = held(ledger)
    attack(chain / "00000001.log")
    before = {path: len(segment_files(path)) for path in ledger.directory.iterdir() if path.is_dir()}
    with ledger.log(settings=SMALL | KEEP_LITTLE) as log:
        assert log.prune() == 0

    assert HELD in sources(ledger)
    assert all(len(segment_files(path)) >= count for path, count in before.items())
    assert "a legal hold may have stood where" in caplog.text
    assert not ledger.verify().ok
    with pytest.raises(AuditError, match="a legal hold may have stood where"):
        list(expired_segments(ledger.directory, AuditConfig(**KEEP_LITTLE), [ledger.key]))


def test_a_hold_signed_with_a_key_that_the_writer_does_not_know_holds(ledger: Ledger) -> None:
    held(ledger, key=HmacKey.generate())
    with ledger.log(settings=SMALL | KEEP_LITTLE) as log:
        log.prune()

    assert HELD in sources(ledger)


def test_without_an_attack_everything_but_the_held_run_goes(ledger: Ledger) -> None:
    held(ledger)
    with ledger.log(settings=SMALL | KEEP_LITTLE) as log:
        assert log.prune() > 0

    assert HELD in sources(ledger)
    assert ledger.verify().ok


def test_nothing_of_a_held_run_is_redacted(ledger: Ledger) -> None:
    _, run = held(ledger)
    with Index(ledger.directory, [ledger.key]) as index, ledger.log() as log:
        index.refresh()
        with pytest.raises(UsageError, match=r"under legal hold.*--release"):
            redact(log, index, run, ["source"])
        holds.hold(log, run, by="ada", is_held=False)
        index.refresh()
        assert redact(log, index, run, ["source"])


@pytest.mark.parametrize(
    "name", ["../../../elsewhere", "/elsewhere", "", "0" * 31, "0" * 33, "A" * 32, "\ud800" * 32, 7, None]
)
def test_a_log_cannot_choose_where_its_heads_are_written(ledger: Ledger, tmp_path: Path, name: object) -> None:
    ledger.fill(1)
    if isinstance(name, str) and name.endswith("elsewhere"):
        name = f"{'../' * 20 if name.startswith('..') else '/'}{tmp_path / 'elsewhere'}"
    file = ledger.directory / LOG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "log": name}))
    with pytest.raises(AuditError, match="is damaged"):
        ledger.fill(1)
    with pytest.raises(AuditError, match="is damaged"):
        ledger.verify()

    assert not (tmp_path / "elsewhere").exists()
    assert len([*default_heads_dir().iterdir()]) == 1
