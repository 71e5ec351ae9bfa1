"""Take the text out of a document. Runs inside a sandbox: its source is sent there as a script.

Parsers are attack surface. Invariant: the host never calls it with a stranger's file, and it imports nothing of
toolcell. Only `kind_of`, which looks at the first bytes, is called by the host, too.
"""

import html.parser
import io
import re
import zipfile
from typing import Any

UNPACKED_BYTES = 200 << 20
"""Most bytes of all files in a docx together; a zip bomb says more, or is ended by the sandbox's memory limit."""
SKIPPED = {"script", "style", "noscript", "template", "svg", "head"}
BLOCKS = {
    "address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "footer", "form",
    "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul",
}  # fmt: skip
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}


class Unreadable(Exception):
    """The document cannot be read; says why."""


def kind_of(name: str, data: bytes) -> str:
    """Return the kind of a document by its first bytes, and by its name where those say nothing."""
    suffix = name.rpartition(".")[2].lower()
    if data[:1024].find(b"%PDF-") >= 0:
        return "pdf"
    if data.startswith(b"PK\x03\x04"):
        return "docx"
    if suffix in ("pdf", "docx"):
        raise Unreadable(f"it is named .{suffix} and does not begin like one")
    if suffix in ("html", "htm", "xhtml") or re.match(rb"\s*(<!doctype html|<html)", data[:512], re.IGNORECASE):
        return "html"
    return "markdown" if suffix in ("md", "markdown") else "text"


def sections_of_markdown(text: str) -> list[dict[str, Any]]:
    """Return a section for each heading; those in code blocks are none."""
    sections: list[dict[str, Any]] = []
    lines: list[str] = []
    heading, fence = "", ""
    for line in text.splitlines():
        mark = re.match(r" {0,3}(```+|~~~+)", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1][:3]
        found = None if fence else re.match(r" {0,3}#{1,6}\s", line)
        if found:
            sections.append({"text": "\n".join(lines), "heading": heading})
            lines, heading = [line], line[found.end() :].strip().rstrip("#").rstrip()
        else:
            lines.append(line)
    return [*sections, {"text": "\n".join(lines), "heading": heading}]


class HtmlText(html.parser.HTMLParser):
    """Collects the visible text of a page, in sections that begin at headings. It keeps no tree of elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: list[dict[str, Any]] = []
        self.parts: list[str] = []
        self.skipping: list[str] = []
        self.heading, self.title, self.within = "", "", ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "title":
            self.within = "title"
        if tag in SKIPPED and len(self.skipping) < 1000:
            self.skipping.append(tag)
        if tag in HEADINGS:
            self.end_section()
            self.within = tag
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.skipping:
            while self.skipping.pop() != tag:
                pass
        if tag == self.within:
            self.within = ""
        if tag in BLOCKS or tag in HEADINGS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.within == "title":
            self.title += data
        elif not self.skipping:
            self.parts.append(data)
            if self.within:
                self.heading += data

    def end_section(self) -> None:
        text = re.sub(r"[ \t\r\f\v]+", " ", "".join(self.parts))
        text = re.sub(r" ?\n ?(\n ?)*", "\n", text).strip()
        self.sections.append({"text": text, "heading": " ".join(self.heading.split())})
        self.parts, self.heading = [], ""


def sections_of_html(text: str) -> tuple[str, list[dict[str, Any]]]:
    parser = HtmlText()
    parser.feed(text)
    parser.close()
    parser.end_section()
    return " ".join(parser.title.split()), parser.sections


def sections_of_pdf(data: bytes) -> tuple[str, list[dict[str, Any]]]:
    """Return title and a section for each page."""
    import pypdf

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("it is encrypted")
        title = str((reader.metadata and reader.metadata.title) or "")
        pages = [(page.extract_text(), at) for at, page in enumerate(reader.pages, start=1)]
    except (Unreadable, MemoryError):
        raise
    except Exception as exc:  # pypdf raises many kinds for damaged files
        raise Unreadable(f"it is damaged: {type(exc).__name__}: {exc}"[:300]) from None
    if pages and not any(text.strip() for text, _ in pages):
        raise Unreadable("it has pages and no text; scanned pages need text recognition first")
    return title, [{"text": text, "page": at} for text, at in pages]


def sections_of_docx(data: bytes) -> tuple[str, list[dict[str, Any]]]:
    """Return title and a section for each heading, tables as rows with tabs."""
    import docx
    from docx.table import Table

    check_zip(data)
    try:
        document = docx.Document(io.BytesIO(data))
        sections: list[dict[str, Any]] = []
        lines: list[str] = []
        heading = ""
        for block in document.iter_inner_content():
            if isinstance(block, Table):
                lines += ["\t".join(cell.text for cell in row.cells) for row in block.rows]
            elif (block.style.name if block.style is not None else "").startswith(("Heading", "Title")) and block.text:
                sections.append({"text": "\n".join(lines), "heading": heading})
                lines, heading = [block.text], block.text
            else:
                lines.append(block.text)
        title = document.core_properties.title or ""
    except (Unreadable, MemoryError):
        raise
    except Exception as exc:  # python-docx and lxml raise many kinds for damaged files
        raise Unreadable(f"it is damaged, or no docx: {type(exc).__name__}: {exc}"[:300]) from None
    return title, [*sections, {"text": "\n".join(lines), "heading": heading}]


def check_zip(data: bytes) -> None:
    """Refuse a zip file that says it is damaged or unpacks to too much."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            total = sum(each.file_size for each in archive.infolist())
    except zipfile.BadZipFile as exc:
        raise Unreadable(f"it is damaged: {exc}") from None
    if total > UNPACKED_BYTES:
        raise Unreadable(f"it unpacks to {total} bytes, and may to {UNPACKED_BYTES}")


def extract(data: bytes, kind: str, most_chars: int) -> dict[str, Any]:
    """Return {"title", "sections"}, or {"error"}. Shape of a section: {"text", "heading" or "page"}.

    All but PDF and docx is UTF-8.
    """
    try:
        title = ""
        if kind == "pdf":
            title, sections = sections_of_pdf(data)
        elif kind == "docx":
            title, sections = sections_of_docx(data)
        elif kind == "html":
            title, sections = sections_of_html(data.decode())
        elif kind == "markdown":
            sections = sections_of_markdown(data.decode())
        else:
            sections = [{"text": data.decode()}]
    except Unreadable as exc:
        return {"error": str(exc)}
    except ImportError as exc:
        return {"missing": str(exc.name)}
    sections = [each for each in sections if each["text"].strip()]
    if (total := sum(len(each["text"]) for each in sections)) > most_chars:
        return {"error": f"it has {total} characters of text, and may have {most_chars}"}
    return {"title": title, "sections": sections}
