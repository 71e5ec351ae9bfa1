"""What a store keeps: documents and their chunks, messages, scheduled actions and their runs, skills. Frozen data.

Units: times are unix seconds. Ids are UUIDv7 unless the caller gives its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, Literal, TypeVar

from toolcell.errors import UsageError
from toolcell.support.checks import brief, check_kind, check_one_of
from toolcell_bridge.wire.invisible import is_visible

MAX_ID_CHARS: Final = 200
MAX_TOP_K: Final = 1000
"""Results that one search may ask for."""
MAX_DIMENSIONS: Final = 8192
"""Numbers in one vector."""
FILTER_FIELDS: Final = ("document_id", "source", "created_at")
FilterOp = Literal["eq", "in", "gt", "lt"]
RunStatus = Literal["running", "done", "failed", "missed", "in_doubt"]
Vector = Sequence[float]


def new_id() -> str:
    """Return a new UUIDv7: ids sort by the millisecond in which they were made.

    Source: RFC 9562, section 5.7.
    """
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | (random >> 62 & 0xFFF) << 64
    return str(uuid.UUID(int=value | 0b10 << 62 | random & (1 << 62) - 1))


def now() -> int:
    """Unix seconds."""
    return int(time.time())


class StoreRecord:
    """Checks of every record: text is text that any store can hold, ids are short and not empty."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, each.name)
            if each.type == "str":
                check_text(f"{type(self).__name__}.{each.name}", value)
            elif each.type == "int":
                check_integer(f"{type(self).__name__}.{each.name}", value)
            elif each.name == "metadata":
                check_metadata(f"{type(self).__name__}.metadata", value)
        check_id(f"{type(self).__name__}.id", getattr(self, "id"))  # noqa: B009


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(StoreRecord):
    """A text and where it is from."""

    id: str = field(default_factory=new_id)
    title: str = ""
    source: str = ""
    content: str = ""
    created_at: int = field(default_factory=now)

    @property
    def digest(self) -> str:
        """SHA-256 of source and content. A store keeps one document of each digest."""
        return hashlib.sha256(f"{len(self.source)}:{self.source}{self.content}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(StoreRecord):
    """A piece of a document, found by its vector and its words."""

    id: str = field(default_factory=new_id)
    document_id: str = ""
    parent_id: str = ""
    """Id of the larger chunk that a search returns in place of this one; empty when there is none."""
    content: str = ""
    chunk_index: int = 0
    """Position in the document, from 0."""
    embedding: Vector | None = None
    """None: only words find it. A chunk that is the parent of another one is not searched at all."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`page_number`, `section_heading`, `source_url`, `images`, and keys of the application. Plain JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(StoreRecord):
    """One message of a conversation."""

    id: str = field(default_factory=new_id)
    thread_id: str = ""
    role: str = "user"
    content: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    embedding: Vector | None = None
    created_at: int = field(default_factory=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledAction(StoreRecord):
    """Scheduled tool calls."""

    id: str = field(default_factory=new_id)
    description: str = ""
    schedule: str = ""
    tool_calls: str = "[]"
    """JSON text: a list of {"tool", "params"}."""
    synthesis_prompt: str = ""
    next_run: int = 0
    enabled: bool = True
    skill_id: str = ""
    created_at: int = field(default_factory=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun(StoreRecord):
    """One run of an action and its outcome. A store keeps one for each action and due time."""

    id: str = field(default_factory=new_id)
    action_id: str = ""
    due_at: int = 0
    owner: str = ""
    """The process that makes it."""
    lease_until: int = 0
    """Running past this time, it is in doubt: its owner has died or hangs."""
    status: RunStatus = "running"
    started_at: int = field(default_factory=now)
    ended_at: int = 0
    detail: str = ""
    """What came of it, in text or JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill(StoreRecord):
    """Instructions that an agent finds by their description."""

    id: str = field(default_factory=new_id)
    name: str = ""
    description: str = ""
    instructions: str = ""
    tools: tuple[str, ...] = ()
    model: str = ""
    tags: tuple[str, ...] = ()
    created_by: str = ""
    references: tuple[str, ...] = ()
    embedding: Vector | None = None
    created_at: int = field(default_factory=now)
    updated_at: int = field(default_factory=now)

    def __post_init__(self) -> None:
        StoreRecord.__post_init__(self)
        for name in ("tools", "tags", "references"):
            values = getattr(self, name)
            check_kind(f"Skill.{name}", values, list, tuple)
            for each in values:
                check_text(f"Skill.{name}", each)
            object.__setattr__(self, name, tuple(values))


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored(Generic[T]):
    """A record that a search found."""

    item: T
    score: float
    """In [0, 1], the best first. Of a vector search: the cosine, where less than 0 counts as 0."""


@dataclass(frozen=True, slots=True)
class ChunkFilter:
    """A condition on the chunks that a search may find. Several filters must all hold.

    A value is compared only with a value of its kind: a number with numbers, a text with texts, true and false with
    true and false. A chunk without the key is never found.
    """

    field: str
    """`document_id`, `source`, `created_at` (of the document) or `meta.<key>`."""
    op: FilterOp
    value: Any
    """A text, a number or a bool; for `in` a list of them."""

    def __post_init__(self) -> None:
        check_text("ChunkFilter.field", self.field)
        if self.field not in FILTER_FIELDS and not self.field.removeprefix("meta.") != self.field:
            raise UsageError(f"ChunkFilter.field must be {', '.join(FILTER_FIELDS)} or meta.<key>, not {self.field!r}")
        if self.field == "meta.":
            raise UsageError("ChunkFilter.field 'meta.' names no key; write meta.<key>")
        check_one_of("ChunkFilter.op", self.op, ("eq", "in", "gt", "lt"))
        if self.op == "in":
            check_kind("ChunkFilter.value of 'in'", self.value, list, tuple, set, frozenset)
            object.__setattr__(self, "value", tuple(self.value))
        for each in self.values:
            _check_comparable(each, self.op)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values to compare with; one unless the operator is `in`."""
        return self.value if self.op == "in" else (self.value,)

    @property
    def key(self) -> str | None:
        """The metadata key, or None when the field is one of the document."""
        return self.field.removeprefix("meta.") if self.field.startswith("meta.") else None


def check_filters(filters: Sequence[ChunkFilter]) -> None:
    """Raises: UsageError, when one is something else, such as a text."""
    for each in filters:
        check_kind("a filter", each, ChunkFilter, cure='write ChunkFilter("meta.page_number", "lt", 20)')


def _check_comparable(value: Any, op: str) -> None:
    check_kind("ChunkFilter.value", value, str, int, float, bool)
    if isinstance(value, str):
        check_text("ChunkFilter.value", value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"ChunkFilter.value must be a finite number, not {value}")
    elif isinstance(value, int):
        check_integer("ChunkFilter.value", int(value))
    if isinstance(value, bool) and op in ("gt", "lt"):
        raise UsageError(f"ChunkFilter {op!r} compares numbers or texts, not {value}")


# Checks


def check_id(what: str, value: object) -> None:
    """Refuse what cannot be an id.

    Raises:
        UsageError: it is empty, too long, or holds control characters.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS or not is_visible(value):
        raise UsageError(f"{what} must be 1 to {MAX_ID_CHARS} printable characters, not {brief(value)}")


def check_text(what: str, value: object) -> None:
    """Refuse text that a store cannot hold.

    Raises:
        UsageError: it is not text, holds a NUL character or half of a surrogate pair.
    """
    check_kind(what, value, str)
    assert isinstance(value, str)
    if "\0" in value:
        raise UsageError(f"{what} holds a NUL character at {value.index(chr(0))}, which no store can keep; remove it")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(
            f"{what} holds half of a surrogate pair at {exc.start}; decode it with errors='replace'"
        ) from None


def check_integer(what: str, value: object) -> None:
    """Refuse what is not a whole number of 64 bits.

    Raises:
        UsageError: it is not an int, or too large.
    """
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        raise UsageError(f"{what} must be a whole number below 2**63, not {brief(value)}")


def check_metadata(what: str, value: object) -> None:
    """Refuse metadata that is not a plain JSON object.

    Raises:
        UsageError: it is not a mapping, or something in it is not JSON.
    """
    check_kind(what, value, Mapping)
    assert isinstance(value, Mapping)
    try:
        text = json.dumps(dict(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise UsageError(f"{what} must be plain JSON: {exc}") from exc
    check_text(what, text.replace("\\u0000", "\0"))


def check_top_k(top_k: object) -> None:
    """Refuse a number of results that makes no sense.

    Raises:
        UsageError: it is not between 1 and `MAX_TOP_K`.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        raise UsageError(f"top_k must be between 1 and {MAX_TOP_K}, not {brief(top_k)}")


def check_vector(what: str, vector: Vector, dimensions: int | None = None) -> None:
    """Refuse what is not a vector of this many finite numbers.

    Raises:
        UsageError: it has another length, or something in it is not a finite number.
    """
    if not 1 <= len(vector) <= MAX_DIMENSIONS:
        raise UsageError(f"{what} must have 1 to {MAX_DIMENSIONS} numbers, not {len(vector)}")
    if dimensions is not None and len(vector) != dimensions:
        raise UsageError(
            f"{what} has {len(vector)} numbers, and this store's vectors have {dimensions}: they come from another "
            "embedding provider; use that one, or a new store"
        )
    try:
        is_finite = math.isfinite(math.fsum(map(abs, vector)))
    except (TypeError, OverflowError):
        is_finite = False
    if not is_finite:
        raise UsageError(f"{what} holds something that is not a finite number")
