"""Documents of each kind, whole, hostile and damaged. Parsed inside a sandbox; the plain parts are tested here."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docx
import pytest

from rows import each_row
from toolcell import Runtime
from toolcell.builtin import PARSERS, HashEmbeddings, Ingestion, SqliteStore
from toolcell.builtin.extraction import extract
from toolcell.builtin.ingestion import Kind, prepared_document
from toolcell.config import PoolConfig
from toolcell.errors import DocumentError, UsageError
from toolcell.results import ExecutionResult, Outcome

EMBEDDINGS = HashEmbeddings(64)


def pdf(*texts: str) -> bytes:
    """Return a PDF with one page for each text."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(texts)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(texts)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for at, text in enumerate(texts):
        page = f"/Parent 2 0 R /Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * at} 0 R"
        objects.append(f"<< /Type /Page /MediaBox [0 0 300 300] {page} >>")
        drawn = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for at, each in enumerate(objects, start=1):
        places.append(len(data))
        data += f"{at} 0 obj\n{each}\nendobj\n".encode()
    rows = "".join(f"{place:010} 00000 n \n" for place in places)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + (table + end).encode()


def word() -> bytes:
    document, file = docx.Document(), io.BytesIO()
    document.core_properties.title = "Travel rules"
    document.add_heading("Trains", 1)
    document.add_paragraph("Second class is paid.")
    document.add_table(rows=1, cols=2).rows[0].cells[0].text = "Berlin"
    document.add_heading("Planes", 1)
    document.add_paragraph("Only over 600 km.")
    document.save(file)
    return file.getvalue()


def zip_bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("word/document.xml", "w") as entry:
        for _ in range(201):
            entry.write(bytes(1 << 20))
    return file.getvalue()


HTML = """<!doctype html><html><head><title>Moon &amp; tides</title><style>p {color: red}</style></head><body>
<script>steal("everything")</script><h1>High tide</h1><p>It comes <b>twice</b> a day.</p>
<ul><li>spring</li><li>neap</li></ul><h2>Low tide</h2><p>In between.</p></body></html>"""


def sections(name: str, data: bytes, kind: Kind = "auto", most: int = 100_000) -> Any:
    try:
        found, text = prepared_document("it", name, data, kind)
    except DocumentError as exc:
        return {"error": str(exc)}
    return {"kind": found, **extract(text, found, most)}


def test_markdown_is_cut_at_its_headings_and_not_in_code() -> None:
    text = "before\n# One #\ntext\n```\n# no heading\n```\n## Two\nmore"
    found = sections("a.md", text.encode())

    assert found["kind"] == "markdown"
    assert [(each["heading"], each["text"].splitlines()[0]) for each in found["sections"]] == [
        ("", "before"),
        ("One", "# One #"),
        ("Two", "## Two"),
    ]
    assert "# no heading" in found["sections"][1]["text"]


def test_html_gives_what_is_visible_in_sections() -> None:
    found = sections("page", HTML.encode())

    assert (found["kind"], found["title"]) == ("html", "Moon & tides")
    assert [(each["heading"], each["text"]) for each in found["sections"]] == [
        ("High tide", "High tide\nIt comes twice a day.\nspring\nneap"),
        ("Low tide", "Low tide\nIn between."),
    ]


@each_row(
    ("data", "text"),
    [
        ("é".encode(), "é"),
        (b"\xef\xbb\xbf" + "é".encode(), "é"),
        ("é".encode("utf-16"), "é"),
        ("caf\u00e9\u2019s".encode("cp1252"), "caf\u00e9\u2019s"),
        ("Привет, мир! Это простой текст.".encode("koi8-r"), "Привет, мир! Это простой текст."),
    ],
)
def test_text_of_the_usual_encodings_is_read(data: bytes, text: str) -> None:
    assert sections("a.txt", data)["sections"] == [{"text": text}]


def test_a_page_in_a_file_names_its_charset() -> None:
    page = '<html><meta charset="iso-8859-2"><p>\u0142'.encode("iso-8859-2")
    assert sections("a.html", page)["sections"] == [{"text": "\u0142", "heading": ""}]


