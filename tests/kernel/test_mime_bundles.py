"""What cells show in a browser runs nothing there and loads nothing: a front end trusts it, and the sandbox ends there."""

from __future__ import annotations

import pytest

from toolcell.kernel.mime_bundles import FRAME, plain_markdown, safe_bundle, safe_metadata

PANDAS = """<div>
<style scoped>
    .dataframe tbody tr th:only-of-type {
        vertical-align: middle;
    }
    .dataframe thead th { text-align: right; }
</style>
<table border="1" class="dataframe">
  <thead><tr style="text-align: right;"><th></th><th>a &lt; b</th></tr></thead>
  <tbody><tr><th>0</th><td>1</td></tr></tbody>
</table>
</div>"""
PIXEL = "data:image/png;base64,iVBORw0KGgo="

PLAIN = [
    PANDAS,
    "",
    "text with an &amp; and a > sign",
    f'<img src="{PIXEL}" width=10 alt="a dot">',
    '<a href="https://example.com/x?a=1&amp;b=2">link</a><br/><hr>',
    "<progress style='width:60ex' max='3' value='0'></progress>",
    "<b style='color: red; background-color: #fff'>x</b>",
    '<style type="text/css">\n#T_a_row0_col0 { background-color: yellow; }\n</style>\n<table id="T_a"></table>',
]
HOSTILE = [
    "<script>alert(1)</script>",
    "<SCRIPT src=//evil/x.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    "<img src='https://evil/?leak'>",
    "<img srcset='https://evil/ 1x'>",
    '<img src="data:text/html;base64,AAAA">',
    '<a href="javascript:alert(1)">x</a>',
    '<a href="&#106;avascript:alert(1)">x</a>',
    '<a href="java\nscript:alert(1)">x</a>',
    '<a href="data:text/html,<script>1</script>">x</a>',
    "<a<style></style> href=x onclick=alert(1)>",
    "<div onclick=alert(1)>",
    "<div style='background: url(https://evil/)'>",
    "<div style='background: u&#114;l(https://evil/)'>",
    "<div style='background: image-set(\"https://evil/\" 1x)'>",
    "<div style='background: \\75rl(https://evil/)'>",
    "<div style='position: fixed; top: 0'>",
    "<style>@import 'https://evil/x.css';</style>",
    "<style>b { background: url(https://evil/) }</style>",
    "<style>b {}</style x><img src=x onerror=alert(1)>",
    "<style><!--</style><img src=x onerror=alert(1)>-->",
    "<svg onload=alert(1)>",
    "<math><mtext></math><img src=x onerror=alert(1)>",
    "<iframe src=https://evil/></iframe>",
    "<form action=https://evil/><input></form>",
    "<meta http-equiv=refresh content='0;url=https://evil/'>",
    "<link rel=stylesheet href=https://evil/x.css>",
    "<base href=https://evil/>",
    "<object data=https://evil/></object>",
    "<!-- --><b>x</b>",
    "<![CDATA[<img src=x onerror=alert(1)>]]>",
    "<b title='<img src=x onerror=alert(1)>'>",
    '<b title="a"onclick="alert(1)">',
    "<b/onclick=alert(1)>",
    "<b\x00onclick=alert(1)>",
    "< script>alert(1)</ script>",
    "<textarea></textarea><script>1</script>",
    "<style>body { display: none }</style>",
    "<style>.dataframe {}} body { display: none }</style>",
    "<style>.dataframe/*{*/, body { display: none }</style>",
    "<style>.dataframe, body { display: none }</style>",
    "<style>.dataframe { & { } } body { }</style>",
    "<div class='x jp-Dialog'>covers the page</div>",
    "<div style='margin-top: -500px; background: white'>covers the question above</div>",
    "<div style='margin: 0 -5em'>x</div>",
    "<div style='margin: calc(0px - 5em)'>x</div>",
    "<div style='transform: scale(50)'>x</div>",
    "<div style='scale: 50'>x</div>",
    "<div style='box-shadow: 0 0 0 100vmax white'>x</div>",
    "<style>.dataframe { margin: -.5em }</style>",
    "<b>$\\href{javascript:alert(1)}{x}$</b>",
    "<b>$&#92;style{background: none}{x}$</b>",
    "<b>$\\newcommand{\\h}{x}$</b>",
    "<template shadowrootmode=open><script>1</script></template>",
]


CHART = {
    "data": [{"type": "bar", "x": ["https://example.com/a"], "text": "<b>a</b>", "marker": {"line": {"width": 1}}}],
    "layout": {"images": [{"source": PIXEL}], "mapbox": {"style": "light"}},
    "config": {"plotlyServerURL": "https://plot.ly"},
}


@pytest.mark.parametrize("form", PLAIN)
def test_plain_html_is_shown_as_it_is(form: str) -> None:
    assert safe_bundle({"text/html": form}) == {"text/html": form}


@pytest.mark.parametrize("form", HOSTILE)
def test_other_html_is_in_a_frame_that_runs_and_loads_nothing(form: str) -> None:
    (framed,) = safe_bundle({"text/html": form}).values()

    head, _, rest = FRAME.partition("{0}")
    assert framed.startswith(head) and framed.endswith(rest)
    assert 'sandbox=""' in head
    inner = framed.removeprefix(head).removesuffix(rest)
    assert not set(inner) & set("<>\"'"), "nothing in it ends the attribute"
    assert "default-src &#x27;none&#x27;" in inner


