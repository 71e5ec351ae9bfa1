"""Scripts that send requests: in sessions, threads and forks, in dry runs, and where the host refuses them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from rows import each_row
from toolcell import Limits, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.egress import Allow, Egress

from .http_server import Server, serving
from .library_uses import ALL_PACKAGES

pytestmark = pytest.mark.isolation

MIB = 1024 * 1024
LONG = 32 * MIB
"""A sandbox that held it whole would be found out."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def runtime(server: Server) -> Iterator[SyncRuntime]:
    egress = Egress(Allow("http://127.0.0.1", ports=[server.server_port], methods=["*"]))
    limits = Limits(wall_s=60, processes=64, egress_bytes=8 * LONG)
    with SyncRuntime(packages=ALL_PACKAGES, egress=egress, limits=limits, pool=PoolConfig(warm=0)) as runtime:
        yield runtime


def test_where_no_request_may_be_sent_no_library_is_changed() -> None:
    with SyncRuntime() as runtime:
        result = runtime.execute_code("""
import http.client, sys
set_result([http.client.HTTPConnection.connect.__module__, [name for name in sys.modules if "egress" in name]])
""")

    assert result.value == ["http.client", []], result.error


def test_where_requests_may_be_sent_no_library_is_imported_for_that() -> None:
    with SyncRuntime(egress=Egress(Allow("a.example"))) as runtime:
        result = runtime.execute_code("""
import sys
set_result([name for name in ("http.client", "ssl", "urllib.request") if name in sys.modules])
""")

    assert result.value == [], result.error


def test_a_library_that_was_imported_before_the_script_sends_as_well(server: Server) -> None:
    egress = Egress(Allow("http://127.0.0.1", ports=[server.server_port]))
    script = "set_result([requests.get(BASE + '/chunked').text, __import__('sys').modules['httpx'].get(BASE + '/json').json()['figs']])"
    with SyncRuntime(packages=ALL_PACKAGES, preload=["requests", "httpx"], egress=egress) as runtime:
        result = runtime.execute_code(f"import requests\n{script}", inputs={"BASE": server.url})

    assert result.value == ["first piece, second piece, last piece", 3], result.error


REFUSED = {
    "urllib": ("urllib.request.urlopen(ELSEWHERE)", "URLError", "no rule is about this host"),
    "requests": ("requests.get(ELSEWHERE)", "ConnectionError", "no rule is about this host"),
    "httpx": ("httpx.get(ELSEWHERE)", "ConnectError", "no rule is about this host"),
    "aiohttp": ("asyncio.run(get(ELSEWHERE))", "ClientConnectorError", "no rule is about this host"),
    "a certificate that is not checked": ("requests.get('https://elsewhere.example/', verify=False)", "ConnectionError", "no rule is about"),
    "a proxy of urllib": (
        "urllib.request.build_opener(urllib.request.ProxyHandler({'http': PROXY})).open(BASE + '/plain')",
        "URLError",
        "leave out proxies",
    ),
    "a proxy of requests": ("requests.get(BASE + '/plain', proxies={'http': PROXY})", "ConnectionError", "leave out proxies"),
    "a tunnel of requests": ("requests.get('https://a.example/', proxies={'https': PROXY})", "ProxyError", "leave out proxies"),
    "a proxy of the environment": (
        "os.environ.update(https_proxy=PROXY) or httpx.get('https://a.example/')",
        "ConnectError",
        "leave out proxies",
    ),
    "a proxy of aiohttp": ("asyncio.run(get(BASE, proxy=PROXY))", "ClientConnectorError", "leave out proxies"),
    "a tunnel of http.client": ("tunnel()", "ConnectionRefusedError", "leave out proxies"),
    "a WebSocket": ("asyncio.run(websocket())", "ClientConnectorError", "not websocket"),
    "a socket": ("socket.create_connection(('a.example', 80))", "gaierror", "use urllib, requests, httpx or aiohttp"),
    "a socket of asyncio": ("asyncio.run(asyncio.open_connection('a.example', 80))", "gaierror", "use urllib, requests"),
    "an address": ("socket.create_connection(('1.1.1.1', 80))", "PermissionError", "use urllib, requests"),
}  # fmt: skip

GET = """
import asyncio, aiohttp

async def get(url, **options):
    async with aiohttp.ClientSession() as session, session.get(url, **options) as answer:
        return await answer.text()
"""

