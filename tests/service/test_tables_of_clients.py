"""Arrays and frames between a client, its tools and a service: over a socket, and over HTTP as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from toolcell import ToolRegistry
from toolcell.results import Array, Table
from toolcell.service import Client, TenantConfig
from toolcell.service.answering import Answers
from toolcell.support.exact_json import from_exact
from toolcell.tools import Approve, Edit
from toolcell_bridge.guest.values import to_plain

from .client_serving import serving

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

FRAME = pd.DataFrame(
    {
        "word": pd.Categorical(["a", None, "é"], categories=["é", "a"]),
        "n": pd.array([1, None, 3], dtype="Int64"),
        "when": pd.to_datetime(["2024-01-01", None, "2025-06-01"]).tz_localize("Europe/Berlin"),
    },
    index=pd.MultiIndex.from_tuples([("x", 1), ("x", 2), ("y", 1)], names=["key", None]),
)
ARRAY = np.array([[1.5, np.nan], [np.inf, -0.0]], dtype="float32")


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    server_tools = ToolRegistry()

    @server_tools.tool
    def at_the_service(df: pd.DataFrame) -> pd.DataFrame:
        """Return a frame that the service has received, as it is."""
        return df

    tenant = TenantConfig(packages=("numpy", "pandas"))
    async with serving(tmp_path_factory.mktemp("state"), server_tools, defaults=tenant) as (url, _):
        yield url


class Desk:
    """A client's tools, and the frames that they got."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.registry = ToolRegistry()

        @self.registry.tool(read_only=True)
        def load() -> pd.DataFrame:
            """Return the frame that is on the desk of the client."""
            return FRAME

        @self.registry.tool
        def same(df: pd.DataFrame) -> pd.DataFrame:
            """Return a frame that was received, as it is."""
            return df

        @self.registry.tool(requires_approval=True)
        def send(df: pd.DataFrame, weights: np.ndarray | None = None) -> int:
            """Send a frame to somebody, and count its rows."""
            self.got.append(df)
            return len(df)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def is_frame(found: Any) -> bool:
    pd.testing.assert_frame_equal(found.to_pandas() if isinstance(found, Table) else found, FRAME)
    return True


async def test_inputs_results_and_calls_over_a_socket_keep_frames(url: str, desk: Desk) -> None:
    source = "f = call_tool('load')\nset_result([df, a, f, call_tool('same', df=f)])"
    async with Client(url, registry=desk.registry) as client:
        result = await client.execute_code(source, inputs={"df": FRAME, "a": ARRAY})
        assert result.ok, result.error
        given, array, loaded, returned = result.value
        assert is_frame(given) and is_frame(loaded) and is_frame(returned)
        assert isinstance(array, Array)
        np.testing.assert_array_equal(array.to_numpy(), ARRAY)
        async with client.session() as session:
            await session.execute_code("x = df", inputs={"df": FRAME})
            assert is_frame((await session.execute_code("x")).value)
        rows = await client.execute_plan([{"tool": "same", "args": {"df": FRAME}}])
        assert is_frame(rows[0]["result"])


async def test_approvals_and_drafts_over_a_socket_keep_frames(url: str, desk: Desk) -> None:
    source = "set_result(call_tool('send', df=call_tool('load')))"
    async with Client(url, registry=desk.registry) as client:
        waits = (await client.execute_code(source, on_approval="suspend")).suspension
        assert waits is not None
        assert is_frame(waits.calls[0].args["df"])
        assert (await client.resume(waits, {waits.calls[0].id: Approve()})).value == 3
        waits = (await client.execute_code(source, on_approval="suspend")).suspension
        assert waits is not None
        edited = await client.resume(waits, {waits.calls[0].id: Edit({"df": FRAME.head(1)})})
        assert edited.value == 1, edited
        draft = await client.execute_code(source, dry_run=True)
        assert is_frame(draft.effects[0].args["df"])
        assert (await client.commit(draft, approve=draft.draft_digest)).ok
    assert [len(each) for each in desk.got] == [3, 1, 3]
    assert is_frame(desk.got[0]) and is_frame(desk.got[2])


async def test_over_http_a_frame_is_its_encoding_and_one_too_large_is_left_out(url: str) -> None:
    plain = to_plain(FRAME)
    assert isinstance(plain, Table)
    form = {"$table": base64.b64encode(plain.to_bytes()).decode()}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        given = {"code": "set_result({'df': df, 'n': len(df)})", "inputs": {"df": form}}
        answer = (await http.post("/v1/execute", json=given)).json()
        assert answer["value"] == {"df": form, "n": 3}
        assert is_frame(from_exact(answer["value"])["df"])
        wrong = await http.post("/v1/execute", json={"code": "1", "inputs": {"df": {"$table": "AAAA"}}})
        assert wrong.status_code == 422, wrong.text
        steps = [{"tool": "at_the_service", "args": {"df": form}}]
        row = (await http.post("/v1/plan", json={"steps": steps})).json()["rows"][0]
        assert row["result"] == form, row
    large = to_plain(pd.DataFrame({"v": np.arange(20_000)}))
    cut = json.loads(await Answers(50_000).text({"value": large, "n": 1}))
    assert "<Table of 20000 rows and 1 columns, from pandas.DataFrame>, 160016 bytes" in str(cut["value"]["$left_out"])
