"""Tables in the audit log: kept within limits, else described; shown, searched, exported and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from toolcell import Limits, SyncRuntime
from toolcell.audit import AuditLog
from toolcell.audit.otel import SpanSink
from toolcell.audit.wildcards import fits
from toolcell.cli import build
from toolcell.tools import ToolRegistry
from toolcell_bridge.guest.values import to_plain

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

FRAME = pd.DataFrame(
    {"n": range(50), "word": ["a"] * 25 + ["in the middle"] + ["b"] * 24, "when": pd.Timestamp("2024-01-02", tz="UTC")}
)
SCRIPT = "f = call_tool('load', rows=rows)\nset_result(call_tool('note', df=f))"

registry = ToolRegistry()


@registry.tool
def load(rows: int) -> pd.DataFrame:
    """Return a frame: a short one with text, or one of so many rows."""
    return FRAME if rows == len(FRAME) else pd.DataFrame({"v": np.arange(rows)})


@registry.tool
def note(df: pd.DataFrame) -> pd.DataFrame:
    """Take note of a frame, and return it."""
    return df


def invoke(*arguments: object) -> tuple[int, str]:
    words = ["audit", *map(str, arguments)]
    result = CliRunner().invoke(build(words), words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The log of a run with a short frame and of one with a long frame, and their ids."""
    folder = tmp_path_factory.mktemp("log") / "audit"
    limits = Limits(frame_bytes=32 << 20, result_bytes=16 << 20)
    with SyncRuntime(registry, packages=["numpy", "pandas"], record=folder, limits=limits) as runtime:
        ids = []
        for rows in (len(FRAME), 200_000):
            result = runtime.execute_code(SCRIPT, inputs={"rows": rows, "given": FRAME})
            assert result.ok, result.error
            ids.append(result.run_id)
    return folder, ids[0], ids[1]


@pytest.mark.isolation
def test_a_recorded_frame_is_shown_searched_exported_and_answered_from(
    log: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ident, _ = log
    monkeypatch.chdir(tmp_path)
    status, shown = invoke("show", folder, ident)
    assert (status, "DataFrame, 50 rows x 3 columns (n int64, word text" in shown) == (0, True)
    status, plain = invoke("show", folder, ident, "--json")
    given = json.loads(plain)["start"]["inputs"]["given"]
    assert given["table"].startswith("DataFrame, 50 rows x 3 columns")
    assert len(given["sha256"]) == 64
    assert ident[:8] in invoke("grep", folder, "in the middle")[1]
    assert invoke("export", folder, ident)[0] == 0
    (receipt,) = tmp_path.glob("*.receipt.json")
    assert "DataFrame, 50 rows x 3 columns" in receipt.read_text()
    status, said = invoke("replay", folder, ident)
    assert (status, "2 of 2 calls answered from the record" in said) == (0, True)


@pytest.mark.isolation
def test_of_a_frame_past_the_limit_shape_types_and_digest_are_kept_and_a_replay_names_what_is_missing(
    log: tuple[Path, str, str],
) -> None:
    folder, _, ident = log
    facts = "pandas.DataFrame, 200000 x 1 (v int64)"
    run = json.loads(invoke("show", folder, ident, "--json")[1])
    assert run["calls"][0]["value_cut"]["tables"] == facts
    assert run["calls"][1]["args_cut"]["tables"] == f"df: {facts}"
    assert len(run["end"]["value_sha256"]) == 64
    assert facts in invoke("show", folder, ident, "--full")[1]
    status, said = invoke("replay", folder, ident)
    assert status == 1
    assert "the answer of call 1, load, was not recorded (size)" in said


@pytest.mark.isolation
def test_a_span_has_the_text_of_a_frame_and_only_where_content_is_wanted(tmp_path: Path) -> None:
    rows = 200_000
    trace, export = (
        pytest.importorskip("opentelemetry.sdk.trace"),
        pytest.importorskip("opentelemetry.sdk.trace.export"),
    )
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    for capture_content in (True, False):
        exporter, provider = memory.InMemorySpanExporter(), trace.TracerProvider()
        provider.add_span_processor(export.SimpleSpanProcessor(exporter))
        log = AuditLog(tmp_path / str(capture_content), sinks=[SpanSink(provider, capture_content=capture_content)])
        with SyncRuntime(registry, packages=["numpy", "pandas"], record=log) as runtime:
            assert runtime.execute_code(SCRIPT, inputs={"rows": rows}).ok
        spans = {span.name: dict(span.attributes) for span in exporter.get_finished_spans()}
        for name, key in (
            ("load", "result"),
            ("note", "result"),
            ("note", "arguments"),
            ("execute_code", "result"),
        ):
            found = spans[f"execute_tool {name}"].get(f"gen_ai.tool.call.{key}", "")
            assert len(found) < 4_000
            assert (f"{rows} rows x" in found or f" {rows} x " in found) is capture_content, (name, key, found)


def test_a_frame_fits_its_record_without_the_secrets_and_no_other() -> None:
    given = pd.DataFrame({"key": ["s3cret", "x"], "when": [pd.Timestamp("2024-01-02")] * 2})
    recorded = [{"key": "[redacted]", "when": "2024-01-02T00:00:00"}, {"key": "x", "when": "2024-01-02T00:00:00"}]
    assert fits(recorded, to_plain(given))
    assert not fits(recorded, to_plain(given.assign(key=["s3cret", "y"])))
