"""Requests are calls: drafts, approval, journals, repair, labels, quotas, the log and replays hold for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from builtin.webkit import Site, page, serve
from egress.doors import SEND
from egress.replays import replayed
from toolcell import Flow, Limits, Outcome, Policy, Quota, Quotas, RunContext, Runtime, ToolRegistry
from toolcell.audit import AuditLog, RecordConfig
from toolcell.calls import uploads
from toolcell.egress import Allow, Egress
from toolcell.results import ExecutionResult
from toolcell.run import calls
from toolcell.tools import Approve

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.anyio]

TOKEN = "tok-51fa0c9d7e"

PAGES: dict[str, Any] = {f"/{name}": page(name, "text/plain") for name in "abcde"}


@asynccontextmanager
async def opened(
    registry: ToolRegistry | None = None, rule: Any = None, **options: Any
) -> AsyncIterator[tuple[Site, Runtime]]:
    async with serve(PAGES) as site:
        given = {"ports": [site.port], "methods": ["GET", "POST"], "secrets": {"X-Key": "{TOKEN}"}, **(rule or {})}
        egress = Egress(Allow("http://127.0.0.1", **given), secrets={"TOKEN": TOKEN})
        async with Runtime(registry, egress=egress, **options) as runtime:
            yield site, runtime


def script(site: Site, text: str) -> str:
    return f"{SEND}\nsite = {site.url(host='127.0.0.1')!r}\n{text}"


async def run(runtime: Runtime, site: Site, text: str, **options: Any) -> ExecutionResult:
    return await runtime.execute_code(script(site, text), **options)


THREE_AND_TWO = """
got = [send(site + name)["body"].decode() for name in "abc"]
sent = [send(site + name, "POST", [["X-API-Key", "{TOKEN}"]], name.encode() * 3)["status"] for name in "de"]
set_result([got, sent])
"""


async def test_a_draft_makes_the_reads_and_its_commit_sends_what_was_shown() -> None:
    async with opened() as (site, runtime):
        draft = await run(runtime, site, THREE_AND_TWO, dry_run=True)
        before = site.paths
        shown = [
            (each.args["method"], each.args["url"], each.args["headers"], each.args["body"]) for each in draft.effects
        ]
        result = await runtime.commit(draft)
        again = site.paths

    assert draft.value == [["a", "b", "c"], [202, 202]]
    assert before == ["/a", "/b", "/c"]
    assert shown == [
        ("POST", site.url(f"/{name}", "127.0.0.1"), [["X-API-Key", "{TOKEN}"]], name.encode() * 3) for name in "de"
    ]
    assert [row.status for row in result.effects] == ["made", "made"]
    assert again == [*before, "/d", "/e"]
    assert all(f"X-API-Key: {TOKEN}\r\n" in request for request in site.requests[3:])
    assert TOKEN not in repr((draft, result))


async def test_what_the_rules_refuse_is_not_collected() -> None:
    async with opened() as (site, runtime):
        draft = await run(runtime, site, "set_result(send('https://evil.test/', 'POST'))", dry_run=True)

    assert draft.value["failed"] == "EgressRefused"
    assert draft.effects == ()


@pytest.mark.slow
async def test_a_long_body_is_neither_collected_nor_approved_unseen() -> None:
    upload = """
name = None
for _ in range(24):
    name = call_tool("http_upload", upload=name, data=b"x" * 200_000)
set_result(send(site + "d", "POST", upload=name))
"""
    async with opened() as (site, runtime):
        draft = await run(runtime, site, upload, dry_run=True)
        asked = await run(runtime, site, upload)

    assert draft.value["failed"] == "EgressLimit"
    assert draft.effects == ()
    assert "4800000 bytes" in draft.value["message"]
    assert len(site.requests) == 1, asked.value


async def test_a_request_waits_for_approval_and_is_then_sent_once() -> None:
    upload = """
