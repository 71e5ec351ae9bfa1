"""`registry.add_mcp_server` with a server on the official SDK, and with one that dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from rows import each_row
from toolcell import Runtime, SyncRuntime
from toolcell.calls.result import Status
from toolcell.errors import McpServerError, RegistrationError, UsageError
from toolcell.tools import ToolRegistry

from .conftest import HONEST, Connected, a_tool, raw, until

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


async def test_tools_have_a_namespace_their_hints_and_their_origin(honest: Connected) -> None:
    registered = {name: honest.registry.registered(f"h.{name}") for name in ("weather", "add", "delete_all")}

    options = {name: tool.options for name, tool in registered.items() if tool is not None}
    assert (options["weather"].read_only, options["weather"].idempotent) == (True, True)
    assert (options["add"].read_only, options["add"].idempotent) == (False, True)
    assert [each for each in options if options[each].requires_approval] == ["delete_all"]
    assert options["add"].reads == options["add"].sends == {"weather"}
    assert options["add"].timeout_s == 60
    assert registered["weather"].definition.description == "[MCP server h] Return the weather of a place."
    assert "def weather(*, place: str, celsius: float = 20.5) -> HWeatherResult" in honest.registry.to_python()


@each_row(
    ("name", "args", "value"),
    [
        ("weather", {"place": "Rome"}, {"place": "Rome", "celsius": 20.5}),
        ("add", {"a": 1, "b": 2}, 3),
        ("hello", {"name": "you"}, "hello you"),
        ("picture", {}, b"\x89PNG\r\n\x1a\n..."),
        ("environment", {"name": "GIVEN"}, "value"),
        ("environment", {"name": "PYTEST_CURRENT_TEST"}, ""),
    ],
)
async def test_what_a_server_answers_is_data_text_or_bytes(
    honest: Connected, name: str, args: dict[str, Any], value: Any
) -> None:
    result = await honest.registry.dispatch(f"h.{name}", args)

    assert result.status is Status.OK, result.text
    assert result.guest_value() == value


async def test_text_and_pictures_of_one_answer_are_a_list_and_the_pictures_are_files(honest: Connected) -> None:
    result = await honest.registry.dispatch("h.album", {})

    assert [each if isinstance(each, str) else each["media_type"] for each in result.value] == [
        "a caption",
        "image/png",
    ]
    assert [(file.name, file.media_type) for file in result.files] == [("image-2.png", "image/png")]
    assert len(result.images) == 1


async def test_failures_are_those_of_the_call(honest: Connected) -> None:
    failed = await honest.registry.dispatch("h.fail", {"text": "boo"})
    wrong = await honest.registry.dispatch("h.add", {"a": "x", "b": 1})
    refused = await honest.registry.dispatch("h.delete_all", {})

    assert failed.error is not None
    assert (failed.error.code, failed.message[:12]) == ("tool_error", "MCP server h")
    assert wrong.error is not None
    assert wrong.error.code == "invalid_arguments"
    assert refused.status is Status.BLOCKED


async def test_a_call_that_is_given_up_is_cancelled_and_the_next_one_is_answered(honest: Connected) -> None:
    heard: list[Any] = []
    run = honest.registry.new_run()
    with anyio.move_on_after(30) as scope:
        run.events.subscribe(lambda event: heard.append(event) or (event.type.endswith("update") and scope.cancel()))
        await honest.registry.dispatch("h.wait", {}, context=run)

    assert scope.cancelled_caught
    assert "half way" in str([each.update for each in heard if each.type.endswith("update")])
    assert (await honest.registry.dispatch("h.hello", {"name": "x"})).output == "hello x"


@pytest.mark.isolation
async def test_a_script_and_a_plan_call_a_servers_tools(honest: Connected) -> None:
    async with Runtime(honest.registry) as runtime:
        script = "a = tools.h.add(a=1, b=2)\ncall_tool('h.weather', place='x', celsius=a)"
        result = await runtime.execute_code(script)
        rows = await runtime.execute_plan([{"tool": "h.add", "args": {"a": 1, "b": 2}}])

    assert result.value == {"place": "x", "celsius": 3}
    assert [row["result"] for row in rows] == [3]


async def test_calls_from_another_event_loop_are_made_in_the_one_that_holds_the_connection(honest: Connected) -> None:
    def elsewhere() -> Any:
        return anyio.run(honest.registry.dispatch, "h.add", {"a": 1, "b": 2})

    assert (await anyio.to_thread.run_sync(elsewhere)).value == 3


@pytest.mark.slow
async def test_a_changed_list_is_followed() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("g", command=HONEST, allow=["grow", "hello", "late"])
    try:
        assert set(registry.list()) == {"g.grow", "g.hello"}
        await until(lambda: client.state == "connected")
        await registry.dispatch("g.grow", {})
        await until(lambda: set(registry.list()) == {"g.grow", "g.late"})
    finally:
        await registry.close()
    assert registry.list() == []


async def test_a_server_that_dies_fails_its_calls_and_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("d", command=raw(pages=[[a_tool()]], dies=True))
    monkeypatch.setattr(client._restarts, "_pause_s", 3600.0)
    try:
        lost = await registry.dispatch("d.t", {})
        await until(lambda: client.state != "connected")
        refused = await registry.dispatch("d.t", {})
    finally:
        await registry.close()

    assert lost.error is not None
    assert refused.error is not None
    assert (lost.error.code, lost.error.retryable) == ("unavailable", False)
    assert "exit status 4: it is over; whether the call was carried out is not known" in lost.message
    assert (refused.error.code, refused.error.retryable) == ("unavailable", True)
    assert "the call was not made" in refused.message


async def test_a_server_is_started_again_with_the_same_tools() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("d", command=raw(pages=[[a_tool()]], dies=True))
    try:
        await registry.dispatch("d.t", {})
        await until(lambda: client.restarts == 1 and client.state == "connected")
        assert registry.list() == ["d.t"]
    finally:
        await registry.close()


async def test_nothing_of_a_server_is_left_after_it_was_closed(tmp_path: Path) -> None:
    registry = ToolRegistry()
    await registry.add_mcp_server("s", command=raw(spawn=str(tmp_path / "pids")))
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert all(map(is_running, pids))

    await registry.close()

    assert not any(map(is_running, pids))


HOST = """
import anyio, signal, sys
from toolcell.tools import ToolRegistry
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
async def main():
    registry = ToolRegistry()
    await registry.add_mcp_server("s", command=sys.argv[1:])
    print("ready", flush=True)
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await registry.close()
anyio.run(main)
"""


@pytest.mark.slow
@each_row(
    ("end", "stopped"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGINT, True)],
    ids=["killed", "killed, its supervisor is stopped", "closed, its supervisor is stopped"],
)
async def test_nothing_of_a_server_is_left_after_its_host(end: signal.Signals, stopped: bool, tmp_path: Path) -> None:
    command = raw(spawn=str(tmp_path / "pids"))
    host = started([sys.executable, "-c", HOST, *command])
    assert host.stdout is not None
    with host, host.stdout:
        assert host.stdout.readline() == b"ready\n"
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        (supervisor,) = psutil.Process(host.pid).children()
        if stopped:
            supervisor.suspend()
        host.send_signal(end)

    await until(lambda: not any(map(is_running, [*pids, supervisor.pid])))


def started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
async def test_a_server_over_http_gets_the_headers_and_its_end_is_noticed() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = started([*HONEST, str(port)])
    registry = ToolRegistry()
    try:
        await until(lambda: can_connect(port))
        url = f"http://127.0.0.1:{port}/mcp"
        client = await registry.add_mcp_server("w", url=url, headers={"x-key": "secret"}, approve="none")
        assert (await registry.dispatch("w.header", {"name": "x-key"})).output == "secret"
        assert (await registry.dispatch("w.delete_all", {})).value == "deleted"
        assert "secret" not in repr(client)
        lost = await registry.dispatch("w.die", {})
        assert lost.error is not None
        assert lost.error.code == "unavailable"
    finally:
        await registry.close()
        process.kill()
        process.communicate()


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@each_row(
    ("options", "says"),
    [
        ({}, "command=[...] or url=..."),
        ({"command": ["x"], "url": "http://x"}, "and not both"),
        ({"command": "npx server"}, "command is a list"),
        ({"command": []}, "command is a list"),
        ({"url": "ftp://x"}, "begins with http:// or https://"),
        ({"url": "http://x", "env": {}}, "headers=..."),
        ({"command": ["x"], "headers": {}}, "env=..."),
        ({"command": ["x"], "env": {"TOKEN": None}}, "MCP server x: env has no text for 'TOKEN'"),
        ({"command": ["x"], "env": {"PORT": 80}}, "'PORT' to int"),
        ({"command": ["x"], "env": ["A=1"]}, "env must be a dict of texts, not of type list"),
        ({"url": "http://x", "headers": {"Authorization": None}}, "headers has no text for 'Authorization'"),
        ({"url": "http://x", "headers": {"Authorization": b"secret"}}, "'Authorization' to bytes"),
        ({"url": "http://x", "headers": "Bearer secret"}, "headers must be a dict of texts, not of type str"),
        ({"command": ["x"], "allow": "abc"}, "write ['abc']"),
        ({"command": ["x"], "labels": {"read": "a"}}, "'reads': ..., 'sends': ..."),
        ({"command": ["x"], "approve": "some"}, "approve"),
        ({"command": ["x"], "timeout": 3}, "did you mean timeout_s?"),
        ({"command": ["x"], "timeout_s": -1}, "timeout_s"),
    ],
)
async def test_what_cannot_be_meant_is_refused_before_anything_is_started(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        await ToolRegistry().add_mcp_server("x", **options)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_server_that_cannot_be_reached_is_named_without_what_its_url_holds() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(McpServerError) as caught:
            await ToolRegistry().add_mcp_server("x", url=f"http://127.0.0.1:{port}/mcp?key=secret")
    assert f"ConnectError at 127.0.0.1:{port}: " in str(caught.value)
    assert "secret" not in str(caught.value)


@each_row("name", ["toolcell", "Toolcell"])
async def test_a_server_with_the_name_of_the_hosts_own_tools_is_refused_at_once(name: str) -> None:
    with pytest.raises(RegistrationError, match=f"'{name}'.*give it another name"):
        await ToolRegistry().add_mcp_server(name, command=["no-such-program-anywhere"])


@each_row("name", ["", "a.b", "a b", "x" * 33, "\u202ex"])
async def test_a_servers_name_is_one_part_of_a_name(name: str) -> None:
    with pytest.raises(RegistrationError, match="a name must match"):
        await ToolRegistry().add_mcp_server(name, command=["x"])


@each_row(
    ("command", "says"),
    [
        (["no-such-program-anywhere"], "there is no program 'no-such-program-anywhere' on the PATH"),
        ([sys.executable, "-I", "-S", "-c", "raise SystemExit('wrong key')"], "exit status 1: wrong key"),
        ([sys.executable, "-I", "-S", "-c", "print('hello')"], "exit status 0: it sent no message of MCP"),
    ],
)
async def test_a_server_that_cannot_be_started_says_why(command: list[str], says: str) -> None:
    registry = ToolRegistry()

    with pytest.raises(McpServerError) as caught:
        await registry.add_mcp_server("x", command=command)
    assert says in str(caught.value)
    assert registry.list() == []


async def test_the_servers_process_is_not_the_callers_and_has_not_its_environment(honest: Connected) -> None:
    pid = int((await honest.registry.dispatch("h.pid", {})).output)

    assert pid != os.getpid()
    assert b"PYTEST" not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.slow
@each_row(("given", "said"), [({"name": "Ada"}, "accept name='Ada'"), (None, "decline None")])
async def test_a_server_s_question_is_answered_by_a_function_of_the_host(given: Any, said: str) -> None:
    async def answer(message: str, schema: Any) -> Any:
        return given if message == "who are you?" and "name" in schema["properties"] else {"name": "nobody"}

    registry = ToolRegistry()
    await registry.add_mcp_server("h", command=HONEST, allow=["ask"], elicitation=answer)
    result = await registry.dispatch("h.ask", {})
    await registry.close()

    assert result.output == said, result.text


@pytest.mark.slow
async def test_a_server_s_question_fails_its_call_where_nobody_answers_any(honest: Connected) -> None:
    result = await honest.registry.dispatch("h.ask", {})

    assert result.error is not None and "MCP server h" in result.message


@pytest.mark.slow
@pytest.mark.isolation
def test_a_blocking_runtime_has_the_tools_of_a_server_until_either_is_closed() -> None:
    asked: list[str] = []

    def answer(message: str, schema: Any) -> dict[str, Any]:
        asked.append(message)
        return {"name": "Ada"}

    with SyncRuntime() as runtime:
        server = runtime.add_mcp_server("h", command=HONEST, elicitation=answer)
        pid = int(runtime.execute_code("tools.h.pid()").value)
        assert runtime.execute_code("tools.h.add(a=1, b=2)").value == 3
        assert "Ada" in runtime.execute_code("tools.h.ask()").value
        with pytest.raises(RegistrationError, match="there is one of that name"):
            runtime.add_mcp_server("h", command=HONEST)
        server.close()
        server.close()
        assert runtime.runtime.registry.list() == [] and not is_running(pid)
        with pytest.raises(McpServerError, match="no program"):
            runtime.add_mcp_server("h", command=["no-such-program-anywhere"])
        with runtime.add_mcp_server("h", command=HONEST) as server:
            server.reconnect()  # it is connected: nothing happens
            assert server.client.state == "connected"
        again = runtime.add_mcp_server("h", command=HONEST)
        pid = int(runtime.execute_code("tools.h.pid()").value)
    assert asked == ["who are you?"]
    assert again.client.state == "closed" and not is_running(pid)
    with pytest.raises(UsageError, match="not open"):
        runtime.add_mcp_server("h", command=HONEST)


@pytest.mark.slow
async def test_two_servers_of_one_registry_have_two_names() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("s", command=raw(pages=[[a_tool()]]))
    assert registry.mcp_servers() == {"s": client}
    with pytest.raises(RegistrationError, match="there is one of that name"):
        await registry.add_mcp_server("s", command=raw(pages=[[a_tool("other")]]))
    await client.close()
    assert registry.mcp_servers() == {}
    await registry.add_mcp_server("s", command=raw(pages=[[a_tool("other")]]))
    assert registry.list() == ["s.other"]
    await registry.close()
