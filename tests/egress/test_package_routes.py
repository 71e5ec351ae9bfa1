"""`install_package` on every route that runs a script: the same packages are allowed, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from mcp.client.client import Client as McpClient
from mcp.client.stdio import StdioServerParameters

from builtin.webkit import Site
from cli.test_cli_repl_terminal import PROMPT, Terminal
from egress.package_index import index, opened
from rows import each_row
from sandbox.test_ray_placement import backend_of, node_of
from service.client_serving import serving
from toolcell import Agent, Policy, PoolConfig, Runtime, SandboxUnavailable, ToolRegistry
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.builtin import ScheduledAction, SqliteStore
from toolcell.config import DEFAULT_LAYERS
from toolcell.egress import Egress, PackageIndex, request_tools
from toolcell.errors import PackageError
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.sandbox.ray.backend import RayBackend
from toolcell.service import Client, TenantConfig
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

INSTALL = """
try: install_package("tiny-pkg")
except RuntimeError as error: said = str(error)
install_package("humanize")
import humanize
set_result([humanize.twice(), "tiny-pkg is not allowed" in said])
"""
INSTALLED = [14, True]


def with_index(site: Site, *command: str) -> list[str]:
    """Return a command of `toolcell` that takes packages from a site, which is not public."""
    url = site.url("/simple/", "localhost").replace("://", "://user:pass%40word@")
    return ["-m", "toolcell", *command, "--package-index", f"{url} @127.0.0.0/8 @::1"]


async def results_of(route: str, runtime: Runtime, source: str) -> list[Any]:
    """Return what whoever runs a script on this route gets of it."""
    match route:
        case "stream":
            return [[event async for event in runtime.stream(source)][-1].result.value]  # type: ignore[union-attr]
        case _:
            return [item.value async for item in runtime.map(source, [{}, {}])]


@each_row("route", ["stream", "map"])
async def test_a_script_of_each_route_installs_what_is_allowed(route: str, wheels: list[Path]) -> None:
    async with opened(wheels, "humanize") as (_, runtime):
        results = await results_of(route, runtime, INSTALL)

    assert results in ([INSTALLED], [INSTALLED, INSTALLED])


async def test_an_agent_that_repairs_its_script_installs_once(wheels: list[Path]) -> None:
    async with opened(wheels, "humanize") as (site, runtime):
        broken, mended = (calls(("execute_code", {"code": code})) for code in (f"{INSTALL}1 / 0", INSTALL))
        model = ScriptedModel([broken, mended, "done"])
        run = await Agent(model, code_execution=runtime, repair=True).run("go")

    told = [each["content"] for each in run.messages if each["role"] == "tool"]
    assert "ZeroDivisionError" in told[0]
    assert told[1].startswith(json.dumps(INSTALLED))
    assert "http_read" not in told[1]
    assert site.paths.count("/simple/humanize/") == 2


async def test_a_server_of_the_command_line_allows_packages(wheels: list[Path]) -> None:
    async with index(*wheels) as site:
        flags = ["--allow-package", "humanize"]
        parameters = StdioServerParameters(command=sys.executable, args=[*with_index(site, "mcp"), *flags])
        async with McpClient(parameters) as client:
            answer = await client.call_tool("execute_code", {"code": INSTALL})

    assert answer.structured_content["value"] == INSTALLED


async def test_packages_of_the_command_line_come_from_the_index_that_is_named_and_its_password_is_sent(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with index(*wheels) as site:
        run = [sys.executable, *with_index(site, "run"), "-p", "tiny-pkg", "--allow-package", "humanize", "-c"]
        code = "import tiny_pkg; install_package('humanize'); import humanize; humanize.twice() + tiny_pkg.VALUE"
        done = await anyio.run_process([*run, code], stderr=subprocess.PIPE, check=False)
        refused = await anyio.run_process([each.partition(" ")[0] for each in run] + [code], check=False)

    assert (done.returncode, done.stdout) == (0, b"21\n"), done.stderr
    logins = {
        path: "Basic dXNlcjpwYXNzQHdvcmQ=" in request for path, request in zip(site.paths, site.requests, strict=False)
    }
    assert (
        logins["/simple/tiny-pkg/"] and logins["/simple/humanize/"] and logins["/files/humanize-4.1-py3-none-any.whl"]
    )
    assert refused.returncode == 1
    assert b"loopback; Allow(private=[...]), or @ADDRESS after the host" in refused.stderr


TOOLS = """
from toolcell import ToolRegistry
registry = ToolRegistry()
registry.save_script("install", {source!r}, description="Install.", folder="scripts")
"""


async def test_a_schedule_calls_a_saved_script_that_installs(wheels: list[Path], tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS.format(source=INSTALL))
    store = SqliteStore(str(tmp_path / "toolcell.db"))
    calls_of_it = json.dumps([{"tool": "install", "params": {}}])
    due = ScheduledAction(description="Go", schedule="08:00 daily", tool_calls=calls_of_it, next_run=1_700_000_000)
    await store.create_scheduled_action(due)
    await store.close()
    async with index(*wheels) as site:
        place = [sys.executable, *with_index(site, "schedule", "run")]
        flags = ["--json", "--once", "--tools", "tools.py", "--allow-package", "humanize"]
        done = await anyio.run_process([*place, *flags], stderr=subprocess.PIPE, check=False, cwd=tmp_path)

    made = json.loads(done.stdout)
    assert (made["status"], "[14, true]" in made["detail"]) == ("done", True), done


async def test_what_is_typed_in_the_repl_is_installed(wheels: list[Path], tmp_path: Path) -> None:
    async with index(*wheels) as site:

        def typed() -> None:
            flags = ["--allow-package", "humanize", "--history", str(tmp_path / "history")]
            with contextlib.closing(Terminal(*with_index(site, "repl"), *flags)) as terminal:
                terminal.wait(PROMPT)
                terminal.run("install_package('tiny-pkg')\r", "tiny-pkg is not allowed")
                terminal.run("install_package('humanize'); import humanize\r", "import humanize\r")
                terminal.run("[humanize.twice()]\r", "[14]")

        await anyio.to_thread.run_sync(typed)


@asynccontextmanager
async def service_of(folder: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, Client]]:
    """Open a service with two tenants, each with a list of its own; yield their clients."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_TRUSTED_HOST"):
        monkeypatch.setenv(name, "")  # the service sets them for its process
    settings = {"package_index": site.url("/simple/", "localhost") + " @127.0.0.0/8 @::1"}
    tenants = {
        "acme": TenantConfig(allow_packages=("humanize",)),
        "bolt": TenantConfig(allow_packages=("tiny-pkg",)),
    }
    store = TokenDatabase(folder / "tokens.db")
    tokens = {name: store.create(name, list(Scope), name=name).text for name in tenants}
    store.close()
    async with (
        serving(folder / "state", tokens=folder / "tokens.db", tenants=tenants, **settings) as (url, _),
        Client(url, token=tokens["acme"]) as acme,
        Client(url, token=tokens["bolt"]) as bolt,
    ):
        yield {"acme": acme, "bolt": bolt}


