"""Heads are pushed to places outside the log. They find a log that was put back, cut off or replaced."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from toolcell.audit import chain_check, keys, records, verification
from toolcell.audit.format import LOG_FILE, read_log_id, segment_path, split_segment
from toolcell.audit.signatures import Head, default_heads_dir
from toolcell.audit.verification import Report
from toolcell.audit.witness import FileWitness, Witness, WitnessFailed
from toolcell.audit.witness_check import UNWITNESSED, WITNESS_BEHIND
from toolcell.audit.witness_places import witness_of
from toolcell.cli import exits
from toolcell.errors import AuditError, UsageError


class Unreliable:
    """A witness that can be told to fail."""

    name = "test:unreliable"

    def __init__(self) -> None:
        self.is_down = False
        self.kept: list[Head] = []
        self.was_asked = threading.Event()

    def push(self, head: Head) -> None:
        self.was_asked.set()
        if self.is_down:
            raise ConnectionError("no route")
        self.kept.append(head)

    def heads(self, log: str) -> list[Head]:
        return self.kept[-1:]


@pytest.fixture
def file(tmp_path: Path) -> FileWitness:
    return FileWitness(tmp_path / "heads.jsonl")


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def forget_heads() -> None:
    """What an attacker with the host's user does to the heads on this machine."""
    shutil.rmtree(default_heads_dir(), ignore_errors=True)


def test_a_witnessed_log_verifies_and_says_which_head_reached_whom(ledger: Ledger, file: FileWitness) -> None:
    for _ in range(2):
        ledger.fill(1, witnesses=[file])
    said = ledger.fields(records.WITNESSED)
    lines = Path(file.name.removeprefix("file:")).read_text().splitlines()

    assert ledger.verify(witnesses=[file], strict=True).ok
    assert len(lines) >= 2 and {json.loads(line)["log"] for line in lines} == {read_log_id(ledger.directory)}
    assert said == [] or {each["witness"] for each in said} == {file.name}


def test_the_log_records_each_head_and_each_failure_once(ledger: Ledger) -> None:
    witness = Unreliable()
    with ledger.opened(witnesses=[witness], settings={"checkpoint_s": 3600}) as recorder:
        log = recorder.log
        first = log.checkpoint()
        witness.is_down = True
        for _ in range(3):
            log.checkpoint()
        witness.is_down = False
        last = log.checkpoint()
    said = ledger.fields(records.WITNESSED)

    assert [bool(each["problem"]) for each in said] == [False, True, False]
    assert (said[0]["seq"], said[0]["link"]) == (first.seq, first.record_hash)
    assert said[2]["seq"] == last.seq
    assert "no route" in said[1]["problem"]


@pytest.mark.parametrize("attack", ["put back", "cut off", "emptied", "replaced", "chain removed"])
def test_rollback_and_replacement_are_found_without_a_head_kept_by_hand(
    ledger: Ledger, file: FileWitness, tmp_path: Path, attack: str
) -> None:
    ledger.fill(1, witnesses=[file])
    shutil.copytree(ledger.directory, tmp_path / "old")
    ledger.fill(1, witnesses=[file])
    forget_heads()
    path = segment_path(ledger.chain(), 1)
    match attack:
        case "put back":
            shutil.rmtree(ledger.directory)
            shutil.copytree(tmp_path / "old", ledger.directory)
        case "cut off":
            last = [*split_segment(path.read_bytes())][-1]
            path.write_bytes(path.read_bytes()[: last.offset])
        case "emptied":
            shutil.rmtree(ledger.chain())
        case "replaced":
            shutil.rmtree(ledger.directory)
            ledger.fill(3)
            forget_heads()
        case "chain removed":
            shutil.rmtree(ledger.chain())
            ledger.fill(1, witnesses=[file])
            forget_heads()

    assert ledger.verify().ok  # without the witness nothing can tell
    report = ledger.verify(witnesses=[file])
    expected = {"put back": "cut_off", "cut off": "cut_off", "replaced": UNWITNESSED}
    assert kinds(report) == {expected.get(attack, verification.CHAIN_MISSING)}


def test_a_chain_that_was_added_with_the_key_but_without_its_witness_is_found(
    ledger: Ledger, file: FileWitness
) -> None:
    with ledger.opened(witnesses=[file]) as recorder:
        ledger.run(recorder)
        ledger.fill(1)  # in another chain, and nobody is told
    report = ledger.verify(witnesses=[file])

    assert kinds(report) == {UNWITNESSED}
    assert len(report.findings) == 1


def test_a_witness_that_forgot_what_it_was_shown_is_found(ledger: Ledger, file: FileWitness) -> None:
    kept = Path(file.name.removeprefix("file:"))
    with ledger.opened(witnesses=[file], settings={"checkpoint_s": 3600}) as recorder:
        recorder.log.checkpoint()
        first = kept.read_bytes()
        ledger.run(recorder)
        recorder.log.checkpoint()
    kept.write_bytes(first)

    assert kinds(ledger.verify(witnesses=[file])) == {WITNESS_BEHIND}


