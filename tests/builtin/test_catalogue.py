"""The built-in packages: their names, their tools, what they take, and what is said of them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import toolcell.builtin as builtin
from rows import each_row
from toolcell.builtin.catalogue import MODULES, PACKAGES, all_packages, package_class
from toolcell.builtin.package import ToolPackage
from toolcell.cli.builtin import NEEDS
from toolcell.errors import UsageError

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]

PROMISED = {
    "knowledge": (["knowledge_search"], ["store", "embeddings"]),
    "remember": (["remember"], ["store", "embeddings"]),
    "search": (["web_search"], ["embeddings", "engine"]),
    "schedule": (
        ["schedule_create", "schedule_list", "schedule_update", "schedule_delete"],
        ["store", "tz_offset"],
    ),
    "shell": (["shell_exec"], ["workspace", "timeout_s"]),
    "file": (["file_read", "file_write", "file_list", "file_delete", "file_stat"], ["workspace"]),
    "http": (["http_fetch"], []),
    "data": (["data_parse", "data_filter", "data_aggregate", "data_transform"], []),
    "skill": (["skill_search", "skill_create", "skill_update"], ["store", "embeddings"]),
}
"""Package to its tools and to what its constructor takes."""


@pytest.mark.conforms("S1", "EX-12")
@each_row("name", PROMISED)
def test_a_package_has_the_tools_and_takes_the_dependencies_that_are_promised(name: str) -> None:
    tools, dependencies = PROMISED[name]
    (info,) = [each for each in all_packages() if each.name == name]
    parameters = inspect.signature(package_class(name)).parameters

    assert set(tools) <= set(info.tools)
    assert set(dependencies) <= set(parameters)
    required = [each for each in parameters.values() if each.default is each.empty]
    assert {each.name for each in required} <= {*dependencies, "runtime"}


def test_every_package_can_be_had_by_name_and_from_the_command_line() -> None:
    made = [getattr(builtin, name) for name in builtin.__all__]
    classes = {each for each in made if isinstance(each, type) and issubclass(each, ToolPackage)} - {ToolPackage}

    assert {package_class(name) for name in PACKAGES} == classes
    assert set(NEEDS) == set(PACKAGES)
    assert all(each.name == package_class(each.name).package for each in all_packages())
    assert {each.name for each in all_packages() if each.extra} == set(MODULES)


def test_the_page_lists_every_package_with_its_tools() -> None:
    page = (ROOT / "docs" / "builtin" / "index.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE)

    assert {name: tuple(re.findall(r"`(\w+)`", tools)) for name, tools in rows} == {
        package_class(each.name).__name__: each.tools for each in all_packages()
    }


def test_an_unknown_package_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="did you mean data"):
        package_class("dta")
