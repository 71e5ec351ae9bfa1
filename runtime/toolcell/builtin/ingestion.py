"""Documents into a store: text, Markdown, HTML, PDF and docx. A stranger's file is parsed inside a sandbox."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from toolcell.builtin.chunking import DEFAULT_SIZES, ChunkSizes, Section
from toolcell.builtin.encodings import encoding_of, text_of
from toolcell.builtin.extraction import Unreadable, kind_of
from toolcell.builtin.indexing import index_document
from toolcell.builtin.stores.protocols import STORES, DocumentStore
from toolcell.builtin.stores.records import Document
from toolcell.calls.call import ScriptRuntime
from toolcell.errors import DocumentError, UsageError
from toolcell.results import ExecutionResult
from toolcell.support import daemon_threads
from toolcell.support.checks import brief, check_count, check_does, check_kind, check_one_of
from toolcell.support.embeddings import PROVIDERS, EmbeddingProvider
from toolcell.support.text import for_terminal

PARSERS: Final = ("pypdf", "python-docx")
"""Packages of the sandboxes that read PDF and docx: `Runtime(packages=PARSERS)`. The other kinds need none."""
MAX_BYTES: Final = 32 << 20
MAX_CHARS: Final = 1_000_000
MAX_LINE_CHARS: Final = 300
"""Most characters of titles and headings."""
_FILE_NAME: Final = re.compile(r"[^\s<>]{1,4096}\.(?:txt|md|markdown|html?|pdf|docx)", re.IGNORECASE)
"""A text that is this and nothing else is a path by mistake."""

Kind = Literal["auto", "text", "markdown", "html", "pdf", "docx"]

_CALL: Final = """
set_result(extract(open("document", "rb").read(), KIND, MAX_CHARS))
"""


@dataclass(frozen=True, slots=True)
class Ingested:
    """The result of ingesting one document."""

    document_id: str
    chunks: int
    """How many were stored; 0 when the store had the document already."""
    kind: str
    title: str
    sections: int
    """Pages of a PDF, parts below a heading otherwise."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a document."""

    kind: str
    title: str
    sections: tuple[Section, ...]


class Ingestion:
    """Puts documents into a store, so that `knowledge_search` finds them.

    The file never reaches a parser in this process: `runtime` starts a sandbox for each, with its limits. Open it with
    `Runtime(packages=PARSERS)`, and with no tools: the script that reads a document needs none.
    """

    def __init__(
        self,
        store: DocumentStore,
        embeddings: EmbeddingProvider,
        runtime: ScriptRuntime,
        *,
        sizes: ChunkSizes = DEFAULT_SIZES,
        max_chars: int = MAX_CHARS,
    ) -> None:
        check_count("Ingestion(max_chars)", max_chars, 1)
        check_does("Ingestion(store)", store, DocumentStore, STORES)
        check_does("Ingestion(embeddings)", embeddings, EmbeddingProvider, PROVIDERS)
        check_kind("Ingestion(sizes)", sizes, ChunkSizes)
        if not inspect.iscoroutinefunction(getattr(runtime, "execute_code", None)):
            raise UsageError(f"Ingestion takes a Runtime, not {brief(runtime)}; a SyncRuntime will not do")
        self._store = store
        self._embeddings = embeddings
        self._runtime = runtime
        self._sizes = sizes
        self._max_chars = max_chars

    async def ingest(
        self, content: bytes | str | os.PathLike[str], *, name: str = "", source: str = "", kind: Kind = "auto"
    ) -> Ingested:
        """Store one document. `content` is text, bytes, or the path of a file as a `Path`.

        `name` is its file name, `source` where it is from, such as a URL; both are the path's where they are not given.

        Raises:
            UsageError: the file cannot be read or is too large, a text is a file's name and nothing else, or the
                sandboxes lack the packages.
            DocumentError: it is damaged, encrypted, not of a known kind, or has too much text.
            SandboxUnavailable: no sandbox could be started.
        """
        check_one_of("kind", kind, get_args(Kind))
        data = await daemon_threads.run_sync(_bytes_of, content)
        path = Path(content) if isinstance(content, os.PathLike) else None
        name = name or (path.name if path else "")
        source = source or (str(path) if path else name)
        found = await self.extract(data, name=name, kind=kind)
        text = "\n\n".join(section.text for section in found.sections)
        document = Document(title=_label(found.title) or name, source=_label(source), content=text)
        done = await index_document(self._store, self._embeddings, document, found.sections, self._sizes)
        return Ingested(done.document_id, done.chunks, found.kind, document.title, len(found.sections))

    async def extract(self, data: bytes, *, name: str = "", kind: Kind = "auto") -> Extracted:
        """Return the text of a document without storing it."""
        what = f"the document {name!r:.100}" if name else "the document"
        found, data = await daemon_threads.run_sync(prepared_document, what, name, data, kind)
        inputs = {"KIND": found, "MAX_CHARS": self._max_chars}
        run = self._runtime.execute_code
        result: ExecutionResult = await run(_script(), inputs=inputs, files={"document": data}, check_types=False)
        if result.error is not None:
            said = for_terminal(result.error.message)[:300]
            raise DocumentError(f"{what} could not be read: its sandbox ended with {result.outcome}: {said}")
        return await daemon_threads.run_sync(self._checked, what, found, result.value)

    def _checked(self, what: str, kind: str, value: Any) -> Extracted:
        """Return what a sandbox gave. A parser that a document has taken over may give anything."""
        if not isinstance(value, dict):
            raise DocumentError(f"{what} could not be read: its sandbox gave no sections")
        if isinstance(missing := value.get("missing"), str):
            raise UsageError(
                f"{what} needs the package {_label(missing)!r} in its sandbox; open Runtime(packages={PARSERS}), with "
                "them installed: pip install 'toolcell[builtin]'"
            )
        if isinstance(error := value.get("error"), str):
            raise DocumentError(f"{what} could not be read: {_label(error)}")
        rows = value.get("sections")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DocumentError(f"{what} could not be read: its sandbox gave no sections")
        sections = tuple(_section(row) for row in rows)
        if sum(len(each.text) for each in sections) > self._max_chars * 4:  # `for_terminal` writes out what is hidden
            raise DocumentError(f"{what} has more than {self._max_chars} characters of text")
        if not any(each.text.strip() for each in sections):
            raise DocumentError(f"{what} has no text")
        return Extracted(kind, _label(value.get("title")), sections)


