"""No tenant sees, uses or delays what is another's: every attempt of a table is made, and is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from house import ROOT
from service.issuer import AUDIENCE, ISSUER, Issuer
from service.tenant_attacks import GROUPS, SECRET, UNKNOWN, Attempt, World, table
from toolcell import ToolRegistry
from toolcell.quotas import Quota
from toolcell.service import ServiceConfig, create_app
from toolcell.service.config import OidcConfig, TenantConfig
from toolcell.service.jwts import KeySet
from toolcell.service.principal import Scope
from toolcell.service.service import Service
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

TOOLS_OF_BOLT = f'''
def vault_key() -> str:
    """Return the key of the vault of bolt."""
    return "{SECRET}"
'''

PAID: list[float] = []
GATE = threading.Event()
WAITING = threading.Semaphore(0)


def pay(amount: float, note: str = "") -> str:
    """Pay an amount, for the tests of tenants."""
    PAID.append(amount)
    return "paid"


def wait_for_the_gate() -> bool:
    """Wait until the test opens its gate."""
    WAITING.release()
    return GATE.wait(60)


def registry() -> ToolRegistry:
    tools = ToolRegistry([wait_for_the_gate])
    tools.add(pay, requires_approval=True)
    return tools


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, TestClient, Issuer]]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "bolt_tools.py").write_text(TOOLS_OF_BOLT)
    TokenDatabase(folder / "tokens.db").list()
    config = ServiceConfig(
        state=folder / "state",
        tokens=folder / "tokens.db",
        oidc=OidcConfig(issuer=ISSUER, audience=AUDIENCE),
        defaults=TenantConfig(record=folder / "runs", concurrent_runs=2, queued_runs=8),
        tenants={"acme": TenantConfig(sessions=3), "bolt": TenantConfig(tools=(str(folder / "bolt_tools.py"),))},
        concurrent_runs=3,
        queued_runs=8,
        idempotency_keys=40,
    )
    issuer, made = Issuer(), Service(config, registry())
    made.authenticator._jwts.__self__.keys = KeySet(ISSUER, transport=issuer.transport)  # type: ignore[attr-defined]
    with TestClient(create_app(made), client=("198.51.100.1", 50000)) as client:
        yield made, client, issuer


@pytest.fixture(scope="module")
def world(service: tuple[Service, TestClient, Issuer]) -> Iterator[World]:
    made, client, issuer = service
    store = TokenDatabase(made.config.tokens or "")
    acme, bolt = (store.create(name, list(Scope), name=f"{name}-agent").text for name in ("acme", "bolt"))
    world = World(client, store, issuer, acme, bolt)
    fill(world)
    yield world
    store.close()


@pytest.fixture(autouse=True)
def _no_wrong_tokens_before(service: tuple[Service, TestClient, Issuer]) -> None:
    wrong = service[0].authenticator._attempts._wrong  # type: ignore[attr-defined]
    for address in list(wrong):
        wrong.pop(address)


def fill(world: World) -> None:
    """Give bolt something of everything."""

    def ok(method: str, path: str, body: Any, **headers: str) -> Any:
        answer = world.ask(method, path, world.bolt, json=body, headers=headers)
        assert answer.status_code in (200, 201, 204), answer.text
        return answer.json() if answer.content else None

    files = [{"name": "in.txt", "text": SECRET}]
    code = f"# {SECRET}\nopen('out.txt', 'w').write(key := call_tool('vault_key'))\nset_result(key, files=['out.txt'])"
    run = ok("POST", "/v1/execute", {"code": code, "files": files})
    assert (run["value"], len(run["files"])) == (SECRET, 1)
    ok("POST", "/v1/execute", {"code": "call_tool('vault_key')"}, **{"Idempotency-Key": "invoice-7"})
    ok("POST", "/v1/sessions", {"name": "vault"})
    ok("POST", "/v1/sessions/vault/execute", {"code": f"secret = '{SECRET}'"})
    ok("POST", "/v1/sessions/vault/files", {"files": [{"name": "secret.txt", "text": SECRET}]})
    waits = ok("POST", "/v1/execute", {"code": f"call_tool('pay', amount=1, note='{SECRET}')"})
    draft = ok("POST", "/v1/execute", {"code": f"call_tool('pay', amount=2, note='{SECRET}')", "dry_run": True})
    assert (waits["outcome"], bool(draft["draft_id"])) == ("suspended", True), (waits, draft)
    listed = world.ask("GET", "/v1/runs?limit=1", world.bolt).json()
    shown = next(
        each for each in world.ask("GET", "/v1/runs", world.bolt).json()["runs"] if each["id"] == run["run_id"]
    )
    world.ids = {
        "run": run["run_id"],
        "place": f"{shown['chain'][:12]}:{shown['seq']}",
        "sha256": shown["sha256"],
        "cursor": listed["next"],
        "session": "vault",
        "suspended": waits["run_id"],
        "draft": draft["draft_id"],
        "key": "invoice-7",
        "tool": "vault_key",
    }


def told(world: World, text: str) -> list[str]:
    """Return what a text says of bolt. What acme itself asked for may be repeated to it."""
    own = ("vault_key", "vault", "session", "key", "tool")
    marks = [SECRET, "bolt-agent", *(ident for what, ident in world.ids.items() if what not in own)]
    return [each for each in marks if each in text]


ATTEMPTS = [pytest.param(each, id=each.title) for attempts in GROUPS.values() for each in attempts]


def test_the_table_has_many_rows_and_none_twice() -> None:
    titles = [each.title for attempts in GROUPS.values() for each in attempts]
    assert len(set(titles)) == len(titles) >= 60


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_a_tenant_tries_against_another_is_refused(world: World, attempt: Attempt) -> None:
    world.client.cookies.clear()
    before = list(PAID)
    answer = attempt.ask(world)

    assert answer.status_code == attempt.status, answer.text
    if attempt.code:
        assert answer.json()["code"] == attempt.code, answer.text
    repeated = {str(answer.request.url).rpartition("/v1/")[2], answer.request.content.decode()}
    found = [each for each in told(world, answer.text) if not any(each in text for text in repeated)]
    assert not found, answer.text
    assert SECRET not in answer.text + str(answer.headers)
    if attempt.same_as is not None:
        other = attempt.same_as(world)
        names = [*world.ids.values(), UNKNOWN, UNKNOWN[:16]]
        assert (other.status_code, blank(other.text, names)) == (answer.status_code, blank(answer.text, names))
        assert {**other.headers, "content-length": ""} == {**answer.headers, "content-length": ""}
    assert before == PAID


def blank(text: str, names: list[str]) -> str:
    """Return a text without the ids that its sender gave."""
    for each in sorted(names, key=len, reverse=True):
        text = text.replace(each, "*")
    return text


def test_after_all_of_that_bolt_has_what_it_had(world: World) -> None:
    def value(code: str) -> Any:
        return world.ask("POST", "/v1/sessions/vault/execute", world.bolt, json={"code": code}).json()["value"]

    assert value("(secret, open('secret.txt').read())") == [SECRET, SECRET]
    assert world.ask("GET", f"/v1/runs/{world.ids['run']}", world.bolt).status_code == 200
    decided = world.ask("GET", f"/v1/suspended/{world.ids['suspended']}", world.bolt)
    assert decided.status_code == 200
    call = decided.json()["calls"][0]["id"]
    body = {"decisions": {call: {"decision": "approve"}}}
    done = world.ask("POST", f"/v1/suspended/{world.ids['suspended']}/decide", world.bolt, json=body)
    assert done.json()["value"] == "paid", done.text


def test_each_tenant_has_its_own_zygote_folders_and_signing_key(
    world: World, service: tuple[Service, TestClient, Issuer]
) -> None:
    made = service[0]
    assert world.run("1").status_code == 200
    acme, bolt = sorted(made.tenants, key=lambda each: each.name)
    state = made.config.state / "tenants"

    assert acme.runtime is not bolt.runtime and acme.runtime.environment.backend is not bolt.runtime.environment.backend
    assert acme.config.record != bolt.config.record
    assert (state / "acme" / "audit.key").read_bytes() != (state / "bolt" / "audit.key").read_bytes()
    for name in ("acme", "bolt"):
        assert (state / name).stat().st_mode & 0o077 == 0
        assert (state / name / "audit.key").stat().st_mode & 0o077 == 0
    assert not [
        path
        for path in (made.config.state.parent / "runs").glob("acme.db*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def test_a_tenant_that_fills_the_queue_does_not_keep_another_out(world: World) -> None:
    GATE.clear()
    with ThreadPoolExecutor(24) as pool:
        greedy = [pool.submit(world.run, "call_tool('wait_for_the_gate')") for _ in range(16)]
        for _ in range(2):
            assert WAITING.acquire(timeout=60)
        answer = world.run("40 + 2", world.bolt)  # acme may have two of the three places
        statuses_by_now = [each.result().status_code for each in greedy if each.done()]
        GATE.set()
        statuses = [each.result(60).status_code for each in greedy]

    assert (answer.status_code, answer.json()["value"]) == (200, 42)
    assert set(statuses_by_now) <= {503} and set(statuses) == {200, 503}
    assert statuses.count(200) == 10, "two ran, and eight waited"


def test_a_tenant_with_too_many_keys_or_sessions_does_not_keep_another_out(world: World) -> None:
    def send(key: str, token: str) -> int:
        return world.ask("POST", "/v1/execute", token, json={"code": "1"}, headers={"Idempotency-Key": key}).status_code

    statuses = [send(f"fill-{number}", world.acme) for number in range(41)]
    assert statuses[-1] == 429 and set(statuses[:30]) == {200}
    assert send("of-bolt", world.bolt) == 200

    opened = [world.ask("POST", "/v1/sessions", json={"name": f"s{number}"}).status_code for number in range(4)]
    assert opened[-1] == 429
    assert world.ask("POST", "/v1/sessions", world.bolt, json={"name": "one-more"}).status_code == 201


def test_wrong_tokens_from_the_address_of_another_do_not_lock_it_out(world: World) -> None:
    assert world.ask("GET", "/v1/tools", world.bolt).status_code == 200
    statuses = [world.ask("GET", "/v1/tools", f"tcs_wrong-{number}").status_code for number in range(40)]

    assert statuses[-1] == 429
    assert world.ask("GET", "/v1/tools", world.bolt).status_code == 200
    assert world.ask("GET", "/v1/tools", world.issue("acme").text).status_code == 429


@pytest.mark.parametrize("quota_by", ["subject", "tenant"])
def test_a_used_up_quota_is_that_of_its_tenant(tmp_path: Path, quota_by: Any) -> None:
    defaults = TenantConfig(quota=Quota(runs=2), quota_by=quota_by)
    store = TokenDatabase(tmp_path / "tokens.db")
    one, other, bolt = (
        store.create(tenant, list(Scope), name=name).text
        for tenant, name in (("acme", "one"), ("acme", "other"), ("bolt", "one"))
    )
    config = ServiceConfig(state=tmp_path / "state", tokens=store.path, defaults=defaults)
    with TestClient(create_app(config)) as client:
        world = World(client, store, Issuer(), one, bolt)
        statuses = [world.run("1").status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert world.run("1", other).status_code == (200 if quota_by == "subject" else 429)
        assert (
            f"the quota of '{'one' if quota_by == 'subject' else 'acme'}' is used up" in world.run("1").json()["detail"]
        )
        assert world.run("1", bolt).status_code == 200
    store.close()


def test_the_table_of_the_documentation_is_this_one() -> None:
    page = (ROOT / "tests" / "TENANTS.md").read_text(encoding="utf-8")
    assert table() in page, "write it with: python tests/service/tenant_attacks.py"


@pytest.mark.slow
def test_a_refused_attempt_is_no_secret_of_its_own(world: World) -> None:
    answer = world.ask("GET", f"/v1/runs/{world.ids['run']}", world.bolt)
    assert SECRET in json.dumps(answer.json()), "the mark that the attempts look for is really there"
