"""What the strict profile refuses is refused before anything runs, on every route, and a model is told what there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolcell import Outcome, Policy, Runtime, SyncRuntime, ToolRegistry
from toolcell.tools.code import CodeTool

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

REFUSED = {
    "import os": "import of 'os' is blocked in a restricted script",
    "import json, os.path": "import of 'os.path' is blocked",
    "from typing import get_type_hints": "cannot import 'get_type_hints' from 'typing'",
    "from . import x": "import",
    "import tools.os": "import of 'tools.os' is blocked",
    "open('f', 'w')": "open is not there in a restricted script",
    "def f():\n    return input()\nf()": "input is not there",
    "().__class__": "",
    "eval('1')": "",
}
ALLOWED = {
    "def open(x): return x\nset_result(open(3))": 3,
    "import json\nset_result(json.loads('[1]'))": [1],
    "from tools import upper\nset_result(upper(text='a'))": "A",
    "import tools\nimport tools as t\nset_result(t.upper(text=tools.upper(text='a')))": "A",
    "set_result([given, sorted([2, 1]), len(str(print))])": None,
}


def routes(runtime: SyncRuntime, session: Any) -> dict[str, Callable[..., Any]]:
    return {"run": runtime.execute_code, "session": session.execute_code}


@pytest.mark.conforms("Q-b3", "R-b1")
def test_nothing_runs_of_a_script_that_is_refused_and_all_of_others() -> None:
    registry, made = ToolRegistry(), list[int]()

    @registry.tool
    def ping(x: int) -> int:
        """Answer with the number that is given."""
        made.append(x)
        return x

    @registry.tool
    def upper(text: str) -> str:
        """Return the text in capital letters."""
        return text.upper()

    with (
        SyncRuntime(registry, policy=Policy(lint="strict")) as runtime,
        runtime.session() as session,
    ):
        for route, execute in routes(runtime, session).items():
            for source, says in REFUSED.items():
                result = execute(f"tools.ping(x=1)\n{source}", inputs={"given": 1})
                assert result.outcome in (Outcome.DENIED, Outcome.ERROR), (route, source)
                assert result.error is not None and says in result.error.message, (route, source)
                assert not made and not result.calls, (route, source)
            for source, value in ALLOWED.items():
                result = execute(f"tools.ping(x=1)\n{source}", inputs={"given": 1})
                assert result.ok and made.pop() == 1, (route, source, result.error)
                assert value is None or result.value == value
        assert session.execute_code("def open(x): return 7").ok
        assert session.execute_code("set_result(open(1))").value == 7
        dry = runtime.execute_code("tools.ping(x=1)\nimport os", dry_run=True)
        assert dry.outcome is Outcome.DENIED and not made
    text = CodeTool(Runtime(registry, policy=Policy(lint="strict"))).describe(registry.state.visible)
    assert "they cannot open files" in text and "json" in text and "There is the standard library" not in text
