"""A receipt proves one run to everybody with the key, and shows nothing of other runs."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from audit.ledger import Ledger
from rows import each_row
from toolcell.audit import keys, receipt, records
from toolcell.audit.keys import save_private
from toolcell.audit.query import Index
from toolcell.cli import build
from toolcell.errors import AuditError
from toolcell.results import ExecutionResult, Outcome


def exported(ledger: Ledger, id: str = "last") -> dict[str, Any]:
    with Index(ledger.path) as index:
        made: dict[str, Any] = json.loads(json.dumps(receipt.export(index, index.find(id))))
    return made


@pytest.fixture
def made(ledger: Ledger) -> dict[str, Any]:
    """The receipt of a run with another run's records among its own."""
    with ledger.opened() as recorder:
        ledger.run(recorder, "before = 1", value="before")
        record = ledger.begin(recorder, "mine = 1")
        ledger.call(record, "search", {"query": "mine"}, 1)
        ledger.run(recorder, "other = 'nobody-elses-business'", value="nobody-elses-business")
        ledger.call(record, "fail", {"text": "mine"}, 2)
        record.end(finished(record.context.run_id))
        ledger.run(recorder, "after = 1")
    return exported(ledger, record.context.run_id)


def finished(run_id: str) -> Any:
    return ExecutionResult(run_id, Outcome.OK, [1, "two"], True)


@pytest.mark.conforms("T5")
def test_a_receipt_holds_a_run_and_verifies(ledger: Ledger, made: dict[str, Any]) -> None:
    checked = receipt.check(made, [ledger.key])

    assert checked.ok, checked.problems
    assert checked.run is not None
    assert checked.run.source == "mine = 1"
    assert [call.tool for call in checked.run.calls] == ["search", "fail"]
    assert checked.run.end["value"] == [1, "two"]
    assert checked.run.limits["wall_s"] == 30
    assert checked.run.definitions[0][0] == "search"
    assert checked.key == ledger.key.key_id
    assert checked.signed_ns is not None


def test_a_receipt_shows_nothing_of_other_runs(made: dict[str, Any]) -> None:
    text = json.dumps(made)
    bodies = b"".join(base64.b64decode(step["body"]) for step in made["events"] if "body" in step)

    assert "nobody-elses-business" not in text
    assert b"nobody-elses-business" not in bodies
    assert any("sha256" in step for step in made["events"])


