"""Files that scripts return can be fetched after the run: for a time, up to a size, and by their own tenant alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import anyio
import pytest
from starlette.testclient import TestClient

from service.clock import Clock
from service_host import client_of, registry
from toolcell.results import OutputFile
from toolcell.service import ServiceConfig, TenantConfig, create_app
from toolcell.service.downloads import ROW_BYTES, DownloadStore

SCRIPT = "open('page.html', 'wb').write(b'<script>1</script>')\nset_result(1, files=['page.html'])"


def returned(name: str, data: bytes | None) -> OutputFile:
    return OutputFile(name, "text/plain", len(data or b""), data)


@pytest.mark.isolation
def test_a_returned_file_is_downloaded_after_the_run_from_every_route(client: TestClient) -> None:
    client.post("/v1/sessions", json={"name": "files"})
    runs = [client.post(path, json={"code": SCRIPT}).json() for path in ("/v1/execute", "/v1/sessions/files/execute")]
    stream = client.post("/v1/execute", json={"code": SCRIPT}, headers={"Accept": "text/event-stream"}).text
    runs.append(json.loads(stream.rpartition("data: ")[2]))

    for run in runs:
        answer = client.get(f"/v1/runs/{run['run_id']}/files/page.html")
        assert (answer.status_code, answer.content) == (200, b"<script>1</script>"), run
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment;")
        assert answer.headers["x-content-type-options"] == "nosniff"
        missing = client.get(f"/v1/runs/{run['run_id']}/files/other.html")
        assert (missing.status_code, missing.json()["code"]) == (404, "no_such_file")
    assert len({run["run_id"] for run in runs}) == 3


@pytest.mark.isolation
def test_a_returned_file_outlives_the_service(tmp_path: Path) -> None:
    config = ServiceConfig(state=tmp_path / "state", defaults=TenantConfig(record=tmp_path / "runs"))
    with client_of(create_app(config, registry=registry())) as client:
        run = client.post("/v1/execute", json={"code": SCRIPT}).json()["run_id"]
    with client_of(create_app(config, registry=registry())) as client:
        assert client.get(f"/v1/runs/{run}/files/page.html").content == b"<script>1</script>"
    (kept,) = (tmp_path / "state").glob("tenants/*/files.sqlite")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_old_files_are_forgotten_and_the_oldest_make_room(tmp_path: Path, clock: Clock) -> None:
    async def work() -> None:
        files = DownloadStore(tmp_path, 10.0, 2 * (ROW_BYTES + 100), clock)
        for name in "abc":
            await files.keep("run", [returned(name, name.encode() * 100), returned("none", None)])
        assert [await files.find("run", name) for name in ("a", "b", "none")] == [None, b"b" * 100, None]
        await files.keep("run", [returned("large", b"x" * 1000)])  # larger than all may be: nothing makes room for it
        assert await files.find("run", "large") is None
        assert await files.find("other", "c") is None
        await files.keep("run", [returned("c", b"")])
        assert await files.find("run", "c") == b""
        clock.now += 10
        assert await files.find("run", "c") is None
        await files.close()

    anyio.run(work)


def test_a_store_that_cannot_be_used_spoils_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "files.sqlite").mkdir()

    with caplog.at_level(logging.WARNING, "toolcell.service"):
        anyio.run(DownloadStore(tmp_path, 10.0, 10_000).keep, "run-1", [returned("a", b"a")])

    assert "run-1 are not kept" in caplog.text
