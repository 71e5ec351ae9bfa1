"""Search, degrees of detail, and what is told of catalogues of 1, 30, 500 and 2,000 tools."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from rows import each_row
from toolcell.config import SHOWN_CHARS
from toolcell.errors import UsageError
from toolcell.tools import Origin, RunContext, ToolRegistry
from toolcell.tools.search import MAX_QUERY_CHARS, ToolIndex
from toolcell.tools.stubs import MAX_TEXT_CHARS
from tools.catalogues import catalogue, name_of
from tools.toolkit import FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.anyio]
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def registry_of(*tools: tuple[str, str, dict[str, Any]], **settings: Any) -> ToolRegistry:
    registry = ToolRegistry(**settings)
    for name, description, properties in tools:
        registry.register(name, description, {"type": "object", "properties": properties}, lambda args: "")
    return registry


async def names_found(registry: ToolRegistry, query: str, **options: Any) -> list[str]:
    return [each.name for each in await registry.search_tools(query, **options)]


@each_row(
    ("query", "best"),
    [
        ("open a ticket", "github.create_issue"),
        ("createIssue", "github.create_issue"),
        ("tickets", "github.create_issue"),
        ("Ärger melden", "complain"),
        ("send a mail", "sendMail"),
        ("attachments", "sendMail"),
        ("sendmail", "sendMail"),
        ("github__create_issue", "github.create_issue"),
    ],
)
async def test_a_search_finds_a_tool_by_its_name_its_description_and_its_parameters(query: str, best: str) -> None:
    registry = registry_of(
        ("github.create_issue", "Open a ticket in the tracker of a repository", {"title": {"type": "string"}}),
        ("sendMail", "Write to somebody by mail", {"attachment": {"type": "string", "description": "A file"}}),
        ("complain", "Ärger dem Kundendienst melden", {}),
        ("weather", "Look up the forecast of a city for a day", {"city": {"type": "string"}}),
    )
    assert (await names_found(registry, query))[0] == best


async def test_a_word_counts_most_in_a_name_then_in_a_description_then_in_a_parameter() -> None:
    registry = registry_of(
        ("first_thing", "Does a thing with something", {"invoice": {"type": "string"}}),
        ("second_thing", "Does a thing with an invoice", {"something": {"type": "string"}}),
        ("invoice_thing", "Does a thing with something", {"something": {"type": "string"}}),
        *((f"other_{number}", "Does another thing altogether", {}) for number in range(5)),
    )
    assert await names_found(registry, "invoice") == ["invoice_thing", "second_thing", "first_thing"]


@each_row("query", ["", "  ", "zzz", "!?", "\0"])
async def test_a_search_without_a_hit_finds_nothing(query: str) -> None:
    assert await names_found(catalogue(30), query) == []
    assert await names_found(ToolRegistry(), query) == []


async def test_tools_that_a_query_names_come_first_and_in_its_order() -> None:
    wanted = ["wiki.find_invoice", "mail.create_meeting"]
    assert (await names_found(catalogue(500), ", ".join(wanted) + ", invoice"))[:2] == wanted


async def test_a_search_finds_only_what_the_caller_may_call() -> None:
    registry = catalogue(30)
    registry.blacklist("github.*", origins=[Origin.CODE])

    assert not any(name.startswith("github") for name in await names_found(registry, "invoice", limit=100))
    found = await names_found(registry, "create invoice github", limit=3, origin=Origin.MODEL)
    assert found[0] == "github.create_invoice"
    assert await names_found(registry, "github.create_invoice", origin=Origin.CODE) != ["github.create_invoice"]


@each_row(
    ("query", "limit", "said"),
    [
        ("x" * (MAX_QUERY_CHARS + 1), 10, "at most 1000 characters, not 1001"),
        (["a"], 10, "must be str, not"),
        ("x", 0, "at least 1, not 0"),
        ("x", 101, "at most 100 tools, not 101"),
        ("x", "3", "whole number"),
    ],
)
async def test_a_wrong_query_is_refused_with_its_limit(query: Any, limit: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        await catalogue(3).search_tools(query, limit=limit)


async def test_tools_without_a_single_word_can_be_searched() -> None:
    registry = registry_of(("_", "????????????????", {}), ("--", "!!!!!!!!!!!!!!!!", {}))
    assert await names_found(registry, "_ a") == ["_"]


def test_a_description_of_any_length_adds_a_bounded_number_of_words() -> None:
    (definition,) = registry_of(("big", "word " * 1_000_000, {})).definitions()
    assert len(ToolIndex([definition])._texts[0]) < 3_000


# Embeddings


# Detail


def test_tools_are_described_in_three_degrees_of_detail() -> None:
    registry = catalogue(2)

    assert registry.describe_tools(detail="names") == "github.create_invoice, mail.create_invoice"
    assert registry.describe_tools(["mail.create_invoice"], detail="signatures") == (
        "mail.create_invoice(title: str, tags: list[str] | None = None, limit: int = 10) -> Any"
        "  # Create a invoice in the mail of the company."
    )
    full = registry.describe_tools(["mail__create_invoice"])
    assert "Title of the invoice, as people read it." in full and "def create_invoice(*, title: str" in full
    ast.parse(full)
    with pytest.raises(UsageError, match="must be one of 'names', 'signatures', 'full', not 'stubs'"):
        registry.describe_tools(detail="stubs")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no tool 'nix'; search_tools"):
        registry.describe_tools(["nix"])
    with pytest.raises(
        UsageError, match=r"there is no tool 'mail.create_invoise' \(did you mean `mail.create_invoice`"
    ):
        registry.describe_tools(["mail.create_invoise"])
    with pytest.raises(UsageError, match=r"the name of a tool must be str.*\[each\.name for each in definitions\]"):
        registry.describe_tools(registry.definitions())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the name of a tool must be str"):
        registry.describe_tools([["mail"]])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"write \['x'\]"):
        registry.describe_tools("x")


def test_a_signature_is_one_bounded_line_whatever_a_stranger_wrote() -> None:
    properties = {f"parameter_{number}": {"type": "string"} for number in range(500)}
    registry = registry_of(("evil", "First\u202e\x1b[31m line\nsecond line", properties))

    line = registry.describe_tools(detail="signatures")

    assert "\n" not in line and "second" not in line and "\u202e" not in line and "\x1b" not in line
    assert len(line) < 600


@pytest.mark.slow
def test_more_text_than_anybody_reads_is_refused_with_what_to_do() -> None:
    registry = catalogue(2_000)
    with pytest.raises(UsageError, match=f"more than {MAX_TEXT_CHARS} characters; ask for fewer, or a detail before"):
        registry.describe_tools()
    assert registry.describe_tools(detail="names").count(",") == 1_999


# What a model is told


async def nothing(call_tool: Any) -> Any:
    return None


def told(registry: ToolRegistry, **options: Any) -> str:
    registry.enable_code_execution(FakeRuntime(nothing), **options)
    [text] = [each.description for each in registry.definitions() if each.name == "execute_code"]
    return text


BEGINNINGS = {1: "Tools, callable as", 30: "Tools, callable as", 500: "500 tools, callable as", 2_000: "2000 tools, "}


@pytest.mark.slow
@each_row("count", BEGINNINGS)
def test_the_description_of_execute_code_has_stubs_then_names_then_a_search(count: int) -> None:
    text = told(catalogue(count))

    assert BEGINNINGS[count] in text
    assert len(text) < SHOWN_CHARS + 4_000
    assert ('"""Create a invoice in the github of the company.' in text) is (count <= 30)
    assert ("search_tools('what it is to do', detail='full')" in text) is (count > 30)
    assert (name_of(count - 1).partition(".")[2] in text) is (count <= 500)


