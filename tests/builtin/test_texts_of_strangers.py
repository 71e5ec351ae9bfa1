"""Encodings, compressions, tables and skills as other programs write them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import anyio
import pytest

from builtin.webkit import stream_of
from rows import each_row
from toolcell import ToolRegistry, UsageError
from toolcell.builtin import DataTools, Files
from toolcell.builtin.encodings import decode, encode, encoding_of, known_encoding, text_of
from toolcell.builtin.ingestion import prepared_document
from toolcell.builtin.skill import parse_skill
from toolcell.builtin.web.fetch import read_body
from toolcell.builtin.web.pages import kind_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def registry(tmp_path: Path) -> ToolRegistry:
    return ToolRegistry([Files(tmp_path), DataTools(tmp_path)])


async def call(registry: ToolRegistry, name: str, **args: Any) -> Any:
    result = await registry.execute(name, args)
    assert not result.is_error, result.text
    return result.value


MEANT = [
    ("gb2312", "gb18030", "\u3400 \u00b7"),
    ("gbk", "gb18030", "\U00020000"),
    ("shift_jis", "cp932", "\u2460 \u9ad9"),
    ("x-sjis", "cp932", "\u2460"),
    ("euc-kr", "cp949", "\ub620"),
    ("ks_c_5601-1987", "cp949", "\ub620"),
    ("latin-1", "cp1252", "\u20ac \u201cx\u201d"),
    ("ISO-8859-1", "cp1252", "\u2013"),
    ("us-ascii", "cp1252", "\u2026"),
    ("iso-8859-9", "cp1254", "\u20ac \u015f"),
    ("tis-620", "cp874", "\u20ac \u0e01"),
    ("big5", "big5hkscs", "\u4e00"),
    ("x-cp1251", "cp1251", "\u0416"),
]


@pytest.mark.parametrize(("label", "codec", "text"), MEANT)
async def test_a_label_means_in_every_tool_what_browsers_take_it_for(
    registry: ToolRegistry, tmp_path: Path, label: str, codec: str, text: str
) -> None:
    (tmp_path / "a.csv").write_bytes(f"name\n{text}\n".encode(codec))

    assert text_of(text.encode(codec), f"text/plain; charset={label}") == text
    assert (await call(registry, "file_read", path="a.csv", encoding=label))["text"] == f"name\n{text}\n"
    assert (await call(registry, "data_parse", path="a.csv", encoding=label))["records"] == [{"name": text}]
    await call(registry, "file_write", path="b", content=text, encoding=label)
    assert (tmp_path / "b").read_bytes() == text.encode(codec)


@each_row("label", ["punycode", "idna", "hex", "rot13", "no such", "", "unicode_escape"])
async def test_what_is_not_an_encoding_of_files_is_refused_by_name(registry: ToolRegistry, label: str) -> None:
    assert known_encoding(label) is None
    for name, args in (
        ("file_read", {"path": "x"}),
        ("file_write", {"path": "x", "content": "a"}),
        ("data_parse", {"content": "a\n1"}),
    ):
        await registry.execute("file_write", {"path": "x", "content": "a"})
        refused = await registry.execute(name, {**args, "encoding": label})
        assert refused.is_error
        assert "there is no text encoding" in refused.text


WRITTEN = [
    ("cp1252", "Le café est fermé à midi, où êtes-vous allés ?"),
    ("cp1252", "café"),
    ("cp1252", "£5"),
    ("cp1252", "I’m sure it’s yours, © 2024"),
    ("cp1252", "20 °C, 21 °C, 19 °C, 18 °C"),
    ("cp1252", "20 °C, 5 µm, price 5 €"),
    ("cp1252", "“x” – y…"),
    ("cp1250", "Książka leży na półce, a źródło jest świeże."),
    ("cp1251", "Привет, мир! Это простой текст."),
    ("koi8-r", "Привет, мир! Это простой текст."),
    ("cp1253", "Καλημέρα κόσμε, αυτό είναι ένα κείμενο."),
    ("cp932", "これは日本語の文章です。"),
    ("gb18030", "这是一个中文文本。今天天气很好。"),
    ("cp949", "이것은 한국어 문장입니다."),
    ("utf-16-le", "grüße aus Köln"),
    ("utf-16-be", "grüße aus Köln"),
    ("utf-8", "grüße 日本"),
]


@pytest.mark.parametrize(("codec", "text"), WRITTEN)
async def test_every_tool_finds_out_which_encoding_a_text_is_in(
    registry: ToolRegistry, tmp_path: Path, codec: str, text: str
) -> None:
    data = f"name\n{text}\n".encode(codec)
    (tmp_path / "a.csv").write_bytes(data)

    read = await call(registry, "file_read", path="a.csv")
    await call(registry, "file_write", path="b", content=read["text"], encoding=read["encoding"])
    assert read["text"] == text_of(data) == f"name\n{text}\n"
    assert (tmp_path / "b").read_bytes() == data
    parsed = await call(registry, "data_parse", path="a.csv", delimiter=";")
    assert parsed["records"] == [{"name": text}]
    assert prepared_document("it", "a.txt", data, "auto") == ("text", f"name\n{text}\n".encode())


def test_a_text_far_into_its_data_is_found_out() -> None:
    text = "plain " * 50_000 + "Ksi\u0105\u017cka le\u017cy na p\u00f3\u0142ce \u015bwie\u017ce. " * 5_000
    assert text_of(text.encode("cp1250")) == text


def test_a_wrong_byte_in_a_text_of_utf_8_changes_itself_alone() -> None:
    data = ("gr\u00fc\u00dfe " * 100).encode() + b"\xe9 " + ("gr\u00fc\u00dfe " * 100).encode()
    assert text_of(data) == "gr\u00fc\u00dfe " * 100 + "\ufffd " + "gr\u00fc\u00dfe " * 100


@each_row("data", [b"a\0b", b"\x7fELF\x02\x01\x01" + bytes(50), b"one\0two\0", bytes(500), bytes(range(256)) * 9])
def test_data_that_is_no_text_is_told_from_text(data: bytes) -> None:
    assert encoding_of(data) is None


def test_every_byte_is_a_character_of_windows_1252_and_back() -> None:
    data = bytes(range(1, 256))

    text, name = decode(data)

    assert name == "windows-1252"
    assert encode(text, name) == data
    assert text_of(data, "text/plain; charset=latin1") == text


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "windows-1252"])
async def test_what_a_tool_says_of_an_encoding_it_takes(registry: ToolRegistry, tmp_path: Path, codec: str) -> None:
    (tmp_path / "x").write_bytes("gr\u00fc\u00dfe".encode(codec))

    read = await call(registry, "file_read", path="x")
    again = await call(registry, "file_read", path="x", encoding=read["encoding"])
    await call(registry, "file_write", path="y", content=read["text"], encoding=read["encoding"])

    assert again["text"] == read["text"] == "gr\u00fc\u00dfe"
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
async def test_a_byte_order_mark_survives_reading_and_writing(
    registry: ToolRegistry, tmp_path: Path, codec: str
) -> None:
    (tmp_path / "x").write_bytes("old".encode(codec))

    await call(registry, "file_write", path="x", content="new")

    assert (tmp_path / "x").read_bytes() == "new".encode(codec)


def body(encoding: str, *pieces: bytes, max_bytes: int = 1000) -> bytes:
    content, is_cut = anyio.run(read_body, stream_of(pieces), encoding, max_bytes)
    assert not is_cut
    return content


@each_row("name", ["utf-8", "none", "binary", "aws-chunked", "UTF-8, identity", "x-unknown"])
def test_a_content_encoding_that_is_not_a_compression_is_ignored(name: str) -> None:
    assert body(name, b"plain") == b"plain"
    assert body(f"{name}, gzip", gzip.compress(b"plain")) == b"plain"


@each_row("after", [b"\0" * 512, b"\n", b"\x1f", b"<!-- served in 3 ms -->", b"\x1fx"])
def test_bytes_behind_a_member_of_gzip_do_not_fail_the_page(after: bytes) -> None:
    data = gzip.compress(b"page") + after

    assert body("gzip", data) == b"page"
    assert body("gzip", *[data[i : i + 1] for i in range(len(data))]) == b"page"


def test_members_of_gzip_that_stand_one_behind_the_other_are_one_body() -> None:
    data = gzip.compress(b"one ") + gzip.compress(b"two") + b"\0"

    assert body("gzip", *[data[i : i + 1] for i in range(len(data))]) == b"one two"


@each_row(
    "media_type",
    [
        "binary/octet-stream",
        "application/csv",
        "application/octet-stream; charset=x",
        "application/x-download",
        "application/vnd.ms-excel",
        "foo/bar; a=b",
    ],
)
def test_a_media_type_that_says_little_is_decided_by_the_content(media_type: str) -> None:
    assert kind_of(media_type, b"a,b\n1,2\n") == "text"
    assert kind_of(media_type, b'{"a": 1}') == "json"
    assert kind_of(media_type, b"<!DOCTYPE html><p>x") == "html"
    assert kind_of(media_type, "caf\u00e9;1\n".encode("latin-1")) == "text"
    for data in (b"%PDF-1.7 x", b"PK\x03\x04rest", b"\x89PNG\r\n", b"a\0b", bytes(range(128, 256)) * 4):
        assert kind_of(media_type, data) == "binary"


def test_pictures_stay_pictures() -> None:
    assert kind_of("image/png", b"plain text") == "binary"


@each_row("newline", ["\n", "\r\n"])
@each_row("sign", [",", ";", "\t", "|"])
async def test_a_line_break_in_a_quoted_name_is_part_of_the_header(
    registry: ToolRegistry, newline: str, sign: str
) -> None:
    text = f'"unit{newline}price"{sign}count{newline}1{sign}2{newline}'

    value = await call(registry, "data_parse", content=text)

    assert value["records"] == [{f"unit{newline}price": "1", "count": "2"}]


@each_row("sign", [",", ";", "|", "^"])
async def test_the_hint_of_spreadsheets_above_the_header_is_the_delimiter(registry: ToolRegistry, sign: str) -> None:
    value = await call(registry, "data_parse", content=f"sep={sign}\na{sign}b\n1{sign}2\n")

    assert value["records"] == [{"a": "1", "b": "2"}]


async def test_a_caller_may_name_the_delimiter_of_text_and_of_files(registry: ToolRegistry, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a:b,c\n1:2,5\n")
    rows = [{"a": "1", "b,c": "2,5"}]

    assert (await call(registry, "data_parse", content="a:b,c\n1:2,5\n", delimiter=":"))["records"] == rows
    assert (await call(registry, "data_parse", path="a.csv", delimiter=":"))["records"] == rows
    where = [{"column": "a", "op": "==", "value": 1}]
    assert (await call(registry, "data_filter", path="a.csv", delimiter=":", where=where))["records"] == rows
    for wrong in ("", "ab", "\n", '"'):
        refused = await registry.execute("data_parse", {"content": "a\n1", "delimiter": wrong})
        assert "delimiter must be one character" in refused.text


SKILLS = [
    ("description: Use it for: reports", "Use it for: reports"),
    ("description: Reads a: b: c", "Reads a: b: c"),
    ("description: it's for: you", "it's for: you"),
    ("description: `code` of the thing", "`code` of the thing"),
    ("description: ends with a colon:", "ends with a colon:"),
    ("description: plain", "plain"),
    ("description: plain\nmetadata: none of it", "plain"),
    ("description: plain\nmetadata: [a, b]", "plain"),
    ("description: plain\nmetadata:\n  tags: {a: 1}", "plain"),
    ("description: plain\nversion: 1.0\nlicense: MIT: see LICENSE", "plain"),
]


@each_row(("lines", "description"), SKILLS)
def test_a_skill_is_read_as_its_author_meant_it(lines: str, description: str) -> None:
    assert parse_skill(f"---\nname: x\n{lines}\n---\nDo it.\n".encode()).description == description


def test_front_matter_that_cannot_be_read_names_its_line() -> None:
    with pytest.raises(UsageError, match=r"line 3 of SKILL.md is not YAML"):
        parse_skill(b"---\nname: x\ndescription: 'a' b\n---\nDo it.\n")
