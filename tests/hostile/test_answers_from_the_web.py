"""Servers that scripts and tools ask, and what their answers cost the host: heads, robots.txt, secrets that are almost there."""

from __future__ import annotations

import gzip
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from builtin.webkit import Names, local, page, serve
from egress.doors import TOKEN, code_of, door
from egress.test_attacks import of
from hostile.loop_silence import Watched, watched
from rows import each_row
from toolcell import Allow, Egress
from toolcell.builtin import WebPolicy
from toolcell.builtin.web.fetch import Fetcher
from toolcell.egress.packages import ScriptPython, described
from toolcell.errors import ToolError
from toolcell.results import OutputFile

pytestmark = pytest.mark.anyio

SILENCE_S = 0.05
HINT = b"HTTP/1.1 103 \r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
ROBOTS = "User-agent: *\n" + "Allow:/%\n" * 50_000


async def quietest(work: Callable[[], Awaitable[Any]]) -> Watched:
    """Return the quietest of three: a neighbour may have taken our caches."""
    return min([await watched(work()) for _ in range(3)], key=lambda found: found.silent_s)


@each_row(
    "head",
    [HINT * 14_000 + OK + b"\r\n", OK + b"a:b\r\n" * 19_000 + b"\r\n", OK + b"set-cookie:b\r\n" * 7_000 + b"\r\n"],
    ids=["answers before the answer", "headers", "cookies"],
)
async def test_a_head_of_very_many_lines_is_given_up(head: bytes) -> None:
    async with serve({"/": head}) as site, door(of(site), secrets={"TOKEN": TOKEN}) as run:
        found = await quietest(lambda: run.send(site.url(host="127.0.0.1")))

    assert code_of(found.outcome) == "EgressProtocolError" and "lines of headers" in found.outcome.message
    assert found.silent_s < SILENCE_S


async def test_very_many_rules_of_a_robots_txt_keep_no_event_loop() -> None:
    async def fetch() -> Any:
        return await Fetcher(local(robots=True), resolver=Names(site_test=[["127.0.0.1"]])).fetch(site.url())

    async with serve({"/robots.txt": page(ROBOTS, "text/plain"), "/": page("found", "text/plain")}) as site:
        found = await quietest(fetch)

    assert found.outcome.content == b"found" and found.silent_s < SILENCE_S


async def test_a_page_that_is_almost_a_secret_keeps_no_event_loop() -> None:
    async with serve({"/": page(TOKEN[:-1] * 65_000, "text/plain")}) as site:
        rule = Allow("http://127.0.0.1", ports=[site.port], secrets={"Authorization": "Bearer {T}"})
        fetcher = Fetcher(WebPolicy(egress=Egress(rule, secrets={"T": TOKEN}), interval_s=0))
        found = await quietest(lambda: fetcher.fetch(site.url(host="127.0.0.1")))

    assert found.outcome.content.startswith(TOKEN[:-1].encode()) and found.silent_s < SILENCE_S


BYTES = gzip.compress(random.Random(1).randbytes(15_000))
BYTE_BY_BYTE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"1\r\n%c\r\n" % each for each in BYTES)
    + b"0\r\n\r\n"
)


async def test_a_body_that_comes_byte_by_byte_keeps_no_event_loop() -> None:
    async with serve({"/": BYTE_BY_BYTE}) as site, door(of(site), secrets={"TOKEN": TOKEN}) as run:
        of_script = await quietest(lambda: run.send(site.url(host="127.0.0.1")))
        fetcher = Fetcher(local(), resolver=Names(site_test=[["127.0.0.1"]]))
        of_tool = await quietest(lambda: fetcher.fetch(site.url()))

    assert (len(of_script.outcome.value["body"]), len(of_tool.outcome.content)) == (15_000, 15_000)
    assert max(of_script.silent_s, of_tool.silent_s) < SILENCE_S


@each_row("text", ["1." * 100_000 + "1", "9" * 4000, "1" * 101], ids=["parts", "digits", "short"])
def test_versions_that_a_script_says_it_has_are_short(text: str) -> None:
    names = {"good": "1.0", "long": text, "n" * 101: "1"}
    found = ScriptPython.of({"python": "3.12.1", "machine": "x86_64", "installed": names})
    assert found.installed == {"good": "1.0"}


def test_tags_of_a_wheel_are_not_multiplied() -> None:
    many = ["py3." + ".".join(f"{letter}{number:x}" for number in range(16)) for letter in "abc"]
    name = f"a-1-{many[0]}-none.{many[1]}-any.{many[2]}.whl"
    assert len(name) < 255
    with pytest.raises(ToolError, match="not a wheel of pure Python"):
        described(OutputFile(name, "", 0, b"", ""))
