"""Who is let in: tokens and JWTs, wrong ones of every kind, and how many wrong ones an address may send."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from starlette.datastructures import Headers

from rows import each_row
from service.clock import Clock
from service.issuer import AUDIENCE, ISSUER, Issuer, jwk_of, unsigned
from toolcell.errors import UsageError
from toolcell.service import authenticators, jwts
from toolcell.service.authenticators import Attempts, BearerAuthenticator, Tokens, network_of
from toolcell.service.config import OidcConfig
from toolcell.service.jwts import Jwts, KeySet, read_keys
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


async def ask(authenticator: BearerAuthenticator, credential: str, client: str = "192.0.2.1") -> Principal | int:
    """Return who it is, or the status of the refusal."""
    try:
        return await authenticator.principal({"authorization": f"Bearer {credential}"}, client)
    except Problem as problem:
        return problem.status


def of_tokens(store: TokenDatabase, counted: Attempts | None = None) -> BearerAuthenticator:
    return BearerAuthenticator(tokens=Tokens(store).principal_of, attempts=counted)


def of_jwts(keys: KeySet, counted: Attempts | None = None, **settings: Any) -> BearerAuthenticator:
    config = OidcConfig(issuer=ISSUER, audience=AUDIENCE, **settings)
    return BearerAuthenticator(jwts=Jwts(config, keys).principal_of, attempts=counted)


@pytest.fixture
def store(tmp_path: Path) -> TokenDatabase:
    return TokenDatabase(tmp_path / "tokens.db")


async def test_a_token_says_who_sends_a_request_and_its_use_is_noted(store: TokenDatabase) -> None:
    named, unnamed = store.create("acme", [Scope.READ], name="ci"), store.create("acme", [Scope.READ])
    authenticator = of_tokens(store)

    assert await ask(authenticator, named.text) == Principal("acme", "ci", frozenset({Scope.READ}))
    assert await ask(authenticator, unnamed.text) == Principal("acme", unnamed.record.id, frozenset({Scope.READ}))
    assert all(each.last_used_at is not None for each in store.list())


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic {}", "{}", "bearer{}", "Bearer {} {}", "Bearer {}, Bearer {}", "Bearer é"],
)
async def test_a_header_that_has_no_token_is_refused(store: TokenDatabase, header: str) -> None:
    text = store.create("acme", [Scope.READ]).text
    with pytest.raises(Problem) as caught:
        await of_tokens(store).principal({"authorization": header.format(text, text)}, "192.0.2.1")
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
    assert text not in json.dumps(caught.value.to_dict())


async def test_two_credentials_in_one_request_are_refused(store: TokenDatabase) -> None:
    rows = [(b"authorization", f"Bearer {store.create(name, [Scope.READ]).text}".encode()) for name in ("a", "b")]
    with pytest.raises(Problem, match="two Authorization"):
        await of_tokens(store).principal(Headers(raw=rows), "192.0.2.1")


async def test_wrong_tokens_of_an_address_are_limited_and_others_do_not_notice(store: TokenDatabase) -> None:
    clock = Clock()
    authenticator = of_tokens(store, Attempts(3, 10, clock=clock))
    good, fresh = store.create("acme", [Scope.READ]).text, store.create("acme", [Scope.READ]).text
    known = await ask(authenticator, good)

    assert [await ask(authenticator, f"tcs_{n}") for n in range(5)] == [401, 401, 401, 429, 429]
    assert await ask(authenticator, fresh) == 429, "a guess that is right must not be told from the others"
    assert await ask(authenticator, fresh, "192.0.2.2") != 429
    assert await ask(authenticator, good) == known, "whoever was let in before is not locked out by a neighbour"
    clock.now += 10
    assert [await ask(authenticator, f"tcs_{n}") for n in range(2)] == [401, 429]


async def test_what_is_remembered_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticators, "MAX_ADDRESSES", 10)
    monkeypatch.setattr(authenticators, "MAX_PROVED", 10)
    counted = Attempts()
    for number in range(50):
        counted.note_wrong(f"192.0.2.{number}")
        counted.note_right(f"192.0.2.{number}", b"digest")
    assert (len(counted._wrong), len(counted._proved)) == (10, 10)


def test_an_address_of_ipv6_is_the_network_of_a_host() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("fe80::1%eth0") == network_of("fe80::2%eth1")
    assert network_of("not an address" * 100) == ("not an address" * 100)[:64]


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def authenticator(issuer: Issuer) -> BearerAuthenticator:
    issuer.asked.clear()
    issuer.answers.clear()
    return of_jwts(KeySet(ISSUER, transport=issuer.transport))


async def test_a_jwt_says_who_sends_a_request(issuer: Issuer, authenticator: BearerAuthenticator) -> None:
    expected = Principal("acme", "anna", frozenset({Scope.EXECUTE, Scope.READ}))

    assert await ask(authenticator, issuer.sign()) == expected
    assert await ask(authenticator, issuer.sign(aud=["elsewhere", AUDIENCE])) == expected
    assert await ask(authenticator, issuer.sign(headers={"typ": "at+jwt"})) == expected
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"], "the keys are kept"


async def test_claims_have_the_names_and_words_that_the_configuration_says(issuer: Issuer) -> None:
    authenticator = of_jwts(
        KeySet(ISSUER, f"{ISSUER}/keys", transport=issuer.transport),
        tenant_claim="org",
        scope_claim="roles",
        scopes={"runner": Scope.EXECUTE, "boss": Scope.APPROVE},
    )
    found = await ask(authenticator, issuer.sign(org="other", roles=["runner", "toolcell:admin", 7, "execute"]))
    assert found == Principal("other", "anna", frozenset({Scope.EXECUTE}))


def forged(issuer: Issuer, attack: str) -> str:
    """Return a token with which somebody tries to get in."""
    now = int(time.time())
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "anna",
        "tenant": "acme",
        "scope": "toolcell:admin",
        "exp": now + 99,
    }
    own = rsa.generate_private_key(65537, 2048)
    match attack:
        case "alg none":
            return unsigned(claims, {"alg": "none", "kid": "rsa"})
        case "alg None":
            return unsigned(claims, {"alg": "None", "kid": "rsa", "typ": "JWT"})
        case "public key as secret":
            return issuer.with_public_key(claims)
        case "own key":
            return issuer.sign(own)
        case "own key in its header":
            return issuer.sign(own, headers={"jwk": jwk_of(own, "rsa"), "jku": "https://evil.example/keys"})
        case "own key id":
            return issuer.sign(own, headers={"kid": "../../../dev/null"})
        case "other algorithm for the key":
            return issuer.sign(ec.generate_private_key(ec.SECP256R1()), alg="ES256")
        case "algorithm that is not allowed":
            return issuer.sign(alg="RS384")
        case "no key id":
            token = issuer.sign()
            _, body, signature = token.split(".")
            return f"{unsigned({}, {'alg': 'RS256'}).split('.')[0]}.{body}.{signature}"
        case "critical header":
            return issuer.sign(headers={"crit": ["b64"], "b64": False})
        case "logout token":
            return issuer.sign(headers={"typ": "logout+jwt"})
        case "changed claims":
            head, _, signature = issuer.sign().split(".")
            return f"{head}.{unsigned(claims, {}).split('.')[1]}.{signature}"
        case "expired":
            return issuer.sign(exp=now - 60)
        case "not valid yet":
            return issuer.sign(nbf=now + 60)
        case "issued in the future":
            return issuer.sign(iat=now + 600)
    changes: dict[str, dict[str, Any]] = {
        "no expiry": {"exp": None},
        "expiry is text": {"exp": "never"},
        "other issuer": {"iss": "https://evil.example"},
        "issuer with a slash": {"iss": f"{ISSUER}/"},
        "no issuer": {"iss": None},
        "other audience": {"aud": "elsewhere"},
        "no audience": {"aud": None},
        "no subject": {"sub": None},
        "empty subject": {"sub": ""},
        "subject with line ends": {"sub": "anna\nadmin"},
        "no tenant": {"tenant": None},
        "tenant is a path": {"tenant": "../other"},
        "tenant is a list": {"tenant": ["acme"]},
    }
    return issuer.sign(**changes[attack])


ATTACKS = {
    "alg none": 401, "alg None": 401, "public key as secret": 401, "own key": 401, "own key in its header": 401,
    "own key id": 401, "other algorithm for the key": 401, "algorithm that is not allowed": 401, "no key id": 401,
    "critical header": 401, "logout token": 401, "changed claims": 401, "expired": 401, "not valid yet": 401,
    "issued in the future": 401, "no expiry": 401, "expiry is text": 401, "other issuer": 401,
    "issuer with a slash": 401, "no issuer": 401, "other audience": 401, "no audience": 401, "no subject": 401,
    "empty subject": 401, "subject with line ends": 401, "no tenant": 403, "tenant is a path": 403,
    "tenant is a list": 403,
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_forged_jwt_is_refused(issuer: Issuer, authenticator: BearerAuthenticator, attack: str) -> None:
    assert await ask(authenticator, forged(issuer, attack)) == ATTACKS[attack]
    assert isinstance(await ask(authenticator, issuer.sign()), Principal)


@pytest.mark.parametrize("text", ["a.b.c", "...", "e30.e30.e30", "x" * 20_000, "eyJhbGciOiJSUzI1NiJ9." * 3, "[" * 5000])
async def test_what_is_no_jwt_is_refused(authenticator: BearerAuthenticator, text: str) -> None:
    assert await ask(authenticator, text) == 401


async def test_a_jwt_is_no_token_and_a_token_is_no_jwt(
    issuer: Issuer, authenticator: BearerAuthenticator, store: TokenDatabase
) -> None:
    assert await ask(authenticator, store.create("acme", [Scope.READ]).text) == 401
    assert await ask(of_tokens(store), issuer.sign()) == 401


async def test_new_keys_are_found_and_unknown_ids_do_not_make_the_service_ask_each_time(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    authenticator = of_jwts(
        KeySet(ISSUER, f"{ISSUER}/keys", transport=issuer.transport, clock=clock),
        Attempts(99),
    )
    new = ec.generate_private_key(ec.SECP256R1())
    issuer.asked.clear()
    assert isinstance(await ask(authenticator, issuer.sign()), Principal)

    monkeypatch.setitem(issuer.keys, "new", new)
    token = issuer.sign(new, alg="ES256", headers={"kid": "new"})
    for number in range(20):
        assert await ask(authenticator, issuer.sign(headers={"kid": f"unknown-{number}"})) == 401
    assert await ask(authenticator, token) == 401
    assert len(issuer.asked) == 1
    clock.now += jwts.AGAIN_AFTER_S
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(ask, authenticator, token)
    assert isinstance(await ask(authenticator, token), Principal)
    assert len(issuer.asked) == 2


@each_row(
    "answer",
    [
        httpx.Response(500),
        httpx.Response(302, headers={"Location": "https://evil.example/keys"}),
        httpx.Response(200, content=b"x" * (jwts.MAX_BYTES + 1)),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, json={"keys": [{}] * (jwts.MAX_KEYS + 1)}),
        httpx.Response(200, json=[1]),
    ],
    ids=["500", "redirect", "too large", "too deep", "too many keys", "no set"],
)
async def test_an_issuer_that_cannot_be_used_is_told_and_old_keys_go_on(issuer: Issuer, answer: httpx.Response) -> None:
    clock = Clock()
    keys = KeySet(ISSUER, f"{ISSUER}/keys", transport=issuer.transport, clock=clock)
    issuer.answers["/keys"] = answer
    assert await ask(of_jwts(keys), issuer.sign()) == 503

    issuer.answers.clear()
    clock.now += jwts.AGAIN_AFTER_S
    assert isinstance(await ask(of_jwts(keys), issuer.sign()), Principal)
    issuer.answers["/keys"] = answer
    clock.now += jwts.KEPT_S
    assert isinstance(await ask(of_jwts(keys), issuer.sign()), Principal)
    issuer.answers.clear()


async def test_a_discovery_document_of_another_issuer_is_refused(issuer: Issuer) -> None:
    for about in (
        {"issuer": "https://evil.example", "jwks_uri": f"{ISSUER}/keys"},
        {"issuer": ISSUER, "jwks_uri": "http://issuer.example/keys"},
        {"issuer": ISSUER},
    ):
        issuer.answers["/.well-known/openid-configuration"] = httpx.Response(200, json=about)
        keys = KeySet(ISSUER, transport=issuer.transport)
        assert await ask(of_jwts(keys), issuer.sign()) == 503
    issuer.answers.clear()


def test_only_public_keys_for_signatures_count() -> None:
    rsa_key = jwk_of(rsa.generate_private_key(65537, 2048), "good")
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"}
    others = [secret, rsa_key | {"kid": "enc", "use": "enc"}, {"kty": "RSA", "kid": "broken"}, 7, {"kty": "RSA"}]
    assert set(read_keys({"keys": [rsa_key, *others]})) == {"good"}


@each_row("algorithm", ["none", "HS256", "HS512", "rs256", ""])
def test_algorithms_that_prove_nothing_are_refused_in_the_configuration(algorithm: str) -> None:
    with pytest.raises(UsageError, match="proves nothing"):
        OidcConfig(issuer=ISSUER, audience=AUDIENCE, algorithms=("RS256", algorithm))


@each_row("url", ["http://issuer.example", "ftp://issuer.example", "issuer.example", "https://", ""])
def test_keys_do_not_come_over_an_unprotected_connection(url: str) -> None:
    with pytest.raises(UsageError, match="https"):
        KeySet(url)
    KeySet("http://127.0.0.1:8080")


@each_row(("bits", "is_used"), [(1_024, False), (2_048, True)])
def test_a_short_rsa_key_of_an_issuer_is_not_used(bits: int, is_used: bool) -> None:
    key = jwk_of(rsa.generate_private_key(65537, bits), "a")
    assert bool(read_keys({"keys": [key]})) is is_used
