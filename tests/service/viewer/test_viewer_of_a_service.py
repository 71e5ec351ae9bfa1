"""The viewer at `/` of a service: who is let in, what they may do, and that they see their tenant alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest
from starlette.routing import Route

from rows import each_row
from service.viewer.watching import served
from toolcell import ToolRegistry
from toolcell.service.app import create_app
from toolcell.service.config import ServiceConfig, TenantConfig
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase
from toolcell.service.viewer import app, sessions_pages, visitors, waiting_page
from toolcell.service.viewer.live_runs import LiveRuns, Reader, event_stream
from toolcell.service.viewer.mounted import own_pages
from toolcell.service.viewer.visitors import IDLE_S, LONGEST_S, Logins

pytestmark = pytest.mark.isolation

ALL = [
    *app.ROUTES,
    *waiting_page.ROUTES,
    *sessions_pages.ROUTES,
    *(each for each in own_pages(None) if each.path != "/login"),  # type: ignore[arg-type]
]
FORMS = [each.path for each in ALL if isinstance(each, Route) and "POST" in (each.methods or ())]
PAGES = [each.path for each in ALL if isinstance(each, Route) and "GET" in (each.methods or ())]
VALUES = {
    "{chain}": "0123456789ab",
    "{seq:int}": "1",
    "{first:int}": "1",
    "{number:int}": "0",
    "{part}": "script",
    "{ident}": "0" * 32,
    "{name}": "hers",
    "{live}": "x",
}


def filled(path: str) -> str:
    for name, value in VALUES.items():
        path = path.replace(name, value)
    return path


def log_in(client: httpx.Client, token: str, **options: Any) -> httpx.Response:
    """Load the form of the login, and send it."""
    return client.post("/login", data={"token": token, "csrf": form_of_the_login(client)}, **options)


def form_of_the_login(client: httpx.Client) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get("/login").text)
    assert found
    return found[1]


class Site:
    def __init__(self, base: str, store: TokenDatabase) -> None:
        self.base, self.store = base, store
        self.clients: list[httpx.Client] = []

    def logged_in(self, tenant: str, *scopes: Scope) -> httpx.Client:
        token = self.store.create(tenant, scopes, name=f"{tenant}'s").text
        client = httpx.Client(base_url=self.base, timeout=60)
        self.clients.append(client)
        answer = log_in(client, token)
        assert (answer.status_code, answer.headers["location"]) == (303, "/"), answer.text
        client.headers["x-token"] = token  # for the test itself
        return client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("service")
    store = TokenDatabase(folder / "tokens.sqlite")
    store.create("nobody", [Scope.READ])  # makes the file
    registry = ToolRegistry()

    @registry.tool(requires_approval=True, read_only=False)
    async def pay(euros: int) -> int:
        """Pay so many euros; a person has to approve it."""
        return euros

    @registry.tool(requires_approval=True)
    async def note(text: str) -> int:
        """Write a text down; a person has to approve it."""
        return len(text)

    config = ServiceConfig(
        state=folder / "state", tokens=folder / "tokens.sqlite", defaults=TenantConfig(record=folder / "runs")
    )
    with served(lambda port: create_app(config, registry=registry)) as base:
        yield Site(base, store)
    store.close()


@pytest.fixture(autouse=True)
def _closed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "site" in request.fixturenames:
        clients: list[httpx.Client] = request.getfixturevalue("site").clients
        while clients:
            clients.pop().close()


def csrf(client: httpx.Client) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', client.get("/verify").text)
    assert found
    return found[1]


@each_row("path", PAGES)
def test_a_stranger_is_sent_to_the_login_from_every_page(site: Site, path: str) -> None:
    with httpx.Client(base_url=site.base) as client:
        for headers in ({}, {"cookie": "toolcell-login=x"}, {"authorization": "Bearer x"}):
            answer = client.get(filled(path), headers=headers)
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")


@each_row("path", FORMS)
def test_every_form_is_refused_without_the_token_of_the_login_and_from_elsewhere(site: Site, path: str) -> None:
    ada, eve = site.logged_in("ada", *Scope), site.logged_in("eve", *Scope)
    good, hers = {"csrf": csrf(ada)}, {"csrf": csrf(eve)}
    assert good != hers
    for fields, headers in (
        ({"x": "y"}, {}),
        (hers, {}),
        ({"csrf": "0" * 64}, {}),
        (good, {"origin": "http://evil.example"}),
        (good, {"sec-fetch-site": "cross-site"}),
        (good, {"sec-fetch-site": "same-site"}),
    ):
        assert ada.post(filled(path), data=fields, headers=headers).status_code == 403, (fields, headers)
    assert ada.get("/runs").status_code == 200  # nor was the login ended


@each_row("path", FORMS)
def test_a_form_needs_its_scope(site: Site, path: str) -> None:
    reader = site.logged_in("ada", Scope.READ)
    fields = {"csrf": csrf(reader)}
    assert reader.put(filled(path), data=fields).status_code == 405  # whatever the scope
    answer = reader.post(filled(path), data=fields)

    assert answer.status_code == (303 if path in ("/verify", "/logout") else 403)


def test_what_waits_and_what_ran_in_one_tenant_is_nothing_to_another(site: Site) -> None:
    ada, eve = site.logged_in("ada", *Scope), site.logged_in("eve", *Scope)
    sent = {"code": "# hers alone\ncall_tool('pay', euros=7)", "on_approval": "suspend"}
    token = {"authorization": f"Bearer {ada.headers['x-token']}"}
    assert httpx.post(f"{site.base}/v1/execute", json=sent, headers=token, timeout=60).json()["outcome"] == "suspended"
    ada.post("/sessions", data={"csrf": csrf(ada), "name": "hers"})
    waiting = re.search(r'action="(/waiting/runs/[^"]+)"', ada.get("/waiting").text)
    run = re.search(r'href="(/runs/[0-9a-f]{12}/\d+)"', ada.get("/runs").text)
    assert waiting and run

    assert ada.get(run[1]).status_code == 200
    for path in (run[1], f"{run[1]}/state", f"{run[1]}/parts/script", "/sessions/hers", "/sessions/hers/files"):
        assert eve.get(path).status_code == 404, path
    for path in (waiting[1], f"{run[1]}/replay", "/sessions/hers/run", "/sessions/hers/forget", "/sessions/hers/reset"):
        decided = {"csrf": csrf(eve), "decision-0": "approve", "code": "1"}
        assert eve.post(path, data=decided).status_code == 404, path
    for path in ("/", "/runs", "/tools", "/waiting", "/sessions", "/pool"):
        page = eve.get(path).text
        assert "hers" not in page.replace("others", ""), path


def test_who_decides_sees_the_script_and_whom_it_is_for(site: Site) -> None:
    ada = site.logged_in("ada4", *Scope)
    sent = {"code": "# the rent of <May>\ncall_tool('pay', euros=7)", "on_approval": "suspend"}
    token = {"authorization": f"Bearer {ada.headers['x-token']}"}
    answer = httpx.post(f"{site.base}/v1/execute", json=sent, headers=token, timeout=60).json()
    assert answer["outcome"] == "suspended", answer
    page = ada.get("/waiting").text
    assert "# the rent of &lt;May&gt;" in page
    assert "for <strong>" in page


def test_a_decision_is_about_the_call_that_was_shown_and_is_taken_once(site: Site) -> None:
    ada = site.logged_in("ada2", *Scope)
    sent = {"code": "set_result(call_tool('pay', euros=7))", "on_approval": "suspend"}
    token = {"authorization": f"Bearer {ada.headers['x-token']}"}
    httpx.post(f"{site.base}/v1/execute", json=sent, headers=token, timeout=60)
    page = ada.get("/waiting").text
    path = re.search(r'action="(/waiting/runs/[^"]+)"', page)
    digest = re.search(r'name="digest-0" value="([^"]+)"', page)
    assert path and digest
    good = {"csrf": csrf(ada), "digest-0": digest[1], "decision-0": "approve"}

    for wrong in (
        {"digest-0": "0" * 64},
        {"digest-0": ""},
        {"decision-0": ""},
        {"decision-0": "yes"},
        {"decision-0": "edit", "args-0": "[1]"},
    ):
        assert ada.post(path[1], data={**good, **wrong}).status_code == 400, wrong
    assert "was carried on" in ada.post(path[1], data=good).text
    assert ada.post(path[1], data=good).status_code == 404


LONG = "call_tool('note', text='rent ' * 6000 + 'and 9000 to mallory')"
"""Longer than a page shows."""


def test_a_call_that_a_page_cannot_show_whole_is_not_approved_there(site: Site) -> None:
    ada = site.logged_in("ada3", *Scope)
    token = {"authorization": f"Bearer {ada.headers['x-token']}"}
    sent = {"code": LONG, "on_approval": "suspend"}
    httpx.post(f"{site.base}/v1/execute", json=sent, headers=token, timeout=60)
    page = ada.get("/waiting").text
    path, digest = re.search(r'action="(/waiting/runs/[^"]+)"', page), re.search(r'digest-0" value="([^"]+)"', page)
    assert path and digest and "(30019 characters, sha256 " in page and 'value="approve"' not in page
    good = {"csrf": csrf(ada), "digest-0": digest[1]}

    for decision in ({"decision-0": "approve"}, {"decision-0": "edit", "args-0": "{}"}):
        answer = ada.post(path[1], data={**good, **decision})
        assert answer.status_code == 400 and "too many to be read and approved on this page" in answer.text
    assert "was carried on" in ada.post(path[1], data={**good, "decision-0": "deny"}).text


def test_a_draft_is_committed_as_the_page_showed_it(site: Site) -> None:
    ada = site.logged_in("ada4", *Scope)
    token = {"authorization": f"Bearer {ada.headers['x-token']}"}
    for code in (LONG, "call_tool('note', text={'$result_of': 'effect-0>)'}['$result_of'] + '\u3164')"):
        sent = {"code": code, "dry_run": True}
        assert httpx.post(f"{site.base}/v1/execute", json=sent, headers=token, timeout=60).json()["draft_id"]
    page = ada.get("/waiting").text
    paths, digests = (
        re.findall(r'action="(/waiting/drafts/[^"]+)"', page),
        re.findall(r'name="digest" value="(.+?)"', page),
    )
    assert "\\u3164" in page and "\u3164" not in page and len(paths) == len(digests) == 2
    assert page.count("They are for <strong>ada4&#39;s</strong>.") == 2, "whoever approves sees whose writes they are"
    assert "[&#39;$result_of&#39;]" in page, "and the scripts that collected them"
    chosen = {"csrf": csrf(ada), "approve-effect-1": "on"}

    assert ada.post(paths[1], data={**chosen, "digest": digests[0]}).status_code == 400
    answer = ada.post(paths[0], data={**chosen, "digest": digests[0]})
    assert answer.status_code == 400 and "too many to be read and approved on this page" in answer.text
    assert "The chosen calls were made" in ada.post(paths[1], data={**chosen, "digest": digests[1]}).text


def test_a_login_ends_with_its_token_and_a_log_out(site: Site) -> None:
    ada = site.logged_in("ada", Scope.READ)
    cookie = dict(ada.cookies)
    assert ada.get("/runs").status_code == 200
    (record,) = [each for each in site.store.list("ada") if site.store.find(ada.headers["x-token"]) == each]
    site.store.revoke(record.id)
    assert ada.get("/runs").headers["location"] == "/login"

    bob = site.logged_in("bob", Scope.READ)
    cookie = dict(bob.cookies)
    assert "bob / " in (shown := bob.get("/runs").text) and "Log out" in shown
    bob.post("/logout", data={"csrf": csrf(bob)})
    with httpx.Client(base_url=site.base, cookies=cookie) as copy:
        assert copy.get("/runs").headers["location"] == "/login"


def test_a_token_without_the_scope_to_read_and_a_login_from_another_site_are_refused(site: Site) -> None:
    runs = site.store.create("ada", [Scope.EXECUTE]).text
    reads = site.store.create("ada", [Scope.READ]).text
    with httpx.Client(base_url=site.base) as client:
        assert "the scope read" in (answer := log_in(client, runs)).text and answer.status_code == 403
        assert log_in(client, reads, headers={"origin": "http://evil.example"}).status_code == 403
        assert log_in(client, "wrong").status_code == 401


def test_a_login_is_refused_without_the_token_of_its_form(site: Site) -> None:
    reads = site.store.create("ada", [Scope.READ]).text
    with httpx.Client(base_url=site.base) as ada, httpx.Client(base_url=site.base) as eve:
        hers, his = form_of_the_login(ada), form_of_the_login(eve)
        assert hers == form_of_the_login(ada) != his  # a second tab does not spoil the form in the first
        for client, fields in ((ada, {}), (ada, {"csrf": his}), (ada, {"csrf": ""}), (eve, {"csrf": hers})):
            answer = client.post("/login", data={"token": reads, **fields})
            assert (answer.status_code, "toolcell-login" in answer.headers.get("set-cookie", "")) == (403, False)
            assert "load the page again" in answer.text
        bare = httpx.post(f"{site.base}/login", data={"token": reads, "csrf": hers})  # a browser without the cookie
        assert bare.status_code == 403
        assert ada.post("/login", data={"token": reads, "csrf": hers}).status_code == 303
        assert [name.rpartition("-")[0] for name in ada.cookies] == ["toolcell-login"]


def test_what_is_no_page_is_answered_by_the_service(site: Site) -> None:
    for path in ("/v1/nothing", "/nothing", "/sessions/a/b/c"):
        answer = httpx.get(f"{site.base}{path}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_a_login_expires_when_it_is_not_used_and_after_its_longest_time() -> None:
    now = [0.0]
    known = Logins(lambda: now[0])
    cookie = known.begin("token")
    for _ in range(int(LONGEST_S / (IDLE_S - 1))):
        now[0] += IDLE_S - 1
        assert known.find(cookie) is not None
    now[0] = LONGEST_S + 1
    assert known.find(cookie) is None
    other = known.begin("token")
    now[0] += IDLE_S + 1
    assert (known.find(other), len(known)) == (None, 0)


def test_logins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "MOST", 2)
    known = Logins()
    first, second, third = (known.begin("token") for _ in range(3))
    assert known.find(first) is None
    assert known.find(second) and known.find(third)


@pytest.mark.anyio
async def test_a_part_of_a_page_can_begin_no_event_of_its_own_and_the_end_ends_what_runs() -> None:
    async def work(tell: object) -> None:
        tell("part", "a\n\nevent: end\rdata: x\r\n\nid: 7")  # type: ignore[operator]

    async def endless(tell: object) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    live, ended = LiveRuns(), list[bool]()
    live.begin("ada", endless)
    run = live.begin("ada", work)
    sent = "".join([each async for each in event_stream(run.follow(Reader()))])
    assert sent == "id: 0\nevent: part\ndata: a\ndata: \ndata: event: enddata: x\ndata: \ndata: id: 7\n\n"
    assert live.find("eve", run.id) is None
    assert ended == []
    await live.close()
    assert ended == [True]
