"""What `--allow` and `--allow-secret` say, and a script that is run with them."""

from __future__ import annotations

import json
import subprocess
import sys

import anyio
import pytest

from builtin.webkit import page, serve
from rows import each_row
from toolcell import Allow, Egress, UsageError


@each_row(
    ("text", "rule"),
    [
        ("a.test", Allow("a.test")),
        ("*.a.test/files/*", Allow("*.a.test", paths=["/files/*"])),
        ("get,PUT a.test:8443", Allow("a.test", methods=["GET", "PUT"], ports=[8443])),
        ("http://10.0.0.7:80/x", Allow("http://10.0.0.7", ports=[80], paths=["/x"])),
        (
            "GET a.test/x @10.0.0.0/8 @::1",
            Allow("a.test", methods=["GET"], paths=["/x"], private=("10.0.0.0/8", "::1")),
        ),
        ("[2606:4700::1111]:8443", Allow("2606:4700::1111", ports=[8443])),
    ],
)
def test_a_rule_is_written_as_a_text(text: str, rule: Allow) -> None:
    assert Allow.parse(text) == rule


@each_row("text", ["", "*", "a.test:x", "TRACE a.test", "ftp://a.test", "me@a.test"])
def test_a_text_that_is_no_rule_is_an_error(text: str) -> None:
    with pytest.raises(UsageError):
        Allow.parse(text)


@each_row(
    ("secret", "said"),
    [
        ("a.test", "is written"),
        ("a.test=X-Key: plain", "is written"),
        ("b.test=X-Key: {KEY}", "no rule is about 'b.test'"),
        ("a.test=X-Key: {KEY_THAT_IS_NOT_SET}", "KEY_THAT_IS_NOT_SET is not set"),
    ],
)
def test_a_secret_that_leads_nowhere_is_an_error(secret: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k-0123456789")
    with pytest.raises(UsageError, match=said):
        Egress.of_texts(["a.test"], [secret])


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_script_of_the_command_line_sends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", "k-0123456789")
    async with serve({"/a": page("hello", "text/plain")}) as site:
        place = f"127.0.0.1:{site.port}"
        code = f"set_result(call_tool('http', method='GET', url='http://{place}/a')['body'].decode())"
        flags = ["--allow", f"http://{place}/a", "--allow-secret", "http://127.0.0.1=X-Key: {SITE_KEY}"]
        command = [sys.executable, "-m", "toolcell", "run", "-c", code, "--json", *flags]
        done = await anyio.run_process(command, stderr=subprocess.PIPE, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["value"] == "hello"
    assert "X-Key: k-0123456789" in site.requests[0]
