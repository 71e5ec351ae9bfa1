"""Keys: made once, kept private, found by default, and both kinds sign."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from audit.ledger import Ledger
from rows import each_row
from toolcell.audit import keys
from toolcell.audit.keys import Ed25519Signer, HmacKey
from toolcell.audit.log import AuditLog
from toolcell.errors import AuditError, UsageError


def test_the_default_key_is_made_once_and_for_its_owner_alone() -> None:
    first = keys.own_signer()
    path = keys.default_key_path()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.own_signer().key_id == first.key_id


def test_an_environment_variable_names_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = HmacKey.generate()
    keys.save_private(tmp_path / "mine.key", mine.to_text())
    monkeypatch.setenv("TOOLCELL_AUDIT_KEY", str(tmp_path / "mine.key"))

    assert keys.own_signer().key_id == mine.key_id


def test_a_key_that_is_named_and_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "typo" / "sign.pem"
    monkeypatch.setenv("TOOLCELL_AUDIT_KEY", str(missing))

    with pytest.raises(AuditError, match=re.escape(f"$TOOLCELL_AUDIT_KEY names {missing}, which is not there")):
        AuditLog(tmp_path / "runs").open()
    assert os.listdir(tmp_path) == []


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    keys.save_private(path, HmacKey.generate().to_text())
    path.chmod(0o640)

    with pytest.raises(AuditError, match="0640"):
        keys.load_signer(path)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    keys.save_private(tmp_path / "a.key", "one")
    with pytest.raises(FileExistsError):
        keys.save_private(tmp_path / "a.key", "two")

    assert (tmp_path / "a.key").read_text() == "one"
    assert os.listdir(tmp_path) == ["a.key"]


@each_row("kind", [HmacKey, Ed25519Signer])
def test_a_key_is_saved_and_loaded_by_a_path_in_words_and_its_public_half_is_for_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[HmacKey | Ed25519Signer]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "chmod", lambda *given: None)  # it has its mode when it appears
    signer = kind.generate()
    signer.save("a.key")
    assert [each.key_id for each in keys.load_verifiers("a.key")] == [signer.key_id]
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"a.key": 0o600} | ({"a.key.pub": 0o644} if kind is Ed25519Signer else {})


@each_row("text", ["", "toolcell-hmac-sha256:xyz", "-----BEGIN PRIVATE KEY-----\nx\n", "something else"])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.key"
    keys.save_private(path, text)

    with pytest.raises(AuditError):
        keys.load_signer(path)


def test_a_key_is_not_the_record_it_signs(ledger: Ledger) -> None:
    keys.save_private(ledger.path, HmacKey.generate().to_text())

    with pytest.raises(UsageError, match="is the record that it would sign"):
        ledger.log(key=ledger.path).open()


def test_a_short_hmac_key_is_refused() -> None:
    with pytest.raises(UsageError):
        HmacKey(b"short")


def test_an_hmac_key_survives_its_file(tmp_path: Path) -> None:
    key = HmacKey.generate()
    keys.save_private(tmp_path / "a.key", key.to_text())
    loaded = keys.load_signer(tmp_path / "a.key")

    assert loaded.key_id == key.key_id
    assert loaded.is_valid(b"data", key.sign(b"data"))
    assert not loaded.is_valid(b"other", key.sign(b"data"))
    assert not HmacKey.generate().is_valid(b"data", key.sign(b"data"))
    assert key.key_id not in key.to_text()


def test_an_ed25519_pair_signs_with_one_half_and_verifies_with_the_other(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    signer = Ed25519Signer.generate()
    keys.save_private(tmp_path / "a.pem", signer.private_text())
    (tmp_path / "a.pub").write_text(signer.to_text())
    private, public = keys.load_signer(tmp_path / "a.pem"), keys.load_verifier(tmp_path / "a.pub")

    assert {signer.key_id, private.key_id, public.key_id} == {signer.key_id}
    assert public.is_valid(b"data", private.sign(b"data"))
    assert not public.is_valid(b"other", private.sign(b"data"))
    assert not public.is_valid(b"data", b"short")
    assert not hasattr(public, "sign")


def test_a_public_key_cannot_sign(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "a.pub").write_text(Ed25519Signer.generate().to_text())
    (tmp_path / "a.pub").chmod(0o600)

    with pytest.raises(AuditError):
        keys.load_signer(tmp_path / "a.pub")


def test_without_cryptography_ed25519_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric", None)

    with pytest.raises(UsageError, match=r"toolcell\[audit\]"):
        Ed25519Signer.generate()


def test_a_key_that_is_no_file_or_another_users_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(AuditError, match="not a regular file"):
        keys.load_signer(tmp_path / "fifo")
    if os.geteuid() == 0:
        path = tmp_path / "a.key"
        keys.save_private(path, HmacKey.generate().to_text())
        os.chown(path, 65534, 65534)
        with pytest.raises(AuditError, match="belongs to user 65534"):
            keys.load_signer(path)
