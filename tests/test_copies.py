"""`changed` does what `dataclasses.replace` does."""

from __future__ import annotations

import dataclasses

import pytest

from toolcell import RunContext
from toolcell.results import ErrorInfo
from toolcell.support.copies import changed


def test_a_copy_has_the_new_values_and_all_others() -> None:
    before = RunContext(user_id="u", thread_id="2")
    after = changed(before, thread_id="3")

    assert after == dataclasses.replace(before, thread_id="3") and before.thread_id == "2"
    assert after.state is before.state
    assert changed(ErrorInfo("T", "m", 1), line=2) == ErrorInfo("T", "m", 2)


def test_what_is_no_field_or_no_dataclass_is_refused() -> None:
    with pytest.raises(TypeError, match="no_field"):
        changed(RunContext(), no_field=1)
    with pytest.raises(TypeError):
        changed(7)
