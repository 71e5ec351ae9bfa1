"""Hostile text in every field of a log, of a session and of what waits: a real browser shows it, and runs none of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page

from audit.ledger import Ledger
from service.viewer.payloads import payloads
from service.viewer.watching import LIGHT, Chromium, served, watched
from toolcell import ToolRegistry
from toolcell.audit import records
from toolcell.audit.log import AuditLog
from toolcell.service.app import create_app
from toolcell.service.config import ServiceConfig, TenantConfig
from toolcell.support.packing import bytes_digest, pack

pytestmark = pytest.mark.browser

ALL = payloads()
IN_ONE_RUN = 12
FAILED = {"type": "ValueError", "message": "", "line": 1}
USAGE = {"wall_s": 0.1, "cpu_s": 0.1, "start_s": 0.1, "peak_memory_bytes": 1}

LOOK = """() => {
  const bad = [];
  for (const each of document.querySelectorAll("*")) {
    for (const {name, value} of each.attributes) {
      if (name.startsWith("on") || name.startsWith("hx-on") || (name === "style" && !each.closest(".plot")) || name === "srcdoc") bad.push(name);
      if (/^(href|src|action|formaction|xlink:href|data)$/.test(name) && !value.startsWith("/") && !value.startsWith("#"))
        bad.push(name + "=" + value);
      if (name.startsWith("hx-") && /^hx-(get|post)$/.test(name) && !value.startsWith("/")) bad.push(value);
      if (name === "hx-vals" || name.startsWith("data-hx")) bad.push(name);
    }
  }
  const strange = "iframe,object,embed,base,math,marquee,style,template,noscript,body *>script,xss,video,audio,frame";
  bad.push(...[...document.querySelectorAll(strange)].map((each) => each.tagName));
  return {bad, pwned: window.__pwned || 0, broken: window.__broken || []};
}"""
WATCH = """addEventListener("securitypolicyviolation", (event) => {
  (window.__broken ||= []).push(event.violatedDirective + " " + event.blockedURI);
});"""


def hunted(page: Page, base: str, visit: Callable[[Callable[[], None]], object]) -> list[Any]:
    """Return everything that a page should not have done while it was visited."""
    found: list[Any] = []
    page.add_init_script(WATCH)
    page.on("dialog", lambda dialog: (found.append(("dialog", dialog.message)), dialog.dismiss()))
    page.on("pageerror", lambda error: found.append(("error", str(error))))
    page.on("console", lambda said: found.append(("console", said.text)) if said.type == "error" else None)
    page.on("request", lambda sent: found.append(("request", sent.url)) if not sent.url.startswith(base) else None)
    page.on("popup", lambda popup: found.append(("popup", popup.url)))

    def look() -> None:
        seen = page.evaluate(LOOK)
        if seen != {"bad": [], "pwned": 0, "broken": []}:
            found.append((page.url, seen))

    visit(look)
    return found


def test_there_are_at_least_500_different_payloads() -> None:
    assert len(ALL) == len(set(ALL)) >= 500


def write(log: AuditLog, texts: list[str]) -> None:
    """Write a run with these texts in every field that a script, a tool, a tenant or a model can fill."""
    now, one = time.time_ns(), texts[0]
    whole = "\n".join(each.replace("\n", " ") for each in texts)
    layers = {"backend": one, "layers": dict(zip(texts, texts, strict=True)), "environment": {}}
    blobs = [
        pack(([[each, each, {"type": each}, {"enum": texts}] for each in texts],)),
        pack(
            (
                {"wall_s": 1.0, "cpu_s": 1.0, "memory_bytes": 1, "tool_calls": 9},
                {"x": texts},
                layers,
                [{each: each, "host": each, "paths": [each]} for each in texts],
            )
        ),
    ]
    for blob in blobs:
        log.keep_blob(bytes_digest(blob), blob, wait=True)
    tools, settings = map(bytes_digest, blobs)
    files = [[each, 3, "00ff", b"<svg onload=alert(1)>"] for each in texts]
    who = {"user": one, "thread": texts[-1], one: one}
    started = (
        one,
        "code",
        f"# {whole}",
        "00ff",
        {one: texts},
        None,
        files,
        tools,
        settings,
        "off",
        1,
        1.0,
        one,
        who,
        {one: one},
    )
    run = log.append(records.RUN_STARTED, 0, started, at_ns=now)
    for number, each in enumerate(texts, start=1):
        log.append(records.CALL_STARTED, run, (number, each, None, each, each, number, {each: each}, {"why": each}))
        log.append(
            records.CALL_ENDED,
            run,
            (number, "ok" if number % 2 else each, 5, [each], None if number % 2 else each, {"message": each}),
        )
    returned = [[each, each, 3, "00ff", each] for each in texts]
    printed = [["stdout", whole], ["stderr", whole], [one, one]]
    error = {"type": one, "message": whole, "line": 1, "trace": whole, "limit": one, "limit_value": 1, "used": 2}
    log.append(
        records.RUN_ENDED,
        run,
        (one, texts, True, "00ff", printed, [1, 1, False], returned, error, USAGE, [1, 0], {one: one}),
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    ledger = Ledger(tmp_path_factory.mktemp("hostile") / "runs")
    with ledger.log() as log:
        for each in ALL:
            write(log, [each])
        for at in range(0, len(ALL), IN_ONE_RUN):
            write(log, ALL[at : at + IN_ONE_RUN])
    with watched(ledger) as site:
        yield site


@pytest.mark.slow
def test_nothing_in_a_log_runs_in_the_list_the_overview_or_the_tools(
    hostile: tuple[str, str], chromium: Chromium
) -> None:
    base, with_token = hostile

    def work(page: Page) -> list[Any]:
        def visit(look: Callable[[], None]) -> None:
            page.goto(with_token)
            look()
            page.goto(f"{base}/runs")
            while page.locator("tr.more a").count():  # as a person who scrolls to the end
                page.evaluate("scrollTo(0, document.body.scrollHeight)")
                page.wait_for_timeout(20)
                if page.locator("tr.more a.button").count():
                    look()
                    page.click("tr.more a.button")
            look()
            page.goto(f"{base}/tools")
            look()
            for address in page.eval_on_selector_all("a[href^='/tool?']", "all => all.map((a) => a.href)")[::25]:
                page.goto(address)
                look()

        return hunted(page, base, visit)

    assert chromium.do(work, **LIGHT) == []


@pytest.mark.slow
def test_nothing_in_a_log_runs_on_the_page_of_a_run(hostile: tuple[str, str], chromium: Chromium) -> None:
    base, with_token = hostile

    def work(page: Page) -> tuple[int, list[Any]]:
        pages = 0

        def visit(look: Callable[[], None]) -> None:
            nonlocal pages
            page.goto(with_token)
            page.goto(f"{base}/runs")
            runs = page.eval_on_selector_all(".runs .title a", "all => all.map((a) => a.href)")
            assert len(runs) == 50
            for address in runs:
                assert page.goto(address).status == 200  # type: ignore[union-attr]
                page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
                look()
                pages += 1

        found = hunted(page, base, visit)
        return pages, found

    pages, found = chromium.do(work, **LIGHT)
    assert found == []
    assert pages * IN_ONE_RUN >= 500


@pytest.mark.slow
@pytest.mark.isolation
def test_nothing_that_a_script_prints_asks_for_or_makes_runs_on_the_pages_of_a_service(
    tmp_path: Path, chromium: Chromium
) -> None:
    registry = ToolRegistry()

    @registry.tool(requires_approval=True, read_only=False)
    async def pay(text: str) -> str:
        """Pay for something; this tool needs approval each time."""
        return text

    texts = [each.encode("utf-8", "replace").decode() for each in ALL]
    config = ServiceConfig(state=tmp_path / "state", defaults=TenantConfig(record=tmp_path / "runs"))
    with served(lambda port: create_app(config, registry=registry)) as base:
        codes = [f"for each in {texts[at::20]!r}: call_tool('pay', text=each)" for at in range(20)]
        for code, options in ((codes[0], {"on_approval": "suspend"}), *((code, {"dry_run": True}) for code in codes)):
            sent = {"code": code, "limits": {"tool_calls": 1000}, **options}
            answer = httpx.post(f"{base}/v1/execute", json=sent, timeout=60)
            assert answer.json()["outcome"] in ("suspended", "ok"), answer.text

        def work(page: Page) -> list[Any]:
            def visit(look: Callable[[], None]) -> None:
                page.goto(f"{base}/waiting")
                assert page.locator("input[type=checkbox]").count() >= 500
                look()
                page.goto(f"{base}/sessions")
                page.fill("[name=name]", "hostile")
                page.click("text=Open a session")
                script = f"texts = {texts!r}\nimport sys\nfor each in texts: print(each)\n"
                page.fill("textarea", script + "print(*texts, file=sys.stderr)\ntexts")
                page.click(".prompt button")
                page.wait_for_selector("#terminal >> text=ok in")
                look()
                names = [each.replace("/", "_").replace("\0", "")[:80] for each in texts]
                made = (
                    f"for each in {names!r}:\n    try: open(each, 'w').close()\n    except (OSError, ValueError): pass"
                )
                page.fill("textarea", made)
                page.click(".prompt button")
                page.wait_for_selector("#terminal >> text=ok in >> nth=1")
                page.click("text=Show files")
                page.wait_for_selector("#session-files td >> nth=100")
                look()
                page.fill("textarea", f"raise ValueError({texts[0]!r} * 3)")
                page.click(".prompt button")
                page.wait_for_selector("#terminal >> text=error in")
                look()

            return hunted(page, base, visit)

        assert chromium.do(work, **LIGHT) == []
