"""MIME bundles of what a cell shows, of which a browser runs nothing and loads nothing.

A front end trusts what the cells of its user show: it runs the scripts of their HTML, and such a script may start a
kernel without a sandbox. An address in it reaches the network, which the sandbox has none of. So each kind of output is
made of what is known to be harmless (`harmless.toml`): HTML by nh3, formulas by their commands, charts by the names of
plotly's schema. A drawing is a picture, in which a browser runs and loads nothing. Markdown arrives as HTML: it is
rendered in the sandbox.

All of it takes a time that is linear in the size of the output.
"""

from __future__ import annotations

import base64
import html
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

import nh3

from toolcell.support.text import cut_text, for_terminal

_LISTS: Final = tomllib.loads(files(__package__).joinpath("harmless.toml").read_text("utf-8"))
HARMLESS: Final[Mapping[str, frozenset[str]]] = {name: frozenset(words.split()) for name, words in _LISTS.items()}
TYPES: Final = HARMLESS["traces"] | HARMLESS["types"]

_ADDRESSES: Final = {
    ("a", "href"): re.compile(r"(?:https?://|mailto:)\S*"),
    ("img", "src"): re.compile(r"data:image/(?:png|jpeg|gif|webp|svg\+xml);base64,[A-Za-z0-9+/=\s]*"),
}

MOST_TAGS: Final = 50_000
MOST_REFERENCES: Final = 2000
"""Such as `&lt;`, in one text."""
DEEPEST: Final = 200
SHORT_CHARS: Final = 4096
"""nh3 takes longer, the more references are in one text and the deeper elements are nested. In so little, any number is
well."""
MOST_LINES_CHARS: Final = 200_000

_TAG: Final = re.compile(
    r"""<!--[^<>]*+(?<=--)>|<!doctype[^<>]*+>|<(/?)([a-z][^\s/<>"']*+)(?:[^<>"']|"[^"<]*"|'[^'<]*'){0,2000}+>""",
    re.IGNORECASE,
)
_MARKUP: Final = re.compile(r"<[a-z/!?]", re.IGNORECASE)
_WITHOUT_END: Final = frozenset({"br", "hr", "img"})

FRAME: Final = (
    '<iframe sandbox="" style="width: 100%; height: 240px; resize: vertical; border: 0" srcdoc="{0}"></iframe>'
)
RULES: Final = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
)

_COMMAND: Final = re.compile(r"\\([a-z]+)", re.IGNORECASE)
BREAK: Final = "\u2060"
"""A word joiner. It has no width, and what it stands in is no command and no tag."""

_COLOUR: Final = re.compile(r"(\x1b\[[0-9;]*m)")
_TAG_START: Final = re.compile(
    r"<(?![\s\d<>=\-+*'\"_.,:;()\[\]{}|]|$|(?:module|lambda|listcomp|genexpr|dictcomp|setcomp|locals|string|stdin)>)"
)
"""The beginning of what may be a tag. Names of Python's own, such as `<module>`, are none that a browser knows."""
_PLACE: Final = re.compile(r"File(?=\s)|Cell(?=\s*+In)|Input(?=\s)")
"""Words of the lines that say where an exception comes from."""
_OWN_PLACE: Final = re.compile(r"\s*(?:File [~/<]|Cell In\[\d+\], line \d)")

_NUMBERED: Final = re.compile(r"\b(xaxis|yaxis|scene|polar|ternary|smith|coloraxis|legend)\d{1,4}\Z")

NOT_SHOWN: Final = "<an output of {0}, which this kernel does not show>"


def safe_bundle(data: Mapping[str, Any]) -> dict[str, Any]:
    forms: dict[str, Any] = {}
    for mime, form in data.items():
        shown_as, show = FORMS.get(mime, (mime, lambda _: None))
        if (shown := show(form)) is not None:
            forms.setdefault(shown_as, shown)
    if not forms and data:
        forms["text/plain"] = NOT_SHOWN.format(", ".join(sorted(map(str, data)))[:200])
    return forms


def safe_metadata(metadata: object) -> dict[str, Any]:
    """Return what of the metadata says how large a picture is. Other entries are orders to the front end."""
    if not isinstance(metadata, Mapping):
        return {}
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        if key in ("width", "height") and type(value) in (int, float) and math.isfinite(value):
            found[key] = value
        elif key in FORMS and isinstance(value, Mapping) and (inner := safe_metadata(value)):
            found[key] = inner
    return found


def safe_lines(text: str) -> str:
    """Return a traceback, a name or a message: text and colours.

    Some front ends turn the places that a traceback names into links, and take the rest of it for HTML.
    """
    pieces = _COLOUR.split(cut_text(text, MOST_LINES_CHARS)[0])
    text = "".join(each if each.startswith("\x1b[") else for_terminal(each) for each in pieces)
    return "\n".join(map(_safe_line, _TAG_START.sub(f"<{BREAK}", text).split("\n")))


