"""Arrays and frames in what a person approves, in plans, maps and edits: complete or marked as cut, and never changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell import SyncRuntime, UsageError
from toolcell.journal.approval_tokens import make_token
from toolcell.mcp.content import IN_PART, question, readable_only
from toolcell.results import Effect, PendingCall, Table, effects_digest, shown_effects
from toolcell.tools import Approve, Deny, Edit, ToolRegistry
from toolcell_bridge.guest.values import to_plain

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

FRAME = pd.DataFrame(
    {"n": [1, 2], "when": pd.to_datetime(["2024-01-01", None]).tz_localize("UTC")}, index=pd.Index(["x", "y"], name="k")
)


class Payments:
    """A registry whose tools note the frames that they got."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.registry = ToolRegistry()

        @self.registry.tool(requires_approval=True)
        def pay(df: pd.DataFrame) -> int:
            """Pay all the rows of a frame to somebody."""
            self.got.append(df)
            return len(df)

        @self.registry.tool
        def note(df: pd.DataFrame, times: int = 1) -> int:
            """Take note of the rows of a frame, and count them."""
            self.got.append(df)
            return len(df) * times


@pytest.fixture
def payments() -> Payments:
    return Payments()


@each_row(
    ("given", "text"),
    [
        (
            FRAME,
            "DataFrame, 2 rows x 2 columns (k text, n int64, when datetime[us, UTC]): "
            '[["x", 1, "2024-01-01 00:00:00+00:00"], ["y", 2, null]]',
        ),
        (np.array([[0.1, np.nan]]), 'array of float64, shape (1, 2): [0.1, "nan"]'),
        (pd.DataFrame({"a b": [b"\x01"]}), 'DataFrame, 1 rows x 1 columns ("a b" object): [[bytes 01]]'),
        (
            pd.Series(pd.Categorical(["b"], categories=["b", "unused"]), name="c"),
            'Series, 1 rows x 1 columns (c category of ["b", "unused"]): [["b"]]',
        ),
    ],
)
def test_a_small_table_is_shown_whole_with_everything_that_is_in_it(given: Any, text: str) -> None:
    effect = Effect("effect-1", "pay", {"value": to_plain(given)})
    assert str(effect) == f"effect-1: pay(value={text})"
    assert effect.is_listed_whole


CATEGORIES = [*map(str, range(100))]


@each_row(
    ("given", "other"),
    [
        (pd.DataFrame({"z": np.zeros(5000)}), pd.DataFrame({"z": [*[0.0] * 4999, 1.0]})),
        (pd.DataFrame({"a": ["x" * 300]}), pd.DataFrame({"a": ["x" * 299 + "y"]})),
        (pd.DataFrame([range(100)]), pd.DataFrame([[*range(99), 0]])),
        (
            pd.Series(pd.Categorical(["0"], categories=CATEGORIES)),
            pd.Series(pd.Categorical(["0"], categories=[*CATEGORIES, "unused"])),
        ),
        (np.zeros((1000, 1)), np.array([*[[0.0]] * 999, [1.0]])),
    ],
)
def test_a_large_table_is_marked_as_cut_and_its_digest_is_of_all_of_it(given: Any, other: Any) -> None:
    one, two = (Effect("effect-1", "pay", {"value": to_plain(each)}) for each in (given, other))
    assert not one.is_listed_whole
    assert ", sha256 " in str(one)
    assert len(str(one)) < 400
    assert "effect-1: listed in part" in shown_effects([one])
    assert effects_digest([one]) != effects_digest([two])
    assert str(one) != str(two)


@each_row("rows", [2, 2000])
def test_a_form_approves_a_frame_only_if_it_has_shown_all_of_it(rows: int) -> None:
    args = {"df": to_plain(pd.DataFrame({"z": np.zeros(rows)}))}
    call = PendingCall("call_1", "pay", args, line=1, digest="0" * 64)
    token = make_token(b"k" * 32, token_id="t", run="run", source="", tools="", expires=0, calls=[call])
    form = question(call)
    assert form.requested_schema["properties"]["decision"]["enum"] == ["approve", "deny"][rows > 2 :]
    assert "DataFrame, " in form.message
    assert len(token) < 2000
    assert readable_only({"call_1": Approve()}, token) == {"call_1": Deny(IN_PART) if rows > 2 else Approve()}


@pytest.mark.isolation
def test_an_edit_and_a_draft_keep_the_types_of_a_frame(payments: Payments, tmp_path: Path) -> None:
    source = "import pandas\ncall_tool('pay', df=df)"
    options: Any = {"packages": ["numpy", "pandas"], "record": tmp_path / "j" / "runs.db"}
    with SyncRuntime(payments.registry, **options) as runtime:
        waits = runtime.execute_code(source, inputs={"df": FRAME}, on_approval="suspend").suspension
        assert waits is not None
        assert waits.calls[0].args["df"] == to_plain(FRAME)
        plain = json.loads(waits.to_json())["toolcell_suspension"]["calls"][0]
        assert plain["args"]["df"].startswith("DataFrame, 2 rows x 2 columns (k text, n int64")
        draft = runtime.execute_code(source, inputs={"df": FRAME}, dry_run=True)
    with SyncRuntime(payments.registry, **options) as runtime:
        edited = runtime.resume(waits.to_json(), {waits.calls[0].id: Edit({"df": FRAME.head(1)})})
        assert edited.value == 1, edited
        assert runtime.commit(draft.draft_id, approve="all").ok
    pd.testing.assert_frame_equal(payments.got[0], FRAME.head(1))
    pd.testing.assert_frame_equal(payments.got[1], FRAME)


@pytest.mark.isolation
def test_a_map_knows_its_inputs_again_and_says_what_it_does_not_keep(tmp_path: Path) -> None:
    large = pd.DataFrame({"v": np.arange(200_000)})
    inputs: list[Any] = [{"df": FRAME}, {"df": large}]
    with SyncRuntime(packages=["numpy", "pandas"], record=tmp_path / "j" / "runs.db") as runtime:

        def carry_on(given: list[Any]) -> list[Any]:
            return list(runtime.map("set_result(df)", given, map_id="m", resume=True))

        first = carry_on(inputs)
        assert [len(item.value) for item in first] == [2, 200_000]
        small, cut = carry_on(inputs)
        with pytest.raises(UsageError, match="input 0 of map 'm' is another than before"):
            carry_on([{"df": FRAME.assign(n=3)}, {"df": large}])
    assert isinstance(small.value, Table)
    pd.testing.assert_frame_equal(small.value.to_pandas(), FRAME)
    assert cut.value is None
    assert "pandas.DataFrame, 200000 x 1 (v int64)" in cut.unkept
    assert "sha256 " in cut.unkept
