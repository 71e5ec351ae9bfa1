"""`toolcell run --mcp`: the tools of MCP servers for a script."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rows import each_row
from toolcell.cli import build, exits
from toolcell.cli.mcp_servers import McpFlags, login_of, read_server
from toolcell.errors import UsageError

RAW = Path(__file__).parent.parent / "mcp_client" / "raw_server.py"
TOOL = {"name": "find-it", "description": "Find something", "inputSchema": {"type": "object"}}
COMMAND = [sys.executable, "-I", "-S", str(RAW), json.dumps({"pages": [[TOOL]]})]


@pytest.mark.isolation
def test_a_script_calls_the_tools_of_two_servers(tmp_path: Path) -> None:
    config = tmp_path / "servers.json"
    entry = {"command": COMMAND[0], "args": COMMAND[1:], "type": "stdio"}
    config.write_text(json.dumps({"mcpServers": {"my notes": entry, "off": {"disabled": True}}}))
    script = "set_result([tools.a.find_it(), call_tool('my_notes.find-it')])"

    flags = ["--mcp", f"a={shlex.join(COMMAND)}", "--mcp-config", str(config)]
    result = CliRunner().invoke(build(["run"]), ["run", "-c", script, *flags])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == ["done", "done"]


@pytest.mark.isolation
def test_tools_of_a_file_that_names_toolcell_itself_can_be_called_and_one_that_is_left_out_is_named(
    tmp_path: Path,
) -> None:
    config = tmp_path / "servers.json"
    words = [*COMMAND[:-1], json.dumps({"pages": [[TOOL, TOOL | {"name": "__call__"}]]})]
    config.write_text(json.dumps({"mcpServers": {"toolcell": {"command": words[0], "args": words[1:]}}}))
    flags = ["-c", "tools.toolcell_server.find_it()", "--mcp-config", str(config)]

    result = CliRunner().invoke(build(["run"]), ["run", *flags])

    assert (result.exit_code, result.stdout) == (0, "done\n"), result.output
    assert "warning: MCP server toolcell_server: __call__: it is left out" in result.stderr.replace("\n", " ")


FAILING: dict[str, Any] = {
    "gone": {"command": "no-such-program-anywhere"},
    "mute": {"command": sys.executable, "args": ["-c", ""]},
    "far": {"url": "http://127.0.0.1:9/mcp"},
    "unset": {"command": "x", "env": {"A": "${NOT_SET_ANYWHERE}"}},
    "empty": {},
}
"""Servers that cannot be had, each in its own way."""


@pytest.mark.isolation
def test_servers_of_a_file_that_cannot_be_had_are_named_and_keep_no_other_from_being_used(tmp_path: Path) -> None:
    good = {"command": COMMAND[0], "args": COMMAND[1:]}
    mixed = ["--mcp-config", written(tmp_path, {"mcpServers": FAILING | {"good": good}})]
    (tmp_path / "bad").mkdir()
    bad = ["--mcp-config", written(tmp_path / "bad", {"mcpServers": FAILING})]
    named = ["--mcp", "a=no-such-program-anywhere"]
    script = ["run", "-c", "[each['name'] for each in list_tools()]"]

    went_on = CliRunner().invoke(build(["run"]), [*script, *mixed])
    logged_in = CliRunner().invoke(build(["mcp"]), ["mcp", "login", *mixed])
    refused = [CliRunner().invoke(build(["run"]), [*script, *flags]) for flags in (bad, named, mixed + named)]

    assert (went_on.exit_code, json.loads(went_on.stdout)) == (0, ["good.find-it"])
    assert (logged_in.exit_code, logged_in.stdout) == (exits.UNAVAILABLE, "good: connected, 1 tools\n")
    for result in (went_on, logged_in):
        lines = result.stderr.splitlines()
        assert len(lines) == len(FAILING), lines
        for name in FAILING:
            assert sum(f" {name}: " in line for line in lines) == 1, (name, lines)
    for result in refused:
        assert (result.exit_code, result.stdout) == (exits.UNAVAILABLE, "")
    assert "no-such-program-anywhere" in refused[1].stderr


def test_a_command_line_and_a_url_are_told_apart() -> None:
    assert read_server("a=npx -y 'a b'") == ("a", {"command": ["npx", "-y", "a b"]})
    assert read_server("a=https://x.example/mcp?k=v") == ("a", {"url": "https://x.example/mcp?k=v"})


@each_row("text", ["a", "a=", "=npx", "a='open"])
def test_a_flag_that_names_no_server_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--mcp"):
        read_server(text)


def written(folder: Path, document: Any) -> str:
    path = folder / "c.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_variables_of_the_environment_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "k")
    entry = {"url": "https://x", "headers": {"a": "Bearer ${KEY_OF_TEST}", "b": "${NOT_SET_ANYWHERE:-d}"}}

    ((name, options),) = McpFlags(mcp_config=[written(tmp_path, {"servers": {"x": entry}})]).servers().items()

    assert (name, options) == ("x", {"url": "https://x", "headers": {"a": "Bearer k", "b": "d"}})


@each_row(
    ("document", "says"),
    [
        ("{", "Expecting"),
        ([], "mcpServers"),
        ({"mcpServers": []}, "mcpServers"),
        ({"mcpServers": {"x": 1}}, "a server is an object"),
        ({"mcpServers": {"x": {"args": "a"}}}, "args is of the wrong type"),
        ({"mcpServers": {"x": {"command": "${NOT_SET_ANYWHERE}"}}}, "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, document: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        McpFlags(mcp_config=[written(tmp_path, document)]).servers()
    assert says in str(caught.value)


def test_two_servers_of_one_name_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"mcpServers": {"a": {"url": "https://x"}}})

    with pytest.raises(UsageError, match="one name"):
        McpFlags(mcp=["a=npx"], mcp_config=[path]).servers()


@each_row(
    ("options", "is_offered"),
    [
        ({"url": "https://x.example/mcp"}, True),
        ({"url": "http://127.0.0.1:80/mcp"}, True),
        ({"url": "http://x.example/mcp"}, False),
        ({"url": "https://x.example/mcp", "headers": {"authorization": "Bearer x"}}, False),
        ({"command": ["x"]}, False),
    ],
)
def test_a_server_at_a_url_may_ask_for_a_login_unless_there_is_a_token_or_it_would_go_in_clear(
    options: dict[str, Any], is_offered: bool
) -> None:
    found = login_of(options, may_ask=False)

    assert ("auth" in found) is is_offered
    assert not is_offered or found["auth"].ask is False


def test_a_login_needs_a_server() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "toolcell", "mcp", "login"], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2 and "--mcp NAME=URL" in ended.stderr


REAL: list[tuple[str, dict[str, Any]]] = [
    ('\ufeff{"mcpServers": {"a": {"command": "npx"}}}', {"a": {"command": ["npx"]}}),
    ('{"mcpServers": {/* one */ "a": {"url": "https://x//y", // two\n},},}', {"a": {"url": "https://x//y"}}),
    ('{"mcp": {"servers": {"a": {"url": "https://x"}}}}', {"a": {"url": "https://x"}}),
    ('{"mcp": {"a": {"type": "local", "command": ["npx", "x"], "environment": {"K": "v"}}}}',
     {"a": {"command": ["npx", "x"], "env": {"K": "v"}}}),
    ('{"context_servers": {"a": {"command": "x", "args": ["y", 3, null]}}}', {"a": {"command": ["x", "y", "3"]}}),
    ('{"mcpServers": {"a": {"httpUrl": "https://x"}, "b": {"serverUrl": "https://y"}}}',
     {"a": {"url": "https://x"}, "b": {"url": "https://y"}}),
    ('{"mcpServers": {"a": {"command": "x", "enabled": false}, "b": {"command": "y", "enabled": true}}}',
     {"b": {"command": ["y"]}}),
    ('{"mcpServers": {"a": {"command": "x", "env": {"PORT": 8080, "DEBUG": true, "NONE": null}}}}',
     {"a": {"command": ["x"], "env": {"PORT": "8080", "DEBUG": "true"}}}),
    ('{"mcpServers": {"a": {"command": "x", "env": null, "args": null, "url": null}}}', {"a": {"command": ["x"]}}),
    ('{"mcpServers": {"a": {"url": "https://x", "headers": {"k": "${env:KEY_OF_TEST}"}}}}',
     {"a": {"url": "https://x", "headers": {"k": "k"}}}),
    ('{"mcpServers": {"a": {"url": "https://x", "headers": {"k": "${ KEY_OF_TEST } ${ENV:KEY_OF_TEST} ${ Env:NO:-d}"}}}}',
     {"a": {"url": "https://x", "headers": {"k": "k k d"}}}),
    ('{"mcpServers": {"a": {"command": "sh", "args": ["-c", "echo ${#a} ${1} $HOME {{x}}"]}}}',
     {"a": {"command": ["sh", "-c", "echo ${#a} ${1} $HOME {{x}}"]}}),
    ('{"mcpServers": {"a": {"type": "streamable-http", "command": "", "url": "https://x", "args": [], "env": {}}}}',
     {"a": {"url": "https://x"}}),
    ('{"mcpServers": {"a": {"type": "stdio", "command": "x", "url": "https://x", "headers": {}}}}', {"a": {"command": ["x"]}}),
    ('{"mcpServers": {"github.com/acme/a server": {"command": "x"}}}', {"github_com_acme_a_server": {"command": ["x"]}}),
]  # fmt: skip


@each_row(("text", "servers"), REAL)
def test_files_of_other_clients_are_taken_as_they_are(
    text: str, servers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "k")
    assert McpFlags(mcp_config=[written(tmp_path, text)]).servers() == servers


@each_row("name", ["天气服务", "@scope/" + "very-long-name" * 5, "é"])
def test_a_long_or_foreign_name_becomes_one_that_can_be_used(name: str, tmp_path: Path) -> None:
    ((short, _),) = McpFlags(mcp_config=[written(tmp_path, {"mcpServers": {name: {"command": "x"}}})]).servers().items()
    assert re.fullmatch("[A-Za-z0-9_-]{1,32}", short)


@each_row(
    ("document", "says"),
    [
        (
            {"a": {"url": "https://x", "headers": {"Authorization": "Bearer ${input:token}"}}},
            r"a: headers: Authorization: \$\{input:token\} is for the client to fill in; .* write \$\{token\}",
        ),
        ({"a": {"command": "x", "args": ["${workspaceFolder}"]}}, "a: args: the variable workspaceFolder is not set"),
        (
            {"a": {"url": "https://x", "headers": {"Authorization": "Bearer ${{ secrets.TOKEN }}"}}},
            r"a: headers: Authorization: \$\{\{ secrets.TOKEN \}\} is not a variable; write \$\{NAME\}",
        ),
        ({"a": {"command": "x", "env": {"T": "${env:TOKEN"}}}, r"a: env: T: \$\{env:TOKEN is not a variable; write"),
        ({"a": {"command": "x", "args": ["--token=${TOKEN"]}}, r"a: args: \$\{TOKEN is not a variable"),
        ({"a": {"type": "http", "uri": "https://x"}}, "a: write \"command\" or \"url\"; the entry has 'type', 'uri'"),
        ({"a": {}}, 'a: write "command" or "url"; the entry has nothing'),
        (
            {"a": {"command": "x", "url": "https://x"}},
            'it has "command" and "url"; leave out one of them, or add "type"',
        ),
        ({"a b": {"command": "x"}, "a/b": {"command": "y"}}, "'a b' and 'a/b' would both be called 'a_b'; rename"),
    ],
)
def test_what_cannot_be_taken_is_named_with_its_key_and_the_cure(
    document: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        McpFlags(mcp_config=[written(tmp_path, {"mcpServers": document})]).servers()