@each_row(
    ("name", "data", "said"),
    [
        ("a.pdf", b"%PDF-1.4\nnonsense", "damaged"),
        ("a.pdf", b"hello", "named .pdf"),
        ("a.docx", b"PK\x03\x04nonsense", "damaged"),
        ("a.docx", zip_bomb(), "unpacks to 210763776 bytes"),
        ("a.pdf", pdf("", ""), "no text"),
        ("a.bin", b"\x7fELF\x00\x01\x02\xff", "binary"),
        ("a.txt", b"x" * 100_001, "100001 characters of text, and may have 100000"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_read_says_why(name: str, data: bytes, said: str) -> None:
    assert said in sections(name, data)["error"]


def test_deep_and_broken_html_is_read_in_one_pass() -> None:
    deep = "<div><b><script>" * 5000 + "x" + "</script></div>" * 10 + "</nothing><p>left <h1>open"
    assert "error" not in sections("a.html", deep.encode())


# In a sandbox


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.isolation
async def test_documents_are_parsed_in_a_sandbox_and_found_afterwards(tmp_path: Path) -> None:
    store = SqliteStore(":memory:")
    (tmp_path / "tides.html").write_text(HTML)
    async with Runtime(packages=PARSERS, pool=PoolConfig(warm=0)) as runtime:
        ingestion = Ingestion(store, EMBEDDINGS, runtime)
        paper = await ingestion.ingest(pdf("Heat pumps save power.", "Annex two"), name="heat.pdf", source="http://x/")
        rules = await ingestion.ingest(word(), name="rules.docx")
        page = await ingestion.ingest(tmp_path / "tides.html")
        again = await ingestion.ingest(tmp_path / "tides.html")
        with pytest.raises(DocumentError, match=r"'bomb\.docx'.*unpacks to"):
            await ingestion.ingest(zip_bomb(), name="bomb.docx")

    assert (paper.kind, paper.title, paper.sections) == ("pdf", "heat.pdf", 2)
    assert (rules.kind, rules.title, rules.sections) == ("docx", "Travel rules", 2)
    assert (page.kind, page.title, page.chunks) == ("html", "Moon & tides", 2)
    assert (again.document_id, again.chunks) == (page.document_id, 0)
    (best,) = await store.search_chunks((await EMBEDDINGS.embed(["heat pumps"]))[0], 1)
    assert (best.item.content, dict(best.item.metadata)) == ("Heat pumps save power.", {"page_number": 1})
    found = await store.search_chunks_keyword("Berlin", 1)
    assert found[0].item.metadata == {"section_heading": "Trains"}
    assert len(await store.list_documents()) == 3


@pytest.mark.anyio
@pytest.mark.isolation
async def test_a_sandbox_without_the_parser_says_what_to_do() -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime:
        ingestion = Ingestion(SqliteStore(":memory:"), EMBEDDINGS, runtime)
        with pytest.raises(UsageError, match=r"needs the package 'pypdf'.*toolcell\[builtin\]"):
            await ingestion.ingest(pdf("x"), name="a.pdf")
        assert (await ingestion.ingest("# Plain\ntext", name="a.md")).chunks == 1


# What a sandbox gives is not trusted


class Guest:
    """Answers as a parser might that a document has taken over."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def execute_code(
        self,
        source: str,
        /,
        *,
        inputs: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes],
        check_types: bool | None = None,
    ) -> ExecutionResult:
        assert check_types is False, "it is not a script of a model"
        return ExecutionResult(run_id="r", outcome=Outcome.OK, value=self.value)


@pytest.mark.anyio
@each_row(
    "value",
    [None, 1, [], {}, {"sections": 1}, {"sections": [1]}, {"sections": []}, {"sections": [{"text": 1}]},
     {"sections": [{"text": "x" * 5_000_000}]}, {"error": "\x1b[31m"}],
)  # fmt: skip
async def test_nonsense_of_a_sandbox_is_a_document_error(value: Any) -> None:
    store = SqliteStore(":memory:")
    with pytest.raises(DocumentError):
        await Ingestion(store, EMBEDDINGS, Guest(value)).ingest("x")
    assert await store.list_documents() == []


@pytest.mark.anyio
async def test_odd_fields_of_a_sandbox_are_left_out() -> None:
    store = SqliteStore(":memory:")
    rows = [
        {"text": "a\x00b\ud800", "page": True, "heading": ["x"]},
        {"text": "c", "page": 1 << 70, "heading": "h\n" * 999},
        {"text": "d", "page": 0},
    ]
    await Ingestion(store, EMBEDDINGS, Guest({"kind": 3, "title": 4, "sections": rows})).ingest("x", name="n")
    (document,) = await store.list_documents()
    found = [*await store.search_chunks_keyword("c", 1), *await store.search_chunks_keyword("d", 1)]

    assert document.title == "n"
    assert "\x00" not in document.content
    assert len(found[0].item.metadata["section_heading"]) <= 300
    assert not any("page_number" in each.item.metadata for each in found)


@pytest.mark.anyio
async def test_a_file_that_is_missing_or_too_large_is_refused(tmp_path: Path) -> None:
    ingestion = Ingestion(SqliteStore(":memory:"), EMBEDDINGS, Guest(None))
    with pytest.raises(UsageError, match="No such file"):
        await ingestion.ingest(tmp_path / "none.pdf")
    with (tmp_path / "large").open("wb") as file:
        file.truncate((32 << 20) + 1)
    with pytest.raises(UsageError, match="33554432 bytes"):
        await ingestion.ingest(tmp_path / "large")


@each_row("text", ["handbook.pdf", "docs/a.md", "../x/Über.DOCX", "https://example.com/index.html"])
@pytest.mark.anyio
async def test_a_path_that_is_given_as_text_is_refused(text: str) -> None:
    store = SqliteStore(":memory:")
    with pytest.raises(UsageError, match="is a path: write Path"):
        await Ingestion(store, EMBEDDINGS, Guest(None)).ingest(text)
    assert await store.list_documents() == []


@each_row("text", ["See report.pdf", "report.pdf\nis late", "<p>a.md", "3.14", "x" * 50 + ".c"])
@pytest.mark.anyio
async def test_a_text_that_names_a_file_is_a_text(text: str) -> None:
    done = await Ingestion(SqliteStore(":memory:"), EMBEDDINGS, Guest({"sections": [{"text": text}]})).ingest(text)
    assert done.chunks == 1
