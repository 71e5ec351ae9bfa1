"""A browser that treats output as JupyterLab treats that of a trusted notebook: its scripts run, if it has any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from machine import CHROMIUM
from toolcell.kernel.mime_bundles import safe_bundle

from .test_mime_bundles import HOSTILE

pytestmark = pytest.mark.browser

SHOW = """form => {
    const place = document.getElementById('output');
    place.innerHTML = form;
    for (const script of place.querySelectorAll('script')) {
        const made = document.createElement('script');
        for (const each of script.attributes) made.setAttribute(each.name, each.value);
        made.textContent = script.textContent;
        script.replaceWith(made);
    }
    const last = document.createElement('img');
    last.onerror = () => { window.isOver = true; };
    last.src = 'data:image/png;base64,AAAA';
    place.append(last);
}"""


@dataclass
class Seen:
    """What an output did."""

    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def show(page: Page, form: str) -> Seen:
    seen = Seen()

    def note_dialog(dialog: Any) -> None:
        seen.dialogs.append(dialog.message)
        dialog.dismiss()

    def note_request(route: Any) -> None:
        seen.requests.append(route.request.url)
        route.abort()

    page.goto("about:blank")
    page.set_content("<div id=output></div>")
    page.on("dialog", note_dialog)
    page.route("**/*", note_request)
    try:
        page.evaluate(SHOW, form)
        page.wait_for_function("window.isOver")
        page.wait_for_load_state("networkidle")
    finally:
        page.unroute_all()
        page.remove_listener("dialog", note_dialog)
    seen.requests = [url for url in seen.requests if not url.startswith("data:")]
    return seen


def test_the_browser_notices_what_runs_and_loads(page: Page) -> None:
    assert show(page, "<script>alert(1)</script>").dialogs == ["1"]
    assert show(page, "<img src='https://evil.example/?leak'>").requests == ["https://evil.example/?leak"]


def test_what_a_kernel_shows_neither_runs_nor_loads_anything(page: Page) -> None:
    for form in HOSTILE:
        hostile = form.replace("//evil/", "//evil.example/")
        assert show(page, safe_bundle({"text/html": hostile})["text/html"]) == Seen(), form
