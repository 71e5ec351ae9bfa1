"""What a model is told: of the sandbox, of what a script returned, of limits, and of what a tool raised."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, Outcome, Secrets, SyncRuntime, UsageError
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.agents.transcript import tool_message
from toolcell.calls.result import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_MODEL_CHARS
from toolcell.results import ErrorInfo, ExecutionResult, LogEntry, Logs, OutputFile
from toolcell.tools import CodeRuntime, File, Image, RunContext, Text, ToolRegistry, ToolResult
from toolcell.tools.code import ADVICE, MAX_PACKAGES, CodeTool

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

PNG = b"\x89PNG\r\n\x1a\n"


class Sandboxes(CodeRuntime):
    """A runtime that says what its sandboxes have."""

    def __init__(self, *packages: str, **limits: Any) -> None:
        self._packages, self._limits = packages, Limits(**limits)

    @property
    def packages(self) -> tuple[str, ...]:
        return self._packages

    @property
    def limits(self) -> Limits:
        return self._limits

    async def execute_code(self, source: str, /, **options: Any) -> ExecutionResult:
        """Run nothing."""
        return ExecutionResult("run", Outcome.OK)


def description(runtime: Any) -> str:
    registry = ToolRegistry()
    registry.enable_code_execution(runtime)
    [tool] = registry.definitions()
    return tool.description


def test_the_description_of_execute_code_says_what_a_sandbox_has() -> None:
    said = description(Sandboxes("numpy 2.1", "pandas 2.2", wall_s=7, memory_bytes=64 << 20, tool_calls=55))

    for fact in (
        "numpy 2.1, pandas 2.2", "7 s", "64 MiB of memory", "64 MiB for files", "55 tool calls", "no network",
        "no other program", "no package can be installed", "starts afresh", "value of the last expression",
        "files=[", "input_files", "images",
    ):  # fmt: skip
        assert fact in said
    assert "no other package" in description(Sandboxes())
    assert "and 3 more" in description(Sandboxes(*[f"p{n} 1" for n in range(MAX_PACKAGES + 3)]))


def test_a_runtime_that_cannot_be_awaited_is_refused_where_it_is_given() -> None:
    for runtime in (SyncRuntime(), object(), None):
        with pytest.raises(UsageError, match="execute_code needs a Runtime, whose execute_code is async"):
            ToolRegistry().enable_code_execution(runtime)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"SyncRuntime.*write Runtime"):
        Agent(ScriptedModel(["x"]), code_execution=SyncRuntime())  # type: ignore[arg-type]


@each_row("outcome", list(ADVICE))
def test_every_limit_says_what_a_model_can_do(outcome: Outcome) -> None:
    error = ErrorInfo("Limit", "used too much", limit="x", limit_value=1.0)

    assert CodeTool.result(ExecutionResult("run", outcome, error=error)).text == f"used too much\n{ADVICE[outcome]}"


def test_returned_files_are_listed_and_images_are_shown() -> None:
    files = (
        OutputFile("chart.png", "image/png", 12, PNG + b"data"),
        OutputFile("fake.png", "image/png", 4, b"<svg"),
        OutputFile("table.csv", "text/csv", 3, b"a,b"),
    )
    result = CodeTool.result(ExecutionResult("run", Outcome.OK, value=1, has_value=True, files=files))

    listed = (
        "files returned: chart.png (image/png, 12 bytes), fake.png (image/png, 4 bytes), table.csv (text/csv, 3 bytes)"
    )
    assert result.text == f"1\n\n{listed}"
    assert [image.data for image in result.images] == [PNG + b"data"]
    assert len(tool_message("c", result, supports_images=True)["images"]) == 1
    assert "images" not in tool_message("c", result)


async def test_an_image_that_a_tool_returns_as_a_file_is_shown_too() -> None:
    def chart() -> File:
        """Draw a chart of the sales."""
        return File("chart.png", PNG, "image/png")

    result = await ToolRegistry([chart]).dispatch("chart", {})

    assert result.text == "(chart.png, 8 bytes)"
    [sent] = tool_message("c", result, supports_images=True)["images"]
    assert sent["media_type"] == "image/png"


def test_images_are_bounded_and_the_model_is_told() -> None:
    many = ToolResult(parts=(Text("t"), *[Image(PNG)] * (MAX_IMAGES + 2)))
    large = ToolResult(parts=(Image(PNG + bytes(MAX_IMAGE_BYTES)),))

    message = tool_message("c", many, supports_images=True)
    assert len(message["images"]) == MAX_IMAGES
    assert f"2 of {MAX_IMAGES + 2} images omitted" in message["content"]
    message = tool_message("c", large, supports_images=True)
    assert "images" not in message
    assert "1 of 1 images omitted" in message["content"]


@each_row("origin", ["value", "text", "error"])
async def test_a_long_result_is_cut_for_the_model_wherever_it_comes_from(origin: str) -> None:
    def long() -> Any:
        """Return a megabyte."""
        if origin == "error":
            raise ValueError("x" * 1_000_000)
        return "x" * 1_000_000 if origin == "text" else ["x" * 1_000_000]

    registry = ToolRegistry([long])
    result = await registry.execute("long")

    assert len(result.text) == MAX_MODEL_CHARS
    assert "characters cut ...]" in result.text
    assert len(result.whole_text) >= 1_000_000


def test_a_long_value_leaves_room_for_files_and_logs() -> None:
    logs = Logs((LogEntry("stdout", "first" + "y" * 60_000 + "last"),))
    files = (OutputFile("a.csv", "text/csv", 1, b"a"),)
    text = CodeTool.result(
        ExecutionResult("run", Outcome.OK, value="x" * 1_000_000, has_value=True, files=files, logs=logs)
    ).text

    assert len(text) < MAX_MODEL_CHARS
    assert text.count("characters cut ...]") == 2
    assert "files returned: a.csv" in text
    assert "logs:\nfirst" in text
    assert text.endswith("last")


async def test_a_tool_may_let_models_read_what_its_exceptions_say() -> None:
    registry = ToolRegistry()

    def query(sql: str) -> str:
        """Run a query on the database."""
        raise LookupError("no such column: nmae (key s3cret)")

    registry.add(query, expose_errors=True)
    registry.enable_plan_execution()
    context = RunContext(secrets=Secrets({"key": "s3cret"}))

    shown = await registry.dispatch("query", {"sql": "x"}, context=context)
    assert shown.text.startswith("LookupError: no such column: nmae (key ")
    assert "s3cret" not in shown.text
    assert (shown.error.code if shown.error else "") == "tool_error"
    plan = await registry.dispatch(
        "execute_plan", {"steps": [{"tool": "query", "args": {"sql": "x"}}]}, context=context
    )
    assert "LookupError: no such column: nmae (key " in plan.text
    assert "s3cret" not in plan.text
