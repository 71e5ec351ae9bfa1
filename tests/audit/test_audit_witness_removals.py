"""Witnesses are told of what retention removes before it is removed; nobody can remove the rest of a log unnoticed."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from audit.test_audit_retention import KEEP_LITTLE, SMALL, two_chains
from audit.test_audit_witnesses import Unreliable
from toolcell.audit.format import PRUNE_FILE, json_bytes, read_segment_file, segment_files
from toolcell.audit.keys import save_private
from toolcell.audit.signatures import PruneRecord, default_heads_dir, read_prune_record
from toolcell.audit.tail import end_of_segment
from toolcell.audit.witness import FileWitness
from toolcell.audit.witness_check import UNWITNESSED
from toolcell.cli import exits


@pytest.fixture
def witness(tmp_path: Path) -> FileWitness:
    return FileWitness(tmp_path / "heads.jsonl")


def found(ledger: Ledger, witness: FileWitness) -> list[str]:
    return [each.kind for each in ledger.verify(witnesses=[witness]).findings]


def test_a_witness_knows_of_all_that_retention_removed(ledger: Ledger, witness: FileWitness) -> None:
    for _ in range(3):
        ledger.fill(20, witnesses=[witness], settings=SMALL)
        with ledger.log(witnesses=[witness], settings=SMALL | KEEP_LITTLE) as log:
            assert log.prune() > 0

    assert found(ledger, witness) == []


def test_chains_that_nobody_writes_are_removed_with_the_witnesss_knowledge(
    ledger: Ledger, witness: FileWitness
) -> None:
    two_chains(ledger)
    with ledger.log(witnesses=[witness], settings=SMALL) as log:
        log.checkpoint()
    with ledger.log(witnesses=[witness], settings=SMALL | KEEP_LITTLE) as log:
        assert log.prune() > 0

    assert found(ledger, witness) == [UNWITNESSED]  # one chain was written without a witness, and stays found


def forge_removal(ledger: Ledger, chain: Path, count: int) -> None:
    """What the key's holder does: remove the oldest segments, and sign a prune record that looks like a writer's."""
    files = dict([*segment_files(chain).items()][:count])
    data = {number: read_segment_file(path) for number, path in files.items()}
    last = max(files)
    end = end_of_segment(last, io.BytesIO(data[last]))
    assert end is not None
    digest = ""
    for each in data.values():
        digest = hashlib.sha256(digest.encode() + hashlib.sha256(each).digest()).hexdigest()
    log = ledger.verify().log
    values = (log, chain.name, last, end.seq, end.record_hash, 1, digest, 2, ledger.key.key_id)
    made = PruneRecord(*values, ledger.key.sign(PruneRecord.statement(*values[:-1])))
    (chain / PRUNE_FILE).write_bytes(json_bytes(made.to_dict()))
    for path in files.values():
        path.unlink()


@pytest.mark.parametrize("was_pruned", [False, True])
def test_a_removal_that_the_keys_holder_signed_and_no_witness_was_told_of_is_found(
    ledger: Ledger, witness: FileWitness, was_pruned: bool
) -> None:
    settings = SMALL | {"checkpoint_records": 5}  # so that the witness is shown something of the first segments
    if was_pruned:
        ledger.fill(20, witnesses=[witness], settings=settings)
        with ledger.log(witnesses=[witness], settings=SMALL | KEEP_LITTLE) as log:
            assert log.prune() > 0
    with ledger.opened(witnesses=[witness], settings=settings) as recorder:
        for _ in range(30):
            ledger.run(recorder)
            recorder.log.checkpoint()
    forge_removal(ledger, ledger.chain(), 2)

    assert ledger.verify(strict=True).ok  # by itself it is perfect
    assert found(ledger, witness) == [UNWITNESSED]


def test_nothing_is_removed_before_every_witness_was_told(ledger: Ledger, witness: FileWitness) -> None:
    other = Unreliable()
    ledger.fill(20, witnesses=[witness, other], settings=SMALL)
    chain, other.is_down = ledger.chain(), True
    before = {*segment_files(chain)}
    with ledger.log(witnesses=[witness, other], settings=SMALL | KEEP_LITTLE) as log:
        assert log.prune() == 0
        assert before <= {*segment_files(chain)} and read_prune_record(chain) is None
        other.is_down = False
        assert log.prune() > 0

    assert found(ledger, witness) == []


def test_a_removal_that_was_cut_short_after_its_witness_was_told_is_no_finding(
    ledger: Ledger, witness: FileWitness, tmp_path: Path
) -> None:
    ledger.fill(20, witnesses=[witness], settings=SMALL)
    shutil.copytree(ledger.directory, tmp_path / "before")
    with ledger.log(witnesses=[witness], settings=SMALL | KEEP_LITTLE | {"checkpoint_s": 3600}) as log:
        log.prune()
    shutil.rmtree(default_heads_dir())
    kept = (tmp_path / "heads.jsonl").read_text().splitlines()
    told = next(index for index, line in enumerate(kept) if json.loads(line)["seq"] == told_seq(ledger))
    (tmp_path / "heads.jsonl").write_text("".join(f"{line}\n" for line in kept[: told + 1]))
    shutil.rmtree(ledger.directory)
    shutil.copytree(tmp_path / "before", ledger.directory)

    assert found(ledger, witness) == []


def told_seq(ledger: Ledger) -> int:
    pruned = read_prune_record(ledger.chain())
    assert pruned is not None
    return pruned.seq


def test_prune_tells_the_witness_that_it_is_given(
    ledger: Ledger, witness: FileWitness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_private(tmp_path / "key", ledger.key.to_text())
    monkeypatch.setenv("TOOLCELL_AUDIT_KEY", str(tmp_path / "key"))
    with ledger.opened(witnesses=[witness], settings=SMALL) as recorder:
        for _ in range(20):
            ledger.run(recorder)
            recorder.log.checkpoint()
    status, _, _ = invoke("prune", ledger.directory, "--keep-bytes", 6000, "--witness", witness.name)

    assert status == exits.OK and read_prune_record(ledger.chain()) is not None
    assert found(ledger, witness) == []
    with ledger.opened(witnesses=[witness], settings=SMALL) as recorder:
        for _ in range(20):
            ledger.run(recorder)
    assert invoke("prune", ledger.directory, "--keep-bytes", 6000)[0] == exits.OK  # and nobody is told
    assert found(ledger, witness) == [UNWITNESSED]
