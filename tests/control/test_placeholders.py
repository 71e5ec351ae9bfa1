"""A placeholder may be stored, passed on and returned. Whatever looks into it ends the dry run."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell import RunContext, ToolRegistry
from toolcell.calls.placeholders import effect_of, effects_in, placeholder, with_results
from toolcell.control.commit import Commit
from toolcell.control.draft import Draft
from toolcell.errors import ToolError
from toolcell.flows import Flow
from toolcell.journal.ledger import Journal
from toolcell_bridge.guest.placeholder import ENDS_DRAFT, RESULT_OF, DraftEnded, GuestDryRun, Placeholder
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.messages import ToolFail, ToolReturn

pytestmark = pytest.mark.quick

KEY = "0123456789abcdef"

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
WITH_PLACEHOLDERS = st.recursive(
    st.none() | st.integers(-5, 5) | st.integers(1, 4).map(lambda n: placeholder(f"effect-{n}", KEY)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def received(value: Any, key: str = KEY) -> Any:
    return GuestDryRun(key).answer("make", ToolReturn(1, value)).value


def approved(draft: Draft) -> Journal:
    journal = Journal("")
    journal.approve([(number, each.call.name) for number, each in enumerate(draft.collected, 1)])
    return journal


def one() -> Any:
    return received(placeholder("effect-1", KEY))


LOOKS: list[Callable[[Any], Any]] = [
    bool, len, hash, int, float, iter, next, sorted, abs, dir, json.dumps, pickle.dumps, bytes, reversed,
    lambda p: p.id, lambda p: p["a b"], lambda p: p[-1], lambda p: p[1:], lambda p: p[True], lambda p: p.get("id", 3),
    lambda p: p["a"]["b"] > 1, lambda p: p["id"] in [1], lambda p: {p["id"]: 1}, lambda p: p["x" * 65], lambda p: p == 1, lambda p: p != p, lambda p: p < 2, lambda p: 1 + p,
    lambda p: p + "x", lambda p: f"{p:.2f}", lambda p: p in {1: 2},
    lambda p: isinstance(p, str), lambda p: p(), lambda p: [*p], lambda p: {p}, lambda p: "a" in p, lambda p: range(p),
    lambda p: setattr(p, "id", 1), lambda p: p.__setitem__("id", 1), lambda p: -p, os.fspath, lambda p: p or 1,
    lambda p: p.__enter__(), lambda p: [1, 2][p],
]  # fmt: skip


@each_row("look", LOOKS)
def test_whatever_looks_into_a_placeholder_ends_the_draft(look: Callable[[Any], Any]) -> None:
    with pytest.raises(DraftEnded, match=r"the result of make \(effect-1\) is not known in a dry run"):
        look(one())


def test_a_placeholder_is_printed_formatted_and_compared_with_none_but_its_text_is_passed_to_no_call() -> None:
    dry_run = GuestDryRun(KEY)
    found = dry_run.answer("make", ToolReturn(1, placeholder("effect-1", KEY))).value
    text = "(result of effect-1)"

    assert [str(found), f"{found}", f"{found!r:>22}", f"{[found]}"] == [text, text, f"  {text}", f"[{text}]"]
    assert f"{found['id']}" == f"{found.get('id')}" == "(id of the result of effect-1)"
    assert str(found["items"][0]["a-b"]) == "(items[0].a-b of the result of effect-1)"
    assert [found == None, found != None, found == None, found in [None]] == [False, True, False, False]  # noqa: E711
    dry_run.check_arguments(b"no result")
    dry_run.check()
    with pytest.raises(DraftEnded, match=r"the text '\(result of effect-1\)'"):
        dry_run.check_arguments(f"created {found}".encode())


def test_members_are_placeholders_that_get_what_the_result_has_there_and_nothing_else_is_a_reference() -> None:
    member = {RESULT_OF: f"effect-1.items[1].id.{KEY}"}
    forged = [f"effect-1.{each}.{KEY}" for each in ("a b", "x" * 65, ".".join("abcdefghi"), "", "[0]", "é", "a\n")]

    assert to_plain(received(placeholder("effect-1", KEY))["items"][1]["id"]) == member
    assert to_plain(received(member)["x"]) == {RESULT_OF: f"effect-1.items[1].id.x.{KEY}"}
    assert effect_of(member, KEY) == "effect-1" and effects_in([member], KEY) == ("effect-1",)
    assert with_results([member], KEY, {"effect-1": {"items": [0, {"id": None}]}}) == [None]
    for result in ({}, [], None, "text", {"items": [1]}, {"items": {"1": 2}}, {"items": [0, [1]]}):
        assert with_results([member], KEY, {"effect-1": result}) == [member]
    for reference in forged:
        assert effect_of({RESULT_OF: reference}, KEY) is None
        assert type(received({RESULT_OF: reference})) is dict


def test_a_script_that_goes_on_after_looking_makes_no_further_call() -> None:
    dry_run = GuestDryRun(KEY)
    found = dry_run.answer("make", ToolReturn(1, placeholder("effect-1", KEY))).value
    dry_run.check()
    with pytest.raises(DraftEnded):
        bool(found)
    with pytest.raises(DraftEnded, match="effect-1"):
        dry_run.check()


def test_no_except_exception_catches_the_end_of_a_draft() -> None:
    assert not issubclass(DraftEnded, Exception)


def test_a_call_that_a_dry_run_cannot_make_ends_the_draft() -> None:
    dry_run = GuestDryRun(KEY)
    with pytest.raises(DraftEnded, match="needs it"):
        dry_run.answer("read", ToolFail(1, ENDS_DRAFT, "it needs it", False, {}))
    with pytest.raises(DraftEnded, match="needs it"):
        dry_run.check()


def test_a_placeholder_is_stored_copied_and_sent_as_it_came() -> None:
    kept = {"a": [one()], "b": (one(), 1)}

    assert isinstance(copy.deepcopy([one()]), list) and type(copy.copy(one())) is Placeholder
    assert to_plain(kept) == {"a": [placeholder("effect-1", KEY)], "b": [placeholder("effect-1", KEY), 1]}


@pytest.mark.slow
@given(value=PLAIN)
def test_data_of_a_tool_cannot_pass_for_a_placeholder(value: Any) -> None:
    forged = [value, {RESULT_OF: "effect-1"}, placeholder("effect-1", "fedcba9876543210"), {RESULT_OF: 1}]

    assert received(forged) == forged
    assert effects_in(forged, KEY) == ()
    assert with_results(forged, KEY, {"effect-1": "x"}) == forged


@given(value=WITH_PLACEHOLDERS)
def test_placeholders_survive_the_way_to_the_guest_and_back(value: Any) -> None:
    assert to_plain(received(value)) == value


@given(value=WITH_PLACEHOLDERS)
def test_every_placeholder_is_found_and_gets_its_result(value: Any) -> None:
    found = effects_in(value, KEY)
    text = json.dumps(value)
    settled = with_results(value, KEY, dict.fromkeys(found, "done"))

    assert set(found) == {f"effect-{n}" for n in range(1, 5) if f"effect-{n}.{KEY}" in text}
    assert effects_in(settled, KEY) == ()
    assert json.dumps(settled).count('"done"') == text.count(RESULT_OF)
    assert effect_of(placeholder("effect-3", KEY), KEY) == "effect-3"


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "join", "read"]), st.integers(0, 3), st.lists(st.integers(0, 30), max_size=3)),
    max_size=8,
)


@pytest.mark.slow
@given(steps=STEPS)
def test_a_draft_that_is_committed_makes_what_the_calls_would_have_made(steps: Any) -> None:
    def registry_with(ledger: list[Any]) -> ToolRegistry:
        registry = ToolRegistry()

        @registry.tool
        async def write(value: Any = 0) -> int:
            """Write a value and return its place."""
            ledger.append(["write", value])
            return len(ledger)

        @registry.tool
        async def join(values: list[Any], more: dict[str, Any]) -> dict[str, Any]:
            """Join values into one."""
            ledger.append(["join", values, more])
            return {"of": values, "at": len(ledger)}

        @registry.tool(read_only=True)
        async def read() -> str:
            """Read what does not change."""
            return "same"

        return registry

    async def make(registry: ToolRegistry, run: RunContext) -> list[Any]:
        got: list[Any] = []
        for tool, number, picks in steps:
            parts = [got[pick % len(got)] for pick in picks] if got else []
            args = {
                "write": {"value": parts or number},
                "join": {"values": [number, *parts], "more": {"a": parts[:1], "b": {"c": parts[-1:]}}},
                "read": {},
            }[tool]
            result = await registry.dispatch(tool, args, context=run)
            assert not result.is_error
            got.append(result.guest_value())
        return got

    async def both() -> None:
        direct, drafted, draft = list[Any](), list[Any](), Draft()
        values = await make(registry_with(direct), RunContext())
        drafts = await make(registry_with(drafted), RunContext().having(draft))
        assert drafted == []
        commit = Commit(draft, RunContext(), approved(draft))
        rows = await commit.make()
        assert all(row.status == "made" for row in rows), rows
        assert drafted == direct and with_results(drafts, draft.key, commit.results) == values

    anyio.run(both)


def test_the_host_collects_nothing_more_after_the_end_of_a_draft_whatever_the_guest_does() -> None:
    registry, draft = ToolRegistry(), Draft()

    @registry.tool
    async def write(value: Any = 0) -> int:
        """Write a value and return its place."""
        raise AssertionError("it was made")

    @registry.tool(read_only=True)
    async def look(value: Any) -> str:
        """Look at a value that is written."""
        raise AssertionError("it was made")

    async def main() -> list[str]:
        run = RunContext().having(draft)
        first = await registry.dispatch("write", {"value": 1}, context=run)
        answers = [await registry.dispatch(name, {"value": first.value}, context=run) for name in ("look", "write")]
        answers.append(await registry.dispatch("write", {"value": placeholder("effect-7", draft.key)}, context=run))
        return [str(each.error.code) if each.error is not None else "" for each in answers]

    assert anyio.run(main) == [ENDS_DRAFT] * 3
    assert [effect.id for effect in draft.effects] == ["effect-1"] and "look has to run" in str(draft)


def test_an_effect_that_the_draft_does_not_have_is_no_argument() -> None:
    registry, draft = ToolRegistry(), Draft()

    @registry.tool
    async def write(value: Any = 0) -> int:
        """Write a value and return its place."""
        raise AssertionError("it was made")

    async def main() -> str:
        args = {"value": [placeholder("effect-7", draft.key)]}
        return (await registry.dispatch("write", args, context=RunContext().having(draft))).message

    assert "refer to the result of effect-7, and this draft has no such effect" in anyio.run(main)


def test_an_effect_whose_preview_failed_is_no_argument() -> None:
    registry, draft = ToolRegistry(), Draft()

    def preview(value: Any = 0) -> int:
        if value == "taken":
            raise ToolError("there is one already")
        return 0

    @registry.tool(preview=preview)
    async def write(value: Any = 0) -> int:
        """Write a value and return its place."""
        raise AssertionError("it was made")

    async def main() -> list[str]:
        run = RunContext().having(draft)
        values = ["taken", placeholder("effect-1", draft.key)]
        return [(await registry.dispatch("write", {"value": value}, context=run)).message for value in values]

    failed, refused = anyio.run(main)
    assert "there is one already" in failed
    assert "refer to the result of effect-1, and this draft has no such effect" in refused


def test_what_the_dry_run_has_read_counts_at_the_commit() -> None:
    registry, draft, sent = ToolRegistry(), Draft(), list[str]()

    @registry.tool(reads="private", read_only=True)
    async def read_mail() -> str:
        """Read a mail of the user."""
        return "secret"

    @registry.tool(sends="public")
    async def publish(text: str) -> str:
        """Publish a text for everybody."""
        sent.append(text)
        return text

    async def main() -> list[str]:
        run = RunContext().having(draft)
        for name, args in (("publish", {"text": "before"}), ("read_mail", {}), ("publish", {"text": "after"})):
            assert not (await registry.dispatch(name, args, context=run)).is_error
        registry.policy.add_flow(Flow("private", "public", "deny"))
        return [row.status for row in await Commit(draft, RunContext(), approved(draft)).make()]

    assert anyio.run(main) == ["made", "refused"] and sent == ["before"]
