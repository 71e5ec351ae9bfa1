"""`HttpRunner`: the client of services that speak POST /execute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from service.compat_server import compat_server
from toolcell import SandboxUnavailable, UsageError
from toolcell.service.compat import CodeFile, CodeRequest, HttpRunner, RunnerOptions
from toolcell.service.compat.retrying import delay_s

pytestmark = pytest.mark.anyio
OK = {"output": "42", "logs": "", "exit_code": 0}


@pytest.fixture
def anyio_backend() -> str:
    """The callback server needs asyncio."""
    return "asyncio"


class Service:
    """Answers POST /execute from a list; an exception is raised in the place of an answer."""

    def __init__(self, *answers: Any, is_idempotent: bool = False) -> None:
        self.answers, self.headers = list(answers), {"toolcell-idempotent": "1"} if is_idempotent else {}
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(f"{request.method} {request.url.path}")
        if request.url.path != "/execute":
            return httpx.Response(200, json={"status": "ready"}, headers=self.headers)
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer, json=OK if answer == 200 else {"error": "said so"})

    def runner(self, **options: Any) -> HttpRunner:
        options = {"retry_delay_s": 0.0, "callback_external": "http://me:1", **options}
        return HttpRunner("http://sandbox:9000", RunnerOptions(**options), transport=httpx.MockTransport(self))


@pytest.mark.conforms("Q43", "EX-45", "Q-b18")
async def test_a_busy_service_is_asked_again_with_the_same_id() -> None:
    service = Service(503, 200)
    async with service.runner() as runner:
        result = await runner.run("set_result(42)")

    assert (result.output, result.ok) == ("42", True)
    assert len(service.bodies) == 2
    assert service.bodies[0] == service.bodies[1]


@pytest.mark.conforms("Q43")
@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 302])
async def test_a_request_that_was_refused_is_not_sent_again(status: int) -> None:
    service = Service(status)
    async with service.runner(max_retries=5) as runner:
        with pytest.raises(UsageError, match=rf"{status}.*said so"):
            await runner.run("1")

    assert len(service.bodies) == 1


UNKNOWN = [500, 502, 504, httpx.ReadTimeout("slow"), httpx.ReadError("reset"), httpx.RemoteProtocolError("EOF")]


@pytest.mark.conforms("Q43", "Q-b18")
@pytest.mark.parametrize("failure", UNKNOWN, ids=str)
async def test_what_may_have_run_is_sent_again_to_a_service_that_runs_each_id_once(failure: Any) -> None:
    service = Service(failure, 200, is_idempotent=True)
    async with service.runner() as runner:
        assert (await runner.run("1")).ok

    assert len(service.bodies) == 2


@pytest.mark.conforms("Q-b18")
@pytest.mark.parametrize("failure", UNKNOWN, ids=str)
async def test_what_may_have_run_is_not_sent_again_to_any_other_service(failure: Any) -> None:
    service = Service(failure, 200)
    async with service.runner() as runner:
        with pytest.raises(SandboxUnavailable, match="may have run"):
            await runner.run("1")
    assert len(service.bodies) == 1

    trusted = Service(failure, 200)
    async with trusted.runner(assume_idempotent=True) as runner:
        assert (await runner.run("1")).ok


@pytest.mark.conforms("Q43")
@pytest.mark.parametrize(("retries", "attempts"), [(2, 2), (1, 1), (0, 1), (-3, 1), (4, 4)])
async def test_so_many_attempts_are_made_and_the_error_counts_them(retries: int, attempts: int) -> None:
    service = Service(*[httpx.ConnectError("connection refused")] * 9)
    async with service.runner(max_retries=retries) as runner:
        with pytest.raises(SandboxUnavailable, match=f"sandbox unreachable after {attempts} attempts: .*refused"):
            await runner.run("1")

    assert len(service.bodies) == attempts


@pytest.mark.conforms("Q43", "Q-b18")
def test_the_delay_doubles_and_a_service_may_ask_for_more() -> None:
    assert [delay_s(n, 0.5, None, 0) for n in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert delay_s(1, 0.5, "7", 0) == 7.0
    assert delay_s(1, 0.5, "later", 0) == 0.5
    assert delay_s(30, 0.5, "999999", 0) == 60.0
    assert 0.5 < delay_s(1, 0.5, None, 1) <= 0.55


@pytest.mark.conforms("Q43")
async def test_cancelling_ends_the_wait_between_attempts() -> None:
    service = Service(503, 200)
    async with service.runner(retry_delay_s=3600.0) as runner:
        with anyio.move_on_after(0.2) as scope:
            await runner.run("1")

    assert scope.cancelled_caught
    assert len(service.bodies) == 1


@pytest.mark.conforms("Q44")
def test_the_options_have_their_documented_values() -> None:
    options = RunnerOptions()

    assert (options.timeout_s, options.max_output_bytes, options.max_file_bytes) == (30.0, 65536, 10 * 2**20)
    assert (options.max_retries, options.retry_delay_s) == (2, 0.5)
    assert (options.callback_addr, options.callback_external) == ("127.0.0.1:0", "")


@pytest.mark.conforms("Q44", "Q-b24")
async def test_a_time_below_a_second_is_sent_as_it_is() -> None:
    service = Service(200, 200)
    async with service.runner() as runner:
        await runner.run("1")
        await runner.run(CodeRequest("1", timeout_s=0.5))

    assert [body["timeout"] for body in service.bodies] == [30.0, 0.5]


@pytest.mark.conforms("Q34")
async def test_each_script_without_a_session_gets_one_of_its_own_that_is_deleted() -> None:
    service = Service(200, 200, 200)
    async with service.runner() as runner:
        await runner.run("1")
        await runner.run("1")
        await runner.run(CodeRequest("1", session_id="mine"))

    first, second, third = (body["session_id"] for body in service.bodies)
    assert len({first, second, third}) == 3
    assert [path for path in service.paths if "DELETE" in path] == [
        f"DELETE /workspace/{first}",
        f"DELETE /workspace/{second}",
    ]


@pytest.mark.conforms("Q44", "Q-b24", "Q33")
async def test_logs_and_files_past_their_limits_are_cut_on_the_clients_side_too() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        files = [{"name": "a.png", "mime": "image/png", "data": "QUJD"}, {"name": "b", "mime": "x", "data": "%"}]
        return httpx.Response(200, json=OK | {"logs": "x" * 9999, "files": files})

    options = RunnerOptions(max_output_bytes=500, max_file_bytes=2, callback_external="http://me:1")
    async with HttpRunner("http://s", options, transport=httpx.MockTransport(answer)) as runner:
        result = await runner.run("1")

    assert len(result.logs) <= 500
    assert result.files == (CodeFile("a.png", "image/png", None), CodeFile("b", "x", None))


@pytest.mark.conforms("Q43")
async def test_an_answer_over_50_mebibytes_is_an_error() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=b" " * (50 * 2**20 + 1))

    options = RunnerOptions(callback_external="http://me:1")
    async with HttpRunner("http://s", options, transport=httpx.MockTransport(answer)) as runner:
        with pytest.raises(SandboxUnavailable, match="52428800"):
            await runner.run("1")


# The callback server


class Asked:
    """Stands for the service: makes a call while the script runs, and keeps what it was told."""

    def __init__(self, runner_url: str = "") -> None:
        self.body: dict[str, Any] = {}
        self.reached, self.go_on = anyio.Event(), anyio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/execute":
            self.body = json.loads(request.content)
            self.reached.set()
            await self.go_on.wait()
        return httpx.Response(200, json=OK)

    async def call(self, name: str = "add", args: Any = None, *, token: str | None = None, **fields: Any) -> Any:
        sent = {"execution_id": self.body["execution_id"], "name": name, "args": args or {}, **fields}
        headers = {"authorization": f"Bearer {token or self.body['callback_token']}"}
        async with httpx.AsyncClient() as http:
            return await http.post(self.body["callback_url"], json=sent, headers=headers)


@pytest.mark.conforms("Q41", "Q42", "Q-b19")
async def test_the_callback_server_starts_with_the_first_script_and_wants_the_runs_token() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers, for this test."""
        return a + b

    asked = Asked()
    async with (
        HttpRunner("http://s", transport=httpx.MockTransport(asked)) as runner,
        anyio.create_task_group() as tasks,
    ):
        assert runner.callback_url == ""
        tasks.start_soon(runner.run, "1", [add])
        await asked.reached.wait()
        assert runner.callback_url.startswith("http://127.0.0.1:")
        assert runner.callback_url.endswith("/_oasis/dispatch")
        answers = [
            await asked.call(args={"a": 1, "b": 2}),
            await asked.call("nothing"),
            await asked.call("execute_code"),
            await asked.call(token="wrong"),
            await asked.call(execution_id="other"),
        ]
        async with httpx.AsyncClient() as http:
            answers.append(await http.get(runner.callback_url))
            answers.append(await http.post(runner.callback_url, content=b"{"))
            answers.append(await http.post(runner.callback_url, content=b'{"execution_id": 1}'))
        asked.go_on.set()

    assert [each.status_code for each in answers] == [200, 200, 200, 401, 404, 405, 400, 400]
    assert answers[0].json() == {"data": "3", "value": 3}
    assert "unknown tool: nothing" in answers[1].json()["error"]
    assert "no recursion" in answers[2].json()["error"]
    assert all(set(each.json()) == {"error"} for each in answers[3:])


