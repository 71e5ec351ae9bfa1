"""A browser that shows outputs as JupyterLab, VS Code and the classic notebook do: whatever they have runs and loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import plotly  # type: ignore[import-untyped]
import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import BrowserContext, sync_playwright

from machine import CHROMIUM
from toolcell.kernel.mime_bundles import safe_bundle, safe_lines
from toolcell.results import ErrorInfo, ExecutionResult, Outcome
from toolcell_bridge.guest.notebook import rendered_markdown

from . import hostile_outputs as hostile

pytestmark = pytest.mark.browser

PLOTLY: Final = "application/vnd.plotly.v1+json"
NOT_SHOWN: Final = (
    "application/javascript", "text/javascript", "text/x-html", "text/vnd.mermaid", "application/vnd.vega.v5+json",
    "application/vnd.vegalite.v5+json", "application/vnd.bokehjs_exec.v0+json", "application/vdom.v1+json",
)  # fmt: skip
HOME: Final = "http://front.example/"
"""Where browsers look up the names of links before somebody clicks."""

FRONT_END = r"""
const place = () => document.body.appendChild(document.createElement('div'));
const run = scripts => { for (const script of scripts) {
    const made = document.createElement('script');
    for (const each of script.attributes) made.setAttribute(each.name, each.value);
    made.textContent = script.textContent;
    script.replaceWith(made);
} };
const insert = html => { const here = place(); here.innerHTML = html; run(here.querySelectorAll('script')); };
const fragment = html => { place().append(document.createRange().createContextualFragment(html)); };
const escaped = text => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');
const picture = (mime, data) => { const made = document.createElement('img'); place().append(made);
    made.src = `data:${mime};base64,${data}`; };
const typeset = text => { if (/\\(href|url|style|class|cssId|data|html\w*|require|includegraphics|mmlToken|bbox|unicode|def|let|csname|\w*color\w*|\w*command|Declare\w*)/.test(text))
    alert('formula ' + text); };
