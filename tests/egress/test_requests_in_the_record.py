"""The record says where requests of scripts went, with which secrets, and under which rules: names, never values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from audit.test_audit_commands import invoke
from builtin.webkit import page, serve
from toolcell import PoolConfig, RunContext, Runtime
from toolcell.audit import Filter, Index, RecordedRun
from toolcell.egress import Allow, Egress
from toolcell.egress.request import read_request

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

VALUES = {"TOKEN": "tok-51fa0c9d7e", "PASS": "pass-8812fe", "UNUSED": "never-sent-1199"}

SCRIPT = """
import urllib.error, urllib.request
urllib.request.urlopen(URL + "a").read()
request = urllib.request.Request(URL + "a", b"key={PASS}", {"X-Own": "{TOKEN}"}, method="POST")
set_result(urllib.request.urlopen(request).status)
try:
    urllib.request.urlopen("http://elsewhere.test/")
except urllib.error.URLError:
    pass
"""


def runs(record: Path) -> list[RecordedRun]:
    with Index(record) as index:
        return [index.load(each) for each in index.runs(Filter(limit=None))]


def requests(run: RecordedRun) -> list[tuple[Any, Any]]:
    """Hosts, and names of secrets, of each request that was sent."""
    extras = [
        call.start_extra
        for call in run.calls
        if call.verdict == "allowed" and not call.start_extra.get("answered_from")
    ]
    return [(each.get("hosts"), each.get("secret_names")) for each in extras if "hosts" in each]


async def test_an_auditor_finds_where_a_secret_went_and_under_which_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    record = tmp_path / "runs.db"
    async with serve({"/a": page("ok", "text/plain")}) as site:
        rules = [
            Allow(
                "http://127.0.0.1",
                methods=["GET", "POST"],
                ports=[site.port],
                headers=["X-Own"],
                secrets={"X-Key": "Bearer {TOKEN}", "body": "{PASS}"},
            ),
            Allow("http://other.test", secrets={"X-Key": "{UNUSED}"}),
        ]
        given = {"URL": site.url(host="127.0.0.1")}
        ann = RunContext(user_id="ann")
        async with Runtime(egress=Egress(*rules, secrets=VALUES), record=record, pool=PoolConfig(warm=1)) as runtime:
            await runtime.execute_code(SCRIPT, inputs=given, context=ann)
            async with runtime.session() as session:
                await session.execute_code(SCRIPT, inputs=given)
            draft = await runtime.execute_code(SCRIPT, inputs=given, dry_run=True)
            made = await runtime.commit(draft, [each.id for each in draft.effects])
            await runtime.execute_code("1", tools=[])
        plain = await Runtime(record=record, pool=PoolConfig(warm=0)).__aenter__()
        await plain.execute_code("2")
        await plain.close()
    code, in_session, drafted, committed, no_tools, without = runs(record)

    assert made.ok and len(site.requests) == 6
    sent = [(["127.0.0.1"], ["TOKEN"]), (["127.0.0.1"], ["PASS", "TOKEN"])]
    assert requests(code) == requests(in_session) == sent
    assert (requests(drafted), requests(committed)) == (sent[:1], sent[1:])
    for run in (code, in_session, drafted):
        assert [(each["host"], each["secret_names"]) for each in run.egress] == [
            ("http://127.0.0.1", ["PASS", "TOKEN"]), ("http://other.test", ["UNUSED"])
        ]  # fmt: skip
        assert run.egress[0]["methods"] == ["GET", "POST"]
    assert without.egress == [] or not without.egress

    def listed(*flags: str) -> list[str]:
        return [each["id"] for each in json.loads(invoke("list", record, "--json", *flags)[1])]

    assert listed("--host", "127.*") == [code.id, in_session.id, drafted.id, committed.id]
    assert listed("--secret", "PASS") == [code.id, in_session.id, committed.id]
    assert listed("--secret", "PASS", "--user", "ann") == [code.id]
    assert listed("--secret", "UNUSED") == listed("--host", "other.test") == []
    (row,) = json.loads(invoke("stats", record, "--hosts", "--json")[1])
    known = {name: row[name] for name in ("host", "requests", "runs", "failed", "secrets")}
    assert known == {"host": "127.0.0.1", "requests": 6, "runs": 4, "failed": 0, "secrets": ["PASS", "TOKEN"]}
    shown = invoke("show", record, code.id, "--full")[1]
    assert "egress" in shown and "secrets sent PASS, TOKEN" in shown and "hosts 127.0.0.1" in shown
    assert "127.0.0.1" in invoke("stats", record, "--hosts")[1]
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("runs.db*"))
    assert [value for value in VALUES.values() if value.encode() in stored] == []
    assert no_tools.outcome == "ok"


def test_of_the_secrets_that_a_rule_allows_those_are_named_that_the_script_wrote() -> None:
    egress = Egress(Allow("api.test", secrets=["TOKEN", "UNUSED"]), secrets=VALUES)
    headers = [["Authorization", "Bearer {TOKEN}"]]
    request = read_request({"method": "GET", "url": "https://api.test/", "headers": headers})
    assert egress.allowed.sent_to(request) == {"hosts": ["api.test"], "secret_names": ["TOKEN"]}
