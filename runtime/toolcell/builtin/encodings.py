"""How text is encoded: what a label means, which encoding a text is in, and text from bytes and back.

A label means what browsers take it to mean, because whoever wrote it tested it there: `latin-1` is Windows-1252,
`gb2312` is gb18030.

Source of the labels: the WHATWG Encoding Standard, section 4.2 (names and labels).
"""

from __future__ import annotations

import base64
import codecs
import re
from contextlib import suppress
from typing import Final

from toolcell.errors import ToolError

BASE64: Final = "base64"

MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks, and the encodings that read and write them."""

_MEANT: Final = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
"""What browsers take an encoding for, under Python's names."""

_LABELS: Final = {
    "unicode-1-1-utf-8": "utf-8",
    "x-unicode20utf8": "utf-8",
    "utf-8-bom": "utf-8-sig",
    "unicode": "utf-16-le",
    "unicodefeff": "utf-16-le",
    "unicodefffe": "utf-16-be",
    "ucs-2": "utf-16-le",
    "iso-10646-ucs-2": "utf-16-le",
    "csunicode": "utf-16-le",
    "dos-874": "cp874",
    "windows-874": "cp874",
    "csgb2312": "gb18030",
    "gb_2312": "gb18030",
    "x-gbk": "gb18030",
    "cn-big5": "big5hkscs",
    "x-x-big5": "big5hkscs",
    "windows-31j": "cp932",
    "x-sjis": "cp932",
    "windows-949": "cp949",
    "csksc56011987": "cp949",
    "ks_c_5601-1989": "cp949",
    "iso-ir-149": "cp949",
    "cseuckr": "cp949",
    "x-euc-jp": "euc_jp",
    "cseucpkdfmtjapanese": "euc_jp",
    "koi": "koi8-r",
    "koi8": "koi8-r",
    "koi8-ru": "koi8-u",
    "mac": "mac-roman",
    "csmacintosh": "mac-roman",
    "x-mac-roman": "mac-roman",
    "x-mac-cyrillic": "mac-cyrillic",
    "x-mac-ukrainian": "mac-cyrillic",
    "iso-8859-8-i": "iso8859-8",
    "csiso88598i": "iso8859-8",
    "csiso88598e": "iso8859-8",
    "visual": "iso8859-8",
    "logical": "iso8859-8",
}
"""Labels that Python does not know."""

_KNOWN: Final = frozenset(
    [
        *("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"),
        *("gb18030", "big5hkscs", "cp932", "cp949", "euc_jp", "iso2022_jp", "koi8-r", "koi8-u", "mac-roman"),
        *("mac-cyrillic", "cp437", "cp850", "cp852", "cp866", "cp874"),
        *(f"cp{number}" for number in range(1250, 1259)),
        *(f"iso8859-{number}" for number in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)),
    ]
)
"""Encodings of files and pages. Python has others that are slow or that run code of their own, such as punycode."""