@pytest.mark.conforms("Q42", "Q-b20")
async def test_calls_of_one_script_run_at_once_and_one_id_is_answered_once() -> None:
    here = 0
    both = anyio.Event()

    async def meet() -> int:
        """Wait until a second call is there, for this test."""
        nonlocal here
        here += 1
        if here == 2:
            both.set()
        await both.wait()
        return here

    asked = Asked()
    said: list[Any] = []

    async def call(call_id: str) -> None:
        said.append((await asked.call("meet", call_id=call_id)).json()["value"])

    async with (
        HttpRunner("http://s", transport=httpx.MockTransport(asked)) as runner,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(runner.run, "1", [meet])
        await asked.reached.wait()
        async with anyio.create_task_group() as calls:
            for call_id in ("c1", "c2", "c1"):
                calls.start_soon(call, call_id)
        asked.go_on.set()

    assert here == 2
    assert said == [2, 2, 2]


@pytest.mark.conforms("Q41", "Q42")
async def test_calls_under_way_when_the_script_ends_are_cancelled_and_later_ones_are_told_so() -> None:
    started = anyio.Event()

    async def hang() -> None:
        """Wait for ever, for this test."""
        started.set()
        await anyio.sleep_forever()

    asked = Asked()
    said: list[httpx.Response] = []

    async def call() -> None:
        said.append(await asked.call("hang"))

    async with HttpRunner("http://s", transport=httpx.MockTransport(asked)) as runner:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run, "1", [hang])
            await asked.reached.wait()
            tasks.start_soon(call)
            await started.wait()
            asked.go_on.set()
        late = await asked.call("hang")
        stranger = await asked.call("hang", token="wrong")

    assert (said[0].status_code, said[0].json()) == (504, {"error": "execution completed"})
    assert (late.status_code, late.json()) == (200, {"error": "execution completed"})
    assert stranger.status_code == 401


