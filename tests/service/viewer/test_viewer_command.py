"""`toolcell ui` as a person calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from audit.ledger import Ledger


def test_the_command_prints_an_address_that_works_until_it_is_interrupted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs.db")
    ledger.fill(2)
    command = [sys.executable, "-m", "toolcell", "ui", str(ledger.path)]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as viewer:
        assert viewer.stdout is not None and viewer.stderr is not None
        address = viewer.stdout.readline().strip()
        try:
            assert address.startswith("http://127.0.0.1:") and "/?token=" in address
            with httpx.Client(follow_redirects=True, timeout=60) as client:
                assert "Overview" in client.get(address).text
                assert "2 in the log" in client.get(address.replace("/?", "/runs?")).text
            assert httpx.get(address.partition("?")[0], timeout=60).status_code == 403
        finally:
            viewer.send_signal(signal.SIGINT)
            try:
                viewer.wait(60)
            finally:
                viewer.kill()
        assert "Traceback" not in viewer.stderr.read()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "named"), [(["no-such-log"], "no-such-log"), (["--port", "70000"], "65535")], ids=str
)
def test_what_cannot_be_shown_is_named(tmp_path: Path, arguments: list[str], named: str) -> None:
    command = [sys.executable, "-m", "toolcell", "ui", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert named in done.stderr
