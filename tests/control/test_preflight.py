"""A preflight reads, in a sandbox, which calls a script can make; one that cannot succeed keeps the script from running."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.conftest import Effects
from rows import each_row
from toolcell import Outcome, SyncRuntime, UsageError
from toolcell.control import Draft
from toolcell.results import Preflight
from toolcell.tools import Approve
from toolcell_bridge.guest.planned_calls import MAX_CALLS, planned_calls

pytestmark = pytest.mark.quick

ROWS: list[tuple[str, list[list[object]]]] = [
    ("call_tool('a')", [[1, "a", []]]),
    ("call_tool('a', None, x=1, raw=True)", [[1, "a", ["x"]]]),
    ("\ncall_tool('a', {'x': 1}, y=2)", [[2, "a", ["y", "x"]]]),
    ("await call_tool_async('a', x=1)", [[1, "a", ["x"]]]),
    ("call_tool('a', {'x': 1, **more})", [[1, "a", None]]),
    ("call_tool('a', {key: 1})", [[1, "a", None]]),
    ("call_tool('a', args)", [[1, "a", None]]),
    ("call_tool('a', **args)", [[1, "a", None]]),
    ("call_tool('a', 1, 2)", [[1, "a", None]]),
    ("call_tool(name)", [[1, None, []]]),
    ("call_tool()", [[1, None, []]]),
    ("tools.a(x=1)", [[1, "a", ["x"]]]),
    ("tools['a-b'](x=1)", [[1, "a-b", ["x"]]]),
    ("tools[name]()", [[1, None, []]]),
    ("tools.__dir__()", []),
    ("tools.a.b(x=1)", [[1, "a.b", ["x"]]]),
    ("tools['a'].b['c-d']()", [[1, "a.b.c-d", []]]),
    ("tools[name].b()", [[1, None, []]]),
    ("tools.a.b(1).c()", [[1, "a.b", None]]),
    ("tools.a.__call__()", []),
    (
        "call_tools_parallel([('a', {'x': 1}), 'b', {'tool': 'c', 'args': {'y': 1}}, d])",
        [[1, "a", ["x"]], [1, "b", []], [1, "c", ["y"]], [1, None, None]],
    ),
    ("call_tools_parallel([('a', {'x': n}) for n in rows])", [[1, "a", ["x"]]]),
    ("call_tools_parallel(calls)", [[1, None, None]]),
    ("def f():\n    if x:\n        return call_tool('a', y=call_tool('b'))", [[3, "a", ["y"]], [3, "b", []]]),
    ("print('call_tool(1)')", []),
    ("from tools import a, b as c\na(x=1)\nc()", [[2, "a", ["x"], True], [3, "b", [], True]]),
    ("from tools import a\na.b(x=1)\na['c']()", [[2, "a.b", ["x"]], [3, "a.c", []]]),
    ("import tools as t, tools\nt.a(x=1)\ntools.b()", [[2, "a", ["x"]], [3, "b", []]]),
    ("from tools import *\na()", [[1, None, None]]),
    ("from tools import a\ndef a(): pass\na()", []),
    ("from .tools import a\na()", []),
]


@each_row(("source", "calls"), ROWS)
def test_calls_are_found_as_far_as_they_are_written_out(source: str, calls: list[list[object]]) -> None:
    assert planned_calls(source) == {"calls": calls, "more": 0, "error": ""}


@given(source=st.text(max_size=200))
def test_any_text_is_read_or_refused_in_words(source: str) -> None:
    found = planned_calls(source)
    assert found["calls"] == [] or not found["error"]


def test_a_script_of_too_many_calls_is_cut_and_says_so() -> None:
    found = planned_calls("call_tool('a')\n" * (MAX_CALLS + 7))
    assert len(found["calls"]) == MAX_CALLS and found["more"] == 7


SCRIPT = "rows = call_tool('read', name='x')\nif rows:\n    call_tool('pay', to='a')\ncall_tool('wriet', text='a')\ncall_tool('write')\ntools[rows[0]]()"


@pytest.mark.isolation
def test_a_script_with_a_call_that_cannot_succeed_is_not_run(opened: SyncRuntime, effects: Effects) -> None:
    result = opened.execute_code(SCRIPT, tools=effects.registry, preflight=True)

    assert result.outcome is Outcome.DENIED and not effects.made and result.preflight is not None
    assert result.error is not None and result.error.line == 4
    assert result.error.message.startswith("wriet: there is no tool of this name")
    assert [each["line"] for each in result.error.findings] == [4, 5]
    assert str(result.preflight).splitlines() == [
        "line 1: read",
        "line 3: pay, writes, needs approval",
        str(result.preflight.calls[2]),
        "line 5: write, writes, missing: text",
        "line 6: a tool that is not written out",
    ]
    assert result.to_dict()["preflight"]["calls"][3]["problem"] == "missing: text"


@pytest.mark.isolation
def test_an_imported_tool_is_looked_at_unless_a_file_may_have_its_name(opened: SyncRuntime, effects: Effects) -> None:
    source = "from tools import write as note\nnote()"
    of_tool = opened.execute_code(source, tools=effects.registry, preflight=True)
    of_file = opened.execute_code(
        "from tools import own\nset_result(own())", files={"tools.py": b"own = int"}, preflight=True
    )

    assert of_tool.outcome is Outcome.DENIED
    assert (of_file.value, of_file.error) == (0, None)


def test_a_script_without_problems_runs_and_suspended_runs_and_drafts_have_their_preflight(
    opened: SyncRuntime, effects: Effects
) -> None:
    source = "call_tool('pay', to='a')"
    waiting = opened.execute_code(source, tools=effects.registry, preflight=True, on_approval="suspend")
    draft = opened.execute_code(source, tools=effects.registry, preflight=True, dry_run=True)

    for result in (waiting, draft):
        assert result.preflight is not None and result.preflight.calls[0].needs_approval
    assert waiting.outcome is Outcome.SUSPENDED and draft.effects and not effects.made


@pytest.mark.isolation
@pytest.mark.parametrize("hostile", ["(" * 50_000, "-" * 1_000_000 + "1", "x = '\x00'", "\ud800", "1 +"])
def test_text_that_cannot_be_read_is_read_in_the_sandbox_and_nowhere_else(opened: SyncRuntime, hostile: str) -> None:
    found = opened.preflight(hostile)

    assert found.calls == () and ("could not be read" in found.note or hostile == "\ud800")
    assert opened.execute_code("1 + 1").value == 2


@pytest.mark.isolation
def test_a_syntax_error_is_known_with_its_line_before_the_script_is_run_or_saved(opened: SyncRuntime) -> None:
    wrong, fine = opened.preflight("x = 1\ny = = 2"), opened.preflight("if 1:\n    return await call_tool_async('f')")

    assert (wrong.error_line, wrong.note) == (2, "the script could not be read: SyntaxError: invalid syntax")
    assert str(wrong).startswith("line 2: the script could not be read")
    assert (fine.error_line, fine.note) == (None, "") and Preflight.of_plain(wrong.to_plain()) == wrong


@pytest.mark.isolation
def test_what_is_no_source_is_refused(opened: SyncRuntime) -> None:
    with pytest.raises(UsageError, match="source must be"):
        opened.preflight(7)  # type: ignore[arg-type, unused-ignore]


@pytest.mark.slow
def test_a_suspension_and_a_draft_have_the_preflight_of_their_script(
    opened: SyncRuntime, durable: SyncRuntime, effects: Effects
) -> None:
    source = "call_tool('write', text='a')\ncall_tool('pay', to='x')\ncall_tool('pay', to='y')"
    draft = Draft()
    result = opened.execute_code(source, tools=effects.registry, preflight=True, dry_run=draft)
    assert draft.preflight == result.preflight and draft.preflight is not None
    for runtime in (opened, durable):
        waits = runtime.execute_code(source, tools=effects.registry, preflight=True, on_approval="suspend")
        assert waits.suspension is not None and waits.suspension.preflight == waits.preflight == result.preflight
        assert waits.to_dict()["preflight"]["calls"][1]["needs_approval"]
        if runtime is durable:
            (again,) = (each for each in durable.suspended_runs() if each.run_id == waits.suspension.run_id)
            assert again.preflight == result.preflight
        second = runtime.resume(waits.suspension, {"call_2": Approve()}, tools=effects.registry)
        assert second.suspension is not None and second.suspension.preflight == second.preflight == result.preflight
        plain = runtime.execute_code(source, tools=effects.registry, on_approval="suspend")
        assert plain.suspension is not None and plain.suspension.preflight is None
