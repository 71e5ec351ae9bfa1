"""`list_tools` and `search_tools` in a script: rows, text in three degrees, wrong questions, 2,000 tools."""

from __future__ import annotations

import pytest

from rows import each_row
from toolcell import Limits, PoolConfig, SyncRuntime
from tools.catalogues import catalogue

pytestmark = pytest.mark.isolation
POOL = PoolConfig(warm=1)
ASKS = """
row, = search_tools("make an invoice in billing", limit=1)
set_result({
    "row": [row["name"], row["parameters"]["required"]],
    "names": search_tools("billing.list_report", limit=1, detail="names"),
    "line": list_tools(row["name"], "mail.create_invoice", detail="signatures"),
    "full": list_tools(row["name"], detail="full"),
    "chosen": [each["name"] for each in list_tools("mail__create_invoice")],
    "called": call_tool(row["name"], title="May")["tool"],
})"""


@each_row("count", [30, 500, 2_000])
def test_a_script_searches_reads_and_calls_what_it_found(count: int) -> None:
    with SyncRuntime(catalogue(count), pool=POOL) as runtime:
        result = runtime.execute_code(ASKS.replace("billing.list_report", "billing.create_invoice"))

    value = result.value
    assert value["row"] == ["billing.create_invoice", ["title"]]
    assert value["names"] == "billing.create_invoice" == value["called"]
    assert value["line"].count("\n") == 1 and "mail.create_invoice(title: str, " in value["line"]
    assert "class billing:" in value["full"] and "Title of the invoice" in value["full"]
    assert value["chosen"] == ["mail.create_invoice"]
    assert [call.name for call in result.calls] == ["billing.create_invoice"]


@pytest.mark.parametrize("count", [1, 2_000])
def test_a_script_reads_all_names_and_rows_of_any_catalogue(count: int) -> None:
    with SyncRuntime(catalogue(count), pool=POOL) as runtime:
        result = runtime.execute_code("set_result([len(list_tools()), list_tools(detail='names').count(',')])")

    assert result.value == [count, count - 1]


@each_row(
    ("asked", "said"),
    [
        ("search_tools('x' * 1001)", "at most 1000 characters, not 1001"),
        ("search_tools(3)", "must be str, not"),
        ("search_tools('x', limit=101)", "at most 100 tools, not 101"),
        ("search_tools('x', limit=None)", "whole number"),
        ("search_tools('x', detail='stubs')", "must be one of 'names', 'signatures', 'full'"),
        ("search_tools('x', detail=['full'])", "must be one of"),
        ("list_tools(detail=0)", "must be one of"),
        ("list_tools('nix')", "there is no tool 'nix'"),
        ("list_tools(1)", "takes names of tools"),
        ("list_tools(*['a'] * 101)", "at most 100 names, not 101"),
        ("call_tool('toolcell.list_tools', names={'a': 1})", "takes names of tools"),
        ("call_tool('toolcell.list_tools', names=[['a']])", "takes names of tools"),
        ("call_tool('toolcell.list_tools', query={'a': 1}, limit='x')", "must be str"),
        ("call_tool('toolcell.list_tools', detail=2**63 - 1)", "must be one of"),
    ],
)
def test_a_question_that_cannot_be_answered_is_an_error_of_the_script(asked: str, said: str) -> None:
    with SyncRuntime(catalogue(3), pool=POOL) as runtime:
        result = runtime.execute_code(f"try: {asked}\nexcept ToolError as exc: set_result([exc.code, str(exc)])")

    code, message = result.value
    assert code == "invalid_arguments" and said in message
    assert not result.calls


@pytest.mark.slow
def test_texts_that_are_too_long_are_refused_and_questions_count_as_calls_in_the_end() -> None:
    with SyncRuntime(catalogue(2_000), pool=POOL, limits=Limits(tool_calls=3)) as runtime:
        full = runtime.execute_code("try: list_tools(detail='full')\nexcept ToolError as exc: set_result(str(exc))")
        endless = runtime.execute_code("while True: search_tools('invoice', limit=1)")

    assert "more than 200000 characters; ask for fewer" in full.value
    assert str(endless.outcome) == "call_limit"


def test_rules_about_scripts_hold_for_what_they_are_told() -> None:
    registry = catalogue(20)
    registry.blacklist("mail.*")
    with SyncRuntime(registry, pool=POOL) as runtime:
        result = runtime.execute_code("set_result([search_tools('mail', detail='names'), list_tools(detail='names')])")

    assert not any("mail." in text for text in result.value)


def test_a_session_and_a_subset_answer_from_their_own_tools() -> None:
    registry = catalogue(20)
    asks = "set_result(search_tools('create invoice', limit=100, detail='names').split(', '))"
    few = registry.subset(["mail.create_invoice", "crm.update_invoice"])
    with SyncRuntime(registry, pool=POOL) as runtime:
        in_run = runtime.execute_code(asks, tools=few).value
        with runtime.session() as session:
            in_session = session.execute_code(asks).value

    assert sorted(in_run) == ["crm.update_invoice", "mail.create_invoice"]
    assert len(in_session) == 20