_WIDE: Final = ["utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be"]
"""Without a byte order mark. Text of other encodings has no null bytes."""
_LATIN: Final = ["cp1252", "cp1250", "cp1254", "iso8859_2"]
_LEGACY: Final = [
    *_LATIN,
    *("cp1251", "koi8_r", "iso8859_5", "cp1253", "iso8859_7", "cp1255", "cp1256", "cp874"),
    *("gb18030", "big5hkscs", "cp932", "euc_jp", "cp949"),
]
"""What text is in that is not UTF-8, in the names of charset-normalizer."""
_ASCII: Final = bytes(range(128))
_TWO_LETTERS: Final = re.compile(rb"[\x80-\xff]{2}")
SAMPLE_BYTES: Final = 64 * 1024
_CHARSET: Final = re.compile(r"""charset\s*+=\s*+["']?\s*+([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)
_META: Final = re.compile(r"""<meta[^>]{0,200}?charset\s{0,5}=\s{0,5}["']?([A-Za-z0-9_:.-]{1,40})""", re.IGNORECASE)


def known_encoding(label: str) -> str | None:
    """Return Python's name of the encoding that a label means; None for a label that means none."""
    label = label.strip().lower()
    if label.startswith("x-cp125"):
        label = label.removeprefix("x-")
    name = _LABELS.get(label)
    if name is None:
        try:
            name = codecs.lookup(label).name
        except (LookupError, ValueError):
            return None
    name = _MEANT.get(name, name)
    return name if name in _KNOWN else None


WINDOWS_1252: Final = "toolcell_windows_1252"
"""Error handler. Bytes that are not UTF-8 are read as Windows-1252, each on its own, so one bad byte in a gigabyte
changes one character. The five that Windows-1252 lacks are control characters, as in browsers, and are written so."""


def _windows_1252(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError):
        wrong = error.object[error.start : error.end]
        return "".join(bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in wrong), error.end
    if isinstance(error, UnicodeEncodeError) and error.encoding in ("charmap", "cp1252"):
        signs = error.object[error.start : error.end]
        if set(signs) <= set("\x81\x8d\x8f\x90\x9d"):
            return signs.encode("latin-1"), error.end
    raise error


codecs.register_error(WINDOWS_1252, _windows_1252)


def lenient(name: str) -> str:
    """Return the error handler with which text of an encoding is read as far as it makes sense."""
    return WINDOWS_1252 if name in ("utf-8", "utf-8-sig", "cp1252") else "replace"


def encoding_of(data: bytes) -> str | None:
    """Return the encoding of a text or its beginning; None for data that is not text.

    By its byte order mark; UTF-8; else what charset-normalizer finds most likely. Of equals, and where it finds none,
    Windows-1252, as in browsers.
    """
    if (marked := _marked(data)) is not None:
        return marked
    has_null = b"\0" in data
    sample = data[:SAMPLE_BYTES] if has_null else _beside_utf_8(data)
    if has_null and sample.count(0) * 4 <= len(sample):  # a UTF-16 of Latin letters is half null bytes
        return None
    if not sample:
        return "utf-8"
    if has_null:
        candidates = _WIDE
    elif len(sample.translate(None, _ASCII)) < 4:  # too little to go by
        return "cp1252"
    else:  # in scripts other than Latin, two letters stand side by side: "20 °C" is not Chinese
        candidates = _LEGACY if _TWO_LETTERS.search(sample) else _LATIN
    from charset_normalizer import from_bytes

    found = from_bytes(sample, cp_isolation=candidates, preemptive_behaviour=False)
    if not found:
        return None if has_null else "cp1252"
    likely = min(found, key=lambda match: (match.chaos, -match.coherence, "cp1252" not in match.could_be_from_charset))
    return "cp1252" if "cp1252" in likely.could_be_from_charset else checked_encoding(likely.encoding)


def _marked(data: bytes) -> str | None:
    return next((name for mark, name in MARKS if data.startswith(mark)), None)


def _beside_utf_8(data: bytes) -> bytes:
    """Return a sample around the first bytes that are not UTF-8, up to the end of a word. Empty: the text is UTF-8.

    The last character may be cut, and one wrong byte among many characters of UTF-8 changes only itself.
    """
    try:
        data.decode("utf-8")
        return b""
    except UnicodeDecodeError as exc:
        if exc.start >= len(data) - 3 and exc.reason == "unexpected end of data":
            return b""
        sample = data[max(0, exc.start - 1000) :][:SAMPLE_BYTES]
    read = sample.decode("utf-8", "replace")
    wrong = read.count("\ufffd")
    if sum(character > "\x7f" for character in read) > 10 * wrong:
        return b""
    return sample[: max(sample.rfind(b" "), sample.rfind(b"\n")) + 1] or sample


def text_of(data: bytes, content_type: str = "", *, is_page: bool = False) -> str:
    """Return the characters of what another program wrote, whatever is wrong with some of them.

    By byte order mark, the charset of the content type, a page's `<meta>`, else `encoding_of`.
    """
    declared = [_CHARSET.search(content_type)]
    if is_page:
        meta = _META.search(data[:2048].decode("latin-1"))
        # If a page were UTF-16, its `<meta>` could not be read here.
        declared.append(None if meta and meta[1].lower().startswith("utf-16") else meta)
    labels = (known_encoding(each[1]) for each in declared if each)
    name = _marked(data) or next(filter(None, labels), None) or encoding_of(data) or "utf-8"
    return data.decode(name, "replace" if name == "utf-8" else lenient(name))


def decode(data: bytes, encoding: str = "auto") -> tuple[str, str]:
    """Return a text and the encoding it was in. `auto` is what `encoding_of` says.

    Raises:
        ToolError: it is not text of this encoding, or there is no such encoding; `auto` finds that it is
            binary.
    """
    if encoding == BASE64:
        return base64.b64encode(data).decode("ascii"), BASE64
    if encoding != "auto":
        return _decode(data, encoding), encoding
    name = encoding_of(data)
    if name is None:
        raise ToolError(f'binary file of {len(data)} bytes; read it with encoding "base64"')
    if name.startswith("utf-") and name != "utf-8":
        return _decode(data, name), name
    with suppress(UnicodeDecodeError):
        return data.decode(name), "windows-1252" if name == "cp1252" else name
    return data.decode("cp1252", WINDOWS_1252), "windows-1252"


def checked_encoding(label: str) -> str:
    """Return Python's name of the encoding that a label means.

    Raises:
        ToolError: it means none.
    """
    if (name := known_encoding(label)) is None:
        cure = "such as utf-8, utf-16, windows-1252, shift_jis or gb18030"
        raise ToolError(f"there is no text encoding {label!r:.60}; name one {cure}", code="invalid_arguments")
    return name


def _decode(data: bytes, encoding: str) -> str:
    name = checked_encoding(encoding)
    try:
        return data.decode(name, WINDOWS_1252 if name == "cp1252" else "strict")
    except UnicodeDecodeError as exc:
        raise ToolError(
            f'not {encoding} text: {exc.reason} at byte {exc.start}; read it with encoding "base64" or "windows-1252"'
        ) from exc


def encode(text: str, encoding: str = "auto", replaced: bytes = b"") -> bytes:
    """Return the bytes of a text. `auto` is UTF-8, or what the byte order mark of the replaced content says; `base64`:
    the bytes that the text stands for.

    Raises:
        ToolError: the text has a character that this encoding lacks, or is not base64; there is no such encoding.
    """
    if encoding == BASE64:
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as exc:
            raise ToolError(f"the content is not base64: {exc}") from exc
    if encoding == "auto":
        encoding = next((name for mark, name in MARKS if replaced.startswith(mark)), "utf-8")
    name = checked_encoding(encoding)
    try:
        return text.removeprefix("\ufeff" if name in ("utf-8-sig", "utf-16", "utf-32") else "").encode(
            name, WINDOWS_1252 if name == "cp1252" else "strict"
        )
    except UnicodeEncodeError as exc:
        bad = f"{text[exc.start]!a}"
        raise ToolError(f"{encoding} has no {bad}, character {exc.start} of the content") from exc
