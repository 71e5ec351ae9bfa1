"""The examples of the result model, and of a single call."""

from __future__ import annotations

import json

import anyio
import pytest

from toolcell.compat import async_, error, ok, silent, to_for_llm, user
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.anyio


@pytest.mark.conforms("EX-5", "F3")
async def test_a_single_call_runs_in_the_task_of_its_caller() -> None:
    async def whoami() -> int:
        """Tell the id of the running task."""
        return anyio.get_current_task().id

    registry = ToolRegistry([whoami])

    [result] = await registry.execute_batch([("whoami", {})])

    assert result.value == anyio.get_current_task().id


@pytest.mark.conforms("EX-37", "B6", "B8")
def test_the_result_aides_set_exactly_the_documented_flags() -> None:
    quiet = {"silent": False, "is_error": False, "async": False}
    failure = ValueError("disk full")
    failed = error("failed").with_error(failure)

    assert to_for_llm(ok("File saved")) == {"for_llm": "File saved", **quiet}
    assert to_for_llm(silent("noted")) == {"for_llm": "noted", **quiet, "silent": True}
    assert to_for_llm(async_("started")) == {"for_llm": "started", **quiet, "async": True}
    assert to_for_llm(error("failed")) == {"for_llm": "failed", **quiet, "is_error": True}
    assert to_for_llm(user("hello")) == {"for_llm": "hello", "for_user": "hello", **quiet}
    assert failed.exc is failure
    assert "err" not in to_for_llm(failed)
    assert "disk full" not in json.dumps(failed.to_dict())
