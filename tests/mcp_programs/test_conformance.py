"""The official conformance suite, for the server and for the client. What must fail is in expected-failures.yml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from .conformance_client import serving_senders
from .conftest import HERE, Programs, serving

pytestmark = [pytest.mark.npm, pytest.mark.isolation]

EXPECTED = HERE / "expected-failures.yml"
PAGE = HERE.parent / "MCP_CONFORMANCE.md"
PASSING_LOGINS = (
    "auth/metadata-default",
    "auth/metadata-var1",
    "auth/metadata-var2",
    "auth/metadata-var3",
    "auth/basic-cimd",
    "auth/scope-from-www-authenticate",
    "auth/scope-from-scopes-supported",
    "auth/scope-omitted-when-undefined",
    "auth/scope-step-up",
    "auth/scope-retry-limit",
    "auth/token-endpoint-auth-basic",
    "auth/token-endpoint-auth-post",
    "auth/token-endpoint-auth-none",
    "auth/pre-registration",
    "auth/2025-03-26-oauth-endpoint-fallback",
    "auth/resource-mismatch",
    "auth/offline-access-scope",
    "auth/offline-access-not-supported",
    "auth/client-credentials-jwt",
    "auth/client-credentials-basic",
    "auth/cross-app-access-complete-flow",
)
PASSING_CLIENT = ("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry", *PASSING_LOGINS)


def suite(programs: Programs) -> list[str]:
    return programs.command("@modelcontextprotocol/conformance", "dist/index.js")


@pytest.mark.slow
def test_the_server_conforms_but_for_what_is_listed(programs: Programs, tools: Path) -> None:
    with serving("--tools", str(tools), "--expose-tools") as url:
        options = ["--url", url, "--suite", "all", "--expected-failures", str(EXPECTED)]
        ended = programs.run([*suite(programs), "server", *options], tools.parent)

    passed = set(re.findall(r"^✓ ([\w/-]+):", ended.stdout, re.MULTILINE))
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert {"server-initialize", "tools-list", "tools-call-simple-text", "dns-rebinding-protection"} <= passed


@pytest.mark.parametrize("scenario", PASSING_CLIENT)
def test_the_client_conforms(programs: Programs, tmp_path: Path, scenario: str) -> None:
    with serving_senders(tmp_path) as client:
        options = ["--command", client, "--scenario", scenario, "--timeout", "120000"]
        ended = programs.run([*suite(programs), "client", *options], tmp_path)

    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert re.search(r"Passed: ([1-9]\d*)/\1, 0 failed, 0 warnings", ended.stdout + ended.stderr)


def test_every_client_scenario_is_one_that_passes_or_is_listed(programs: Programs, tmp_path: Path) -> None:
    ended = programs.run([*suite(programs), "list"], tmp_path)
    listed = set(re.findall(r"^  - ([\w/-]+) ", ended.stdout.partition("Client scenarios")[2], re.MULTILINE))

    assert listed - set(PASSING_CLIENT) == set(yaml.safe_load(EXPECTED.read_text())["client"])


def test_the_page_has_a_reason_for_each_that_is_expected_to_fail() -> None:
    page = PAGE.read_text()
    expected = yaml.safe_load(EXPECTED.read_text())

    assert [name for names in expected.values() for name in names if f"`{name}`" not in page] == []
