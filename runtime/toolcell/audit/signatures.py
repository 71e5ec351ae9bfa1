"""The statements that signatures are made over, and the heads that are kept outside the record.

A statement names its purpose and its record, so no statement can be passed off as another. This module knows no keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import platformdirs

from toolcell.errors import AuditError, BadInput
from toolcell.support.files import make_private_folder, write_file
from toolcell.support.packing import pack

if TYPE_CHECKING:
    from toolcell.audit.keys import Signer, Verifier

TIME, ASKED, CLOSED, PRUNED = "time", "asked", "closed", "pruned"
"""Why a checkpoint was made. `pruned`: events up to it were removed by retention, and it stands for them."""


@dataclass(frozen=True, slots=True)
class Head:
    """A signed checkpoint: a chain up to this event is what was written.

    The newest one of a chain, kept outside the record, shows when the chain's end is cut.
    """

    log: str
    """Id of the record."""
    chain: str
    seq: int
    record_hash: bytes
    at_ns: int
    reason: str
    key: str
    signature: bytes

    @staticmethod
    def _statement(log: str, chain: str, seq: int, record_hash: bytes, at_ns: int, reason: str) -> bytes:
        return pack(["toolcell record checkpoint 1", log, chain, seq, record_hash, at_ns, reason])

    @classmethod
    def saved(cls, log: str, directory: Path | None = None) -> list[Self]:
        """Return the heads that writers of a record saved on this machine."""
        folder = (directory or default_heads_dir()) / log
        try:
            files = sorted(folder.glob("*.json"))
        except OSError:
            return []
        return [head for file in files for head in cls.load(file)]

    @classmethod
    def load(cls, path: str | Path) -> list[Self]:
        """Read heads from a file that holds one head or a list.

        Raises:
            BadInput: the file cannot be read or holds something else.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            return [cls.from_dict(each) for each in (found if isinstance(found, list) else [found])]
        except (OSError, ValueError, RecursionError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise BadInput(f"cannot read heads from {path}: {why}") from exc
        except AuditError as exc:
            raise BadInput(f"{path} holds no heads: {exc}") from exc

    @classmethod
    def sign(cls, log: str, chain: str, seq: int, record_hash: bytes, at_ns: int, reason: str, signer: Signer) -> Self:
        """Make a signed head.

        Raises:
            AuditError: the signer, which may be the caller's own, raised.
        """
        try:
            signature = bytes(memoryview(signer.sign(cls._statement(log, chain, seq, record_hash, at_ns, reason))))
        except Exception as exc:
            raise AuditError(f"the key {signer.key_id} did not sign: {type(exc).__name__}: {exc}") from exc
        return cls(log, chain, seq, record_hash, at_ns, reason, signer.key_id, signature)

    def is_signed_by(self, verifier: Verifier) -> bool:
        """True when it has not been changed since it was signed."""
        own = self._statement(self.log, self.chain, self.seq, self.record_hash, self.at_ns, self.reason)
        return verifier.is_valid(own, self.signature)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        fields = {name: getattr(self, _ATTRIBUTES.get(name, name)) for name in HEAD_FIELDS}
        return {name: value.hex() if name in _BYTES else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises:
            AuditError: this is not a head.
        """
        try:
            fields: dict[str, Any] = {name: plain[name] for name in HEAD_FIELDS}
            for name, value in fields.items():
                if name in _BYTES:
                    fields[name] = bytes.fromhex(value)
                elif not isinstance(value, int if name in _NUMBERS else str):
                    raise TypeError(f"{name} is {value!r:.60}")
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise AuditError(f"this is not a head of a record: {type(exc).__name__} {exc}") from exc
        return cls(**{_ATTRIBUTES.get(name, name): value for name, value in fields.items()})


HEAD_FIELDS: Final = ("log", "chain", "seq", "hash", "at_ns", "reason", "key", "signature")
_ATTRIBUTES: Final = {"hash": "record_hash"}
_BYTES: Final = frozenset({"hash", "signature"})
_NUMBERS: Final = frozenset({"seq", "at_ns"})


# Checkpoints in the database

CHECKPOINT_COLUMNS: Final = "writer, n, hash, at, reason, key_id, signature"
INSERT_CHECKPOINT: Final = (
    f"INSERT INTO checkpoint ({CHECKPOINT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (writer, n, reason) "
    "DO UPDATE SET hash = excluded.hash, at = excluded.at, key_id = excluded.key_id, signature = excluded.signature"
)


def checkpoint_row(head: Head) -> tuple[Any, ...]:
    """Return the values of `INSERT_CHECKPOINT`."""
    return (head.chain, head.seq, head.record_hash, head.at_ns, head.reason, head.key, head.signature)


def head_of(log: str, row: tuple[Any, ...]) -> Head | None:
    """Return the head in a row of the checkpoints; None where a column is of another type."""
    return None if tuple(map(type, row)) != (str, int, bytes, int, str, str, bytes) else Head(log, *row)


# Files


def default_heads_dir() -> Path:
    """Return audit-heads in the user's state directory: ~/.local/state/toolcell on Linux, or $XDG_STATE_HOME's."""
    return platformdirs.user_state_path("toolcell", appauthor=False) / "audit-heads"


def save_head(directory: Path, head: Head) -> None:
    """Write the head of a chain in place of its older one."""
    folder = directory / head.log
    make_private_folder(folder)
    text = json.dumps(head.to_dict(), indent=1, sort_keys=True) + "\n"
    write_file(folder / f"{head.chain}.json", text.encode())


def forget_heads(directory: Path, log: str, chains: list[str]) -> None:
    """Remove the heads of chains of which retention has left nothing."""
    for chain in chains:
        with suppress(OSError):
            (directory / log / f"{chain}.json").unlink(missing_ok=True)
