"""The statements that signatures are made over: checkpoints, heads kept outside the log, and prune records.

A statement names its purpose and its log, so no statement can be passed off as another. This module knows no keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import platformdirs

from toolcell.audit.format import PRUNE_FILE, BadInput, json_bytes, read_small_file
from toolcell.errors import AuditError
from toolcell.support.atomic import write_file
from toolcell.support.packing import pack
from toolcell.support.private_files import make_private_folder

if TYPE_CHECKING:
    from toolcell.audit.keys import Signer, Verifier


def checkpoint_statement(log: str, chain: str, seq: int, at_ns: int, previous_hash: bytes, reason: str) -> bytes:
    """Return the statement of a checkpoint: the chain up to this hash is what was written."""
    return pack(["toolcell audit checkpoint 1", log, chain, seq, at_ns, previous_hash, reason])


@dataclass(frozen=True, slots=True)
class Head:
    """The length of a chain at a checkpoint. A head that is kept outside the log shows when the chain's end is cut."""

    log: str
    chain: str
    seq: int
    record_hash: bytes
    at_ns: int
    key: str
    signature: bytes

    @staticmethod
    def _statement(log: str, chain: str, seq: int, record_hash: bytes, at_ns: int) -> bytes:
        return pack(["toolcell audit head 1", log, chain, seq, record_hash, at_ns])

    @classmethod
    def sign(cls, log: str, chain: str, seq: int, record_hash: bytes, at_ns: int, signer: Signer) -> Self:
        """Make a signed head."""
        signature = signer.sign(cls._statement(log, chain, seq, record_hash, at_ns))
        return cls(log, chain, seq, record_hash, at_ns, signer.key_id, signature)

    def is_signed_by(self, verifier: Verifier) -> bool:
        """True when the head has not been changed since it was signed."""
        statement = self._statement(self.log, self.chain, self.seq, self.record_hash, self.at_ns)
        return verifier.is_valid(statement, self.signature)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return _plain(self, HEAD_FIELDS)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises:
            AuditError: this is not a head.
        """
        return cls(**_parsed(plain, HEAD_FIELDS, "head"))


@dataclass(frozen=True, slots=True)
class PruneRecord:
    """Stands for the removed beginning of a chain. The rest of the chain verifies against it."""

    log: str
    chain: str
    last_segment: int
    """This segment and all before it were removed."""
    seq: int
    """Number of the last record removed."""
    record_hash: bytes
    """Hash of the same record: the previous hash of the first record kept."""
    newest_ns: int
    """When that record was written."""
    files_sha256: str
    """Over the sha256 of each removed file, each together with the digest of those before it."""
    at_ns: int
    key: str
    signature: bytes

    @staticmethod
    def statement(*values: Any) -> bytes:
        """Return the statement that is signed: the fields in order, without the last two."""
        return pack(["toolcell audit stub 1", *values])

    def is_signed_by(self, verifier: Verifier) -> bool:
        """True when the prune record has not been changed since it was signed."""
        values = [getattr(self, _ATTRIBUTES.get(name, name)) for name in PRUNE_FIELDS[:-2]]
        return verifier.is_valid(self.statement(*values), self.signature)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return _plain(self, PRUNE_FIELDS)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises:
            AuditError: this is not a prune record.
        """
        return cls(**_parsed(plain, PRUNE_FIELDS, "stub"))


HEAD_FIELDS = ("log", "chain", "seq", "link", "at_ns", "key", "signature")
PRUNE_FIELDS = (
    "log", "chain", "last_segment", "seq", "link", "newest_ns", "files_sha256", "at_ns", "key", "signature",
)  # fmt: skip

_ATTRIBUTES = {"link": "record_hash"}
"""Key in JSON to attribute, where they differ."""

_BYTES = frozenset({"link", "signature"})
_NUMBERS = frozenset({"seq", "at_ns", "last_segment", "newest_ns"})


def _plain(value: object, names: Iterable[str]) -> dict[str, Any]:
    fields = {name: getattr(value, _ATTRIBUTES.get(name, name)) for name in names}
    return {name: item.hex() if name in _BYTES else item for name, item in fields.items()}


def _parsed(plain: Mapping[str, Any], names: Iterable[str], kind: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = {name: plain[name] for name in names}
        for name, value in fields.items():
            if name in _BYTES:
                fields[name] = bytes.fromhex(value)
            elif not isinstance(value, int if name in _NUMBERS else str):
                raise TypeError(f"{name} is {value!r:.60}")
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise AuditError(f"this is not a {kind} of an audit log: {type(exc).__name__} {exc}") from exc
    return {_ATTRIBUTES.get(name, name): value for name, value in fields.items()}


# Files


def default_heads_dir() -> Path:
    """Return audit-heads in the user's state directory: ~/.local/state/toolcell on Linux, or $XDG_STATE_HOME's."""
    return platformdirs.user_state_path("toolcell", appauthor=False) / "audit-heads"


def save_head(directory: Path, head: Head) -> None:
    """Write the head of a chain in place of its older one."""
    folder = directory / head.log
    make_private_folder(folder)
    write_file(folder / f"{head.chain}.json", json_bytes(head.to_dict()))


def saved_heads(log: str, directory: Path | None = None) -> list[Head]:
    """Return the heads that writers of a log saved on this machine."""
    folder = (directory or default_heads_dir()) / log
    try:
        files = sorted(folder.glob("*.json"))
    except OSError:
        return []
    return [head for file in files for head in load_heads(file)]


def known_heads(log: str, directory: Path) -> list[Head]:
    """Return the heads that a writer has to respect. Unlike `saved_heads`, pass over files that hold none."""
    heads: list[Head] = []
    for file in (directory / log).glob("*.json"):
        with suppress(BadInput):
            heads += load_heads(file)
    return [head for head in heads if head.log == log]


def load_heads(path: str | Path) -> list[Head]:
    """Read heads from a file that holds one head or a list.

    Raises:
        BadInput: the file cannot be read or holds something else.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return [Head.from_dict(each) for each in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError, RecursionError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise BadInput(f"cannot read heads from {path}: {why}") from exc
    except AuditError as exc:
        raise BadInput(f"{path} holds no heads: {exc}") from exc


def read_prune_record(chain: Path) -> PruneRecord | None:
    """Return the prune record of a chain; None when nothing was ever removed from it.

    Raises:
        AuditError: the prune record is damaged.
    """
    try:
        return PruneRecord.from_dict(json.loads(read_small_file(chain / PRUNE_FILE)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise AuditError(f"{chain / PRUNE_FILE} is damaged: {exc}") from exc