async def test_what_one_tenant_may_install_does_not_serve_another(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = dict[str, Any]()

    async def install(name: str, client: Client) -> None:
        results[name] = await client.execute_code(INSTALL)

    async with index(*wheels) as site, service_of(tmp_path, site, monkeypatch) as clients:
        async with anyio.create_task_group() as tasks:
            for name, client in clients.items():
                tasks.start_soon(install, name, client)
        own = await clients["bolt"].execute_code("install_package('tiny-pkg'); import tiny_pkg; tiny_pkg.VALUE")

    assert results["acme"].value == INSTALLED
    assert "the package humanize is not allowed" in results["bolt"].error.message
    assert own.value == 7


async def test_a_script_on_a_node_installs_what_pip_found_here(
    wheels: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(_: RayBackend) -> None:
        """Open or close no cluster: the only node is known."""

    monkeypatch.setattr(RayBackend, "open", nothing)
    monkeypatch.setattr(RayBackend, "close", nothing)
    there = ProcessBackend()
    await there.open()
    try:
        async with (
            node_of(there, "there") as node,
            opened(wheels, "humanize", backend=backend_of(node), pool=PoolConfig(warm=0)) as (_, runtime),
        ):
            result = await runtime.execute_code(INSTALL)
    finally:
        await there.close()

    assert result.value == INSTALLED, result.error
    assert result.isolation.backend == "ray"


async def test_pip_is_isolated_as_scripts_are_also_when_another_process_commits(
    wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, required, find_wheels = ToolRegistry(), list[Any](), request_tools.find_wheels

    @registry.tool
    def send(value: int) -> None:
        """Send a value to the office."""

    async def find(*args: Any, policy: Policy, **options: Any) -> Any:
        required.append(policy.require)
        return await find_wheels(*args, policy=policy, **options)

    monkeypatch.setattr(request_tools, "find_wheels", find)
    policy = Policy(require=DEFAULT_LAYERS - {"landlock"})
    options = {"registry": registry, "policy": policy, "record": tmp_path / "journal" / "runs.db"}
    async with opened(wheels, "humanize", **options) as (site, runtime):
        draft = await runtime.execute_code("install_package('humanize')\ntools.send(1)", dry_run=True)
        own = Egress(packages=PackageIndex(["humanize"], url=site.url("/simple/", "127.0.0.1")))
        async with Runtime(egress=own, **options) as other:
            result = await other.commit(draft.draft_id, recheck=True)

    assert result.ok
    assert required == [policy.require, policy.require]


@pytest.mark.parametrize("failure", [SandboxUnavailable("no namespaces here"), PackageError("pip is not to be had")])
async def test_a_machine_on_which_pip_cannot_run_says_why(
    failure: Exception, wheels: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(request_tools, "find_wheels", fail)
    async with opened(wheels, "humanize") as (_, runtime):
        result = await runtime.execute_code("install_package('humanize')")

    assert result.error is not None
    assert f"cannot run: {failure}" in result.error.message
