"""How many functions the host calls for one run and for one tool call. Counts do not depend on the machine's speed."""

from __future__ import annotations

import anyio
import pytest
from benchmarks.count_calls import Calls, measure

pytestmark = pytest.mark.isolation

BOUNDS = {"run without calls": Calls(260, 200), "one more tool call": Calls(100, 90)}
"""docs/benchmarks.md has the figures. They leave a little for other versions of Python and of the libraries."""


def test_a_run_and_a_tool_call_take_few_function_calls() -> None:
    for name, calls in anyio.run(measure, 5).items():
        assert calls.python <= BOUNDS[name].python, name
        assert calls.c <= BOUNDS[name].c, name