def prepared_document(what: str, name: str, data: bytes, kind: Kind) -> tuple[str, bytes]:
    """Return the kind of a document and what its sandbox reads: text is UTF-8.

    Raises:
        DocumentError: it is of no kind that is known.
    """
    try:
        found = kind_of(name, data) if kind == "auto" else kind
    except Unreadable as exc:
        raise DocumentError(f"{what} could not be read: {exc}") from exc
    if found in ("pdf", "docx"):
        return found, data
    if encoding_of(data) is None:
        raise DocumentError(f"{what} could not be read: it is binary, and no kind of document that is known")
    return found, text_of(data, is_page=found == "html").encode()


def _section(row: Mapping[str, Any]) -> Section:
    text = row.get("text")
    metadata: dict[str, Any] = {}
    if heading := _label(row.get("heading")):
        metadata["section_heading"] = heading
    page = row.get("page")
    if isinstance(page, int) and not isinstance(page, bool) and 0 < page < 1 << 31:
        metadata["page_number"] = page
    return Section(for_terminal(text) if isinstance(text, str) else "", metadata)


def _label(text: object) -> str:
    return " ".join(for_terminal(text[: MAX_LINE_CHARS * 2]).split())[:MAX_LINE_CHARS] if isinstance(text, str) else ""


def _bytes_of(content: bytes | str | os.PathLike[str]) -> bytes:
    check_kind("content", content, bytes, str, os.PathLike, cure="a path is Path(...)")
    if isinstance(content, os.PathLike):
        try:
            with open(os.open(content, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe may never say anything
                    raise OSError(errno.EINVAL, "not a regular file")
                data = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise UsageError(f"the document {os.fspath(content)!r} cannot be read: {exc.strerror}") from exc
    else:
        if isinstance(content, str) and _FILE_NAME.fullmatch(content):
            raise UsageError(f"a str is a document's text, and {content!r:.200} is a path: write Path(...) around it")
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    if len(data) > MAX_BYTES:
        raise UsageError(f"a document may have {MAX_BYTES} bytes, and this one has more; split it")
    return data


def _script() -> str:
    """Return the source of `extraction` and a call of it."""
    spec = importlib.util.find_spec("toolcell.builtin.extraction")
    assert spec is not None
    assert spec.loader is not None
    source: str | None = spec.loader.get_source(spec.name)  # type: ignore[attr-defined]
    assert source is not None
    return source + _CALL