@pytest.mark.conforms("Q42")
async def test_late_calls_of_a_cancelled_run_are_told_that_it_was_cancelled() -> None:
    asked = Asked()
    async with HttpRunner("http://s", transport=httpx.MockTransport(asked)) as runner:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run, "1")
            await asked.reached.wait()
            tasks.cancel_scope.cancel()
        late = await asked.call("x")

    assert late.json() == {"error": "execution cancelled"}


@pytest.mark.conforms("Q42", "Q44", "Q-b19")
async def test_an_address_that_nobody_can_call_needs_another_to_be_told() -> None:
    service = Service(200)
    options = {"callback_external": "", "callback_addr": "0.0.0.0:0"}
    async with service.runner(**options) as runner:
        with pytest.raises(UsageError, match="callback_advertise"):
            await runner.run("1")
    async with service.runner(**options, callback_advertise="10.0.0.5") as runner:
        await runner.run("1")

    assert service.bodies[0]["callback_url"].startswith("http://10.0.0.5:")


@pytest.mark.conforms("Q42", "Q44")
async def test_the_callbacks_can_be_served_by_a_server_of_ones_own() -> None:
    asked = Asked()
    options = RunnerOptions(callback_external="https://agents.example/base/")
    async with HttpRunner("http://s", options, transport=httpx.MockTransport(asked)) as runner:
        own = httpx.AsyncClient(transport=httpx.ASGITransport(runner.callback_app), base_url="http://own")
        async with own, anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run, "1")
            await asked.reached.wait()
            sent = {"execution_id": asked.body["execution_id"], "name": "nothing", "args": {}}
            headers = {"authorization": f"Bearer {asked.body['callback_token']}"}
            answer = await own.post("/_oasis/dispatch", json=sent, headers=headers)
            asked.go_on.set()

    assert asked.body["callback_url"] == "https://agents.example/base/_oasis/dispatch"
    assert "unknown tool" in answer.json()["error"]


# With the service


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with compat_server(tmp_path_factory.mktemp("runner") / "w") as (url, _):
        yield url


@pytest.mark.isolation
@pytest.mark.conforms("Q42", "Q-b13", "Q-b18", "Q-b19")
async def test_a_script_in_the_service_calls_tools_of_this_process_and_gets_values(url: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look_up(row: dict[str, Any]) -> list[Any]:
        """Look a row up, for this test."""
        seen.append(row)
        return [1, "123", None]

    code = "set_result(call_tool('look_up', {'row': {'id': 7}}), files=['in.txt'])"
    async with HttpRunner(url) as runner:
        result = await runner.run(CodeRequest(code, files=(CodeFile("in.txt", data=b"hello"),)), [look_up])
        again = await runner.run(CodeRequest("set_result(1)", execution_id="fixed"))

    assert json.loads(result.output) == [1, "123", None]
    assert seen == [{"id": 7}]
    assert result.files == (CodeFile("in.txt", "text/plain", b"hello"),)
    assert again.output == "1"
