"""MIME bundles of what a cell shows, made safe for a browser: text, pictures, data of known kinds, and HTML that runs
nothing and loads nothing.

A front end trusts what the cells of its user show: it runs the scripts of their HTML, and such a script may start a
kernel without a sandbox. An address in it reaches the network, which the sandbox has none of. So HTML that is more than
the plain elements and attributes below goes into a frame that runs and loads nothing.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from typing import Any, Final

PLAIN: Final = frozenset({"text/plain", "image/png", "image/jpeg", "image/gif", "image/webp"})
"""Media types whose texts are shown as they are. Others run code in the browser, or may in one of its extensions."""

PLOTLY: Final = "application/vnd.plotly.v1+json"
PLOTLY_SERVER: Final = "https://plot.ly"
"""Named in each chart; nothing is sent there."""

ELEMENTS: Final = re.compile(
    r"a|abbr|b|blockquote|br|caption|center|code|col|colgroup|dd|del|details|div|dl|dt|em|font|h[1-6]|hr|i|img|ins|kbd|"
    r"li|mark|meter|ol|p|pre|progress|q|s|samp|small|span|strike|strong|sub|summary|sup|table|tbody|td|tfoot|th|thead|tr|tt|u|ul|var"
)
ATTRIBUTES: Final = re.compile(
    r"align|alt|bgcolor|border|cellpadding|cellspacing|class|color|colspan|dir|height|id|lang|max|min|open|role|rowspan|scope|"
    r"size|span|start|title|valign|value|width"
)

_ATTRIBUTE: Final = r"""([a-z][a-z0-9_-]*)(?:\s*=\s*("[^"<>]*"|'[^'<>]*'|[a-z0-9_.#%-]+))?"""
_TAG: Final = re.compile(rf"<(/?)([a-z][a-z0-9]*)((?:\s+{_ATTRIBUTE})*)\s*/?>", re.IGNORECASE)
_ATTRIBUTES: Final = re.compile(rf"\s+{_ATTRIBUTE}", re.IGNORECASE)
_STYLE: Final = re.compile(r"<style(?: scoped(?:=\"\")?| type=\"text/css\")*>([^<]*)</style>", re.IGNORECASE)
_UNFIT: Final = re.compile(
    r"url\s*\(|image|src\s*\(|cross-fade|expression|behavior|binding|//|[\\@&]|"
    r"position\s*:|z-index|transform|translate|scale|shadow|outline|filter|calc|(?<![\w-])-\s*[\d.]",
    re.IGNORECASE,
)
"""In a style: what may load something, hide that it does, or cover the page."""

_OF_FRONT_END: Final = re.compile(r"\b(?:jp|lm|p|bp\d*|monaco|codicon)-", re.IGNORECASE)
"""In a class or an id: what a front end styles as a part of its own, such as a dialog over the page."""

_LATEX_UNFIT: Final = re.compile(
    r"\\(?:href|url|style|class|cssId|data|html\w*|require|includegraphics|def|let)\b|\\\w*command\b"
)
"""In a formula: what loads something, runs something, or gives such a command another name."""

_PICTURE: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp|svg\+xml);base64,[a-z0-9+/=\s]*", re.IGNORECASE)
_LINK: Final = re.compile(r"(?:https?://|#)[^\s\"'<>]*", re.IGNORECASE)

_SVG_UNFIT: Final = re.compile(
    r"<!ENTITY|<\s*(?:\w+:)?script|foreignObject|\son\w+\s*=|javascript:|@import|&#|"
    r"href\s*=\s*+[\"']?+\s*+(?!#|data:image/(?:png|jpeg);|[\"'])|url\(\s*+[\"']?+\s*+(?!#|[\"'])",
    re.IGNORECASE,
)
"""In a drawing: what runs or loads something where a program puts it into its page, or hides that it does."""

_ADDRESSED: Final = frozenset({"source", "style", "geojson", "topojsonURL", "plotlyServerURL", "tiles", "url", "src"})
"""Keys of a chart whose texts plotly loads, or sends the chart to."""
_CHART_UNFIT: Final = re.compile(r"<[^>]*\bstyle\b[^>]*(?:url|image|src|[\\@&])", re.IGNORECASE)

FRAME: Final = (
    '<iframe sandbox="" style="width: 100%; height: 240px; resize: vertical; border: 0" srcdoc="{0}"></iframe>'
    "<p>This output is shown without its scripts, and without what it would load.</p>"
)
RULES: Final = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    'img-src data:; media-src data:; font-src data:">'
)


