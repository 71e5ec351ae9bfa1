"""A client logs in at a server that wants it, keeps its tokens, and asks nobody twice."""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from rows import each_row
from toolcell.egress.resolver import SystemResolver
from toolcell.errors import UsageError
from toolcell.mcp.oauth import ClientCredentials, OAuth
from toolcell.mcp.tokens import default_path
from toolcell.tools import ToolRegistry

from .oauth_world import ISSUER, METADATA, PRM, REDIRECT_URI, SERVER, Text, World, problem

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return new_world(monkeypatch)


def new_world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    world.store = Text()
    monkeypatch.setattr(SystemResolver, "resolve", looked_up)
    return world


world_addresses = {"auth.example.net": "93.184.216.34", "inside.example.net": "10.0.0.7"}


async def looked_up(_: SystemResolver, host: str, port: int) -> list[str]:
    return [world_addresses[host]]


async def test_a_person_logs_in_once_and_the_next_process_needs_nobody(world: World) -> None:
    async with world.client(world.login()) as client:
        first = await client.post(SERVER)
    async with world.client(world.login()) as client:
        second = await client.post(SERVER)

    assert first.status_code == second.status_code == 200
    assert len(world.asked) == len(world.sent_to("/register")) == 1
    assert world.form(world.sent_to("/token")[0])["code"] == "the-code"
    assert "code_challenge_method=S256" in world.asked[0]


async def test_a_refused_token_is_refreshed_at_the_same_authorization_server_without_asking(world: World) -> None:
    async with world.client(world.login()) as client:
        await client.post(SERVER)
    world.valid = {"access-2"}
    async with world.client(world.login()) as client:  # a process that has discovered nothing
        answer = await client.post(SERVER)

    refreshed = world.sent_to("/token")[-1]
    assert answer.status_code == 200 and len(world.asked) == 1
    assert refreshed.headers["host"] == "auth.example.net"
    assert world.form(refreshed)["refresh_token"] == "refresh-me"


async def test_a_token_that_another_process_refreshed_is_taken(world: World) -> None:
    async with world.client(world.login()) as early, world.client(world.login()) as late:
        await early.post(SERVER)
        await late.post(SERVER)
        world.valid = {"access-2"}
        await early.post(SERVER)
        answer = await late.post(SERVER)

    assert answer.status_code == 200
    assert [world.form(each)["grant_type"] for each in world.sent_to("/token")] == [
        "authorization_code",
        "refresh_token",
    ]


async def test_two_processes_with_one_store_refresh_a_rotating_token_once(world: World, tmp_path: Path) -> None:
    logins = [world.login(store=tmp_path / "tokens.json") for _ in range(2)]
    async with world.client(logins[0]) as one, world.client(logins[1]) as other:
        await one.post(SERVER)
        await other.post(SERVER)
        world.valid = {"access-2"}
        statuses: list[int] = []

        async def post(client: httpx2.AsyncClient) -> None:
            statuses.append((await client.post(SERVER)).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, one)
            tasks.start_soon(post, other)

    assert statuses == [200, 200]
    assert [world.form(each)["grant_type"] for each in world.sent_to("/token")] == [
        "authorization_code",
        "refresh_token",
    ]


async def test_nobody_is_asked_while_the_authorization_server_is_down(world: World) -> None:
    async with world.client(world.login()) as client:
        await client.post(SERVER)
        world.valid = set()
        world.answers[f"{ISSUER}/token"] = httpx2.Response(503)
        answer = await client.post(SERVER)

    assert "cannot be refreshed now: HTTP 503" in problem(answer)
    assert len(world.asked) == 1


async def test_requests_in_parallel_share_one_login(world: World) -> None:
    answers = list[int]()
    async with world.client(world.login()) as client, anyio.create_task_group() as tasks:

        async def post() -> None:
            answers.append((await client.post(SERVER)).status_code)

        for _ in range(20):
            tasks.start_soon(post)

    assert answers == [200] * 20
    assert len(world.asked) == len(world.sent_to("/token")) == 1


async def test_a_slow_answer_keeps_no_other_request_waiting(world: World) -> None:
    slow, is_there = anyio.Event(), anyio.Event()
    plain = world.answer

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.content == b"slow":
            is_there.set()
            await slow.wait()
        return await plain(request)

    world.answer = answer  # type: ignore[method-assign]
    async with world.client(world.login()) as client:
        await client.post(SERVER)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(SERVER, content=b"slow"))
            await is_there.wait()
            with anyio.fail_after(60):
                assert (await client.post(SERVER)).status_code == 200
            slow.set()


async def test_a_login_that_fails_is_said_and_nobody_is_asked_again_until_a_person_wants_it(world: World) -> None:
    world.come_back = lambda query: f"{REDIRECT_URI}?error=access_denied&state={query['state']}"
    login = world.login()
    async with world.client(login) as client:
        answers = [await client.post(SERVER) for _ in range(3)]
        login.begin_connection()
        answers.append(await client.post(SERVER))
        asked = len(world.asked)
        login.begin_connection(by_person=True)
        world.come_back = world.with_code
        assert (await client.post(SERVER)).status_code == 200

    assert {problem(answer) for answer in answers} == {"the login was refused: access_denied"}
    assert asked == 1