def _safe_line(line: str) -> str:
    plain = _COLOUR.sub("", line)
    if _PLACE.search(plain) is None:
        return line
    if _OWN_PLACE.match(plain) is None:
        line = _PLACE.sub(lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", plain)
    return line.replace("'", "\u2019")  # it would end the address of the link


def _text(form: object) -> str | None:
    return form if isinstance(form, str) else None


def _picture(form: object) -> str | None:
    try:
        data = base64.b64decode("".join(form.split()), validate=True) if isinstance(form, str) else b""
    except ValueError:
        return None
    return base64.b64encode(data).decode() or None


def _drawing(form: object) -> str | None:
    if not isinstance(form, str):
        return None
    packed = base64.b64encode(form.encode("utf-8", "replace")).decode()
    return f'<img alt="" src="data:image/svg+xml;base64,{packed}">'


def _formula(form: object) -> str | None:
    """Return a formula of known commands. A front end may take it for Markdown, of which nothing is left in it."""
    if not isinstance(form, str) or any(name not in HARMLESS["commands"] for name in _COMMAND.findall(form)):
        return None
    for sign, instead in (("<", r"\lt "), ("`", "'"), ("~~", "~ ~"), ("![", "! ["), ("](", "] ("), ("]:", "] :")):
        form = form.replace(sign, instead)
    return form


def _html(form: object) -> str | None:
    """Return HTML of known elements; with the page's styles, in a frame without scripts and network."""
    if not isinstance(form, str) or not _is_simple(form):
        return None
    if "<style" in form and ".dataframe" not in form:
        return FRAME.format(html.escape(RULES + PAGE.clean(form)))
    return _without_commands(CELL.clean(form)).strip() or None


def _without_commands(text: str) -> str:
    """Break the commands of formulas that are not known: a front end typesets what is between dollars."""
    if not any(sign in text for sign in ("$", r"\(", r"\[", r"\begin")):
        return text
    return _COMMAND.sub(lambda found: found[0] if found[1] in HARMLESS["commands"] else f"\\{BREAK}{found[1]}", text)


def _filter(element: str, name: str, value: str) -> str | None:
    if name not in ("href", "src"):
        return value
    address = _ADDRESSES.get((element, name))
    return value if address is not None and address.fullmatch(value.strip()) else None


def _is_simple(text: str) -> bool:
    """Return whether HTML is short, or has few references, and elements closed in order and not nested deeply."""
    if len(text) <= SHORT_CHARS:
        return True
    if text.count("<") > MOST_TAGS or any(piece.count("&") > MOST_REFERENCES for piece in text.split("<")):
        return False
    tags = [(found[1], (found[2] or "br").lower()) for found in _TAG.finditer(text)]
    if len(tags) != len(_MARKUP.findall(text)):
        return False
    opened: list[str] = []
    for end, name in tags:
        if not end and name not in _WITHOUT_END:
            opened.append(name)
        elif opened and opened[-1] == name:
            opened.pop()
        if len(opened) > DEEPEST:
            return False
    return True


def _chart(form: object) -> Any:
    """Return a chart of plotly with what its schema has for charts that load nothing."""
    match form:
        case {"data": [*traces]} if all(
            isinstance(each, dict) and str(each.get("type", "scatter")) in HARMLESS["traces"] for each in traces
        ):
            return _part_of_chart(form)
    return None


def _part_of_chart(part: object, key: str = "") -> Any:
    match part:
        case dict():
            return {name: _part_of_chart(value, name) for name, value in part.items() if _is_of_chart(name)}
        case [str(), *_] if key in ("args", "args2"):  # of a button: the name of what it sets
            return []
        case list():
            return [_part_of_chart(each, key) for each in part]
        case str() if key.endswith("source") or (key.endswith("type") and part not in TYPES):
            return ""
        case str():
            return _label(part)
        case _:
            return part


def _is_of_chart(name: str) -> bool:
    """Return whether a name is one of plotly's schema, or a path of such names."""
    return all(_NUMBERED.sub(r"\1", each) in HARMLESS["chart"] for each in name.split("."))


def _label(text: str) -> str:
    if "<" in text:
        text = LABEL.clean(text) if _is_simple(text) else text.replace("<", "&lt;")
    return _without_commands(text)


def _cleaner(*more: str) -> nh3.Cleaner:
    """`more`: elements of a page of its own, in which classes and all styles are harmless, too."""
    return nh3.Cleaner(
        tags={*HARMLESS["elements"], *more},
        clean_content_tags={"script", "style", "title", "template", "noscript"} - {*more},
        attributes={"*": {*HARMLESS["attributes"], *(("class", "id") if more else ())}},
        allowed_classes=None if more else {"table": {"dataframe"}},
        filter_style_properties=None if more else {*HARMLESS["styles"]},
        attribute_filter=_filter,
        url_schemes={"http", "https", "mailto", "data"},
        url_relative="deny",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )


CELL: Final = _cleaner()
PAGE: Final = _cleaner("style")
LABEL: Final = nh3.Cleaner(tags={*HARMLESS["labels"]}, attributes={}, link_rel=None)

FORMS: Final[Mapping[str, tuple[str, Callable[[object], Any]]]] = {
    "text/plain": ("text/plain", _text),
    "text/html": ("text/html", _html),
    "text/latex": ("text/latex", _formula),
    "image/png": ("image/png", _picture),
    "image/jpeg": ("image/jpeg", _picture),
    "image/gif": ("image/gif", _picture),
    "image/webp": ("image/webp", _picture),
    "image/svg+xml": ("text/html", _drawing),
    "application/json": ("application/json", lambda form: form),
    "application/vnd.plotly.v1+json": ("application/vnd.plotly.v1+json", _chart),
}
"""By media type: as which type it is shown, and what makes it safe. Other types run code in a front end, or may."""
