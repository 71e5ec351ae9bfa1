"""What cells show in a browser runs nothing there and loads nothing: a front end trusts it, and the sandbox ends there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly  # type: ignore[import-untyped]
from plotly.basedatatypes import BaseFigure  # type: ignore[import-untyped]

from rows import each_row
from toolcell.kernel.mime_bundles import FRAME, HARMLESS, MOST_TAGS, safe_bundle, safe_lines, safe_metadata

from .hostile_outputs import CHARTS, EVIL, LATEX

SCHEMA = Path(plotly.__file__).parent / "validators" / "_validators.json"
PLOTLY = "application/vnd.plotly.v1+json"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@each_row(
    ("form", "expected"),
    [
        ("a &amp; b > c", "a &amp; b &gt; c"),
        (f'<img src="{PIXEL}" width=10 alt="a dot">', f'<img src="{PIXEL}" width="10" alt="a dot">'),
        ("<progress style='width:60ex' max='3' value='0'></progress>", '<progress style="width:60ex" max="3" value="0"></progress>'),
        ("<b style='color: red; margin-top: -9em'>x</b>", '<b style="color:red">x</b>'),
        ("<table class='dataframe jp-Dialog'><tr><td>1</td></tr></table>", '<table class="dataframe"><tbody><tr><td>1</td></tr></tbody></table>'),
        ("<style scoped>.dataframe tbody {}</style><b>x</b>", "<b>x</b>"),
        ("$\\alpha \\href{x}{y}$ C:\\x", "$\\alpha \\\u2060href{x}{y}$ C:\\\u2060x"),
        ("C:\\x", "C:\\x"),
    ],
)  # fmt: skip
def test_html_keeps_what_is_harmless(form: str, expected: str) -> None:
    assert safe_bundle({"text/html": form}) == {"text/html": expected}


def test_a_link_opens_another_page_by_a_click_and_only_by_the_schemes_of_the_web() -> None:
    given = "".join(
        f'<a href="{address}">x</a>'
        for address in ["https://a.example/?b=1&amp;c", "mailto:a@b.example", "javascript:x", "JAVA\tscript:x", "//a", "x", "data:,x"]
    )  # fmt: skip
    shown = safe_bundle({"text/html": given})["text/html"]
    assert shown.count("<a ") == shown.count('target="_blank"') == shown.count('rel="noopener noreferrer"') == 7
    assert shown.count("href") == 2 and "https://a.example/?b=1&amp;c" in shown and "mailto:a@b.example" in shown


def test_html_with_styles_of_its_own_is_in_a_frame_without_scripts_and_network() -> None:
    (framed,) = safe_bundle({"text/html": "<style>#T_a { color: red }</style><b id=T_a onclick=x>x</b>"}).values()

    head, _, rest = FRAME.partition("{0}")
    assert framed.startswith(head) and framed.endswith(rest) and 'sandbox=""' in head
    inner = framed.removeprefix(head).removesuffix(rest)
    assert not set(inner) & set("<>\"'"), "nothing in it ends the attribute"
    assert "default-src &#x27;none&#x27;" in inner and "color: red" in inner and "onclick" not in inner


def test_each_media_type_is_made_safe_in_its_own_way_and_no_other_is_shown() -> None:
    data = {
        "text/plain": "text",
        "text/latex": "$\\frac{x}{2}<1$",
        "image/png": "iVBORw0K\nGgo=",
        "image/gif": "not base64!",
        "image/svg+xml": "<svg onload='x'/>",
        "text/markdown": "# never as it comes",
        "application/json": {"a": [1]},
        "application/javascript": "alert(1)",
        "application/vnd.bokehjs_exec.v0+json": "",
        "application/vnd.jupyter.widget-view+json": {},
        "application/vnd.vegalite.v5+json": {},
        "application/geo+json": {},
        "image/jpeg": ["not a text"],
    }
    assert safe_bundle(data) == {
        "text/plain": "text",
        "text/latex": "$\\frac{x}{2}\\lt 1$",
        "image/png": "iVBORw0KGgo=",
        "text/html": '<img alt="" src="data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9J3gnLz4=">',
        "application/json": {"a": [1]},
    }
    assert safe_bundle({"application/javascript": "alert(1)"}) == {
        "text/plain": "<an output of application/javascript, which this kernel does not show>"
    }


def test_formulas_of_sympy_are_shown_and_those_with_other_commands_are_not() -> None:
    plain = r"$\displaystyle \left[\begin{matrix}\sqrt{2} & \frac{\pi}{2}\\0 & \int\limits_{0}^{\infty} e^{- x^{2}}\, dx\end{matrix}\right]$"
    assert safe_bundle({"text/latex": plain}) == {"text/latex": plain}
    for hostile in LATEX:
        shown = safe_bundle({"text/latex": hostile})
        assert "text/latex" not in shown or not any(sign in shown["text/latex"] for sign in ("<", "`", "~~~", "](")), (
            hostile
        )


def everything_in(part: Any) -> list[tuple[str, object]]:
    if isinstance(part, dict):
        return [found for name, each in part.items() for found in [(name, each), *everything_in(each)]]
    return [found for each in part for found in everything_in(each)] if isinstance(part, list) else []


def test_a_chart_has_what_plotlys_schema_has_for_charts_that_load_nothing() -> None:
    import plotly.express as px  # type: ignore[import-untyped]

    figure: BaseFigure = px.scatter(x=[1, 2], y=[3, 4], animation_frame=["a", "b"], title="<b>a</b> < b")
    chart = figure.to_plotly_json() | {
        "config": {"plotlyServerURL": "https://plot.ly"},
        "frames": [{"name": "a", "data": []}],
    }
    chart = safe_bundle({PLOTLY: chart})[PLOTLY]
    assert chart["data"][0]["type"] == "scatter" and chart["layout"]["title"]["text"] == "<b>a</b> &lt; b"
    assert chart["layout"]["updatemenus"][0]["buttons"][0]["args"][0] is None and chart["frames"] == [
        {"name": "a", "data": []}
    ]
    for hostile in CHARTS:
        shown = safe_bundle({PLOTLY: hostile, "text/plain": "chart"})
        assert EVIL not in str(shown), hostile
        assert all(name in HARMLESS["chart"] or name[-1].isdigit() for name, _ in everything_in(shown.get(PLOTLY, {})))


def test_names_of_charts_are_of_plotlys_schema_and_none_is_of_a_map_or_an_address() -> None:
    schema = {part for path in json.loads(SCHEMA.read_text()) for part in path.split(".")}
    assert HARMLESS["traces"] <= schema
    assert not HARMLESS["chart"] & {
        "geo",
        "map",
        "mapbox",
        "images",
        "geojson",
        "topojsonURL",
        "plotlyServerURL",
        "meta",
        "accesstoken",
    }
    # Older versions of plotly have these, and wire formats.
    assert HARMLESS["chart"] - schema <= {"bdata", "dtype", "redraw", "fromcurrent", "titlefont", "titleside", "frame"}


def test_a_traceback_keeps_its_text_and_colours() -> None:
    plain = "\x1b[31mZeroDivisionError\x1b[39m: a < b <module>\nCell In[1], line 1\n  File ~/x.py:3, in f(a)\n\tif a <= 'b':"
    assert safe_lines(plain) == plain
    assert safe_lines("<a href=''>") == "<\u2060a href=''>" and safe_lines("\x1b]8;;x\x07") == "\\x1b]8;;x\\x07"


def test_metadata_are_sizes_only() -> None:
    given = {
        "image/png": {"width": 10, "height": 5.5, "x": 1},
        "image/gif": {"width": float("inf")},
        "text/html": {"isolated": True},
        "x": {"width": 1},
        "width": True,
        "y": 2,
    }
    assert safe_metadata(given) == {"image/png": {"width": 10, "height": 5.5}}
    assert safe_metadata([1]) == {}


PIECES = [
    "<div>", "<b>", "<a><b><i>", "<p>", "<b></b>", "<table><tr><td>1</td></tr></table>", "<div><table></div></table>",
    "<div title='</div>'></x>", "<svg><source>", "<!-- x></div>-->", "<style ", "<b a='", "<b a ", "<", "&", "&lt;", "![", "[a](",
    "\\", "$\\x", "\\begin{", "File ", "'", "\x1b[", "\x1b[0m", "\u0301",
]  # fmt: skip

SHOW: dict[str, Callable[[str], object]] = {
    "text/html": lambda text: safe_bundle({"text/html": text}),
    "text/latex": lambda text: safe_bundle({"text/latex": text}),
    "image/svg+xml": lambda text: safe_bundle({"image/svg+xml": text}),
    "image/png": lambda text: safe_bundle({"image/png": text}),
    PLOTLY: lambda text: safe_bundle({PLOTLY: {"data": [], "layout": {"title": text}}}),
    "error": safe_lines,
}


def test_the_time_for_an_output_grows_no_faster_than_the_output() -> None:
    slow = {
        (name, piece): seconds
        for name, show in SHOW.items()
        for piece in PIECES
        if (seconds := _least_of_three(show, piece * (100_000 // len(piece)))) > 0.5
    }
    assert not slow, "100,000 characters in a linear time take less than a fifth of a second"


def test_html_with_more_tags_than_are_cleaned_in_time_is_not_shown_as_html() -> None:
    most, more = "<b></b>" * (MOST_TAGS // 2), "<b></b>" * (MOST_TAGS // 2 + 1)

    assert [[*safe_bundle({"text/html": text, "text/plain": "b"})] for text in (most, more)] == [
        ["text/html", "text/plain"], ["text/plain"],
    ]  # fmt: skip


def _least_of_three(show: Callable[[str], object], text: str) -> float:
    least = float("inf")
    for _ in range(3):
        begin = time.process_time()
        show(text)
        least = min(least, time.process_time() - begin)
        if least < 0.2:
            break
    return least