async def test_a_server_that_refuses_every_token_is_logged_in_at_once(world: World) -> None:
    world.valid = set()
    async with world.client(world.login()) as client:
        answers = [await client.post(SERVER) for _ in range(3)]

    assert "refuses the token" in problem(answers[0]) and len(world.asked) <= 2
    assert len({len(world.asked)} | {len(world.sent_to("/token"))}) <= 2
    assert "refuses the token" in problem(answers[2])


async def test_more_rights_are_asked_for_once_for_each_new_scope(world: World) -> None:
    async with world.client(world.login()) as client:
        await client.post(SERVER)
        plain, scope = world.answer, "write"

        async def answer(request: httpx2.Request) -> httpx2.Response:
            if request.headers["host"] != "mcp.example.com" or request.method != "POST":
                return await plain(request)
            challenge = f'Bearer error="insufficient_scope", scope="{scope}"'
            return httpx2.Response(403, headers={"www-authenticate": challenge})

        world.answer = answer  # type: ignore[method-assign]
        for _ in range(3):
            said = problem(await client.post(SERVER))
        asked = len(world.asked)
        for number in range(30):
            scope = f"scope-{number}"
            await client.post(SERVER)

    assert asked == 2 and "scope=write" in world.asked[1] and "logged in already" in said
    assert len(world.asked) <= 1 + 10


@each_row(
    ("place", "said"),
    [
        ("http://169.254.169.254/latest", "http:// is refused"),
        ("https://169.254.169.254/latest", "link-local"),
        ("https://[::ffff:10.0.0.1]/x", "private"),
        ("https://inside.example.net/x", "(private)"),
        ("http://127.0.0.1:9/x", "http:// is refused"),
        ("https://localhost/x", "loopback"),
        ("https://user:pw@auth.example.net/x", "not a plain https URL"),
    ],
)
@each_row("named", ["metadata", "issuer", "authorize", "token", "register"])
async def test_a_login_never_leads_to_a_private_place(
    monkeypatch: pytest.MonkeyPatch, place: str, said: str, named: str
) -> None:
    world = new_world(monkeypatch)  # one for each row: a place that a row sets stays
    world_addresses["localhost"] = "127.0.0.1"
    if named == "metadata":
        world.refused = httpx2.Headers({"www-authenticate": f'Bearer resource_metadata="{place}"'})
    elif named == "issuer":
        world.answers[PRM]["authorization_servers"] = [place]
    else:
        field = {"authorize": "authorization_endpoint", "token": "token_endpoint", "register": "registration_endpoint"}
        world.answers[METADATA][field[named]] = place
    async with world.client(world.login()) as client:
        answer = await client.post(SERVER)

    assert said in problem(answer)
    assert world.sent_to("169.254") + world.sent_to("inside") + world.sent_to("127.0.0.1") == []
    assert named == "token" or world.asked == []


async def test_what_the_user_names_may_be_private(world: World) -> None:
    world.answers[METADATA]["token_endpoint"] = "https://inside.example.net/token"
    world.answers["https://inside.example.net/token"] = {"access_token": "access-1"}
    async with world.client(world.login(private=["10.0.0.0/8"])) as client:
        assert (await client.post(SERVER)).status_code == 200


async def test_exactly_the_checked_address_is_connected_to_and_the_name_stays(world: World) -> None:
    async with world.client(world.login()) as client:
        await client.post(SERVER)
    token = world.sent_to("/token")[0]

    assert (token.url.host, token.headers["host"]) == ("93.184.216.34", "auth.example.net")
    assert token.extensions["sni_hostname"] == "auth.example.net"


async def test_an_endless_answer_is_cut(world: World) -> None:
    async def endless() -> Any:
        while True:
            yield b"x" * 65536

    headers = {"content-type": "text/event-stream"}
    world.answers[METADATA] = httpx2.Response(200, headers=headers, content=endless())
    async with world.client(world.login()) as client:
        with anyio.fail_after(60):
            answer = await client.post(SERVER)

    assert "cannot be reached: ReadError" in problem(answer)


@each_row(
    ("come_back", "said"),
    [
        ("code=x&state=wrong", "the login's state is wrong"),
        ("code=x", "the login's state is wrong"),
        ("state={state}", "without a code"),
        ("code=x&state={state}&iss=https://evil.example", "iss mismatch"),
    ],
)
async def test_an_answer_of_another_login_is_refused(world: World, come_back: str, said: str) -> None:
    world.come_back = lambda query: f"{REDIRECT_URI}?{come_back.format(**query)}"
    async with world.client(world.login()) as client:
        answer = await client.post(SERVER)

    assert said in problem(answer)
    assert world.sent_to("/token") == []


async def test_metadata_of_another_issuer_is_refused(world: World) -> None:
    world.answers[METADATA]["issuer"] = "https://evil.example"
    async with world.client(world.login()) as client:
        assert "issuer mismatch" in problem(await client.post(SERVER))
    assert world.asked == []