name = call_tool("http_upload", upload=None, data=b"x" * 9000)
set_result([send(site + "a")["body"], send(site + "d", "POST", upload=name)["status"]])
"""
    async with opened(rule={"approval": "POST"}) as (site, runtime):
        waiting = await run(runtime, site, upload, on_approval="suspend")
        assert waiting.suspension is not None
        (call,) = waiting.suspension.calls
        before = site.paths
        result = await runtime.resume(waiting.suspension.to_json(), {call.id: Approve()})
        refused = await run(runtime, site, upload, on_approval="deny")

    assert waiting.outcome is Outcome.SUSPENDED
    assert call.args["body"] == b"x" * 9000
    assert before == ["/a"]
    assert result.value == [b"a", 200]
    assert site.paths == ["/a", "/d", "/a"]
    assert refused.error is not None


@pytest.mark.slow
async def test_a_repair_sends_nothing_twice() -> None:
    async with opened() as (site, runtime):
        failed = await run(runtime, site, "send(site + 'a'); send(site + 'd', 'POST', body=b'1'); 1 / 0")
        mended = await run(
            runtime, site, "send(site + 'a'); set_result(send(site + 'd', 'POST', body=b'1')['body'])", repairs=failed
        )

    assert failed.outcome is Outcome.ERROR
    assert mended.value == b"d"
    assert site.paths == ["/a", "/d"]


@pytest.mark.slow
async def test_a_repair_reads_no_parts_of_another_answer() -> None:
    read = """
def fetch(name):
    answer = send(site + name)
    parts = [answer["body"]]
    while parts[-1]:
        parts.append(call_tool("http_read", rest=answer["rest"], size=262144))
    return "".join({*b"".join(parts).decode()})
"""
    async with opened() as (site, runtime):
        site.pages.update({f"/long-{name}": page(name * 700_000) for name in "ab"})
        failed = await run(runtime, site, f"{read}fetch('long-a'); 1 / 0")
        mended = await run(runtime, site, f"{read}set_result([fetch('long-b'), fetch('long-a')])", repairs=failed)

    assert mended.value == ["b", "a"], mended.error
    assert site.paths == ["/long-a", "/long-b"]


@pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning")  # trio's, of a body that is dropped
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_commit_leaves_no_connection_open() -> None:
    async with opened() as (site, runtime):
        closed = anyio.Event()

        async def long(stream: ByteStream) -> None:
            try:
                await stream.send(page("x" * 7_000_000))
                await stream.receive()
            finally:
                closed.set()

        site.pages["/long"] = long
        draft = await run(runtime, site, "send(site + 'long', 'POST')", dry_run=True)
        result = await runtime.commit(draft)
        with anyio.fail_after(60):
            await closed.wait()

    assert [row.status for row in result.effects] == ["made"]


@pytest.mark.slow
async def test_long_bodies_that_are_sent_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "INLINE_BYTES", 1000)
    text = """
def posted(number):
    name = call_tool("http_upload", upload=None, data=b"%d" % number * 1000)
    return {"method": "POST", "url": site + "a", "headers": [], "body": b"", "upload": name}

found = [call_tool("http", posted(number))["status"] for number in range(100, 170)]
found += [each["status"] for each in call_tools_parallel([("http", posted(each)) for each in (7100, 7200, 7100)])]
set_result(found)
"""
    async with opened() as (site, runtime):
        result = await run(runtime, site, text)

    assert result.value == [200] * 73, result.error
    assert len(site.requests) == 73


@pytest.mark.slow
async def test_bodies_that_were_uploaded_are_kept_after_the_run_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ANSWER_BYTES", 1_000_000)
    text = """
name = [call_tool("http_upload", upload=None, data=b"x" * 200_000) for _ in range(8)]
for each in name:
    call_tool("http", {"method": "POST", "url": site + "a", "headers": [], "body": b"", "upload": each})
"""
    async with opened() as (site, runtime):
        short = await run(runtime, site, text.replace("range(8)", "range(2)"))
        long = await run(runtime, site, text)
        kept = vars(runtime)["_finished"]

    assert short.outcome is long.outcome is Outcome.OK
    assert kept.get(str(short.journal_id)) is not None
    assert kept.get(str(long.journal_id)) is None


async def test_what_is_approved_and_logged_is_the_url_that_is_sent(tmp_path: Path) -> None:
    text = "send(site + 'safe/%2e%2e/x/../%61dmin?\\u202ea=1#/harmless', 'POST')"
    async with opened(rule={"approval": "POST"}, record=tmp_path / "runs.db") as (site, runtime):
        waiting = await run(runtime, site, text, on_approval="suspend")
        assert waiting.suspension is not None
        pending = waiting.suspension.calls[0]
        draft = await run(runtime, site, text, dry_run=True)
        await runtime.resume(waiting.suspension.to_json(), {pending.id: Approve()})
        sent = site.url("/admin?%E2%80%AEa=1", "127.0.0.1")
        log = b"".join(file.read_bytes() for file in tmp_path.glob("runs.db*"))

    assert site.paths == ["/admin?%E2%80%AEa=1"]
    assert pending.args["url"] == draft.effects[0].args["url"] == sent
    assert log.count(sent.encode()) >= 1


@pytest.mark.slow
async def test_a_repair_sends_a_read_again_that_has_failed() -> None:
    async with opened() as (site, runtime):
        site.pages["/late"] = b"no HTTP at all\r\n\r\n"
        failed = await run(runtime, site, "answer = send(site + 'late'); answer['status']")
        site.pages["/late"] = page("now")
        mended = await run(runtime, site, "answer = send(site + 'late'); set_result(answer['body'])", repairs=failed)

    assert failed.outcome is Outcome.ERROR
    assert mended.value == b"now"


@pytest.mark.slow
async def test_a_run_that_is_carried_on_sends_nothing_twice(tmp_path: Path) -> None:
    text = """
