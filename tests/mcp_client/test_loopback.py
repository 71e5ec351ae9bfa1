"""The browser comes back to a server on loopback, which takes the answer of its own login only."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import httpx2
import pytest

from rows import each_row
from toolcell.errors import McpServerError
from toolcell.mcp.login import Loopback, _listening, read_answer
from toolcell.mcp.oauth import OAuth

from .oauth_world import SERVER, Text, World
from .test_oauth import world

pytestmark = pytest.mark.anyio
__all__ = ["world"]

LOGIN = "https://auth.example.net/authorize?state=the-state"


@pytest.fixture
async def listening() -> AsyncIterator[tuple[Loopback, str]]:
    loopback = Loopback("s", open_browser=False)
    yield loopback, await loopback.listen(0)
    loopback.close()


async def test_only_the_answer_with_the_right_state_is_taken(listening: tuple[Loopback, str]) -> None:
    loopback, uri = listening
    answers, statuses = list[str](), list[int]()

    async def wait() -> None:
        answers.append(await loopback.ask(LOGIN))

    async with anyio.create_task_group() as tasks, httpx2.AsyncClient() as browser:
        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        for query in ("code=evil&state=guessed", "code=evil", "state=", "code=mine&state=the-state"):
            statuses.append((await browser.get(f"{uri}?{query}")).status_code)

    assert statuses == [400, 400, 400, 200]
    assert read_answer(answers[0]) == ("mine", "the-state", None)


@each_row("sent", [b"\x00\xff\n", b"GET\n", b"GET " + b"x" * 100_000 + b"\n", b"POST /callback HTTP/1.1\n"])
async def test_what_is_no_request_ends_only_its_own_connection(listening: tuple[Loopback, str], sent: bytes) -> None:
    loopback, uri = listening
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loopback.ask, LOGIN)
        await anyio.lowlevel.checkpoint()
        async with await anyio.connect_tcp("127.0.0.1", httpx2.URL(uri).port or 0) as stream:
            await stream.send(sent)
            with anyio.fail_after(60):
                try:
                    assert b"200 OK" not in await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    pass
        async with httpx2.AsyncClient() as browser:
            assert (await browser.get(f"{uri}?code=c&state=the-state")).status_code == 200


def test_a_refused_login_is_said() -> None:
    with pytest.raises(McpServerError, match="refused: access_denied"):
        read_answer("http://127.0.0.1/callback?error=access_denied")


async def test_a_login_in_the_browser_ends_with_a_token_and_nothing_listens_any_more(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    login = world.login(OAuth(store=Text(), open_browser=False))
    async with world.client(login) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.post, SERVER)
        printed = ""
        with anyio.fail_after(60):
            while "https://auth.example.net/authorize" not in printed:
                printed += capsys.readouterr().err
                await anyio.sleep(0.01)
        page = httpx2.URL(printed.split()[-1])
        uri = page.params["redirect_uri"]
        async with httpx2.AsyncClient() as browser:
            await browser.get(f"{uri}?code=c&state={page.params['state']}")

    assert login.problem == "" and world.form(world.sent_to("/token")[0])["redirect_uri"] == uri
    with pytest.raises(OSError):
        await anyio.connect_tcp("127.0.0.1", httpx2.URL(uri).port or 0)


async def test_a_registered_client_comes_back_to_its_port_and_registers_again_when_that_is_taken() -> None:
    loopback, other = Loopback("s", open_browser=False), Loopback("s", open_browser=False)
    registered = await loopback.listen(0)
    taken = await _listening(other, 0, [registered])
    loopback.close()
    other.close()
    again = await _listening(other, 0, [registered])
    other.close()

    assert again == registered != taken