def test_a_head_that_somebody_added_to_a_witness_is_found_and_hides_nothing(ledger: Ledger, file: FileWitness) -> None:
    ledger.fill(1, witnesses=[file])
    kept = Path(file.name.removeprefix("file:"))
    head = json.loads(kept.read_text().splitlines()[-1])
    forged = json.dumps(head | {"seq": head["seq"] + 5})
    kept.write_text(f"{kept.read_text()}{forged}\n")

    assert chain_check.BAD_HEAD in kinds(ledger.verify(witnesses=[file]))
    junk = b"\xff\xfe{" + b"[" * 3000 + b"\n{}\n[]\n1\nnull\n" + b"x" * 100_000
    kept.write_bytes(junk + b"\n" + json.dumps(head).encode() + b"\n")
    assert ledger.verify(witnesses=[file]).ok


def test_a_required_witness_that_fails_stops_the_log_and_one_that_recovers_lets_it_go_on(ledger: Ledger) -> None:
    witness = Unreliable()
    with ledger.opened(witnesses=[witness], settings={"checkpoint_s": 0.01, "require_witness": True}) as recorder:
        assert len(witness.kept) == 1  # before anything else
        ledger.run(recorder)
        witness.is_down = True
        with pytest.raises(AuditError, match="no route"):
            while True:
                ledger.run(recorder)
        witness.is_down = False
        witness.was_asked.clear()
        while not (witness.was_asked.wait(10) and _can_write(ledger, recorder)):
            witness.was_asked.clear()
    assert ledger.verify(witnesses=[witness]).ok


def _can_write(ledger: Ledger, recorder: object) -> bool:
    try:
        ledger.run(recorder)  # type: ignore[arg-type]
    except AuditError:
        return False
    return True


def test_a_log_that_requires_a_witness_does_not_open_without_one(ledger: Ledger) -> None:
    witness = Unreliable()
    witness.is_down = True
    log = ledger.log(witnesses=[witness], settings={"require_witness": True})
    with pytest.raises(WitnessFailed, match="no route"):
        log.open()
    assert not log.is_open
    witness.is_down = False
    with log:
        pass
    assert ledger.verify(witnesses=[witness]).ok


def test_a_witness_that_fails_costs_nothing_else_by_default(ledger: Ledger) -> None:
    witness = Unreliable()
    witness.is_down = True
    ledger.fill(2, witnesses=[witness])

    assert len(ledger.kinds()) == 8
    assert ledger.verify(strict=True).ok


def _any_head(ledger: Ledger) -> Head:
    with ledger.log() as log:
        return log.checkpoint()


@pytest.mark.parametrize("place", ["", "file:", "syslog:/dev/log", "git:.", "https://host/heads", "heads.jsonl"])
def test_a_text_that_names_no_witness_is_refused(place: str) -> None:
    with pytest.raises(UsageError):
        witness_of(place, "log")


def test_a_file_witness_follows_no_link_and_waits_for_no_reader(tmp_path: Path, ledger: Ledger) -> None:
    import os

    head = _any_head(ledger)
    (tmp_path / "target").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "no/such"):
        witness: Witness = FileWitness(tmp_path / name)
        with pytest.raises(WitnessFailed):
            witness.push(head)
        if name != "link":
            with pytest.raises(WitnessFailed):
                list(witness.heads("log"))


def test_the_command_asks_the_witnesses(ledger: Ledger, file: FileWitness, tmp_path: Path) -> None:
    signer = keys.own_signer()
    assert isinstance(signer, keys.HmacKey)
    ledger.key = signer
    ledger.fill(1, witnesses=[file])

    assert invoke("verify", ledger.directory, "--witness", file.name)[0] == exits.OK
    assert invoke("verify", ledger.directory, "--witness", f"file:{tmp_path}/nothing")[0] == exits.USAGE
    (tmp_path / "empty").write_text("")
    status, out, _ = invoke("verify", ledger.directory, "--witness", f"file:{tmp_path}/empty")
    assert status == exits.BROKEN and UNWITNESSED in out
    assert (ledger.directory / LOG_FILE).exists()


@pytest.mark.isolation
def test_run_shows_its_log_to_a_witness_and_makes_spans(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from toolcell.cli import build

    (tmp_path / "script.py").write_text("print('ran')")
    words = ["run", str(tmp_path / "script.py"), "--audit", str(tmp_path / "log")]
    flags = ["--witness", f"file:{tmp_path}/heads", "--require-witness", "--otel", "console"]
    done = CliRunner().invoke(build(words), [*words, *flags])

    assert done.exit_code == exits.OK, done.output
    assert '"name": "execute_tool execute_code"' in done.stderr
    assert (tmp_path / "heads").read_text().count("\n") >= 2
    for wrong in (["run", "x.py", "--witness", "file:x"], [*words, "--require-witness"], [*words, "--witness", "x"]):
        assert CliRunner().invoke(build(wrong), wrong).exit_code == exits.USAGE
    down = [*words, "--witness", f"file:{tmp_path}/no/such", "--require-witness"]
    assert CliRunner().invoke(build(down), down).exit_code == exits.USAGE
