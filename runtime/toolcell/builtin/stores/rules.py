"""Rules that hold in every store, as plain functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolcell.builtin.stores.records import Chunk, Document, check_text
from toolcell.errors import UsageError
from toolcell.support.checks import check_one_of


def check_provider(known: tuple[str, int] | None, name: str, dimensions: int) -> None:
    """Refuse an embedding provider other than the one that made the store's vectors.

    `known` has an empty name when vectors were stored before any provider was named.

    Raises:
        UsageError: names both.
    """
    if known is None or known == (name, dimensions) or known == ("", dimensions):
        return
    raise UsageError(
        f"this store's vectors have {known[1]} numbers and come from {known[0] or 'another provider'!r}, and {name!r} "
        f"makes vectors of {dimensions}; use that provider, or a new store"
    )


def check_chunks(document: Document, chunks: Sequence[Chunk], taken: Iterable[str]) -> None:
    """Refuse chunks that do not make up a document. `taken` are ids of it that the store has already.

    Raises:
        UsageError: a chunk belongs elsewhere, has a parent that is not among them, or an id is used twice.
    """
    known: set[str] = set()
    repeated = [*taken]
    for chunk in chunks:
        repeated += [chunk.id] if chunk.id in known else []
        known.add(chunk.id)
    if repeated:
        raise UsageError(f"the id {repeated[0]!r} is taken; leave it out to get a new one")
    for chunk in chunks:
        if chunk.document_id != document.id:
            raise UsageError(f"chunk {chunk.id!r} has document_id {chunk.document_id!r}, not {document.id!r}")
        if chunk.parent_id and chunk.parent_id not in known:
            raise UsageError(f"chunk {chunk.id!r} has a parent {chunk.parent_id!r} that is not a chunk of its document")


def check_description_query(substring: str) -> str:
    """Return what to look for in folded descriptions.

    Raises:
        UsageError: it is empty: it would match every action.
    """
    check_text("description_query", substring)
    if not substring.strip():
        raise UsageError("description_query is empty, which would match every action; give a part of the description")
    return substring.casefold()


def check_run_end(status: str) -> None:
    """Refuse a status that is not an end of a run.

    Raises:
        UsageError: names those that are.
    """
    check_one_of("status", status, ("done", "failed", "missed", "in_doubt"))