@pytest.mark.parametrize("form", HOSTILE)
def test_markdown_has_no_such_elements(form: str) -> None:
    assert "<" not in plain_markdown(f"# Title\n\n{form}")


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("# a < b\n\n*x* <b>y</b> [l](https://example.com)", "# a < b\n\n*x* <b>y</b> [l](https://example.com)"),
        ("![p](https://evil/?leak)", "\\![p](https://evil/?leak)"),
        ("![p][r]\n\n[r]: https://evil/", "\\![p][r]\n\n[r]: https://evil/"),
        (f"![p]({PIXEL})", f"![p]({PIXEL})"),
        ("[x](javascript:alert(1))", "[x](javascript&#8203;:alert(1))"),
        ("[x](JavaScript :alert(1))", "[x](JavaScript&#8203; :alert(1))"),
    ],
)
def test_markdown_keeps_what_is_plain(form: str, expected: str) -> None:
    assert plain_markdown(form) == expected


def test_media_types_that_run_code_are_not_shown_and_the_others_are() -> None:
    data = {
        "text/plain": "text",
        "text/latex": "$x$",
        "image/png": "iVBORw0KGgo=",
        "application/vnd.plotly.v1+json": CHART,
        "application/javascript": "alert(1)",
        "application/vnd.bokehjs_exec.v0+json": "",
        "application/vnd.jupyter.widget-view+json": {},
        "application/geo+json": {},
        "text/html": 5,
        "image/jpeg": ["not a text"],
    }
    assert list(safe_bundle(data)) == list(data)[:4]
    assert safe_bundle({"application/javascript": "alert(1)"}) == {
        "text/plain": "<an output of application/javascript, which this kernel does not show>"
    }


@pytest.mark.parametrize(
    "hostile",
    [
        "<svg><script>1</script></svg>",
        "<svg><svg:script>1</svg:script></svg>",
        "<svg onload='1'/>",
        "<!DOCTYPE a [<!ENTITY b 'c'>]><svg/>",
        "<svg><a xlink:href='javascript:alert(1)'/></svg>",
        "<svg><a href='&#106;avascript:alert(1)'/></svg>",
        "<svg><image href='https://evil/?leak'/></svg>",
        '<svg><use xlink:href="//evil/x.svg#a"/></svg>',
        "<svg><style>@import 'https://evil/x.css';</style></svg>",
        "<svg><rect style='fill: url(https://evil/#a)'/></svg>",
        "<svg><foreignObject/></svg>",
    ],
)
def test_a_drawing_that_runs_or_loads_something_is_not_shown(hostile: str) -> None:
    assert "image/svg+xml" not in safe_bundle({"image/svg+xml": hostile})


def test_other_drawings_are_shown() -> None:
    drawing = (
        "<svg xmlns='http://www.w3.org/2000/svg'><use xlink:href='#a'/><path style='clip-path: url(#b)' d='M0'/></svg>"
    )
    assert safe_bundle({"image/svg+xml": drawing}) == {"image/svg+xml": drawing}


@pytest.mark.parametrize(
    "hostile",
    [
        {"layout": {"images": [{"source": "https://evil/?leak"}]}},
        {"layout": {"images": [{"source": "//evil/?leak"}]}},
        {"layout": {"template": {"layout": {"images": [{"source": "\thttps:evil"}]}}}},
        {"layout": {"map": {"style": "https://evil/style.json"}}},
        {"layout": {"mapbox": {"layers": [{"source": ["https://evil/{x}"]}]}}},
        {"data": [{"type": "choropleth", "geojson": "https://evil/?leak"}]},
        {"data": [{"text": "<span style='mask: url(https://evil/)'>x</span>"}]},
        {"config": {"plotlyServerURL": "https://evil/"}},
        {"config": {"topojsonURL": "https://evil/"}},
    ],
)
def test_a_chart_that_loads_something_is_not_shown(hostile: dict[str, object]) -> None:
    assert safe_bundle({"application/vnd.plotly.v1+json": hostile, "text/plain": "chart"}) == {"text/plain": "chart"}


@pytest.mark.parametrize("mime", ["text/latex", "text/markdown"])
@pytest.mark.parametrize(
    "formula", ["$\\href{javascript:alert(1)}{x}$", "$\\style{x}{y}$", "$\\require{html}$", "$\\renewcommand\\x{y}$"]
)
def test_a_formula_with_commands_for_a_page_is_not_shown(mime: str, formula: str) -> None:
    assert safe_bundle({mime: formula, "text/plain": "formula"}) == {"text/plain": "formula"}


@pytest.mark.parametrize("begin", ["<svg a='href=", "<svg style='fill:url(", "<", "<svg on"])
def test_a_drawing_of_many_blanks_is_judged_at_once(begin: str) -> None:
    drawing = begin + " " * (1 << 20)
    assert safe_bundle({"image/svg+xml": drawing, "text/plain": ""})["text/plain"] == ""


def test_metadata_are_sizes_only() -> None:
    given = {
        "image/png": {"width": 10, "height": 5.5, "x": 1},
        "image/gif": {"width": float("inf")},
        "text/html": {"isolated": True},
        "width": True,
        "y": 2,
    }
    assert safe_metadata(given) == {"image/png": {"width": 10, "height": 5.5}}
    assert safe_metadata([1]) == {}
