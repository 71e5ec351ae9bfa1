"""The viewer as a person uses it, in Chromium: find, open, replay, approve, watch, type; with the keyboard alone, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from service.viewer.watching import DARK, LIGHT, SMALL, Chromium, served
from toolcell import ToolRegistry
from toolcell.service.app import create_app
from toolcell.service.config import ServiceConfig, TenantConfig
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.browser, pytest.mark.isolation]

REPORT = """# weekly report
rows = call_tool('look_up', customer='ada')
print('found', rows['euros'])
set_result(rows)
"""
REFUND = "account = call_tool('look_up', customer='ada')\nset_result(call_tool('refund', customer='ada', euros=account['euros']))"
DRY_RUN = "for name in ('ada', 'bob', 'cleo'): call_tool('book', name=name)"


class Shop:
    """Tools of a service, and what they did."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go_on = threading.Event()
        self.registry = ToolRegistry()

        @self.registry.tool
        async def look_up(customer: str) -> dict[str, object]:
            """Look up a customer by name and return the account."""
            return {"name": customer, "euros": 40}

        @self.registry.tool(requires_approval=True, read_only=False)
        async def refund(customer: str, euros: int) -> str:
            """Pay money back to a customer; this needs approval."""
            self.done.append(f"refund {customer} {euros}")
            return f"paid {euros}"

        @self.registry.tool(read_only=False)
        async def book(name: str) -> str:
            """Book something for a customer, by its name."""
            self.done.append(f"book {name}")
            return name

        @self.registry.tool
        def wait_here() -> str:
            """Answer when the test says so, and not before."""
            assert self.go_on.wait(60)
            return "went on"


@pytest.fixture(scope="module")
def shop() -> Shop:
    return Shop()