async def test_what_an_authorization_server_sends_back_is_neither_said_nor_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    echo = '{"error": "invalid_grant", "error_description": "the-code, my-secret-of-client"}'
    world.answers[f"{ISSUER}/token"] = httpx2.Response(400, text=echo)
    auth = OAuth(
        redirect=world.person,
        redirect_uri=REDIRECT_URI,
        store=Text(),
        client_id="mine",
        client_secret="my-secret-of-client",
        issuer=ISSUER,
    )
    with caplog.at_level(logging.DEBUG):
        async with world.client(world.login(auth)) as client:
            said = problem(await client.post(SERVER))

    assert said == "the authorization server did not give a token: HTTP 400, invalid_grant"
    assert "my-secret-of-client" not in caplog.text + repr(auth) and "the-code" not in caplog.text


async def test_a_token_that_a_server_sends_back_is_hidden(world: World) -> None:
    login = world.login()
    async with world.client(login) as client:
        await client.post(SERVER)

    assert login.hide("given: access-1, refresh-me") == "given: [redacted], [redacted]"


@each_row(
    ("issuer", "said"),
    [(None, "would go to auth.example.net"), ("https://other.example", "names other authorization servers")],
)
@each_row("kind", ["person", "program"])
async def test_a_clients_secret_goes_only_to_its_own_authorization_server(
    world: World, issuer: str | None, said: str, kind: str
) -> None:
    known: dict[str, Any] = {"client_id": "mine", "client_secret": "secret-of-mine", "issuer": issuer}
    person = {"redirect": world.person, "redirect_uri": REDIRECT_URI, "store": Text()}
    auth = OAuth(**known, **person) if kind == "person" else ClientCredentials(**known)
    async with world.client(world.login(auth)) as client:
        answer = await client.post(SERVER)

    assert said in problem(answer)
    assert world.sent_to("/token") == []


async def test_a_program_logs_in_as_itself(world: World) -> None:
    world.answers[PRM]["authorization_servers"] = ["https://other.example", ISSUER]
    auth = ClientCredentials(client_id="mine", client_secret="secret-of-mine", issuer=ISSUER, scopes=["read"])
    async with world.client(world.login(auth)) as client:
        assert (await client.post(SERVER)).status_code == 200

    sent = world.sent_to("/token")[0]
    assert world.form(sent)["grant_type"] == "client_credentials" and world.form(sent)["scope"] == "read"
    assert sent.headers["authorization"].startswith("Basic ")


async def test_the_file_of_tokens_is_its_owners_and_of_one_server(world: World, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokens.json"
    world.store = path
    async with world.client(world.login()) as client:
        await client.post(SERVER)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_text(path.read_text().replace(SERVER, "https://evil.example/mcp"))
    async with world.client(world.login()) as client:
        await client.post(SERVER)
    assert len(world.asked) == 2
    assert default_path(SERVER) != default_path("https://mcp.example.com/other")


async def test_a_store_that_fails_is_said_without_what_it_was_given(world: World) -> None:
    class Broken:
        def load(self) -> None:
            return None

        def save(self, text: str) -> None:
            raise ValueError(text)

    world.store = Broken()
    async with world.client(world.login()) as client:
        assert problem(await client.post(SERVER)) == "the store of its tokens failed to save: ValueError"


async def test_a_person_who_never_comes_back_is_not_waited_for(world: World) -> None:
    async def nobody(url: str) -> str:
        await anyio.sleep_forever()
        return ""

    login = world.login(OAuth(redirect=nobody, redirect_uri=REDIRECT_URI, store=Text(), timeout_s=0.05))
    async with world.client(login) as client:
        assert "nobody logged in within 0.05 s" in problem(await client.post(SERVER))


async def test_a_service_uses_what_is_kept_and_asks_nobody(world: World) -> None:
    async with world.client(world.login(OAuth(ask=False, store=world.store))) as client:
        assert "toolcell mcp login" in problem(await client.post(SERVER))
    async with world.client(world.login()) as client:
        await client.post(SERVER)
    world.valid = {"access-2"}
    async with world.client(world.login(OAuth(ask=False, store=world.store))) as client:
        assert (await client.post(SERVER)).status_code == 200

    assert len(world.asked) == 1


@each_row(
    ("options", "said"),
    [
        ({"command": ["x"], "auth": "oauth"}, "auth is for url=..."),
        ({"url": "https://x.example", "auth": "basic"}, "not of type str"),
        ({"url": "http://x.example", "auth": "oauth"}, "in clear over http://"),
        ({"url": "https://x.example", "auth": "oauth", "headers": {"authorization": "Bearer x"}}, "leave it out"),
    ],
)
async def test_a_wrong_auth_is_said_before_anything_is_sent(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        await ToolRegistry().add_mcp_server("x", **options)


@each_row(
    "wrong",
    [
        {"redirect": print},
        {"client_secret": "x"},
        {"client_metadata_url": "http://x.example/client"},
        {"scopes": "read"},
        {"issuer": "auth.example.net"},
        {"timeout_s": -1},
    ],
)
def test_a_login_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        OAuth(**wrong)
