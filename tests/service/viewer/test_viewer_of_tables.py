"""Arrays and frames on the pages of the viewer: read as tables, downloaded whole, approved if all of them was shown."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.viewer.watching import served
from toolcell import ToolRegistry
from toolcell.service.app import create_app
from toolcell.service.config import ServiceConfig, TenantConfig
from toolcell.support.exact_json import exact_json_text
from toolcell_bridge.guest.values import to_plain

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

pytestmark = pytest.mark.isolation

ROWS = 1000
FRAME = pd.DataFrame(
    {"n": range(ROWS), "word": ["<b>"] + ["é"] * (ROWS - 1), "when": pd.Timestamp("2024-01-02", tz="UTC")},
    index=pd.RangeIndex(1, ROWS + 1, name="key"),
)
ARRAY = np.array([[1.5, np.nan], [0.25, 3.0]], dtype="float32")


class Desk:
    """A service with tools that take frames, what they got, and a client of its pages."""

    def __init__(self, client: httpx.Client, got: list[Any]) -> None:
        self.client, self.got = client, got

    def execute(self, code: str, **options: Any) -> Any:
        """Run a script that gets the frame `df` and the array `a`."""
        body = {"code": code, "inputs": {"df": to_plain(FRAME), "a": to_plain(ARRAY)}, **options}
        headers = {"content-type": "application/json"}
        return self.client.post("/v1/execute", content=exact_json_text(body), headers=headers).json()

    def page(self, path: str) -> str:
        return html.unescape(self.client.get(path).text)

    def run_page(self, text: str) -> str:
        found = re.search(r'href="(/runs/[0-9a-f]{12}/\d+)"', self.page(f"/runs?q={text}"))
        assert found
        return found[1]

    def send(self, path: str, **fields: str) -> httpx.Response:
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.page("/verify"))
        assert found
        return self.client.post(path, data={"csrf": found[1], **fields})


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder, got, registry = tmp_path_factory.mktemp("service"), list[Any](), ToolRegistry()

    @registry.tool
    def doubled(df: pd.DataFrame) -> pd.DataFrame:
        """Return a frame twice over, one below the other."""
        return pd.concat([df, df])

    @registry.tool(requires_approval=True)
    def pay(rows: pd.DataFrame, weights: pd.Series, note: str = "") -> int:
        """Pay everybody in the rows of a frame; a person has to approve it."""
        got.append((rows, weights, note))
        return len(rows)

    tenant = TenantConfig(packages=("numpy", "pandas"), record=folder / "runs")
    config = ServiceConfig(state=folder / "state", defaults=tenant)
    with (
        served(lambda port: create_app(config, registry=registry)) as base,
        httpx.Client(base_url=base, timeout=60, follow_redirects=True) as client,
    ):
        yield Desk(client, got)


def test_a_run_shows_frames_as_tables_wherever_they_are_and_gives_all_their_rows(desk: Desk) -> None:
    code = "# through\nd = call_tool('doubled', df=df)\nset_result({'frame': d, 'array': a})"
    assert desk.execute(code)["outcome"] == "ok"
    run = desk.run_page("through")
    page = desk.page(run)
    title = "rows x 3 columns (key int64, n int64, word text, when datetime[us, UTC])"
    assert page.count(f'"DataFrame, {ROWS} {title}"') == 2, "the input and the argument"
    assert page.count(f'"DataFrame, {2 * ROWS} {title}"') == 2, "what the tool and the script returned"
    assert '"array of float32, shape (2, 2)"' in page
    assert f'\n   "{ROWS}  999  é     2024-01-02 00:00:00+00:00"\n' in page, "each row has a line of its own"
    assert "<b>" not in desk.client.get(run).text

    result = json.loads(desk.page(f"{run}/parts/result"))
    assert result["array"]["table"]["values"] == [[1.5, "nan"], [0.25, 3.0]]
    answer = json.loads(desk.page(f"{run}/parts/answer-1"))["table"]
    assert answer == result["frame"]["table"]
    assert [row["n"] for row in answer["rows"]] == [*range(ROWS)] * 2
    assert json.loads(desk.page(f"{run}/parts/sent-1"))["df"]["table"]["shape"] == [ROWS, 3]


def test_the_terminal_of_a_session_shows_a_frame(desk: Desk) -> None:
    desk.send("/sessions", name="frames")
    entry = desk.send("/sessions/frames/run", code="import pandas as pd\npd.Series({'x': 1, 'y': 2}, name='n')").text
    events = re.search(r'sse-connect="([^"]+)"', entry)
    assert events
    assert '"Series, 2 rows x 1 columns (index text, n int64)"' in desk.page(events[1])


PAY = "call_tool('pay', rows=df.head({rows}), weights=df.n.head(2), note='x')"


def test_a_frame_is_approved_if_every_cell_was_shown_and_stays_a_frame_when_something_else_is_edited(
    desk: Desk,
) -> None:
    for rows in (30, ROWS):
        assert desk.execute(PAY.format(rows=rows), on_approval="suspend")["outcome"] == "suspended"
    forms = re.findall(r'<form method="post" action="(/waiting/runs/.+?)</form>', desk.page("/waiting"), re.DOTALL)
    (whole,) = [each for each in forms if "DataFrame, 30 rows" in each]
    (cut,) = [each for each in forms if "DataFrame, 1000 rows" in each]
    assert '[15, 14, \\"é\\", \\"2024-01-02 00:00:00+00:00\\"]' in whole, "a row in the middle"

    def decide(form: str, **fields: str) -> httpx.Response:
        digest = re.search(r'name="digest-0" value="(.+?)"', form)
        assert digest
        return desk.send(form.partition('"')[0], **{"digest-0": digest[1], **fields})

    assert 'value="approve"' not in cut
    refused = decide(cut, **{"decision-0": "approve"})
    assert refused.status_code == 400 and "too many to be read and approved" in refused.text

    text = re.search(r"<textarea.+?>(.+?)</textarea>", whole, re.DOTALL)
    assert text
    wrong = decide(whole, **{"decision-0": "edit", "args-0": text[1].replace("[15, 14,", "[15, 15,")})
    assert wrong.status_code == 400 and "rows of pay holds bytes, an array or a table" in wrong.text
    done = decide(whole, **{"decision-0": "edit", "args-0": text[1].replace('"x"', '"y"')})
    assert "was carried on" in done.text, done.text
    ((rows, weights, note),) = desk.got
    pd.testing.assert_frame_equal(rows, FRAME.head(30))
    pd.testing.assert_series_equal(weights, FRAME.n.head(2))
    assert note == "y"


def test_of_a_draft_only_those_writes_are_chosen_whose_frames_were_shown_whole(desk: Desk) -> None:
    code = f"{PAY.format(rows=2)}\n{PAY.format(rows=ROWS)}"
    assert desk.execute(code, dry_run=True)["outcome"] == "ok"
    page = desk.page("/waiting")
    boxes = re.findall(r'<input type="checkbox" name="approve-(effect-\d)"(.*?)aria-label', page)
    assert boxes == [("effect-1", " checked "), ("effect-2", " ")]
