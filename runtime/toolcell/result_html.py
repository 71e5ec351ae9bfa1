"""Show a result as HTML, for notebooks: no style sheet, no script, no request to anywhere.

Everything in a result is hostile text. The template escapes it, and what a browser hides or reorders is spelled out.
What has a backslash is code: a notebook typesets formulas elsewhere, and those have commands for links and styles.
What a file is, its content says, and not the script that made it. HTML and everything unknown is only saved: a browser
never renders it.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from toolcell.support.exact_json import json_text
from toolcell.support.text import clean, cut_text
from toolcell_bridge.guest.pictures import picture_type
from toolcell_bridge.wire.tables import Array, Table

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TEXT_CHARS: Final = 20_000
MAX_ROWS: Final = 50
MAX_COLUMNS: Final = 20
MAX_CELL_CHARS: Final = 200
MAX_FILE_CHARS: Final = 5_000
MAX_SHOWN_BYTES: Final = 4 << 20
"""Most bytes of all files together: a notebook keeps them."""

SIGNATURES: Final = (
    (0, b"RIFF", 8, b"WAVE", "audio/wav"),
    (0, b"ID3", 0, b"", "audio/mpeg"),
    (0, b"fLaC", 0, b"", "audio/flac"),
    (0, b"OggS", 0, b"", "audio/ogg"),
    (4, b"ftyp", 0, b"", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", 0, b"", "video/webm"),
)
"""Two places and the bytes that stand there, and the media type."""

_TEMPLATE: Final = """\
{% macro shown(text) %}{% if "\\\\" in text | string %}<code>{{ text }}</code>{% else %}{{ text }}{% endif %}\
{% endmacro %}\
<div>
<p><strong>{{ result.outcome }}</strong>
 in {{ "%.3g" % result.usage.wall_s }} s, {{ result.calls | length }} tool calls, <code>{{ result.run_id }}</code></p>
{% if table %}<table><thead><tr>{% for name in table[0] %}<th>{{ shown(name) }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table[1] %}<tr>{% for cell in row %}<td>{{ shown(cell) }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% if below %}<p>{{ shown(below) }}</p>
{% endif %}{% elif result.has_value %}<pre>{{ value }}</pre>
{% endif %}{% if logs %}<details open><summary>output</summary><pre>{{ logs }}</pre></details>
{% endif %}{% if error %}<pre style="border-left: 3px solid #c62828; padding-left: 8px">{{ error }}</pre>
{% endif %}{% for each in result.warnings %}<p>warning: {{ shown(each) }}</p>
{% endfor %}{% if result.calls %}<details><summary>tool calls</summary><table>
<thead><tr><th>tool</th><th>line</th><th>status</th><th>ms</th><th>arguments</th></tr></thead><tbody>
{% for call in calls %}<tr><td>{{ shown(call[0]) }}</td><td>{{ call[1] }}</td><td>{{ call[2] }}</td>\
<td>{{ call[3] }}</td><td><code>{{ call[4] }}</code></td></tr>
{% endfor %}</tbody></table></details>
{% endif %}{% for file in files %}<figure>{% if file.kind == "image" %}\
<img alt="{{ file.name }}" src="{{ file.url }}" style="max-width: 100%">\
{% elif file.kind == "audio" %}<audio controls src="{{ file.url }}"></audio>\
{% elif file.kind == "video" %}<video controls src="{{ file.url }}" style="max-width: 100%"></video>\
{% elif file.text %}<pre>{{ file.text }}</pre>{% endif %}\
<figcaption>{% if file.saved %}<a download="{{ file.name }}" href="{{ file.saved }}">{{ shown(file.name) }}</a>\
{% else %}{{ shown(file.name) }}{% endif %} ({{ shown(file.about) }})</figcaption></figure>
{% endfor %}</div>
"""


def result_html(result: Any) -> str:
    """Return an `ExecutionResult` as HTML: outcome, value (records as a table), output, error, calls, files.

    Files of up to 4 MiB in all are shown, or can be saved; texts are cut at 20,000 characters and tables at 50 rows.
    """
    rows, below = _table(result.value) if result.has_value else (None, "")
    return _template().render(
        result=result,
        table=rows,
        below=below,
        value="" if rows else _value(result.value),
        logs=_short(result.logs.text),
        error=_error(result),
        calls=[
            (call.name, call.line or "", call.status, f"{call.duration_s * 1000:.1f}", _cell(call.args))
            for call in result.calls[:MAX_ROWS]
        ],
        files=[*_shown_files(result.files)],
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    # `finalize` sees every value before it is escaped, whatever the template forgets.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(str(value)),
    )
    return environment.from_string(_TEMPLATE)


def _short(text: str) -> str:
    return cut_text(text, MAX_TEXT_CHARS)[0]


def _value(value: Any) -> str:
    return _short(value if isinstance(value, str) else json_text(value, indent=2))


def _cell(value: Any) -> str:
    return cut_text(value if isinstance(value, str) else json_text(value), MAX_CELL_CHARS)[0]


def _table(value: Any) -> tuple[tuple[list[str], list[list[str]]] | None, str]:
    """Return names and rows of an array, a table or a list of records, or None, and what is said below."""
    if isinstance(value, Array | Table):
        title, labels, cells = value.shown()
        return (labels, cells), title
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, dict) for each in value):
        return None, ""
    names = list(dict.fromkeys(name for row in value[:MAX_ROWS] for name in row))
    if not 0 < len(names) <= MAX_COLUMNS:
        return None, ""
    rows = [[_cell(row[name]) if name in row else "" for name in names] for row in value[:MAX_ROWS]]
    below = f"and {len(value) - MAX_ROWS} more rows" if len(value) > MAX_ROWS else ""
    return ([_cell(name) for name in names], rows), below


def _error(result: Any) -> str:
    if result.error is None:
        return ""
    where = f"line {result.error.line}: " if result.error.line else ""
    return _short(result.error.traceback or f"{where}{result.error.type}: {result.error.message}")


# Files


def _shown_files(files: Iterable[Any]) -> Iterator[dict[str, str]]:
    """Yield what is shown of each `OutputFile`. A browser shows what has a `kind`; what it does not know, it saves."""
    room = MAX_SHOWN_BYTES
    for each in files:
        shown, data = {"name": each.name, "about": each.problem or f"{each.media_type}, {each.size} bytes"}, each.data
        if data is not None and len(data) <= room:
            room -= len(data)
            packed = base64.b64encode(data).decode("ascii")
            if media_type := _media_type(data):
                shown |= {"kind": media_type.partition("/")[0], "url": f"data:{media_type};base64,{packed}"}
            else:
                saved = f"data:application/octet-stream;base64,{packed}"
                shown |= {"saved": saved, "text": _text_beginning(data)}
        yield dict.fromkeys(("kind", "url", "saved", "text"), "") | shown


def _media_type(data: bytes) -> str:
    """Return the media type of a picture, sound or film, or an empty text."""
    if picture := picture_type(data):
        return picture
    for start, first, then, second, media_type in SIGNATURES:
        if data.startswith(first, start) and data.startswith(second, then):
            return media_type
    # As an image, an SVG runs no script and loads nothing.
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    is_svg = head.startswith(b"<svg") or (head.startswith((b"<?xml", b"<!DOCTYPE svg")) and b"<svg" in head)
    return "image/svg+xml" if is_svg else ""


def _text_beginning(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in text else cut_text(text, MAX_FILE_CHARS)[0]
