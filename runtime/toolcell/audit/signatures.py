"""What signatures are made over: checkpoints, heads kept elsewhere, and stubs of what retention removed.

A statement names its purpose and its log, so that none can be passed off as another. Knows no keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from toolcell.audit import layout
from toolcell.audit.records import pack
from toolcell.errors import AuditError

if TYPE_CHECKING:
    from toolcell.audit.keys import Signer, Verifier


def checkpoint_statement(log: str, chain: str, seq: int, at_ns: int, before: bytes, reason: str) -> bytes:
    """What a checkpoint's signature says: up to here this is what was written."""
    return pack(["toolcell audit checkpoint 1", log, chain, seq, at_ns, before, reason])


@dataclass(frozen=True, slots=True)
class Head:
    """How far a chain had got at a checkpoint. Kept away from the log, it shows that its end was cut off."""

    log: str
    chain: str
    seq: int
    link: bytes
    at_ns: int
    key: str
    signature: bytes

    @staticmethod
    def _statement(log: str, chain: str, seq: int, link: bytes, at_ns: int) -> bytes:
        return pack(["toolcell audit head 1", log, chain, seq, link, at_ns])

    @classmethod
    def sign(cls, log: str, chain: str, seq: int, link: bytes, at_ns: int, signer: Signer) -> Self:
        """A head as the log's writer makes it."""
        signature = signer.sign(cls._statement(log, chain, seq, link, at_ns))
        return cls(log, chain, seq, link, at_ns, signer.key_id, signature)

    def is_signed_by(self, verifier: Verifier) -> bool:
        """True when it has not been changed since."""
        return verifier.is_valid(self._statement(self.log, self.chain, self.seq, self.link, self.at_ns), self.signature)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return _plain(self, ("log", "chain", "seq", "link", "at_ns", "key", "signature"))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The same back.

        Raises:
            AuditError: it is no head.
        """
        return cls(**_parsed(plain, ("log", "chain", "seq", "link", "at_ns", "key", "signature"), "head"))


STUB_NAMES = (
    "log", "chain", "last_segment", "seq", "link", "newest_ns", "files_sha256", "at_ns", "key", "signature",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PruneRecord:
    """What is left of a chain's beginning: enough for what follows to verify."""

    log: str
    chain: str
    last_segment: int
    """All up to this one were removed."""
    seq: int
    """Of the last record removed."""
    link: bytes
    """Of the same: what the first record kept is linked to."""
    newest_ns: int
    """When that record was written."""
    files_sha256: str
    """Over the sha256 of each removed file, each together with the digest of those before it."""
    at_ns: int
    key: str
    signature: bytes

    @staticmethod
    def statement(*values: Any) -> bytes:
        """What its signature is made over: its fields in order, without the last two."""
        return pack(["toolcell audit stub 1", *values])

    def is_signed_by(self, verifier: Verifier) -> bool:
        """True when it has not been changed since."""
        values = [getattr(self, name) for name in STUB_NAMES[:-2]]
        return verifier.is_valid(self.statement(*values), self.signature)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return _plain(self, STUB_NAMES)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The same back.

        Raises:
            AuditError: it is no stub.
        """
        return cls(**_parsed(plain, STUB_NAMES, "stub"))


_BYTES = frozenset({"link", "signature"})
_NUMBERS = frozenset({"seq", "at_ns", "last_segment", "newest_ns"})


def _plain(value: object, names: Iterable[str]) -> dict[str, Any]:
    fields = {name: getattr(value, name) for name in names}
    return {name: item.hex() if name in _BYTES else item for name, item in fields.items()}


def _parsed(plain: Mapping[str, Any], names: Iterable[str], what: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = {name: plain[name] for name in names}
        for name, value in fields.items():
            if name in _BYTES:
                fields[name] = bytes.fromhex(value)
            elif not isinstance(value, int if name in _NUMBERS else str):
                raise TypeError(f"{name} is {value!r:.60}")
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise AuditError(f"this is no {what} of an audit log: {type(exc).__name__} {exc}") from exc
    return fields


# Where a writer leaves its heads


def default_heads_dir() -> Path:
    """$XDG_STATE_HOME/toolcell/audit-heads, or ~/.local/state/toolcell/audit-heads."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "toolcell" / "audit-heads"


def save_head(directory: Path, head: Head) -> None:
    """Replace the head of a chain."""
    place = directory / head.log
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    layout.write_whole(place / f"{head.chain}.json", head.to_dict())