def safe_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the forms of a value that a front end may show."""
    forms: dict[str, Any] = {}
    for mime, form in data.items():
        match mime, form:
            case "text/html", str():
                forms[mime] = form if is_plain_html(form) else FRAME.format(html.escape(RULES + form))
            case ("text/markdown", str()) if not _LATEX_UNFIT.search(html.unescape(form)):
                forms[mime] = plain_markdown(form)
            case ("text/latex", str()) if not _LATEX_UNFIT.search(form):
                forms[mime] = form
            case ("image/svg+xml", str()) if not _SVG_UNFIT.search(form):
                forms[mime] = form
            case "application/json", _:
                forms[mime] = form
            case (str(chart), dict()) if chart == PLOTLY and is_plain_chart(form):
                forms[mime] = form
            case (_, str()) if mime in PLAIN:
                forms[mime] = form
    if not forms and data:
        forms["text/plain"] = (
            f"<an output of {', '.join(sorted(map(str, data)))[:200]}, which this kernel does not show>"
        )
    return forms


def safe_metadata(metadata: object) -> dict[str, Any]:
    """Return what of the metadata says how large a picture is. Other entries are orders to the front end."""
    if not isinstance(metadata, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in ("width", "height") and type(value) in (int, float) and math.isfinite(value):
            found[key] = value
        elif isinstance(value, Mapping) and (inner := safe_metadata(value)):
            found[key] = inner
    return found


def is_plain_html(text: str) -> bool:
    """Return whether HTML consists of plain elements with plain attributes, and of formulas that load nothing.

    Every `<` must begin such an element, so a browser cannot read it in another way.
    """
    if _LATEX_UNFIT.search(html.unescape(text)):  # a front end typesets what is between dollars
        return False
    end = 0
    while (start := text.find("<", end)) >= 0:
        if (style := _STYLE.match(text, start)) is not None:
            if _UNFIT.search(style[1]) or not _is_of_table(style[1]):
                return False
            end = style.end()
            continue
        tag = _TAG.match(text, start)
        if (
            tag is None
            or ELEMENTS.fullmatch(tag[2].lower()) is None
            or not all(map(_is_plain, _ATTRIBUTES.finditer(tag[3])))
        ):
            return False
        end = tag.end()
    return True


def _is_of_table(style: str) -> bool:
    """Return whether each rule of a style is about a table of pandas or polars, and so changes nothing else."""
    *rules, rest = style.split("}")
    if rest.strip() or any(sign in style for sign in ('"', "'", "/*")):
        return False
    for rule in rules:
        head, _, body = rule.partition("{")
        if "{" in body or not all(each.strip().startswith((".dataframe", "#T_")) for each in head.split(",")):
            return False
    return True


def _is_plain(found: re.Match[str]) -> bool:
    name, value = found[1].lower(), html.unescape((found[2] or "").strip("\"'")).strip()
    match name:
        case "src":
            return _PICTURE.fullmatch(value) is not None
        case "href":
            return _LINK.fullmatch(value) is not None
        case "style":
            return not _UNFIT.search(value)
        case "class" | "id":
            return not _OF_FRONT_END.search(value)
        case _:
            return ATTRIBUTES.fullmatch(name) is not None


def is_plain_chart(chart: object, key: str = "") -> bool:
    """Return whether plotly draws a chart from what is in it, and loads nothing."""
    match chart:
        case dict():
            return all(is_plain_chart(value, str(name)) for name, value in chart.items())
        case list():
            return all(is_plain_chart(each, key) for each in chart)
        case str() if key in _ADDRESSED:
            return _PICTURE.fullmatch(chart) is not None or chart == PLOTLY_SERVER or not re.search(r"[:/\\]", chart)
        case str():
            return not _CHART_UNFIT.search(chart)
        case _:
            return True


def plain_markdown(text: str) -> str:
    """Return Markdown without elements that are not plain, pictures from elsewhere, and addresses that run code."""
    if not is_plain_html(re.sub(r"<(?=[^a-z/!?])", "", text, flags=re.IGNORECASE)):
        text = text.replace("<", "&lt;")
    text = re.sub(r"!\[(?![^\]]*\]\(data:image/)", r"\\![", text)
    return re.sub(r"(javascript|vbscript|data)(?=\s*:(?!image/))", r"\1&#8203;", text, flags=re.IGNORECASE)
