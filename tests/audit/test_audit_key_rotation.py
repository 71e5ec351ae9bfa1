"""Which key signed what can be seen, and a key can be replaced."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import anyio
import pytest

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from rows import each_row
from toolcell.audit import Index, key_ranges, keys, load_verifiers, records
from toolcell.audit.key_ranges import FORGED, UNKNOWN, UNSIGNED, VALID
from toolcell.audit.keys import HmacKey
from toolcell.cli import exits
from toolcell.service.log_reader import LogReader


def states(ledger: Ledger, *given: HmacKey) -> list[tuple[str, str]]:
    return [(each.key, each.state) for each in key_ranges.key_ranges(ledger.path, given)]


def test_each_range_has_its_key(ledger: Ledger) -> None:
    first, second = ledger.key, HmacKey.generate()
    ledger.fill(2)
    ledger.fill(1)
    ledger.fill(1, key=second)
    found = key_ranges.key_ranges(ledger.path, [first])
    own = [each for each in found if each.key == first.key_id]

    assert {(each.key, each.state) for each in found} == {(first.key_id, VALID), (second.key_id, UNKNOWN)}
    assert [(each.algorithm, each.signatures) for each in own] == [(keys.HMAC, 1)] * 2


def test_what_is_unsigned_or_forged_is_not_called_valid(ledger: Ledger) -> None:
    ledger.fill(1)
    ledger.rows("UPDATE checkpoint SET at = at + 1")
    assert (ledger.key.key_id, FORGED) in states(ledger, ledger.key)
    ledger.rows("DELETE FROM checkpoint")
    assert states(ledger, ledger.key) == [("", UNSIGNED)]


@pytest.mark.parametrize("algorithm", ["", keys.ED25519])
def test_a_key_is_replaced_and_everything_still_verifies(ledger: Ledger, algorithm: str) -> None:
    path = keys.default_key_path()
    old = keys.own_signer()
    ledger.fill(1, key=None)
    flags = ["--algorithm", algorithm] if algorithm else []
    done = json.loads(invoke("rotate", ledger.path, *flags, "--json")[1])
    ledger.fill(1, key=None)
    status, out, _ = invoke("verify", ledger.path)
    (said,) = ledger.fields(records.KEY_CHANGED)

    assert (done["old"], done["new"]) == (old.key_id, keys.own_signer().key_id)
    assert (said["old"], said["new"], bool(said["public"])) == (done["old"], done["new"], bool(algorithm))
    assert status == exits.OK and "ok  3 chains" in out, out
    assert {run["trust"] for run in json.loads(invoke("list", ledger.path, "--json")[1])} == {"verified"}
    listed = json.loads(invoke("keys", ledger.path, "--json")[1])
    assert {(each["key"], each["successor"]) for each in listed} == {
        (done["old"], ""), (done["old"], done["new"]), (done["new"], "")
    }  # fmt: skip
    assert "the next key is" in invoke("keys", ledger.path)[1]
    for file in (path, path.with_name(f"{path.name}.{old.key_id}")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_key_that_was_planted_beside_ours_is_used_only_under_its_own_id(tmp_path: Path) -> None:
    path = keys.default_key_path()
    keys.own_signer()
    keys.save_private(path.with_name(f"{path.name}.0123456789abcdef"), HmacKey.generate().to_text())
    path.with_name(f"{path.name}.junk").write_text("junk")

    assert keys.retired_keys(path) == []


def test_what_a_replaced_key_signed_is_verified_by_a_service_and_removed_by_retention(ledger: Ledger) -> None:
    keys.own_signer()
    ledger.fill(2, key=None)
    invoke("rotate", ledger.path)
    reader = LogReader(ledger.path, load_verifiers())
    assert {run.trust for run in anyio.run(reader.read, Index.runs)} == {"verified"}
    reader.close_now()
    prune = ("prune", ledger.path, "--older-than", "0s", "--json")
    planned = json.loads(invoke(*prune, "--dry-run")[1])
    assert json.loads(invoke(*prune)[1]) == planned
    assert all(each["events"] for each in planned)


@each_row("flag", ["--sign", "--record-config"])
def test_a_dry_run_of_prune_has_the_keys_that_a_named_key_replaced(tmp_path: Path, flag: str) -> None:
    ledger, key, config = Ledger(tmp_path / "runs.db"), tmp_path / "team.key", tmp_path / "record.toml"
    HmacKey.generate().save(key)
    ledger.fill(1, key=key)
    assert invoke("rotate", ledger.path, "--key", key)[0] == exits.OK
    config.write_text(f'key = "{key}"')
    prune = ("prune", ledger.path, "--older-than", "0s", "--json", flag, key if flag == "--sign" else config)
    planned = json.loads(invoke(*prune, "--dry-run")[1])
    assert all(each["events"] for each in planned)
    assert json.loads(invoke(*prune)[1]) == planned


def test_what_replaced_keys_signed_is_verified_also_where_the_key_itself_cannot_be_read(ledger: Ledger) -> None:
    old = keys.own_signer()
    ledger.fill(1, key=None)
    invoke("rotate", ledger.path)
    keys.default_key_path().unlink()
    listed = json.loads(invoke("keys", ledger.path, "--json")[1])
    assert {(each["key"], each["state"]) for each in listed} == {(old.key_id, VALID)}
    assert [run["trust"] for run in json.loads(invoke("list", ledger.path, "--json")[1])] == ["verified"]
    assert [each.key_id for each in load_verifiers(is_needed=False)] == [old.key_id]
    status, _, said = invoke("verify", ledger.path)
    assert status == exits.USAGE and "audit.key: No such file" in said and "--key FILE" in said


def test_prune_takes_the_key_of_chains_that_another_one_signed(ledger: Ledger, tmp_path: Path) -> None:
    ledger.fill(1)
    ledger.key.save(tmp_path / "other.key")
    prune = ("prune", ledger.path, "--older-than", "0s", "--json")
    (stays,) = json.loads(invoke(*prune)[1])
    (goes,) = json.loads(invoke(*prune, "--key", tmp_path / "other.key", "--key", keys.default_key_path())[1])[:1]
    assert (stays["chain"], stays["events"]) == (goes["chain"], 0)
    assert goes["events"] > 0


def test_keys_exits_with_5_when_a_signature_is_forged(ledger: Ledger) -> None:
    ledger.fill(1, key=None)
    assert invoke("keys", ledger.path)[0] == exits.OK
    ledger.rows("UPDATE checkpoint SET at = at + 1")
    assert invoke("keys", ledger.path)[0] == exits.BROKEN


def test_a_log_that_cannot_be_written_keeps_the_old_key(ledger: Ledger, tmp_path: Path) -> None:
    old = keys.own_signer()
    (tmp_path / "file").write_text("{}")
    status, *_ = invoke("rotate", tmp_path / "file")

    assert status != exits.OK
    assert keys.own_signer().key_id == old.key_id
