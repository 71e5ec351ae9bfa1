"""Split texts into chunks at the largest boundary that fits: sections, paragraphs, sentences, words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from toolcell.builtin.stores.records import Chunk, Document
from toolcell.errors import UsageError
from toolcell.support.checks import check_count
from toolcell.support.lazy import needed

CHARS_PER_TOKEN: Final = 4
"""A rule of thumb for English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """How long chunks are. Units: characters, about four to a token."""

    chars: int = 512 * CHARS_PER_TOKEN
    overlap_chars: int = 50 * CHARS_PER_TOKEN
    """What a chunk repeats of the one before it, so that no sentence is cut in both."""
    parent_chars: int = 0
    """With a number: texts are split into parents of this length first. Their chunks are searched, and the parents
    are what a search returns."""

    def __post_init__(self) -> None:
        check_count("ChunkSizes(chars)", self.chars, 16)
        check_count("ChunkSizes(overlap_chars)", self.overlap_chars, 0)
        check_count("ChunkSizes(parent_chars)", self.parent_chars, 0)
        if self.overlap_chars * 2 > self.chars:
            raise UsageError(f"overlap_chars must be at most half of chars ({self.chars}), not {self.overlap_chars}")
        if 0 < self.parent_chars < self.chars:
            raise UsageError(f"parent_chars must be at least chars ({self.chars}), not {self.parent_chars}")


DEFAULT_SIZES: Final = ChunkSizes()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a text that no chunk crosses, with what is known about it."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`section_heading`, `page_number` and the like; every chunk of the section gets it."""


def split(text: str, chars: int, overlap_chars: int = 0) -> list[str]:
    """Return the pieces of a text, each at most `chars` long. A short text is one piece.

    Raises:
        UsageError: the text is longer, and semchunk is not installed.
    """
    text = text.strip()
    if len(text) <= chars:
        return [text] if text else []
    semchunk = needed("semchunk", f"a text of more than {chars} characters")
    pieces: list[str] = semchunk.chunk(text, chars, len, memoize=False, overlap=overlap_chars or None)
    return [piece for piece in pieces if piece.strip()]


def chunks_of(document: Document, sections: Sequence[Section], sizes: ChunkSizes = DEFAULT_SIZES) -> list[Chunk]:
    """Return the chunks of a document, parents before their children, without embeddings."""
    found: list[Chunk] = []
    for section in sections:
        for text, parent in _pieces(section.text, sizes):
            chunk = Chunk(
                document_id=document.id,
                parent_id=found[-parent].id if parent else "",
                content=text,
                chunk_index=len(found),
                metadata=dict(section.metadata),
            )
            found.append(chunk)
    return found


def _pieces(text: str, sizes: ChunkSizes) -> Iterator[tuple[str, int]]:
    """Yield each piece, and how many pieces before it its parent came; 0 when it has none."""
    if not sizes.parent_chars:
        for piece in split(text, sizes.chars, sizes.overlap_chars):
            yield piece, 0
        return
    for parent in split(text, sizes.parent_chars):
        children = split(parent, sizes.chars, sizes.overlap_chars)
        yield parent, 0
        if len(children) > 1:
            for at, child in enumerate(children, start=1):
                yield child, at
