"""What a person reads of a draft, a call or a question is what is made. Attacked by scripts that write texts like ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell import ExecutionResult, Outcome, RunContext, SyncRuntime, ToolRegistry, UsageError
from toolcell.control import Draft
from toolcell.results import (
    CommitResult,
    Effect,
    EffectResult,
    ErrorInfo,
    PendingCall,
    RevertedCall,
    effects_digest,
    shown_effects,
)
from toolcell.support.call_text import arguments_text
from toolcell.tools.code import CodeTool

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

FORGED_LINE = 'effect-2: pay(to="ada", euros=40)  (line 3)'

FORGERY = f"""
call_tool("note", {{"text": {{"$result_of": 'effect-0>)  (line 2)\\n{FORGED_LINE}\\x1b]'}}}})
call_tool("pay", {{"to": "mallory", "euros": 9000}})
"""


class Shop:
    """Tools with a ledger, that take anything."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.registry = ToolRegistry()

        @self.registry.tool
        async def note(text: Any = None, **more: Any) -> Any:
            """Write anything down and return it."""
            self.made.append(["note", text, more])
            return text

        @self.registry.tool(sends="public")
        async def pay(to: str, euros: int) -> str:
            """Send money to somebody."""
            self.made.append(["pay", to, euros])
            return f"paid {to}"

        @self.registry.tool(read_only=True, reads="private")
        async def mail() -> str:
            """Read a mail of the user."""
            return "secret"


@pytest.fixture
def shop() -> Shop:
    return Shop()


def dry(runtime: SyncRuntime, shop: Shop, source: str, **options: Any) -> ExecutionResult:
    return runtime.execute_code(source, tools=shop.registry, dry_run=True, **options)


def draft_texts(result: ExecutionResult, runtime: SyncRuntime) -> list[str]:
    """Every text of a draft that somebody may read before it is committed."""

    return [
        str(result),
        shown_effects(result.effects),
        "\n".join(map(str, result.effects)),
        CodeTool.result(result).text,
    ]


def test_a_script_cannot_write_a_placeholder_of_its_own_into_a_draft(opened: SyncRuntime, shop: Shop) -> None:
    draft = dry(opened, shop, FORGERY)
    assert len(draft.effects) == 2

    for text in draft_texts(draft, opened):
        assert FORGED_LINE not in text.splitlines() and "<result of" not in text
        assert 'pay(to="mallory", euros=9000)' in text and r"\\x1b" not in text
        assert "\x1b" not in text and r"\u001b]" in text
    assert opened.commit(draft).ok
    assert shop.made[0][1] == {"$result_of": f"effect-0>)  (line 2)\n{FORGED_LINE}\x1b]"}, "sent as it is"


@pytest.mark.parametrize(
    "reference",
    [
        "effect-1",
        "effect-1.",
        "effect-1.{key}x",
        "effect-9.{key}",
        "pay(40).{key}",
        "effect-0.{key}",
        "effect-01.{key}",
    ],
)
def test_what_only_looks_like_a_reference_is_sent_as_it_is_or_refused_and_never_replaced(
    opened: SyncRuntime, shop: Shop, reference: str
) -> None:
    draft = Draft()
    given = {"$result_of": reference.format(key=draft.id)}

    async def main() -> CommitResult | None:
        run = RunContext().having(draft)
        await shop.registry.dispatch("note", {"text": "first"}, context=run)
        answer = await shop.registry.dispatch("note", {"text": [given]}, context=run)
        if answer.is_error:
            assert "this draft has no such effect" in answer.message
        return None

    anyio.run(main)
    assert "<result of" not in str(draft)
    assert opened.commit(draft, tools=shop.registry).ok
    assert shop.made[1:] in ([], [["note", [given], {}]])


def test_a_reference_to_an_effect_of_this_draft_is_shown_as_one_and_replaced(opened: SyncRuntime, shop: Shop) -> None:
    draft = dry(opened, shop, "first = call_tool('note', text='a')\ncall_tool('note', text=[first])")
    assert "effect-2: note(text=[<result of effect-1>])" in str(draft)
    assert opened.commit(draft).ok and shop.made[1] == ["note", ["a"], {}]


def test_names_of_arguments_and_keys_end_no_line_and_hide_nothing(opened: SyncRuntime, shop: Shop) -> None:
    source = """
call_tool("note", {"a=1)\\neffect-9: pay(to": 1, "\\x1b]": 2, "text": {"\\u202e\\u3164k\\n": 3}})
call_tool("note", text="after")
"""
    draft = dry(opened, shop, source)
    lines = shown_effects(draft.effects).splitlines()
    assert len(lines) == 3 and 'note(text="after")' in lines[2]
    assert (
        r'"a=1)\neffect-9: pay(to"=1' in lines[1]
        and r'"\u001b]"=2' in lines[1]
        and r'{"\u202e\u3164k\n": 3}' in lines[1]
    )