@pytest.fixture(scope="module")
def base(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    config = ServiceConfig(state=folder / "state", defaults=TenantConfig(record=folder / "runs"))
    with served(lambda port: create_app(config, registry=shop.registry)) as address:
        assert execute(address, REPORT)["outcome"] == "ok"
        assert execute(address, "1 / 0")["outcome"] == "error"
        assert execute(address, "while True: pass", limits={"wall_s": 0.3})["outcome"] == "timeout"
        yield address


def execute(base: str, code: str, **options: Any) -> Any:
    answer = httpx.post(f"{base}/v1/execute", json={"code": code, **options}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_run_is_found_opened_and_replayed(base: str, chromium: Chromium) -> None:
    def work(page: Page) -> None:
        page.goto(base)
        page.click("nav >> text=Runs")
        page.wait_for_url("**/runs")
        page.keyboard.press("/")
        expect(page.locator("[name=q]")).to_be_focused()
        page.keyboard.type("weekly")
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs?q=weekly*")
        expect(page.locator(".runs tbody tr[id]")).to_have_count(1)
        page.click("text=# weekly report")
        expect(page.locator(".script")).to_contain_text("1 look_up: ok")
        expect(page.locator("main")).to_contain_text("found 40")
        page.click("#call-1 summary")
        expect(page.locator("#call-1")).to_contain_text('"customer": "ada"')
        page.click("text=Run it again with the recorded answers")
        expect(page.locator("#replayed")).to_contain_text("The same result: 1 of 1 calls were answered from the record")

    chromium.do(work, **LIGHT)


def test_what_a_suspended_run_asks_for_is_edited_and_approved(base: str, shop: Shop, chromium: Chromium) -> None:
    assert execute(base, REFUND, on_approval="suspend")["outcome"] == "suspended"

    def work(page: Page) -> None:
        page.goto(f"{base}/waiting")
        assert "40" in page.input_value("textarea")
        page.fill("textarea", "no JSON")
        page.check("text=Approve with the arguments above")
        page.click("text=Decide, and carry the run on")
        expect(page.locator("main")).to_contain_text("are not JSON")
        page.goto(f"{base}/waiting")
        page.fill("textarea", '{"customer": "ada", "euros": 7}')
        page.check("text=Approve with the arguments above")
        page.click("text=Decide, and carry the run on")
        expect(page.locator("main")).to_contain_text("paid 7")
        page.go_back()
        page.reload()
        expect(page.locator("main")).not_to_contain_text("refund")

    chromium.do(work, **LIGHT)
    assert shop.done == ["refund ada 7"]
    shop.done.clear()


def test_a_denied_call_is_not_made_and_the_script_learns_why(base: str, shop: Shop, chromium: Chromium) -> None:
    execute(base, REFUND, on_approval="suspend")

    def work(page: Page) -> None:
        page.goto(f"{base}/waiting")
        page.check("text=Deny")
        page.fill("[name=reason-0]", "not this month")
        page.click("text=Decide, and carry the run on")
        expect(page.locator("main")).to_contain_text("not this month")

    chromium.do(work, **LIGHT)
    assert shop.done == []


def test_of_the_writes_of_a_dry_run_those_that_are_chosen_are_made(base: str, shop: Shop, chromium: Chromium) -> None:
    assert execute(base, DRY_RUN, dry_run=True)["outcome"] == "ok"

    def work(page: Page) -> None:
        page.goto(f"{base}/waiting")
        expect(page.locator("input[type=checkbox]")).to_have_count(3)
        page.uncheck("[name=approve-effect-2]")
        page.click("text=Make the chosen calls")
        expect(page.locator("h1")).to_have_text("The chosen calls were made")
        page.goto(f"{base}/waiting")
        expect(page.locator("main")).not_to_contain_text("dry run")

    chromium.do(work, **LIGHT)
    assert shop.done == ["book ada", "book cleo"]
    shop.done.clear()


def test_a_run_is_watched_while_it_is_under_way(base: str, shop: Shop, chromium: Chromium) -> None:
    shop.go_on.clear()
    code = "# slow\ncall_tool('look_up', customer='bob')\nset_result(call_tool('wait_here'))"
    client = threading.Thread(target=execute, args=(base, code))

    def work(page: Page) -> None:
        page.goto(f"{base}/runs")
        client.start()
        row = page.locator(".runs tr", has_text="# slow")  # it appears by itself
        expect(row).to_contain_text("unfinished")
        page.goto(f"{base}/pool")
        expect(page.locator("main")).to_contain_text("local")
        page.goto(f"{base}/runs")
        row.locator("a").click()
        expect(page.locator("#run-state")).to_contain_text("This page follows it")
        expect(page.locator(".call-list")).to_contain_text("wait_here")
        page.click("#call-1 summary")
        shop.go_on.set()
        expect(page.locator("#run-state")).to_contain_text("went on")
        expect(page.locator("#run-state")).not_to_contain_text("This page follows it")
        assert page.locator("#call-1[open]").count() == 1

    try:
        chromium.do(work, **LIGHT)
    finally:
        shop.go_on.set()
        client.join(60)


def test_a_session_is_used_in_its_terminal(base: str, chromium: Chromium) -> None:
    def work(page: Page) -> None:
        page.goto(f"{base}/sessions")
        page.fill("[name=name]", "terminal")
        page.click("text=Open a session")
        page.wait_for_url("**/sessions/terminal")
        page.wait_for_load_state()  # a key that is pressed before the page's script has run is lost
        terminal = page.locator("#terminal")
        for code, shown in (
            ("import time\nfor n in range(3):\n    print('tick', n)\n    time.sleep(0.05)\nx = 40", "tick 2"),
            ("x + 2", "42"),
            ("1 / 0", "ZeroDivisionError"),
            ("call_tool('look_up', customer='ada')", "look_up: ok"),
            ("open('dot.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + bytes(20)); None", "ok in"),
        ):
            page.fill("textarea", code)
            page.keyboard.press("Control+Enter")
            expect(terminal).to_contain_text(shown)
            expect(page.locator("textarea")).to_have_value("")
        page.fill("textarea", "while True: pass")
        page.keyboard.press("Control+Enter")
        expect(page.locator("textarea")).to_have_value("")
        page.click("text=Interrupt")
        expect(terminal).to_contain_text("cancelled by the caller")
        page.click("text=Show files")
        expect(page.locator("#session-files")).to_contain_text("dot.png")
        page.click("text=Close the session for good")
        expect(page.locator("main")).not_to_contain_text("terminal")

    chromium.do(work, **LIGHT)


def test_everything_is_done_with_the_keyboard_alone(base: str, shop: Shop, chromium: Chromium) -> None:
    execute(base, REFUND, on_approval="suspend")

    def work(page: Page) -> None:
        def tab_to(text: str) -> None:
            for _ in range(80):
                page.keyboard.press("Tab")
                about = "e => (e.innerText || e.value || e.name || '') + ' ' + (e.name || '') + ' ' + (e.value || '')"
                if text in page.evaluate(
                    f"document.activeElement.closest('a, button, input, textarea') ? ({about})(document.activeElement) : ''"
                ):
                    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
                    return
            raise AssertionError(f"{text} is not reached")

        page.goto(f"{base}/runs")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        tab_to("# weekly report")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("weekly report")
        page.wait_for_load_state()  # before its scripts are there, a form is sent as a page
        tab_to("Run it again")
        page.keyboard.press("Enter")
        expect(page.locator("#replayed")).to_contain_text("The same result")
        page.goto(f"{base}/waiting")
        tab_to("decision-0")
        page.keyboard.press("Space")
        tab_to("Decide, and carry")
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_contain_text("paid 40")
        page.goto(f"{base}/sessions")
        tab_to("name")
        page.keyboard.type("keys")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("keys")
        tab_to("code")
        page.keyboard.type("6 * 7")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#terminal")).to_contain_text("42")

    chromium.do(work, **LIGHT)
    assert shop.done == ["refund ada 40"]
    shop.done.clear()


@pytest.mark.parametrize("look", [LIGHT, {**DARK, **SMALL}], ids=["light", "dark and small"])
def test_axe_finds_no_violation_on_any_page(base: str, look: dict[str, Any], chromium: Chromium) -> None:
    execute(base, REFUND, on_approval="suspend")
    execute(base, DRY_RUN, dry_run=True)
    httpx.post(f"{base}/v1/sessions", json={"name": f"axe-{id(look):x}"}, timeout=60)

    def work(page: Page) -> list[str]:
        found = []

        def check(name: str) -> None:
            results = Axe().run(page)
            found.extend(
                f"{name}: {each['id']}: {each['nodes'][0]['html'][:200]}" for each in results.response["violations"]
            )
            widest = "Math.max(document.documentElement.scrollWidth, document.querySelector('.runs')?.scrollWidth ?? 0)"
            wide = page.evaluate(f"{widest} - innerWidth")
            if wide > 0:
                found.append(f"{name}: {wide} px too wide")

        for path in (
            "/",
            "/runs",
            "/runs?q=nothing",
            "/tools",
            "/tool?name=refund",
            "/waiting",
            "/sessions",
            "/pool",
            "/nothing-like-it",
        ):
            page.goto(base + path)
            page.wait_for_timeout(150)
            if path != "/nothing-like-it":
                check(path)
        page.goto(f"{base}/runs?q=weekly")
        page.click("text=# weekly report")
        page.click("#call-1 summary")
        page.click("text=Run it again")
        expect(page.locator("#replayed .notice")).to_be_visible()
        check("run")
        page.goto(f"{base}/verify")
        page.click("text=Check the log now")
        expect(page.locator("#verification")).to_contain_text("Nothing is wrong")
        check("verify")
        page.goto(f"{base}/sessions/axe-{id(look):x}")
        page.fill("textarea", "print('hello')\n1 / 0")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#terminal")).to_contain_text("ZeroDivisionError")
        check("session")
        page.goto(f"{base}/waiting")
        page.check("text=Deny >> nth=0")
        page.click("text=Decide, and carry >> nth=0")
        expect(page.locator("h1")).to_contain_text("carried on")
        check("decided")
        page.goto(f"{base}/waiting")
        page.uncheck("[name=approve-effect-1] >> nth=0")
        page.click("text=Make the chosen calls >> nth=0")
        expect(page.locator("h1")).to_contain_text("were made")
        check("committed")
        page.goto(f"{base}/runs?outcome=x")
        check("problem")
        return found

    assert chromium.do(work, **look) == []


def test_a_token_logs_a_browser_in_shows_its_tenant_and_logs_it_out(
    shop: Shop, tmp_path: Path, chromium: Chromium
) -> None:
    store = TokenDatabase(tmp_path / "tokens.sqlite")
    ada = store.create("ada", name="ada's laptop", scopes=frozenset(Scope)).text
    issued = store.create("bob", name="bob", scopes=frozenset({Scope.READ}))
    bob = issued.text
    config = ServiceConfig(
        state=tmp_path / "state", tokens=tmp_path / "tokens.sqlite", defaults=TenantConfig(record=tmp_path / "runs")
    )

    def log_in(page: Page, base: str, token: str) -> None:
        page.goto(f"{base}/runs")
        assert page.url == f"{base}/login"
        page.fill("[name=token]", token)
        page.keyboard.press("Enter")

    with served(lambda port: create_app(config, registry=shop.registry)) as base:
        for token, name in ((ada, "ada"), (bob, "bob")):
            code, headers = f"# of {name}", {"authorization": f"Bearer {token}"}
            status = httpx.post(f"{base}/v1/execute", json={"code": code}, headers=headers, timeout=60).status_code
            assert status == (200 if name == "ada" else 403)

        def work(page: Page) -> None:
            log_in(page, base, "wrong")
            expect(page.locator("main")).to_contain_text("not a token of the service")
            assert Axe().run(page).response["violations"] == []
            log_in(page, base, ada)
            page.wait_for_url(f"{base}/")
            (cookie,) = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            assert ada not in cookie["value"]
            page.goto(f"{base}/runs")
            expect(page.locator("main")).to_contain_text("# of ada")
            address = page.locator(".runs .title a").get_attribute("href")
            page.click("text=Log out")
            page.wait_for_url(f"{base}/login")
            page.context.add_cookies([cookie])  # a copy of the cookie is worth nothing now
            log_in(page, base, bob)
            page.wait_for_url(f"{base}/")
            page.goto(f"{base}/runs")
            expect(page.locator("main")).not_to_contain_text("# of ada")
            assert page.goto(f"{base}{address}").status == 404  # type: ignore[union-attr]
            page.goto(f"{base}/sessions")
            assert page.locator("text=Open a session").count() == 0
            store.revoke(issued.record.id)
            page.goto(f"{base}/runs")
            assert page.url == f"{base}/login"

        chromium.do(work, **LIGHT)
