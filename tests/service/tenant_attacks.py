"""What tenant acme tries against tenant bolt: a table. `test_tenants` makes each attempt; tests/TENANTS.md has it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.testclient import TestClient

from service.issuer import Issuer
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

SECRET = "SECRET-OF-BOLT"
"""Stands in bolt's script, session, files, arguments and answers."""
UNKNOWN = "0123456789abcdef0123456789abcdef"
"""An id that nobody has."""


@dataclass
class World:
    """A service with two tenants. bolt has something of everything."""

    client: TestClient
    store: TokenDatabase
    issuer: Issuer
    acme: str
    """Token of acme, with every scope."""
    bolt: str
    ids: dict[str, str] = field(default_factory=dict)
    """Ids of what bolt has: run, place, draft, suspended, call, script's digest, cursor, key."""

    def ask(self, method: str, path: str, token: str | None = None, **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        headers.setdefault("Authorization", f"Bearer {self.acme if token is None else token}")
        return self.client.request(method, path, headers=headers, **options)

    def run(self, code: str, token: str | None = None, **body: Any) -> httpx.Response:
        return self.ask("POST", "/v1/execute", token, json={"code": code, **body})

    def issue(self, tenant: str, *scopes: Scope, lifetime_s: float | None = 600) -> Any:
        return self.store.create(tenant, scopes or tuple(Scope), lifetime_s=lifetime_s)


Ask = Callable[[World], httpx.Response]


@dataclass(frozen=True)
class Attempt:
    """One row of the table."""

    title: str
    ask: Ask
    status: int
    code: str = ""
    """Code of the problem; empty where the answer is about acme's own things only."""
    same_as: Ask | None = None
    """The same with an id that nobody has. The answers must not differ."""


def by_id(title: str, method: str, path: str, what: str, status: int, code: str, body: Any = None) -> Attempt:
    """Return an attempt to use an id of bolt's. `{}` in the path stands for it."""

    def asking(ident: Callable[[World], str]) -> Ask:
        options: dict[str, Any] = {} if body is None else {"json": body}
        return lambda world: world.ask(method, path.format(ident(world)), **options)

    unknown = UNKNOWN[: 16 if what == "draft" else None]  # of the same form as those that there are
    return Attempt(title, asking(lambda world: world.ids[what]), status, code, asking(lambda world: unknown))


def get(title: str, path: str) -> Attempt:
    """Return an attempt to find something of bolt's in a list; `{what}` in the path stands for its id."""
    return Attempt(title, lambda world: world.ask("GET", path.format(**world.ids)), 200)


def with_header(title: str, headers: Mapping[str, str], status: int, code: str = "", path: str = "/v1/runs") -> Attempt:
    """Return an attempt with headers instead of, or besides, a token."""
    return Attempt(title, lambda world: world.ask("GET", path, headers=headers), status, code)


def session(title: str, method: str, rest: str, body: Any = None) -> Attempt:
    """Return an attempt on bolt's session."""
    return by_id(title, method, f"/v1/sessions/{{}}{rest}", "session", 404, "no_such_session", body)


def with_token(title: str, token: Callable[[World], str], status: int, code: str) -> Attempt:
    """Return an attempt to list bolt's runs with a token."""
    return Attempt(title, lambda world: world.ask("GET", "/v1/runs", token(world)), status, code)


RUNS = (
    by_id("the record of a run, by its id", "GET", "/v1/runs/{}", "run", 404, "no_such_run"),
    by_id("the record of a run, by its place in the log", "GET", "/v1/runs/{}", "place", 404, "no_such_run"),
    by_id("a replay of a run", "POST", "/v1/runs/{}/replay", "run", 404, "no_such_run", {}),
    by_id("undoing what a run has made", "POST", "/v1/runs/{}/revert", "run", 404, "no_such_id"),
    get("bolt's runs in the list", "/v1/runs?limit=100"),
    get("bolt's runs by user", "/v1/runs?user=bolt-agent"),
    get("bolt's runs by digest of the script", "/v1/runs?sha256={sha256}"),
    get("bolt's runs by tool", "/v1/runs?tool=vault_key"),
    get("bolt's runs by session", "/v1/runs?session=vault"),
    get("bolt's runs with a cursor of bolt's list", "/v1/runs?cursor={cursor}"),
    Attempt(
        "mending a run of bolt's",
        lambda world: world.run("1", repairs=world.ids["run"]),
        422,
        "usage_error",
        lambda world: world.run("1", repairs=UNKNOWN),
    ),
)

SESSIONS = (
    session("looking at a session", "GET", ""),
    session("a script in a session", "POST", "/execute", {"code": "secret"}),
    session("events of a script in a session", "POST", "/execute", {"code": "1"}),
    session("writing files to a session", "POST", "/files", {"files": [{"name": "x", "text": "x"}]}),
    session("writing one file to a session", "PUT", "/files/secret.txt"),
    session("the list of files of a session", "GET", "/files"),
    session("a file of a session", "GET", "/files/secret.txt"),
    session("interrupting a session", "POST", "/interrupt"),
    session("resetting a session", "POST", "/reset"),
    session("giving up the script of a session", "POST", "/abandon"),
    session("a copy of a session", "POST", "/fork", {"name": "copy"}),
    session("removing a session", "DELETE", ""),
    get("bolt's session in the list", "/v1/sessions"),
    Attempt(
        "restoring a session by its name",
        lambda world: world.ask("POST", "/v1/sessions", json={"name": "vault", "restore": True}),
        404,
        "no_such_session",
    ),
)


def own_session_of_this_name(world: World) -> httpx.Response:
    """Open a session of the same name. It is acme's own, and empty."""
    assert world.ask("POST", "/v1/sessions", json={"name": "vault"}).status_code == 201
    try:
        code = "import os; (globals().get('secret'), os.listdir('.'))"
        answer = world.ask("POST", "/v1/sessions/vault/execute", json={"code": code})
        assert answer.json()["value"] == [None, []], answer.text
        return answer
    finally:
        assert world.ask("DELETE", "/v1/sessions/vault").status_code == 204


def in_own_session(method: str, path: str, **options: Any) -> Ask:
    """Ask for a file of acme's own session."""

    def ask(world: World) -> httpx.Response:
        world.ask("POST", "/v1/sessions", json={"name": "own"})
        return world.ask(method, f"/v1/sessions/own/files/{path}", **options)

    return ask


NAMES = (
    Attempt("a session of the same name", own_session_of_this_name, 200),
    Attempt("a session with a path as its name",
            lambda world: world.ask("POST", "/v1/sessions", json={"name": "../../bolt/journal/vault"}), 422,
            "invalid_request"),
    Attempt("a path to bolt's session in the URL",
            lambda world: world.ask("GET", "/v1/sessions/..%2F..%2Fbolt%2Fvault"), 404, "not_found"),
    Attempt("a run whose id is a path", lambda world: world.ask("GET", "/v1/runs/..%2F..%2Fbolt"), 404, "not_found"),
    Attempt("a run whose id is ..", lambda world: world.ask("GET", "/v1/runs/%2E%2E"), 422, "invalid_request"),
    Attempt("a draft whose id is a path",
            lambda world: world.ask("POST", "/v1/drafts/..%2Fbolt/commit", json={}), 404, "not_found"),
    Attempt("a file above the workspace, to read", in_own_session("GET", "..%2F..%2F..%2Fetc%2Fpasswd"), 404,
            "no_such_file"),
    Attempt("a file above the workspace, to write", in_own_session("PUT", "..%2F..%2Fescaped", content=b"x"), 422,
            "usage_error"),
    Attempt("an absolute path to bolt's state", in_own_session("GET", "%2Fstate%2Ftenants%2Fbolt%2Faudit.key"), 404,
            "no_such_file"),
)  # fmt: skip


def decide_with_calls_of_bolt(world: World) -> httpx.Response:
    """Decide about acme's own suspended run, with the id of bolt's call and bolt's run in the body."""
    waits = world.run("call_tool('pay', amount=1)").json()["run_id"]
    body = {"decisions": {world.ids["suspended"]: {"decision": "approve"}}}
    return world.ask("POST", f"/v1/suspended/{waits}/decide", json=body)


APPROVE: Any = {"decisions": {"call_1": {"decision": "approve"}}}

DECISIONS = (
    get("bolt's suspended runs in the list", "/v1/suspended"),
    by_id("a suspended run", "GET", "/v1/suspended/{}", "suspended", 404, "not_suspended"),
    by_id("approving a suspended run", "POST", "/v1/suspended/{}/decide", "suspended", 409, "not_suspended", APPROVE),
    by_id("carrying on a run that has ended", "POST", "/v1/suspended/{}/decide", "run", 409, "not_suspended", {}),
    by_id("making what a dry run collected", "POST", "/v1/drafts/{}/commit", "draft", 404, "no_such_id", {}),
    Attempt("deciding about bolt's call in an own run", decide_with_calls_of_bolt, 422, "usage_error"),
)


def keyed(code: str, *before: str) -> Ask:
    """Send bolt's Idempotency-Key with a script, and with others before it."""

    def ask(world: World) -> httpx.Response:
        answers = [
            world.ask("POST", "/v1/execute", headers={"Idempotency-Key": world.ids["key"]}, json={"code": each})
            for each in (*before, code)
        ]
        assert "Idempotency-Replayed" not in answers[-1].headers
        return answers[-1]

    return ask


KEYS = (
    Attempt("bolt's Idempotency-Key with bolt's body", keyed("call_tool('vault_key')"), 200),
    Attempt(
        "bolt's Idempotency-Key with another body",
        keyed("1", "call_tool('vault_key')"),  # acme's own is that of the row above
        422,
        "key_reused",
    ),
)

TOOLS = (
    get("bolt's tools in the list", "/v1/tools"),
    get("bolt's tools by search", "/v1/tools?q=the key of the vault"),
    get("bolt's tools in the stubs", "/v1/stubs"),
    get("bolt's tools in the OpenAPI document", "/v1/openapi.json"),
    by_id("a tool", "GET", "/v1/tools/{}", "tool", 404, "no_such_tool"),
    Attempt("a script with a tool of bolt's", lambda world: world.run("1", tools=["vault_key"]), 422, "unknown_tool"),
    Attempt("a call of a tool of bolt's", lambda world: world.run("call_tool('vault_key')"), 200),
    Attempt(
        "a plan with a tool of bolt's",
        lambda world: world.ask("POST", "/v1/plan", json={"steps": [{"tool": "vault_key", "args": {}}]}),
        200,
    ),
    Attempt(
        "bolt's state, from a script",
        lambda world: world.run("import glob, os; [*glob.glob('/**/bolt*', recursive=True), *os.environ.values()]"),
        200,
    ),
    Attempt("bolt's name from the probes", lambda world: world.ask("GET", "/readyz"), 200),
)


def rotated(world: World) -> str:
    """Return a token in whose place there is another one."""
    old = world.issue("bolt")
    world.store.rotate(old.record.id, overlap_s=0)
    return str(old.text)


def revoked(world: World) -> str:
    """Return a token that worked until it was revoked."""
    issued = world.issue("bolt")
    assert world.ask("GET", "/v1/runs", issued.text).status_code == 200
    world.store.revoke(issued.record.id)
    return str(issued.text)


def expired(world: World) -> str:
    """Return a token that has expired."""
    issued = world.issue("bolt", lifetime_s=0.001)
    while world.store.now() < (issued.record.expires_at or 0):
        time.sleep(0.001)
    return str(issued.text)


def crossed(world: World) -> str:
    """Return the id of bolt's token with the secret of acme's."""
    return "_".join([*world.bolt.split("_", 2)[:2], world.acme.split("_", 2)[2]])


def as_user(token: str) -> dict[str, str]:
    """Return a token as a password."""
    return {"Authorization": "Basic " + base64.b64encode(f"bolt:{token}".encode()).decode()}


def limited(scope: Scope, method: str, path: str, body: Any = None) -> Ask:
    """Ask with a token of bolt's that allows one scope."""
    return lambda world: world.ask(
        method, path.format(**world.ids), world.issue("bolt", scope).text, **({} if body is None else {"json": body})
    )


TOKENS = (
    Attempt("no token", lambda world: world.client.get("/v1/runs"), 401, "unauthorized"),
    with_token("a token of random letters", lambda world: "tcs_" + "0" * 16 + "_" + "A" * 43, 401, "unauthorized"),
    with_token("the id of bolt's token with an own secret", crossed, 401, "unauthorized"),
    with_token("bolt's token, cut by one letter", lambda world: world.bolt[:-1], 401, "unauthorized"),
    with_token("the digest that stands in the store", lambda world: "a" * 64, 401, "unauthorized"),
    with_token("a revoked token of bolt's", revoked, 401, "unauthorized"),
    with_token("an expired token of bolt's", expired, 401, "unauthorized"),
    with_token("a rotated token of bolt's after its overlap", rotated, 401, "unauthorized"),
    Attempt("bolt's token in the URL", lambda world: world.client.get(f"/v1/runs?token={world.bolt}"), 401,
            "unauthorized"),
    Attempt("bolt's token as a password", lambda world: world.client.get("/v1/runs", headers=as_user(world.bolt)), 401,
            "unauthorized"),
    Attempt("bolt's token as a cookie",
            lambda world: world.client.get("/v1/runs", headers={"Cookie": f"token={world.bolt}"}), 401, "unauthorized"),
    Attempt("two tokens in one request",
            lambda world: world.client.get("/v1/runs", headers=[("Authorization", f"Bearer {world.acme}"),
                                                                ("Authorization", f"Bearer {world.bolt}")]),  # type: ignore[arg-type]
            401, "unauthorized"),
    Attempt("running a script with bolt's token that may read",
            limited(Scope.READ, "POST", "/v1/execute", {"code": "1"}), 403, "forbidden"),
    Attempt("removing a session with bolt's token that may read",
            limited(Scope.READ, "DELETE", "/v1/sessions/vault"), 403, "forbidden"),
    Attempt("approving with bolt's token that may execute",
            limited(Scope.EXECUTE, "POST", "/v1/suspended/{suspended}/decide", APPROVE), 403, "forbidden"),
    Attempt("committing with bolt's token that may execute",
            limited(Scope.EXECUTE, "POST", "/v1/drafts/{draft}/commit", {}), 403, "forbidden"),
    Attempt("reading runs with bolt's token that may execute",
            limited(Scope.EXECUTE, "GET", "/v1/runs/{run}"), 403, "forbidden"),
)  # fmt: skip


def signed(key: Any = None, **changes: Any) -> Callable[[World], str]:
    """Return a JWT of the issuer, or of another key."""
    return lambda world: world.issuer.sign(key, **({"tenant": "bolt", "scope": "toolcell:admin"} | changes))


def with_public_key(world: World) -> str:
    """Sign with the public key as a secret."""
    return world.issuer.with_public_key({"tenant": "bolt", "scope": "toolcell:admin", "exp": time.time() + 99})


def unsigned(world: World) -> str:
    """Sign with nothing."""
    return jwt.encode({"tenant": "bolt", "sub": "x", "exp": time.time() + 99}, None, "none", {"kid": "rsa"})


OWN_KEY = rsa.generate_private_key(65537, 2048)

JWTS = (
    with_token("a JWT without a signature", unsigned, 401, "unauthorized"),
    with_token("a JWT signed with the public key as a secret", with_public_key, 401, "unauthorized"),
    with_token("a JWT signed with an own key", signed(OWN_KEY), 401, "unauthorized"),
    with_token(
        "a JWT that brings its key", signed(OWN_KEY, headers={"jku": "https://evil.example"}), 401, "unauthorized"
    ),
    with_token("a JWT for another service", signed(aud="other"), 401, "unauthorized"),
    with_token("a JWT of another issuer", signed(iss="https://evil.example"), 401, "unauthorized"),
    with_token("a JWT that has expired", signed(exp=1), 401, "unauthorized"),
    with_token("a JWT of a tenant that is not listed", signed(tenant="nobody"), 403, "no_tenant"),
    with_token("a JWT with a list of tenants", signed(tenant=["acme", "bolt"]), 403, "no_tenant"),
    with_token("a JWT of bolt's without a scope that we know", signed(scope="admin execute"), 403, "forbidden"),
    with_token("a JWT of acme's that names bolt elsewhere", signed(tenant="acme", tenant_id="bolt"), 200, ""),
)

HEADERS = (
    with_header("a header that names the tenant", {"X-Tenant": "bolt", "X-Tenant-Id": "bolt"}, 200),
    with_header("a header that names the user", {"X-Forwarded-User": "bolt-agent", "Remote-User": "bolt-agent"}, 200),
    with_header(
        "an address of this machine in the headers",
        {"Authorization": "", "X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1"},
        401,
        "unauthorized",
    ),
    with_header(
        "the host of this machine in the headers", {"Authorization": "", "Host": "localhost"}, 401, "unauthorized"
    ),
    with_header("another URL in the headers", {"X-Original-URL": "/v1/runs/bolt", "X-Rewrite-URL": "/admin"}, 200),
    Attempt(
        "another method in the headers",
        lambda world: world.ask("GET", "/v1/sessions/vault", headers={"X-HTTP-Method-Override": "DELETE"}),
        404,
        "no_such_session",
    ),
    Attempt("the tenant in the body", lambda world: world.run("1", tenant="bolt"), 422, "invalid_request"),
    Attempt("the user in the body", lambda world: world.run("1", user_id="bolt-agent"), 422, "invalid_request"),
    Attempt("the tenant in the query", lambda world: world.ask("GET", "/v1/runs?tenant=bolt"), 422, "invalid_request"),
    Attempt("the tenant in the path", lambda world: world.ask("GET", "/v1/tenants/bolt/runs"), 404, "not_found"),
)

GROUPS: dict[str, tuple[Attempt, ...]] = {
    "Runs and the audit log": RUNS,
    "Sessions and their files": SESSIONS,
    "Names and paths": NAMES,
    "Suspended runs and drafts": DECISIONS,
    "Idempotency keys": KEYS,
    "Tools, documents and scripts": TOOLS,
    "Tokens": TOKENS,
    "JWTs": JWTS,
    "Headers, bodies and queries": HEADERS,
}


def table() -> str:
    """Return the table as it stands in tests/TENANTS.md."""
    lines = ["| | acme tries | and gets |", "|---:|---|---|"]
    number = 0
    for group, attempts in GROUPS.items():
        lines.append(f"| | **{group}** | |")
        for each in attempts:
            number += 1
            got = f"{each.status} `{each.code}`" if each.code else f"{each.status}, with nothing of bolt's"
            lines.append(f"| {number} | {each.title} | {got} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
