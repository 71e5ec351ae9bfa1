"""The page of a run in a real browser: nothing in it runs, and it asks nobody for anything."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from audit.test_audit_html import PAYLOADS, Structure, page_with
from machine import CHROMIUM as BROWSER

pytestmark = pytest.mark.browser

RAN = "the-script-ran"
ATTACKS = [each.replace("alert(1)", f"document.title='{RAN}'") for each in PAYLOADS]
"""Each leaves its mark in the title if it runs."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--disable-breakpad",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=2000",
    "--dump-dom",
)


class Site:
    """Answers for every name there is, and keeps what it was asked for."""

    def __init__(self, page: str) -> None:
        site, self.asked = self, list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host = self.headers["Host"].partition(":")[0]
                if host.endswith(".example"):  # what the browser asks its maker for is not a matter of the page
                    site.asked.append(f"{host}{self.path}")
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(page.encode("utf-8", "replace") if self.path == "/page.html" else b"")

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def opened(page: str, home: Path) -> tuple[str, list[str]]:
    """Open a page in a browser for which every address is this test's; return its DOM, and what was asked for."""
    with Site(page) as site:
        everywhere = f"--host-resolver-rules=MAP * 127.0.0.1:{site.port}"
        command = [
            str(BROWSER),
            *FLAGS,
            f"--user-data-dir={home / 'profile'}",
            everywhere,
            "http://log.example/page.html",
        ]
        environment = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home), "XDG_CACHE_HOME": str(home)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as browser:
            try:
                dom = browser.communicate(timeout=120)[0].decode("utf-8")
            finally:
                try:
                    os.killpg(browser.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
    return dom, site.asked


def elements(page: str) -> Counter[str]:
    """Count the elements, with the names of their attributes; a browser adds the bodies of tables."""
    found = (each for each in Structure(page).found if isinstance(each, tuple) and isinstance(each[1], list))
    return Counter(f"{tag} {sorted(name for name, _ in attributes)}" for tag, attributes in found if tag != "tbody")


def title(page: str) -> str:
    return page.partition("<title>")[2].partition("</title>")[0]


def test_nothing_that_a_record_holds_runs_in_a_browser_or_is_loaded(home: Path) -> None:
    dom, asked = opened(page_with("\n".join(ATTACKS)), home)

    assert [each for each in asked if "favicon" not in each] == ["log.example/page.html"]
    assert elements(dom) == elements(page_with("\n".join("harmless" for _ in ATTACKS)))
    assert title(dom).startswith("run &lt;script&gt;") and RAN in title(dom)  # as text: the title is still the run's


def test_the_same_texts_would_run_and_load_in_a_page_that_did_not_escape_them(home: Path) -> None:
    raw = (
        "<!DOCTYPE html><title>untouched</title><body>"
        + "\n".join(ATTACKS[:8])
        + "<link rel=stylesheet href=//evil.example/x.css>"
    )
    dom, asked = opened(raw, home)

    assert title(dom) == RAN
    assert "evil.example/x.css" in asked