USING = f"""
{GET}
import http.client, os, socket, urllib.request
import httpx, requests
PROXY, ELSEWHERE = "http://127.0.0.1:3128", "http://elsewhere.example/"

async def websocket():
    async with aiohttp.ClientSession() as session:
        await session.ws_connect(BASE + "/plain")

def tunnel():
    connection = http.client.HTTPSConnection("127.0.0.1", 3128)
    connection.set_tunnel("a.example")
    connection.request("GET", "/")

"""


@each_row("name", REFUSED)
def test_what_is_not_sent_fails_as_without_a_connection_and_says_why(
    runtime: SyncRuntime, server: Server, name: str
) -> None:
    source, kind, why = REFUSED[name]

    error = runtime.execute_code(USING + source, inputs={"BASE": server.url}).error

    assert error is not None
    assert (error.type, why in error.message) == (kind, True), error.message


def test_a_session_goes_on_with_the_connections_of_its_scripts(runtime: SyncRuntime, server: Server) -> None:
    with runtime.session() as session:
        session.execute_code(
            "import requests\nclient = requests.Session()\nclient.get(BASE + '/set-cookie')",
            inputs={"BASE": server.url},
        )
        cookies = session.execute_code("client.get(BASE + '/echo').json()['headers']['Cookie']")
        awaited = session.execute_code(
            "import httpx\nasync with httpx.AsyncClient() as client:\n    text = (await client.get(BASE + '/chunked')).text\ntext"
        )

    assert cookies.value == "a=1; b=2", cookies.error
    assert awaited.value == "first piece, second piece, last piece", awaited.error


def test_a_fork_is_told_that_the_script_makes_the_requests(runtime: SyncRuntime, server: Server) -> None:
    result = runtime.execute_code(
        """
import os, urllib.request
read, write = os.pipe()
if os.fork() == 0:
    try:
        urllib.request.urlopen(BASE + "/plain")
    except OSError as error:
        os.write(write, repr(error).encode())
    os._exit(0)
os.wait()
set_result([os.read(read, 1000).decode(), urllib.request.urlopen(BASE + "/plain").read().decode()])
""",
        inputs={"BASE": server.url},
    )

    assert isinstance(result.value, list), result.error
    failed, made = result.value
    assert "only the process that runs the script makes requests" in failed
    assert made == "plain text"


def test_a_dry_run_makes_what_reads_and_collects_what_writes(runtime: SyncRuntime, server: Server) -> None:
    draft = runtime.execute_code(
        """
import httpx, requests
read = [requests.get(BASE + "/chunked").text, httpx.get(BASE + "/json").json()["figs"]]
written = [requests.post(BASE + "/echo", data=b"one"), httpx.post(BASE + "/echo", content=b"two")]
set_result([read, [[each.status_code, each.text] for each in written]])
""",
        inputs={"BASE": server.url},
        dry_run=True,
    )

    assert draft.value == [["first piece, second piece, last piece", 3], [[202, ""], [202, ""]]], draft.error
    assert [effect.args["body"] for effect in draft.effects] == [b"one", b"two"]
    assert runtime.commit(draft, approve=[effect.id for effect in draft.effects]).ok


def test_a_draft_that_has_ended_sends_nothing_more(server: Server) -> None:
    registry = ToolRegistry()

    @registry.tool
    def save(text: str) -> str:
        """Write a text to a store of the program."""
        return text

    egress = Egress(Allow("http://127.0.0.1", ports=[server.server_port]))
    with SyncRuntime(registry, packages=ALL_PACKAGES, egress=egress) as runtime:
        draft = runtime.execute_code(
            f"{GET}\ntry:\n    len(tools.save('a'))\nfinally:\n    asyncio.run(get(BASE + '/plain'))",
            inputs={"BASE": server.url},
            dry_run=True,
        )

    assert draft.error is not None and "not known in a dry run" in draft.error.message
    assert [call.name for call in draft.calls] == ["save"]


def test_an_event_loop_ends_without_a_word_about_connections(runtime: SyncRuntime, server: Server) -> None:
    result = runtime.execute_code(
        f"{GET}\nloop = asyncio.new_event_loop()\ntext = loop.run_until_complete(get(BASE + '/plain'))\nloop.close()\ntext",
        inputs={"BASE": server.url},
    )

    assert (result.value, result.logs.stderr) == ("plain text", ""), result.error


