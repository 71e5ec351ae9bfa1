"""Scripts in containers send requests like those in processes, alone and in sessions."""

from __future__ import annotations

import pytest

from builtin.webkit import page, serve
from toolcell import PoolConfig, Runtime
from toolcell.egress import Allow, Egress
from toolcell.sandbox.docker import DockerBackend

pytestmark = [pytest.mark.docker, pytest.mark.anyio]

TOKEN = "tok-51fa0c9d7e"

SCRIPT = """
import urllib.error, urllib.request
found = [urllib.request.urlopen(URL + "a").read().decode()]
try:
    urllib.request.urlopen("http://elsewhere.test/")
except urllib.error.URLError as error:
    found.append("no rule is about this host" in str(error))
set_result(found)
"""


async def test_a_container_sends_requests_through_the_host() -> None:
    async with serve({"/a": page(f"you sent {TOKEN}", "text/plain")}) as site:
        rule = Allow("http://127.0.0.1", ports=[site.port], secrets={"X-Key": "{TOKEN}"})
        egress, given = Egress(rule, secrets={"TOKEN": TOKEN}), {"URL": site.url(host="127.0.0.1")}
        async with Runtime(backend=DockerBackend(), egress=egress, pool=PoolConfig(warm=0)) as runtime:
            alone = await runtime.execute_code(SCRIPT, inputs=given)
            async with runtime.session() as session:
                in_session = [await session.execute_code(SCRIPT, inputs=given) for _ in range(2)]

    assert [each.value for each in (alone, *in_session)] == [["you sent {TOKEN}", True]] * 3, alone.error
    assert all(f"X-Key: {TOKEN}" in request for request in site.requests)