answer = send(site + "long")
parts = [answer["body"]]
while parts[-1]:
    parts.append(call_tool("http_read", rest=answer["rest"], size=262144))
set_result([len(b"".join(parts)), send(site + "d", "POST")["status"]])
"""
    async with opened(rule={"approval": "POST"}, record=tmp_path / "runs.db") as (site, runtime):
        site.pages["/long"] = page("x" * 700_000)
        waiting = await run(runtime, site, text, on_approval="suspend")
        assert waiting.suspension is not None, waiting.error
        result = await runtime.resume(waiting.suspension.to_json(), {waiting.suspension.calls[0].id: Approve()})

    assert result.value == [700_000, 200], result.error
    assert site.paths == ["/long", "/d"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


async def test_a_run_that_has_read_private_data_sends_nothing_to_the_public() -> None:
    registry = ToolRegistry()

    @registry.tool(reads="private")
    def salaries() -> list[int]:
        """Return what people earn."""
        return [1, 2]

    @registry.tool(sends="public")
    def publish(text: str) -> None:
        """Publish a text on the web."""

    policy = Policy(flows=(Flow("private", "public", "deny"),))
    async with opened(registry, policy=policy) as (site, runtime):
        result = await run(
            runtime, site, "before = send(site)['status']; tools.salaries(); set_result([before, send(site)])"
        )
    async with opened(registry, policy=policy, rule={"sends": "intranet"}) as (other, runtime):
        inside = await run(runtime, other, "tools.salaries(); set_result(send(site)['status'])")

    assert result.value[0] == 404
    assert result.value[1]["failed"] == "not_permitted"
    assert inside.value == 404
    assert len(site.requests) == 1


async def test_hooks_see_requests_and_may_refuse_them() -> None:
    registry, seen = ToolRegistry(), list[Any]()

    @registry.before_call
    def look(call: Any) -> None:
        seen.append((call.name, call.args["method"], call.args["url"]))

    async with opened(registry) as (site, runtime):
        await run(runtime, site, "send(site + 'a')")

    assert seen == [("http", "GET", site.url("/a", "127.0.0.1"))]


async def test_a_hook_does_not_make_a_read_a_write() -> None:
    from toolcell.tools import Rewrite

    registry = ToolRegistry()

    @registry.before_call
    def change(call: Any) -> Rewrite:
        return Rewrite({**call.args, "method": "POST"})

    async with opened(registry) as (site, runtime):
        draft = await run(runtime, site, "set_result(send(site + 'a'))", dry_run=True)

    assert draft.value["failed"] == "EgressRefused"
    assert site.requests == []


async def test_quotas_count_requests() -> None:
    async with opened(quotas=Quotas(Quota(calls=1))) as (site, runtime):
        result = await run(runtime, site, "set_result([send(site + 'a')['status'], send(site + 'b')])")

    assert result.value[0] == 200
    assert result.value[1]["failed"] == "unavailable"


@pytest.mark.slow
async def test_the_log_has_each_request_and_a_replay_needs_no_network(tmp_path: Path) -> None:
    text = """