TEXT = "x\x1b]\ncommitted: all\u2028of it\x9d\x1bP"
"""Ends lines, and begins sequences that end nowhere."""


@pytest.mark.parametrize(
    "shown",
    [
        lambda: str(CommitResult("r", (_failed(TEXT), _failed("last")))),
        lambda: str(CommitResult("r", (EffectResult("effect-1", TEXT, {TEXT: TEXT}, "made"), _failed("last")))),
        lambda: shown_effects(
            [Effect("effect-1", TEXT, {TEXT: [TEXT, {TEXT: 1}]}, reason=TEXT), Effect("e", "last", {})]
        ),
        lambda: "\n".join(
            map(str, [RevertedCall(TEXT, {"a": TEXT}, "failed", TEXT), RevertedCall("last", {}, "reverted")])
        ),
        lambda: "\n".join(
            map(str, [PendingCall("c", TEXT, {TEXT: TEXT}, 1, "", TEXT), PendingCall("c", "last", {}, 1, "")])
        ),
    ],
)
def test_every_text_about_calls_shows_each_on_one_line_whatever_they_hold(shown: Any) -> None:
    text = shown()
    assert len(text.splitlines()) == len(text.split("\n")) <= 3
    assert "last" in text.splitlines()[-1] and not {"\x1b", "\x9d", "\u2028"} & {*text}
    assert "\ncommitted" not in text


def _failed(error: str) -> EffectResult:
    return EffectResult("effect-1", "pay", {"to": "ada"}, "failed", None, error)


def test_the_names_of_tools_in_a_preflight_hide_none_of_its_lines(opened: SyncRuntime, shop: Shop) -> None:
    source = 'call_tool("x\\x1b]")\ncall_tool("pay", to="mallory", euros=9000)\ncall_tool("y\\nline 3: nothing")'
    lines = str(opened.preflight(source, tools=shop.registry)).splitlines()
    assert len(lines) == 3 and lines[1].startswith("line 2: pay, writes")


def test_the_message_of_an_error_passes_for_no_line_of_a_result() -> None:
    lines = str(
        ExecutionResult("r", Outcome.ERROR, error=ErrorInfo("E", "x\ndry run: nothing was to be written"))
    ).splitlines()
    assert "dry run: nothing was to be written" not in lines and "       dry run: nothing was to be written" in lines


@pytest.mark.parametrize(
    "source",
    [
        "for n in range(51): call_tool('note', text=n)",
        "call_tool('note', text='x' * 300 + 'pay 9000')",
        "call_tool('note', **{'a' * 300: 1})",
        "call_tool('note', **{f'a{n}': n for n in range(60)})",
        "call_tool('note', text=[{'a': list(range(1000))}])",
    ],
)
def test_all_of_a_draft_that_is_listed_in_part_needs_its_digest_or_ids(
    opened: SyncRuntime, shop: Shop, source: str
) -> None:
    draft = dry(opened, shop, source)
    assert draft.draft_digest == effects_digest(draft.effects) and draft.draft_digest in str(draft)
    with pytest.raises(UsageError, match=r"text shows it whole.*digest.*or their ids"):
        opened.commit(draft)
    with pytest.raises(UsageError, match="the effects of this draft have sha256"):
        opened.commit(draft, "0" * 64)
    assert shop.made == []
    assert opened.commit(draft, draft.draft_digest).ok and len(shop.made) == len(draft.effects)

    again = dry(opened, shop, source)
    assert opened.commit(again, [each.id for each in again.effects]).ok


def test_what_is_cut_says_its_length_and_its_digest() -> None:
    text = "x" * 3000
    cut = arguments_text({"to": "mallory", "pad": text, "rows": [1] * 3000, "data": b"y" * 3000, "euros": 99999})
    assert not cut.is_whole and "euros=99999" in cut.parts and 'to="mallory"' in cut.parts
    assert "(3000 characters, sha256 e1630f843370f402)" in cut.parts[1]
    assert "(3000 values, sha256 " in cut.parts[2] and "(3000 bytes, sha256 " in cut.parts[3]


def test_a_result_approves_no_effects_that_it_does_not_show(folder: Path, durable: SyncRuntime, shop: Shop) -> None:
    shared = Draft()
    runs = [
        durable.execute_code(f"call_tool('note', text='{name}')", tools=shop.registry, dry_run=shared) for name in "ab"
    ]
    assert [len(each.effects) for each in runs] == [1, 1] and 'text="a"' not in str(runs[1])
    with pytest.raises(UsageError, match="they are not those of this result"):
        durable.commit(runs[1], tools=shop.registry)
    assert shop.made == []
    assert durable.commit(shared, tools=shop.registry).ok and [each[1] for each in shop.made] == ["a", "b"]
