"""Which calls of a run can be undone, as the run notes them."""

from __future__ import annotations

from types import SimpleNamespace

from toolcell.calls.options import ToolOptions
from toolcell.calls.result import ToolResult
from toolcell.calls.reverts import FINAL, MadeCalls


def test_each_call_that_cannot_be_undone_is_noted_by_its_own_name() -> None:
    whole = MadeCalls()
    part, done = MadeCalls(whole), ToolResult.ok("done")
    final, undoable = ToolOptions(), ToolOptions(revert=lambda args, result: None)
    for name, options in (("mail", final), ("shout", final), ("save", undoable), ("mail", final)):
        part.add(SimpleNamespace(name=name, options=options, args={}, raw_args={}), done)

    assert [(each.tool, each.problem, each.call is None) for each in whole.calls] == [
        ("mail", FINAL, True),
        ("shout", FINAL, True),
        ("save", "", False),
        ("mail", FINAL, True),
    ]
    assert part.calls == whole.calls