WHOLE_BODIES = {
    "urllib": "urllib.request.urlopen(urllib.request.Request(UP, data=BODY)).read()",
    "http.client": "by_http_client()",
    "urllib3": "urllib3.PoolManager().request('PUT', UP, body=BODY).data",
    "requests": "requests.post(UP, data=BODY).content",
    "requests, a file": "requests.post(UP, data=open('body', 'rb')).content",
    "requests, a form in parts": "requests.post(UP, files={'f': BODY}).content",
    "httpx": "httpx.post(UP, content=BODY).content",
    "async httpx": "asyncio.run(by_httpx())",
    "aiohttp": "asyncio.run(by_aiohttp())",
}


@each_row("size", [MIB, 5 * MIB + 1])
@each_row("library", WHOLE_BODIES)
def test_a_long_body_whose_length_is_known_arrives_whole(
    runtime: SyncRuntime, server: Server, library: str, size: int
) -> None:
    source = f"""
import asyncio, http.client, json, urllib.request
import aiohttp, httpx, requests, urllib3

BODY = bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256)
open("body", "wb").write(BODY)

def by_http_client():
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    connection.request("POST", "/echo", BODY, {{"Content-Length": str(len(BODY))}})
    return connection.getresponse().read()

async def by_httpx():
    async with httpx.AsyncClient() as client:
        return (await client.post(UP, content=BODY)).content

async def by_aiohttp():
    async with aiohttp.ClientSession() as session, session.post(UP, data=BODY) as answer:
        return await answer.read()

told = json.loads({WHOLE_BODIES[library]})
set_result([told["size"], told["digest"]])
"""
    given = {"UP": f"{server.url}/echo", "PORT": server.server_port, "SIZE": size}
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)

    result = runtime.execute_code(source, inputs=given)

    assert isinstance(result.value, list), result.error
    if "parts" in library:
        assert result.value[0] > size
    else:
        assert result.value == [size, hashlib.sha256(body).hexdigest()]


DOWN_AND_UP = {
    "urllib": """
with urllib.request.urlopen(DOWN) as answer:
    size = sum(len(part) for part in iter(lambda: answer.read(65536), b""))
return [size, json.load(urllib.request.urlopen(urllib.request.Request(UP, data=blocks())))["size"]]
""",
    "httpx": """
with httpx.stream("GET", DOWN) as answer:
    size = sum(map(len, answer.iter_bytes()))
return [size, httpx.post(UP, content=blocks(), timeout=60).json()["size"]]
""",
    "async httpx": """
async def main():
    async with httpx.AsyncClient(timeout=60) as client:
        async with client.stream("GET", DOWN) as answer:
            size = sum([len(part) async for part in answer.aiter_bytes()])
        return [size, (await client.post(UP, content=async_blocks())).json()["size"]]
return asyncio.run(main())
""",
    "aiohttp": """
async def main():
    async with aiohttp.ClientSession() as session:
        async with session.get(DOWN) as answer:
            size = sum([len(part) async for part in answer.content.iter_chunked(65536)])
        async with session.post(UP, data=async_blocks()) as answer:
            return [size, (await answer.json())["size"]]
return asyncio.run(main())
""",
}


@pytest.mark.slow
@each_row("library", DOWN_AND_UP)
def test_a_long_body_is_never_held_in_the_sandbox(runtime: SyncRuntime, server: Server, library: str) -> None:
    body = "".join(f"    {line}\n" for line in DOWN_AND_UP[library].strip().splitlines())
    source = f"""
import asyncio, json, resource, urllib.request
import aiohttp, httpx, requests

def blocks():
    for _ in range(SIZE // 65536):
        yield bytes(65536)

async def async_blocks():
    for block in blocks():
        yield block

def use():
{body}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
sizes = use()
set_result([sizes, peak() - before])
"""
    given = {"DOWN": f"{server.url}/large?bytes={LONG}", "UP": f"{server.url}/echo", "SIZE": LONG}

    result = runtime.execute_code(source, inputs=given)

    assert isinstance(result.value, list), result.error
    sizes, taken = result.value
    assert sizes == [LONG, LONG]
    assert taken < 24 * MIB