def test_a_receipt_verifies_elsewhere_with_the_public_key_alone(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    ledger = Ledger(tmp_path / "log")
    signer = keys.Ed25519Signer.generate()
    ledger.fill(3, key=signer)
    (tmp_path / "audit.pub").write_text(signer.to_text())
    (tmp_path / "receipt.json").write_text(json.dumps(exported(ledger)))

    public = keys.load_verifier(tmp_path / "audit.pub")
    assert receipt.check(receipt.read(tmp_path / "receipt.json"), [public]).ok


def test_a_run_far_from_the_terms_it_ran_under_still_has_a_short_receipt(ledger: Ledger) -> None:
    ledger.fill(400, settings={"checkpoint_records": 50, "checkpoint_s": 3600})
    made = exported(ledger)

    assert receipt.check(made, [ledger.key]).ok
    assert len(made["events"]) < 1000


def test_a_run_no_checkpoint_covers_has_no_receipt_yet(ledger: Ledger) -> None:
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        ledger.run(recorder)
        with pytest.raises(AuditError, match="no checkpoint covers"):
            exported(ledger)
        recorder.log.checkpoint()
        assert receipt.check(exported(ledger), [ledger.key]).ok


def flipped(text: str) -> str:
    return ("1" if text[0] != "1" else "2") + text[1:]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every leaf."""
    if isinstance(value, dict):
        return [found for key in value for found in places(value[key], (*path, key))]
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in places(item, (*path, index))]
    return [path]


def test_whatever_is_changed_in_a_receipt_it_does_not_verify(ledger: Ledger, made: dict[str, Any]) -> None:
    """Every single value: the words, the records, the digests, the hashes."""
    for path in places(made):
        changed = copy.deepcopy(made)
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        old = holder[path[-1]]
        match old:
            case str() if old:
                holder[path[-1]] = flipped(old)
            case bool():
                holder[path[-1]] = not old
            case int() | float():
                holder[path[-1]] = old + 1
            case _:
                holder[path[-1]] = "something"
        if path == ("format",):
            continue  # `read` looks at that
        assert not receipt.check(changed, [ledger.key]).ok, path


def test_whatever_is_taken_out_of_a_receipt_it_does_not_verify(ledger: Ledger, made: dict[str, Any]) -> None:
    for index in range(len(made["events"])):
        changed = copy.deepcopy(made)
        del changed["events"][index]
        assert not receipt.check(changed, [ledger.key]).ok
    for name in made:
        changed = {key: value for key, value in made.items() if key not in (name, "format")}
        assert name == "format" or not receipt.check(changed, [ledger.key]).ok


def test_a_receipt_with_a_member_that_nobody_signed_does_not_verify(ledger: Ledger, made: dict[str, Any]) -> None:
    holders = {path[:length] for path in places(made) for length in range(len(path))}
    objects = [path for path in holders if isinstance(at(made, path), dict)]
    assert () in objects and ("head",) in objects and len(objects) > 12
    for path in objects:
        changed = copy.deepcopy(made)
        at(changed, path)["verdict"] = "approved"
        checked = receipt.check(changed, [ledger.key])
        assert not checked.ok and checked.problems, path
        assert path[:1] in [("run",), ("blobs",)] or "verdict" in str(checked.problems) or path == ("head",), checked
    assert not receipt.check({**made, "before": made["before"] + " "}, [ledger.key]).ok


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def hidden(made: dict[str, Any], index: int, run: int | None) -> dict[str, Any]:
    """A step that shows only run and digest, as those of other runs do."""
    step, chain, first = made["events"][index], made["head"]["chain"], made["first_seq"]
    salted = bytes.fromhex(step["salt"]) + base64.b64decode(step["body"])
    digest = records.event_digest(chain, first + index, first, step["kind"], step["at_ns"], salted)
    return {"run": first if run is None else run, "sha256": digest.hex()}


def test_no_record_of_the_run_can_be_hidden_behind_its_digest(ledger: Ledger, made: dict[str, Any]) -> None:
    """The chain of hashes still holds; but the run's number is a part of each hash."""
    for index, step in enumerate(made["events"]):
        if step.get("kind") not in (records.CALL_STARTED, records.CALL_ENDED, records.RUN_ENDED):
            continue
        for claimed in (None, 0, 1):
            changed = copy.deepcopy(made)
            changed["events"][index] = hidden(made, index, claimed)
            checked = receipt.check(changed, [ledger.key])
            assert not checked.ok
            wanted = "belongs to the run and is hidden" if claimed is None else "not those that were signed"
            assert any(wanted in problem for problem in checked.problems)


def test_a_run_that_ends_behind_the_receipt_is_a_part_and_says_so(ledger: Ledger, tmp_path: Path) -> None:
    """A receipt made while the run goes on is right as far as it goes, and is not taken for the whole run."""
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        record = ledger.begin(recorder)
        ledger.call(record, "search", {"query": "x"}, 1)
        recorder.log.checkpoint()
        (tmp_path / "part.json").write_text(json.dumps(exported(ledger)))
        ledger.call(record, "search", {"query": "y"}, 2)
        record.end(finished(record.context.run_id))
    key = tmp_path / "key"
    save_private(key, ledger.key.to_text())
    checked = receipt.check(receipt.read(tmp_path / "part.json"), [ledger.key])
    words = ["audit", "verify", str(tmp_path / "part.json"), "--key", str(key)]
    done = CliRunner().invoke(build(words), words)

    assert checked.ok
    assert checked.is_partial
    assert "it does not show the run's end" in checked.missing[0]
    assert done.exit_code == 1
    assert "partial" in done.output
    assert not receipt.check(exported(ledger), [ledger.key]).is_partial


@pytest.mark.parametrize("name", ["terms", "tools"])
def test_settings_and_tools_cannot_be_left_out_quietly(ledger: Ledger, made: dict[str, Any], name: str) -> None:
    changed = copy.deepcopy(made)
    del changed["blobs"][made["run"]["start"][name]]
    word = "settings" if name == "terms" else "tools"
    own = ("limits", "policy", "isolation") if name == "terms" else ("definitions",)
    changed["run"] |= {key: [] if key == "definitions" else {} for key in own}
    if name == "terms":
        changed["run"]["policy"] = {key: made["run"]["start"][key] for key in ("lint", "seed", "clock")}
    checked = receipt.check(changed, [ledger.key])

    assert checked.missing == (f"it does not show the run's {word}",), checked.problems
    assert checked.is_partial


def test_a_receipt_is_not_verified_by_another_key(made: dict[str, Any]) -> None:
    checked = receipt.check(made, [keys.HmacKey.generate()])

    assert not checked.ok
    assert "which was not given" in checked.problems[0]


def test_a_receipt_whose_key_is_not_there_is_unchecked_and_says_once_which_key_it_needs(
    ledger: Ledger, made: dict[str, Any]
) -> None:
    checked = receipt.check(made, [keys.HmacKey.generate()])
    changed = copy.deepcopy(made)
    changed["run"]["sort"] = "another"

    assert checked.is_unchecked
    (problem,) = checked.problems
    assert f"key {ledger.key.key_id} (hmac-sha256), which was not given; pass it with --key" in problem
    assert checked.to_dict()["checked"] is False
    assert not receipt.check(changed, [keys.HmacKey.generate()]).is_unchecked
    assert not receipt.check(changed, [ledger.key]).is_unchecked


@each_row("text", ["", "{}", "[]", '{"format": "something else"}', "\x00"])
def test_what_is_no_receipt_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(AuditError):
        receipt.read(tmp_path / "r.json")


def test_a_receipt_is_one_file_of_json_in_ascii(ledger: Ledger, tmp_path: Path) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, "x = 'é\u202e\x1b[31m'", printed="\x00\x1b]0;title\x07")
    (tmp_path / "r.json").write_text(json.dumps(exported(ledger)))
    data = (tmp_path / "r.json").read_bytes()

    assert data.isascii()
    assert b"\x1b" not in data
    assert receipt.check(receipt.read(tmp_path / "r.json"), [ledger.key]).ok


def test_a_receipt_says_the_kind_of_each_value_as_it_was_recorded(ledger: Ledger, made: dict[str, Any]) -> None:
    for told in (True, 1.0):
        assert made["run"]["end"]["value"][0] == told
        made["run"]["end"]["value"][0] = told
        assert "in words" in receipt.check(made, [ledger.key]).problems[0]


def test_a_receipt_in_which_two_readers_can_read_two_things_is_none(made: dict[str, Any], tmp_path: Path) -> None:
    run = json.dumps(made["run"])
    text = json.dumps(made)
    for doubled in (
        text.replace(run, run.replace('"tool": "search"', '"tool": "pay", "tool": "search"')),
        text[:-1] + f', "run": {run}}}',
    ):
        assert doubled != text and json.loads(doubled) == made
        (tmp_path / "r.json").write_text(doubled)
        with pytest.raises(AuditError, match="a name twice"):
            receipt.read(tmp_path / "r.json")
