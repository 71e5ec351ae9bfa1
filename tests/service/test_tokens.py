"""The store of tokens: what is in its file, what ends a token, and who may use it at once."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from service.clock import Clock
from toolcell.errors import StoreError, UsageError
from toolcell.service.principal import Scope
from toolcell.service.tokens import MAX_LIFETIME_S, NOTE_USE_AFTER_S, TOKEN, TokenDatabase

pytestmark = pytest.mark.quick

READ = (Scope.READ,)


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> TokenDatabase:
    return TokenDatabase(tmp_path / "tokens.db", clock=clock)


def state(store: TokenDatabase, text: str) -> str | None:
    record = store.find(text)
    return None if record is None else record.state(store.now())


def test_a_token_has_256_random_bits_and_says_what_it_is_for(store: TokenDatabase) -> None:
    issued = store.create("acme", [Scope.READ, Scope.EXECUTE], name="ci")
    found = store.find(issued.text)

    assert TOKEN.fullmatch(issued.text)
    assert len(issued.text.split("_", 2)[2]) == 43  # 32 bytes in base64
    assert found is not None
    assert (found.tenant, found.name, found.scopes) == ("acme", "ci", {Scope.READ, Scope.EXECUTE})
    assert len({store.create("acme", READ).text for _ in range(50)}) == 50


def test_the_file_has_no_secret_and_only_its_owner_may_read_it(store: TokenDatabase, tmp_path: Path) -> None:
    secret = store.create("acme", READ).text.split("_", 2)[2]

    files = list(tmp_path.iterdir())
    assert {each.name for each in files} >= {"tokens.db", "tokens.db-wal"}
    for each in files:
        assert each.stat().st_mode & 0o777 == 0o600, each
        assert secret.encode() not in each.read_bytes()


@pytest.mark.parametrize("change", ["other secret", "other id", "no prefix", "longer", "cut", "line end", "empty"])
def test_a_token_that_differs_in_anything_is_not_found(store: TokenDatabase, change: str) -> None:
    text, other = store.create("acme", READ).text, store.create("other", READ).text
    prefix, own_id, secret = text.split("_", 2)
    changed = {
        "other secret": f"{prefix}_{own_id}_{other.split('_', 2)[2]}",
        "other id": f"{prefix}_{other.split('_', 2)[1]}_{secret}",
        "no prefix": f"{own_id}_{secret}",
        "longer": text + "A",
        "cut": text[:-1],
        "line end": text + "\n",
        "empty": "",
    }[change]

    assert store.find(text) is not None
    assert store.find(changed) is None


def test_a_token_ends_when_it_expires_or_is_revoked(store: TokenDatabase, clock: Clock) -> None:
    short, longest, endless = (store.create("acme", READ, lifetime_s=each) for each in (60, MAX_LIFETIME_S, None))

    clock.now += 59
    assert [state(store, each.text) for each in (short, longest, endless)] == ["active"] * 3
    clock.now += 1
    assert [state(store, each.text) for each in (short, longest, endless)] == ["expired", "active", "active"]
    clock.now += MAX_LIFETIME_S - 60
    assert [state(store, each.text) for each in (longest, endless)] == ["expired", "active"]
    revoked = store.revoke(endless.record.id)
    assert state(store, endless.text) == "revoked"
    clock.now += 5
    assert store.revoke(endless.record.id) == revoked


def test_what_another_process_revokes_ends_here_at_once(tmp_path: Path) -> None:
    store = TokenDatabase(tmp_path / "tokens.db")
    issued = store.create("acme", READ)
    assert state(store, issued.text) == "active"
    code = (
        "import sys; from toolcell.service.tokens import TokenDatabase; TokenDatabase(sys.argv[1]).revoke(sys.argv[2])"
    )

    subprocess.run([sys.executable, "-c", code, str(store.path), issued.record.id], check=True, timeout=60)
    assert state(store, issued.text) == "revoked"


def test_a_rotated_token_overlaps_with_the_one_in_its_place(store: TokenDatabase, clock: Clock) -> None:
    old = store.create("acme", [Scope.EXECUTE], name="ci", lifetime_s=1000)
    clock.now += 400
    new = store.rotate(old.record.id, overlap_s=100)

    assert new.record.expires_at == clock.now + 1000
    assert (new.record.tenant, new.record.name, new.record.scopes) == ("acme", "ci", {Scope.EXECUTE})
    clock.now += 99
    assert (state(store, old.text), state(store, new.text)) == ("active", "active")
    clock.now += 1
    assert (state(store, old.text), state(store, new.text)) == ("expired", "active")


def test_rotating_never_makes_the_old_token_live_longer(store: TokenDatabase, clock: Clock) -> None:
    old = store.create("acme", READ, lifetime_s=10)
    store.rotate(old.record.id, overlap_s=1000)

    clock.now += 10
    assert state(store, old.text) == "expired"


def test_a_token_that_ended_or_was_rotated_is_not_rotated(store: TokenDatabase) -> None:
    rotated, revoked = store.create("acme", READ), store.create("acme", READ)
    new = store.rotate(rotated.record.id)
    store.revoke(revoked.record.id)

    with pytest.raises(UsageError, match=f"rotate {new.record.id}"):
        store.rotate(rotated.record.id)
    with pytest.raises(UsageError, match="is revoked"):
        store.rotate(revoked.record.id)
    with pytest.raises(UsageError, match="no token with the id"):
        store.rotate("0123456789abcdef")


def test_the_list_is_of_one_tenant_or_of_all(store: TokenDatabase, clock: Clock) -> None:
    first = store.create("acme", READ)
    clock.now += 1
    second = store.create("other", READ)

    assert [each.id for each in store.list()] == [first.record.id, second.record.id]
    assert store.list("other") == [second.record]
    assert store.list("nobody") == []


def test_a_use_is_noted_and_not_more_often_than_needed(store: TokenDatabase, clock: Clock) -> None:
    issued = store.create("acme", READ)
    assert store.is_use_to_note(issued.record)
    store.note_use(issued.record.id)

    (noted,) = store.list()
    assert noted.last_used_at == clock.now
    assert not store.is_use_to_note(noted)
    clock.now += NOTE_USE_AFTER_S
    assert store.is_use_to_note(noted)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tenant": "../other"},
        {"tenant": ""},
        {"tenant": "a" * 65},
        {"tenant": "a\n"},
        {"scopes": ()},
        {"name": "a\nb"},
        {"name": "a" * 101},
        {"lifetime_s": 0.0},
        {"lifetime_s": -1.0},
        {"lifetime_s": float("nan")},
        {"lifetime_s": MAX_LIFETIME_S + 1},
    ],
    ids=str,
)
def test_a_token_that_makes_no_sense_is_not_made(store: TokenDatabase, arguments: dict[str, object]) -> None:
    given: dict[str, object] = {"tenant": "acme", "scopes": READ} | arguments
    with pytest.raises(UsageError):
        store.create(**given)  # type: ignore[arg-type]
    assert store.list() == []


def test_a_file_that_is_no_store_is_refused_and_not_changed(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")
    connection.close()
    (tmp_path / "text").write_text("no database, but a text of some length. " * 30)
    os.mkfifo(tmp_path / "pipe")
    for each in tmp_path.iterdir():
        each.chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    before = {name: (tmp_path / name).read_bytes() for name in ("other.db", "text")}

    for name in ("other.db", "text", "pipe", "link"):
        with pytest.raises(StoreError):
            TokenDatabase(tmp_path / name).list()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert not (tmp_path / "missing").exists()


def test_the_store_keeps_its_locks_when_its_second_connection_is_opened(tmp_path: Path) -> None:
    """Without them, another process would remove the log under it, and no token revoked later would be seen here."""
    path = tmp_path / "tokens.db"
    first = TokenDatabase(path)
    token = first.create("acme", READ)
    first.close()

    store = TokenDatabase(path)
    assert store.find(token.text) is not None
    store.note_use(token.record.id)  # reads so far, and writes now

    inode = f":{path.stat().st_ino} "
    assert any(inode in line and f" {os.getpid()} " in line for line in Path("/proc/locks").read_text().splitlines())
    for change in ("store.list(); store.create('z', ())", f"store.revoke({token.record.id!r})"):
        code = f"from toolcell.service.tokens import TokenDatabase\nstore = TokenDatabase({str(path)!r})\n"
        subprocess.run([sys.executable, "-c", f"{code}try: {change}\nfinally: store.close()"], capture_output=True)
    assert state(store, token.text) == "revoked"