const typesetAll = () => { const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) if (!walk.currentNode.parentElement.closest('script, style, pre, code') &&
        /\$|\\\(|\\\[|\\begin/.test(walk.currentNode.data)) typeset(walk.currentNode.data); };
const colour = /\x1b\[[^m]*m/g;
const linked = text => {  // VS Code: places become links in HTML, by which the rest of a line is HTML, too
    text = text.replace(/\x1b\[4\dm/g, '');
    let path = '', first = '';
    const lines = text.split('\n').map(line => {
        let found = line.match(/File\s+(?:\x1b\[.+?m)?(.+):(\d+)/);
        if (found) { path = found[1].replace(colour, '').trim() + ':'; return line; }
        const cell = /((?:\x1b\[.+?m)*Cell(?:\x1b\[.+?m|\s)*In(?:\x1b\[.+?m|\s)*\[(\d+)\](?:\x1b\[.+?m|\s|,)+)(line (\d+)).*/;
        const input = /(Input\s+?(?:\x1b\[.+?m)(In\s*\[(\d+)\]))(.*)/;
        for (const [rule, address] of [[cell, 'vscode-notebook-cell:?execution_count=$2'], [input, 'vscode-notebook-cell:?execution_count=$3']]) {
            if (!rule.test(line)) continue;
            path = line.replace(rule, address).replace(colour, '').trim() + '&line=';
            const link = line.replace(rule, `<a href='${path}$4'>$3</a>`);
            first = first || link;
            return line.replace(rule, `$1${link}`);
        }
        found = line.match(/^((?:\x1b\[.+?m|\s|-|>)*)(\d+)(?:\x1b\[.+?m)*( .*)/);
        return found && path ? `${found[1]}<a href='${path}${found[2]}'>${found[2]}</a>${found[3]}` : line;
    });
    place().innerHTML = first;
    for (const piece of lines.join('\n').split(/\x1b\[[^m]*m/)) for (const line of piece.split('\n'))
        for (const html of line.match(/<a\s+(?:[^>]*?\s+)?href=(["'])(.*?)\1[^>]*?>.*?<\/a>/gi) || []) insert(html);
};
const autolinked = text => insert('<pre>' + escaped(text.replace(colour, '')).replace(/https?:\/\/[^\s"'<>]+/g, '<a href="$&">$&</a>') + '</pre>');
"""

WAYS: Final = {
    "JupyterLab": {"html": "insert", "text": "autolinked", "latex": "autolinked", "drawing": "picture", "error": "autolinked"},
    "VS Code": {"html": "insert", "text": "linked", "latex": "insert", "drawing": "insert", "error": "linked"},
    "classic": {"html": "fragment", "text": "autolinked", "latex": "autolinked", "drawing": "fragment", "error": "autolinked"},
}  # fmt: skip
"""By front end: the function that puts an output of each kind into its page."""


@dataclass
class Seen:
    """What outputs did."""

    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    handlers: list[str] = field(default_factory=list)
    """Attributes that run something at an event, and schemes of links that would."""


@dataclass
class Browser:
    """A browser whose log names each host that it looks up."""

    context: BrowserContext

    def show(self, calls: list[tuple[str, ...]], charts: list[Any]) -> Seen:
        """Call functions of the front end in a new page, one after the other, and draw charts."""
        seen, page = Seen(), self.context.new_page()
        page.set_default_timeout(120_000)  # of a busy machine

        def note_dialog(dialog: Any) -> None:
            seen.dialogs.append(dialog.message)
            dialog.dismiss()

        def answer(route: Any) -> None:
            if route.request.url in (HOME, f"{HOME}last"):
                route.fulfill(body="<!DOCTYPE html><body>", content_type="text/html")
            else:
                seen.requests.append(route.request.url)
                route.abort()

        page.on("dialog", note_dialog)
        page.route("**/*", answer)
        try:
            page.goto(HOME)
            page.add_script_tag(path=Path(plotly.__file__).parent / "package_data" / "plotly.min.js")
            page.evaluate(
                FRONT_END + "calls => { for (const [name, ...rest] of calls) eval(name)(...rest); typesetAll(); }",
                calls,
            )
            if charts:
                page.evaluate(DRAW, charts)
            page.evaluate(LAST)
            seen.handlers = page.evaluate(HANDLERS)
        finally:
            page.close()
        seen.requests = [url for url in seen.requests if not url.startswith("data:")]
        return seen


DRAW: Final = """async charts => {
    for (const chart of charts) {
        const place = document.body.appendChild(document.createElement('div'));
        try {
            await Plotly.newPlot(place, chart);
            for (const each of place.querySelectorAll('.updatemenu-button, .slider-grip-rect')) each.dispatchEvent(new MouseEvent('click'));
        } catch { }
    }
}"""
LAST: Final = """async () => {
    const over = each => each.complete || new Promise(done => { each.onload = each.onerror = done; });
    await Promise.all([...document.images].map(over));
    for (let turn = 0; turn < 3; turn++) await fetch('/last').catch(() => 0);
}"""
HANDLERS: Final = """() => [...document.querySelectorAll('body *:not(.js-plotly-plot *)')].flatMap(each => [
    ...[...each.attributes].filter(one => one.name.startsWith('on')).map(one => `${each.tagName} ${one.name}`),
    ...(each.tagName == 'A' && each.hasAttribute('href') && !/^(https?|mailto|vscode-notebook-cell|file):|^[~/]/.test(each.getAttribute('href'))
        ? [`link ${each.getAttribute('href')}`] : [])])"""


def outputs(way: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield what a front end would call for each hostile output, as the kernel sends it."""
    bundles = [{"text/html": each} for each in hostile.HTML]
    bundles += [{"image/svg+xml": each} for each in hostile.SVG]
    bundles += [{"text/html": rendered_markdown(each)} for each in hostile.MARKDOWN]
    bundles += [{"text/markdown": each} for each in hostile.MARKDOWN]
    bundles += [{"text/latex": each} for each in hostile.LATEX]
    bundles += [
        {mime: each} for mime in ("image/png", "image/jpeg", "image/gif", "image/webp") for each in hostile.PICTURES
    ]
    bundles += [{mime: each} for mime in NOT_SHOWN for each in hostile.HTML]
    for bundle in map(safe_bundle, bundles):
        for mime, form in bundle.items():
            kind = {"text/html": "html", "text/latex": "latex", "text/plain": "text"}.get(mime, "picture")
            if kind == "latex" and way["latex"] == "insert":
                form = MarkdownIt("commonmark").render(form)
            yield (way[kind], form) if kind != "picture" else ("picture", mime, form)
            if kind in ("html", "latex"):  # some front ends show it in their pager, or in a saved page
                yield "fragment", form
    for error in hostile.ERRORS:
        yield way["error"], safe_lines(error)
    for text in (*hostile.HTML, *hostile.LATEX, *hostile.ERRORS):  # what `%%toolcell` shows with any kernel
        error = ErrorInfo("ToolError", text)
        yield (
            "fragment",
            ExecutionResult("id", Outcome.ERROR, [{text: text}], True, error=error, warnings=(text,))._repr_html_(),
        )


def test_what_a_kernel_shows_runs_loads_and_looks_up_nothing(tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(  # another kind looks up nothing ahead
            tmp_path / "profile",
            executable_path=CHROMIUM,
            args=["--no-sandbox", f"--log-net-log={log}", "--net-log-capture-mode=Everything"],
        )
        notices_what_runs_and_loads(Browser(browser))
        charts = [shown for each in hostile.CHARTS if (shown := safe_bundle({PLOTLY: each}).get(PLOTLY)) is not None]
        assert len(charts) > 10
        for name, way in WAYS.items():
            calls = list(outputs(way))
            assert len(calls) > 300
            assert Browser(browser).show(calls, charts if name == "JupyterLab" else []) == Seen(), name
        browser.close()

    noticed = log.read_text()
    assert "looked-up.example" in noticed and hostile.EVIL not in noticed


def notices_what_runs_and_loads(browser: Browser) -> None:
    """Check that this test would notice an output that is not harmless."""
    seen = browser.show(
        [
            ("insert", "<script>alert(1)</script><a href='javascript:1' onclick=2>x</a>"),
            ("fragment", "<script>alert(2)</script>"),
            ("insert", "<img src='https://noticed.example/?leak'><link rel=dns-prefetch href=//looked-up.example>"),
            ("linked", "File x' onfocus='alert(3)' autofocus tabindex='1:3\n      3 x"),
            ("insert", "<b>$\\href{x}{y}$</b>"),
        ],
        [{"data": [], "layout": {"images": [{"source": "https://noticed.example/chart", "sizex": 1, "sizey": 1}]}}],
    )
    assert {each[:7] for each in seen.dialogs} == {"1", "2", "3", "formula"}
    assert seen.requests == ["https://noticed.example/?leak", "https://noticed.example/chart"]
    assert {"A onclick", "link javascript:1"} <= set(seen.handlers)
