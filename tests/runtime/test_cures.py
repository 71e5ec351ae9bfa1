"""Errors that a script meets because of its sandbox: each names the cure."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell import Limits, Outcome, SyncRuntime, ToolRegistry
from toolcell.tools.code import CodeTool

from .conftest import Run

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

CURES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a package": (
        "import pandas",
        {},
        ("No module named 'pandas'", "packages=['pandas']", "--packages pandas", "a service"),
    ),
    "a package of another name": ("import sklearn.svm", {}, ("packages=['scikit-learn']",)),
    "a tool as a function": ("add(1)", {}, ("name 'add' is not defined; tools are called as tools.add(...)",)),
    "an unknown tool to import": ("from tools import ad", {}, ("cannot import name 'ad'",)),
    "a tool to import": ("import web_search", {}, ("write tools.web_search(...), and no import",)),
    "an await too many": (
        "x = 1\nawait tools.add(x)",
        {},
        ("'await' expression", "leave out await", "call_tool_async"),
    ),
    "an await too few": ("call_tool_async('add', 1) + 1", {}, ("'coroutine'", "await it first")),
    "a key as an attribute": ("tools.web_search('x')[0].title", {}, ("attribute 'title'; it is a dict", "['title']")),
    "a full disk": ("open('x', 'w').write('x' * 10**7)", {"disk_bytes": 1 << 20}, ("Errno 28", "limit disk_bytes")),
    "too many open files": (
        "files = [open('x', 'w') for n in range(999)]",
        {"open_files": 64},
        ("Errno 24", "limit open_files"),
    ),
    "no inode left": ("for n in range(999): open(str(n), 'w')", {"inodes": 100}, ("Errno 28", "limit inodes")),
    "an object": ("class A: pass\nset_result([A()])", {}, ("result[0]: A is not data", "vars(x)")),
    "a function": ("set_result(len)", {}, ("is not data", "call it")),
    "a number for files": ("set_result(1, files=5)", {}, ("files= takes paths", "['chart.png']", "not 5")),
    "a file without a name in Unicode": (
        "import os\nset_result(1, files=[os.fsdecode(b'a\\xff')])",
        {},
        ("'a\\udcff'", "rename the file"),
    ),
    "a large result": ("set_result('x' * 10**7)", {}, ("result too large", "result_bytes", "files=['result.json']")),
    "too many elements": ("set_result([1] * 10**6)", {}, ("elements", "json.dumps(x)")),
    "more elements": (
        "set_result([1] * 9000)",
        {"message_elements": 8192},
        ("result too large", "> 8192 elements", "message_elements"),
    ),
    "an argument of more elements": (
        "call_tool('echo', q=[1] * 9000)",
        {"message_elements": 8192},
        ("arguments too large", "message_elements"),
    ),
    "an answer of more elements": (
        "call_tool('echo', q=[1] * 9000)",
        {"answer_elements": 8192},
        ("result too large", "answer_elements"),
    ),
    "a large argument": ("call_tool('echo', q='x' * 10**7)", {}, ("frame_bytes", "send less")),
}


@pytest.mark.parametrize("name", CURES)
def test_an_error_of_the_sandbox_names_the_cure(run: Run, name: str) -> None:
    source, limits, cures = CURES[name]

    result = run(source, limits=Limits(**limits))

    assert (result.outcome, result.error is not None) == (Outcome.ERROR, True)
    assert result.error is not None
    for cure in cures:
        assert cure in result.error.message
        assert cure in CodeTool.result(result).text


@pytest.mark.parametrize("name", ["github", "github__find_docs"])
def test_a_namespace_that_a_script_calls_without_tools_is_named(name: str) -> None:
    def find_docs(query: str) -> str:
        """Find pages of the documentation."""
        return query

    registry = ToolRegistry()
    registry.add(find_docs)
    with SyncRuntime(registry.namespaced("github", ".")) as runtime:
        result = runtime.execute_code(f"{name}('x')")

    assert result.error is not None
    assert "; tools are called as tools.github." in result.error.message


@pytest.mark.parametrize(
    "source",
    [
        *(
            "nothing",
            "{}.title",
            "(1).title",
            "import asyncio\nasync def f(): await 1\nawait f()",
            "raise NameError('add')",
        ),
        *("import json.nothing", "import msvcrt", "__import__('no name')"),
    ],
)
def test_errors_that_are_the_scripts_own_have_no_cure(run: Run, source: str) -> None:
    result = run(source)

    assert result.error is not None
    assert ";" not in result.error.message


def test_an_exception_with_hostile_attributes_is_an_ordinary_error(run: Run) -> None:
    source = (
        "class S(str):\n    def __eq__(self, other): 1 / 0\n    __hash__ = str.__hash__\n"
        "    def partition(self, sep): 1 / 0\n    def isidentifier(self): 1 / 0\n"
    )

    for kind in ("NameError", "ModuleNotFoundError", "AttributeError"):
        given = "name=S('add'), obj={S('add'): 1}" if kind == "AttributeError" else "name=S('add')"
        result = run(f"{source}raise {kind}('x', {given})")

        assert result.outcome is Outcome.ERROR
        assert result.error is not None
        assert (result.error.type, result.error.message.partition(";")[0]) == (kind, "x")


def test_input_files_without_room_name_the_limit(run: Run) -> None:
    result = run("1", files={f"{number}/x": "" for number in range(90)}, limits=Limits(inodes=100))

    assert result.error is not None
    assert (result.error.limit, result.error.limit_value) == ("inodes", 100)


def test_a_text_in_place_of_a_files_name_costs_that_file_alone(run: Run) -> None:
    result = run("open('a', 'w').close()\nset_result(1, files=['a', 'text of a report ' * 1000])")

    assert (result.outcome, result.value) == (Outcome.OK, 1)
    assert [file.problem for file in result.files] == [None, "missing"]


def test_a_full_disk_is_named_with_its_limit(run: Run) -> None:
    result = run("open('x', 'w').write('x' * 10**7)", limits=Limits(disk_bytes=1 << 20))

    assert result.error is not None
    assert (result.error.limit, result.error.limit_value) == ("disk_bytes", 1 << 20)
    assert "limit disk_bytes is 1048576" in CodeTool.result(result).text


def test_asking_which_tools_there_are_is_no_tool_call(run: Run) -> None:
    result = run("list_tools()\n[tools.add(2), tools.add(3)]", limits=Limits(tool_calls=2))

    assert result.value == [3, 4]
    assert [call.name for call in result.calls] == ["add", "add"]
    assert result.usage.calls == 2


def test_asking_for_ever_is_bounded(run: Run) -> None:
    result = run("while True: list_tools()", limits=Limits(tool_calls=5))

    assert result.outcome is Outcome.CALL_LIMIT


def test_the_folders_of_libraries_are_returned_only_if_asked_for(run: Run) -> None:
    source = (
        "import os\nfor name in ('.cache/m', 'sub/.cache'):\n    os.makedirs(name)\n    open(f'{name}/f', 'w').close()\n"
        "open('a.txt', 'w').close()\nset_result(1, files="
    )

    every, asked = run(f"{source}[OUTPUT_DIR])"), run(f"{source}['.cache'])")

    assert sorted(file.name for file in every.files) == ["a.txt", "sub/.cache/f"]
    assert [file.name for file in asked.files] == [".cache/m/f"]
