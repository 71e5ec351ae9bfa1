"""A run as one HTML file: whatever a script, a tool or a forger wrote is text in it, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from rows import each_row
from toolcell.audit.html import ShownRun
from toolcell.audit.query import Trust
from toolcell.audit.reader import RecordedCall, RecordedRun
from toolcell.cli import exits
from toolcell.tools import RunContext

PAYLOADS = (
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>",
    "\"><script>alert(1)</script>", "'><script>alert(1)</script>", "\" onmouseover=\"alert(1)", "' onmouseover='alert(1)",
    "`onmouseover=alert(1)", "</title><script>alert(1)</script>", "</style><script>alert(1)</script>", "</pre><script>alert(1)</script>",
    "</code></td></tr></table><h1>verified</h1>", "</textarea><script>alert(1)</script>", "<!--", "-->", "<!--><script>alert(1)</script>-->",
    "<![CDATA[", "]]>", "<!DOCTYPE html>", "<?xml version='1.0'?>", "<iframe src=javascript:alert(1)>", "<a href=javascript:alert(1)>x</a>",
    "javascript:alert(1)", "data:text/html,<script>alert(1)</script>", "<base href=//evil.example/>", "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<link rel=stylesheet href=//evil.example/x.css>", "<style>*{background:url(//evil.example)}</style>", "@import '//evil.example';", "expression(alert(1))",
    "<form action=//evil.example><input name=a>", "<object data=//evil.example>", "<embed src=//evil.example>", "<math><mtext></form><form><mglyph><svg><mtext><style><path id=\"</style><img onerror=alert(1) src>\">",
    "&lt;script&gt;alert(1)&lt;/script&gt;", "&#60;script&#62;", "&#x3c;script&#x3e;", "&amp;lt;script&amp;gt;", "{{ 7*7 }}", "{{ ''.__class__.__mro__ }}", "{% raw %}", "{# comment #}", "${7*7}", "<%= 7*7 %>",
    "+ADw-script+AD4-alert(1)+ADw-/script+AD4-", "\u0130<scr\u0131pt>alert(1)</scr\u0131pt>", "\uff1cscript\uff1ealert(1)\uff1c/script\uff1e", "<scr\x00ipt>alert(1)</scr\x00ipt>",
    "\u202etpircs<\u202c", "\ud800<script>", "\x1b]8;;http://evil.example\x07x", "<details open ontoggle=alert(1)>", "<rect onclick=alert(1)>", "'sha256-AAAA' 'unsafe-inline'; script-src *", "\u2028<script>alert(1)</script>",
)  # fmt: skip


class Structure(HTMLParser):
    """Everything of a page but its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Any] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)

    def handle_comment(self, data: str) -> None:
        self.found.append(("comment", data))

    def handle_decl(self, decl: str) -> None:
        self.found.append(("declaration", decl))

    def handle_pi(self, data: str) -> None:
        self.found.append(("instruction", data))

    def unknown_decl(self, data: str) -> None:
        self.found.append(("unknown", data))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def run_with(text: str) -> RecordedRun:
    """A run that has a text wherever a record can hold one."""
    start = {
        "source": f"{text}\n{text}",
        "sha256": text,
        "inputs": {text: text},
        "files": [[text, 1, text, None]],
        "who": {text: text, "user": text},
        "lint": text,
        "seed": 1,
        "clock": 1.0,
        "more": {text: text, "source_cut": {"why": text}},
    }
    end = {
        "outcome": text,
        "has_value": True,
        "value": [text, {text: text}],
        "value_sha256": text,
        "logs": [["stdout", text], ["stderr", text], [text, text]],
        "files": [[text, text, 1, text, None], [text, None, 1, None, text]],
        "error": {"type": text, "message": text, "line": 1, "trace": text, text: text},
        "usage": {text: text},
        "calls": [2, 0],
        "more": {text: text},
    }
    calls = (
        RecordedCall(1, text, None, text, text, 1, {text: text}, 5, 2, text, 6, 0.5, text, text, {"why": text, text: text}, {"message": text}),
        RecordedCall(2, text, 1, text, text, None, text, 7, 3, text, 8, 1e18, [text], None, {}, {"text": text, text: [text]}),
    )  # fmt: skip
    settings = {"limits": {text: text}, "policy": {text: text}, "isolation": {"backend": text, text: text}}
    return RecordedRun(text, text, 1, "code", 1, start, calls, 9, end, settings, {"definitions": [[text, text, {}]]})


def page_with(text: str, trust: str = Trust.VERIFIED) -> str:
    return ShownRun(run_with(text)).to_html(trust, log=text)


def test_there_are_fifty_payloads() -> None:
    assert len(set(PAYLOADS)) >= 50


@each_row("payload", PAYLOADS)
def test_hostile_text_in_every_field_changes_nothing_but_the_text(payload: str) -> None:
    page = page_with(payload)
    found = Structure(page)

    assert found.found == Structure(page_with("harmless")).found
    assert not {"\x00", "\x1b", "\u202e", "\u2028", "\ud800"} & set(page)
    page.encode("utf-8")


def test_every_field_is_shown() -> None:
    text = "".join(Structure(page_with("<planted>")).text)

    assert text.count("<planted>") >= 50
    assert "&lt;" not in text


def test_the_page_asks_nobody_for_anything_and_runs_nothing() -> None:
    page = page_with("x")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    tags = {each[0] for each in Structure(page).found if isinstance(each, tuple)}
    attributes = {
        name
        for each in Structure(page).found
        if isinstance(each, tuple) and isinstance(each[1], list)
        for name, _ in each[1]
    }

    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert page.index("charset") < page.index("<title>")
    assert not tags & {
        "script",
        "link",
        "img",
        "iframe",
        "a",
        "base",
        "form",
        "object",
        "embed",
        "audio",
        "video",
        "use",
        "image",
    }
    assert not attributes & {"src", "href", "style", "srcset", "action", "background"}
    assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in style and "@import" not in style and "@media print" in style


@each_row("trust", Trust)
def test_the_page_says_how_far_the_run_can_be_trusted(trust: str) -> None:
    kind = {Trust.VERIFIED: "good", Trust.BROKEN: "bad"}.get(Trust(trust), "warn")
    assert f'<strong class="{kind}">{trust}</strong>' in page_with("x", trust)


def test_calls_stand_beside_their_lines_and_on_a_timeline() -> None:
    page = page_with("x")
    first = re.search(r'<tr class="failed"><td class="number">1</td>.*?</tr>', page)

    assert first is not None and "1 x: x 500.000 ms" in first[0]
    bars = [tuple(map(int, each)) for each in re.findall(r'x="(\d+)" y="0" width="(\d+)"', page)]
    assert len(bars) == 2
    assert all(start >= 0 and start + width <= 1000 and width >= 2 for start, width in bars)


def test_the_command_writes_the_page(ledger: Ledger, tmp_path: Path) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, "a = '<b>'\nset_result(a)", context=RunContext(run_id="aaaa"), printed="<i>")
    file = tmp_path / "run.html"
    status, _, err = invoke("show", ledger.path, "aaaa", "--html", file)

    assert status == exits.OK and "run.html" in err
    page = file.read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page and "<b>" not in page and "unverified" in page
    assert invoke("show", ledger.path, "aaaa", "--html", tmp_path / "no" / "dir")[0] == exits.USAGE


def test_runs_without_a_script_an_end_or_calls_have_a_page() -> None:
    assert "No end is recorded" in ShownRun(RecordedRun("id", "c", 1, "calls", 5, {})).to_html(Trust.VERIFIED)