@each_row(
    ("shown_chars", "part"),
    [
        (60_000, "tags: list[str] | None = None, limit: int = 10) -> Any:"),
        (16_000, "github.create_invoice(title: str, tags: list[str] | None = None, limit: int = 10) -> Any  # Create"),
        (3_000, "Their names: github.create_invoice, mail.create_invoice"),
        (100, "too many to list. Search first"),
        (0, "too many to list. Search first"),
    ],
)
def test_a_smaller_budget_gives_signatures_names_and_nothing(shown_chars: int, part: str) -> None:
    short, long = told(catalogue(100), shown_chars=0), told(catalogue(100), shown_chars=shown_chars)

    assert part in long
    assert len(long) <= len(short) + shown_chars + 200


@each_row("wrong", [-1, None, "10", 1.5, True])
def test_a_budget_that_is_none_is_refused(wrong: Any) -> None:
    for use in (
        lambda: told(catalogue(1), shown_chars=wrong),
        lambda: catalogue(1).definitions(shown_chars=wrong or -1),
    ):
        with pytest.raises(UsageError, match="shown_chars must be a whole number of at least 0"):
            use()


def test_a_description_follows_the_rules_and_the_registry() -> None:
    registry = catalogue(500)
    assert "search_tools" in told(registry)
    registry.allow_only("github.create_invoice", "execute_code")
    assert "def create_invoice" in told(registry) and "mail" not in told(registry)