name = call_tool("http_upload", upload=None, data=b"y" * 5000)
answers = [send(site + "a")["body"], send(site + "d", "POST", upload=name)["status"]]
set_result([answers, send("https://evil.test/")["failed"]])
"""
    async with opened(record=tmp_path / "runs.db") as (site, runtime):
        await run(runtime, site, text)
        source = script(site, text)
    recorded, again = await replayed(tmp_path, source)

    assert again.ok, again.divergence
    assert again.answered == 3
    assert len(site.requests) == 2
    calls = [call.tool for call in recorded.calls]
    assert calls == ["http", "http", "http"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


@pytest.mark.slow
async def test_a_replay_says_how_to_record_answers_that_are_too_long_for_the_log(tmp_path: Path) -> None:
    text = "set_result([len(send(site + name)['body']) for name in ('long', 'longer')])"
    for folder, config in (("short", RecordConfig()), ("long", RecordConfig(value_bytes=262144))):
        async with opened(record=AuditLog(tmp_path / folder / "runs.db", config=config)) as (site, runtime):
            site.pages |= {"/long": page("x" * 100_000), "/longer": page("x" * 200_000)}
            await run(runtime, site, text)
            source = script(site, text)
        _, again = await replayed(tmp_path / folder, source)
        if folder == "short":
            assert again.divergence is not None
            assert "call 1, http, was not recorded (size)" in again.divergence.message
            assert "RecordConfig(value_bytes=262144)" in again.divergence.message
        else:
            assert again.ok, again.divergence


async def test_sessions_send_requests_too() -> None:
    async with opened() as (site, runtime), runtime.session() as session:
        first = await session.execute_code(script(site, "answer = send(site + 'a'); set_result(answer['body'])"))
        second = await session.execute_code("set_result([answer['body'], send(site + 'b')['body']])")

    assert (first.value, second.value) == (b"a", [b"a", b"b"])


@pytest.mark.slow
async def test_a_session_that_has_sent_requests_goes_on_in_another_process(tmp_path: Path) -> None:
    async with opened(record=tmp_path / "runs.db") as (site, runtime):
        async with runtime.session("asks") as session:
            source = "import urllib.request\nanswer = urllib.request.urlopen(site + 'a').read()"
            assert (await session.execute_code(script(site, source))).ok
        sent = len(site.requests)
        async with Runtime(record=tmp_path / "runs.db") as other, other.session("asks", restore=True) as session:
            assert (await session.execute_code("answer")).value == b"a"

    assert len(site.requests) == sent == 1


async def test_a_tool_of_the_program_is_not_hidden_by_a_request() -> None:
    registry = ToolRegistry()

    @registry.tool(name="http")
    def own(url: str) -> str:
        """Fetch a page in another way."""
        return url

    async with opened(registry) as (site, runtime):
        with pytest.raises(Exception, match="'http', which is taken"):
            await run(runtime, site, "1")


async def test_a_model_is_told_where_its_scripts_may_send_requests() -> None:
    registry = ToolRegistry()
    async with opened(registry) as (_, runtime):
        registry.enable_code_execution(runtime)
        (told,) = (each.description for each in registry.definitions() if each.name == "execute_code")
    other = ToolRegistry()
    other.enable_code_execution(Runtime(other))
    (untold,) = (each.description for each in other.definitions())

    third = ToolRegistry()
    third.enable_code_execution(Runtime(third, egress=Egress(packages=["humanize>=4", "markdown"])))
    (packages,) = (each.description for each in third.definitions() if each.name == "execute_code")
    assert 'install_package("name") installs no other packages than humanize>=4, markdown: only' in packages
    assert "reach only http://127.0.0.1, there is no other network, no other program" in told
    assert "There is no network, no other program" in untold


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning")  # trio's, of a body that is dropped
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_scripts_of_one_agent_keep_their_own_requests() -> None:
    """They run at once, in one run, and the first to end leaves the others theirs."""
    upload = """
name = call_tool("http_upload", upload=None, data=b"x" * 10)
answer = send(site + "long")
{then}
parts = [answer["body"], call_tool("http_read", rest=answer["rest"], size=9)]
set_result([send(site + "d", "POST", upload=name)["status"], len(parts[1])])
"""
    registry, over = ToolRegistry(), anyio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until the other script is over."""
        await over.wait()

    async with opened(registry) as (site, runtime):
        site.pages["/long"] = page("x" * 700_000)
        context, results = RunContext(), list[ExecutionResult]()

        async def first() -> None:
            results.append(await run(runtime, site, upload.format(then=""), context=context))
            over.set()

        async def second() -> None:
            limits = Limits(egress_requests=2)
            text = upload.format(then="tools.wait()")
            results.append(await run(runtime, site, text, context=context, limits=limits))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second)
            tasks.start_soon(first)

    assert [each.value for each in results] == [[200, 9], [200, 9]], [each.error for each in results]