# A list that is too long for a model


def test_a_large_catalogue_leaves_the_list_of_a_model_only_where_it_can_be_searched() -> None:
    registry = catalogue(500)
    assert len(registry.definitions(shown_chars=10_000)) == 500
    registry.enable_tool_search()

    assert [each.name for each in registry.definitions(shown_chars=10_000)] == ["search_tools"]
    assert len(registry.definitions()) == len(registry.definitions(shown_chars=10**9)) == 501
    found = ["mail.create_invoice", "nix", "github.create_invoice"]
    names = [each.name for each in registry.definitions(shown_chars=10_000, found=found)]
    assert names == ["github.create_invoice", "mail.create_invoice", "search_tools"]
    room = len(registry.definitions(shown_chars=10_000, found=[name_of(number) for number in range(500)]))
    assert 10 < room < 40


async def test_the_model_s_search_tells_and_notes_what_it_found_and_nothing_that_is_refused() -> None:
    registry = catalogue(30)
    registry.enable_tool_search()
    registry.blacklist("mail.*")
    run = RunContext()

    args = {"query": "create invoice", "limit": 3, "detail": "names"}
    result = await registry.dispatch("search_tools", args, context=run)
    refused = await registry.dispatch("search_tools", {"query": "mail.create_invoice", "limit": 100}, context=run)
    none = await registry.dispatch("search_tools", {"query": "zzz"}, context=run)
    wrong = await registry.dispatch("search_tools", {"query": "x", "detail": "stubs"}, context=run)
    from_code = await registry.dispatch("search_tools", {"query": "x"}, origin=Origin.CODE)

    assert result.text.split(", ")[0] == "github.create_invoice" and len(result.text.split(", ")) == 3
    assert list(run.state.found_tools)[-1] == refused.text.partition("(")[0]
    assert "mail" not in refused.text
    assert none.text == "none of 27 tools fits; use other words"
    assert wrong.is_error and "detail" in wrong.text
    assert from_code.is_error


@pytest.mark.parametrize("origin", [Origin.MODEL, Origin.CODE])
async def test_tools_that_stay_the_same_are_indexed_once(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools whose descriptions are made for each caller count as the same while their texts are."""
    registry = registry_of(*((f"tool_{number}", "Do something that is worth a search", {}) for number in range(3)))

    async def nothing(call_tool: Any) -> Any:
        return None

    registry.enable_code_execution(FakeRuntime(nothing))
    registry.enable_tool_search()
    made: list[int] = []
    index = ToolIndex.__init__

    def counted(self: ToolIndex, definitions: Any) -> None:
        made.append(len(definitions))
        index(self, definitions)

    monkeypatch.setattr(ToolIndex, "__init__", counted)
    for _ in range(3):
        assert await registry.search_tools("do something", origin=origin)
    assert len(made) == 1
    registry.register("tool_3", "Do something else that is worth a search", NOTHING, lambda args: "")
    await registry.search_tools("do something", origin=origin)
    assert len(made) == 2
