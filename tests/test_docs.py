"""What the documentation says is true: links lead somewhere, programs run, figures and names agree."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import toolcell
from rows import each_row
from toolcell import Agent, Limits, Outcome, PoolConfig, compat
from toolcell.calls.options import ToolOptions
from toolcell.cli import COMMANDS, build
from toolcell.errors import MissingPackage
from toolcell.support.text import size
from toolcell.tools.spec import RegistrySettings
from toolcell_bridge.guest.lint import IMPORTABLE

ROOT = Path(__file__).parent.parent
HOST = Path(toolcell.__file__).parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "sandbox_images").glob("*.md"),
        *(ROOT / "tests").glob("*.md"),
    ]
)
OLD_NAMES = ROOT / "CHANGELOG.md"
"""The one page that may name what is no longer there."""
README = (ROOT / "README.md").read_text(encoding="utf-8")

IMPORTED = re.compile(r"^ *from (toolcell(?:\.\w+)+) import (\([^)]*\)|.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
"""A program of the README, followed by what it prints."""
SHELL_LINE = re.compile(r"^(?:\$ |    )toolcell ([a-z]+)((?: ?[^\s#&]+)*)", re.MULTILINE)
"""A `toolcell` command as it is typed, up to a comment."""
INCLUDED = re.compile(r"^\[`(examples/[\w/]+\.py)`\]\([^)\n]+\):\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""An example, as a page shows it."""
EXCERPT = re.compile(r"^From \[`(examples/[\w/]+\.py)`\]\(\S+\):\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Lines of an example, as a page shows them."""
CITED = re.compile(r"\bconforms\(([^)]*)\)")
DEFINED = re.compile(r"^\| ([A-Z][A-Z]?(?:-b|-)?\d+) \| \S", re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment under which GitHub offers a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each_row("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if fragment:
            assert fragment in map(anchor, HEADING.findall(target.read_text(encoding="utf-8"))), link


@each_row("path", [*PAGES, *sorted((ROOT / "examples").rglob("*.py"))], ids=lambda path: path.name)
def test_what_a_package_offers_is_imported_from_the_package(path: Path) -> None:
    for module, names in IMPORTED.findall(path.read_text(encoding="utf-8")):
        package = module.rpartition(".")[0]
        offered = set() if package == "toolcell" else set(getattr(importlib.import_module(package), "__all__", ()))
        assert not offered & set(re.findall(r"\w+", names)), f"import {names} from {package}"


def test_examples_on_pages_are_the_files() -> None:
    shown = [each for page in PAGES for each in INCLUDED.findall(page.read_text(encoding="utf-8"))]

    assert len(shown) > 5
    for name, text in shown:
        assert text == (ROOT / name).read_text(encoding="utf-8"), name


def test_excerpts_on_pages_are_lines_of_the_examples() -> None:
    shown = [each for page in PAGES for each in EXCERPT.findall(page.read_text(encoding="utf-8"))]

    assert len(shown) > 10
    for name, text in shown:
        example = without_indentation((ROOT / name).read_text(encoding="utf-8"))
        missing = [each for each in without_indentation(text).split("\n\n") if each.strip() not in example]
        assert not missing, name


def without_indentation(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def test_the_readme_begins_with_the_demo_and_the_tests() -> None:
    assert re.findall(r"^\$ (make \w+)", README, re.MULTILINE)[:2] == ["make demo", "make test"]


@pytest.mark.isolation
@each_row("page", ["README.md", "docs/authoring-tools.md", "docs/plans.md"])
def test_programs_of_a_page_print_what_it_says(page: str) -> None:
    programs = PROGRAM.findall((ROOT / page).read_text(encoding="utf-8"))
    assert programs
    for source, printed in programs:
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == printed


@pytest.mark.isolation
def test_the_agent_of_the_readme_runs_with_a_scripted_model() -> None:
    [source] = [each for each in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "OpenAIProvider" in each]
    script = "set_result(sum(each['euros'] for each in tools.sales(month='2026-10')))"
    answers = f"[calls(('execute_code', {{'code': {script!r}}})), 'We earned 10 euros.']"
    scripted = source.replace("OpenAIProvider()", f"ScriptedModel({answers})").replace(
        "import anyio\n", "import anyio\nfrom toolcell.testing import ScriptedModel, calls\n"
    )
    done = subprocess.run([sys.executable, "-c", scripted], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "We earned 10 euros.\n"


def test_every_requirement_that_a_test_cites_is_defined_on_the_conformance_page() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    cited = {name for marker in CITED.findall(tests) for name in re.findall(r'"([^"]+)"', marker)}
    page = (ROOT / "tests" / "CONFORMANCE.md").read_text(encoding="utf-8")
    defined = DEFINED.findall(page.partition("## Requirements without a test")[0])

    assert len(cited) > 300
    assert not cited - set(defined)
    assert len(defined) == len(set(defined))


def test_the_pages_name_every_outcome_and_every_tool_option() -> None:
    scripts, tools = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("scripts.md", "authoring-tools.md")
    )
    row = next(line for line in scripts.splitlines() if line.startswith("| `outcome` |"))

    assert set(re.findall(r"`(\w+)`", row)[1:]) == {str(outcome) for outcome in Outcome}
    assert set(re.findall(r"`(\w+)`", tools)) >= {field.name for field in fields(ToolOptions)} - {"is_agent"}


def shown_default(name: str, value: Any) -> str:
    return (
        "none"
        if value is None
        else size(value)
        if name.endswith("_bytes") or name == "host_work"
        else f"{value:,g}"
        if value < 100_000
        else f"{value:,}"
    )


def test_the_table_of_limits_has_every_limit_with_its_default() -> None:
    text = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?:\((\w+)=\))?` \| ([^|]+) \| \S", text.partition("\n## Limits\n")[2], re.MULTILINE)
    shown = {field or owner: default for owner, field, default in rows}
    settings = {name: getattr(RegistrySettings(), name) for _, name, _ in rows if hasattr(RegistrySettings(), name)}
    expected = {name: field.default for name, field in Limits.model_fields.items()} | settings
    expected |= {name: field.default for name, field in PoolConfig.model_fields.items()}
    expected |= {"max_iterations": signature(Agent).parameters["max_iterations"].default}
    assert shown == {name: shown_default(name, value) for name, value in expected.items()}
    assert len(settings) == 5


def test_the_page_about_lint_lists_what_a_strict_script_may_import_and_use() -> None:
    pytest.importorskip("RestrictedPython")
    policies = importlib.import_module("toolcell_bridge.guest.lint_policies")
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    modules, names = [re.findall(r"`([\w.]+)`", block) for block in re.findall(r"(?:^> .*\n)+", text, re.MULTILINE)]
    known = [name for name in policies._restricted_builtins() if hasattr(builtins, name) and not name.startswith("_")]
    plain = [name for name in known if not is_exception(getattr(builtins, name))]
    assert (modules, names) == (sorted(IMPORTABLE), sorted(plain))


def is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_every_command_of_the_pages_exists() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

    assert set(re.findall(r"(?:\$ |`|^    )make ([a-z]+)", text, re.MULTILINE)) <= set(targets)
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), name


def flags_of(command: Any) -> set[str]:
    own = {flag for option in command.params for flag in option.opts}
    subcommands = getattr(command, "commands", {}).values()
    return own.union(*map(flags_of, subcommands), {"--help", "-h"})


def test_the_page_of_the_command_line_lists_every_command() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("\n## ")[0]

    assert set(re.findall(r"^    toolcell (\w+)", page, re.MULTILINE)) == set(COMMANDS)


@each_row("page", PAGES, ids=lambda page: page.name)
def test_every_line_for_a_shell_names_a_command_and_flags_that_exist(page: Path) -> None:
    for name, rest in SHELL_LINE.findall(page.read_text(encoding="utf-8")):
        assert name in COMMANDS, name
        command: Any = typer.main.get_command(build([name]))
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest)) <= flags_of(command.commands[name]), rest


FACES = (
    "toolcell",
    *(f"toolcell.{name}" for name in ("agents", "builtin", "integrations", "results", "service", "testing")),
)
"""Packages whose names are for programs alone. Those of the core also have what the outer rooms use."""


@each_row("face", FACES)
def test_every_public_name_is_in_a_page(face: str) -> None:
    pages = [page for page in PAGES if page != OLD_NAMES]
    words = set(re.findall(r"\w+", "\n".join(page.read_text(encoding="utf-8") for page in pages)))

    assert not set(importlib.import_module(face).__all__) - words


def find_name(dotted: str) -> object:
    """The module, class or function of a dotted name."""
    try:
        return importlib.import_module(dotted)
    except (MissingPackage, ModuleNotFoundError) as exc:
        source = HOST.joinpath(*dotted.split(".")[1:]).with_suffix(".py")
        if isinstance(exc, MissingPackage) and source.exists():  # an adapter without its framework: it can be read
            text = source.read_text(encoding="utf-8")
            return SimpleNamespace(
                **{name: name for name in re.findall(r"^(?:class|(?:async )?def) (\w+)", text, re.M)}
            )
        parent, _, name = dotted.rpartition(".")
        return getattr(find_name(parent), name)


@each_row("page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.name)
def test_every_name_of_a_reference_page_is_imported_from_where_the_page_says(page: Path) -> None:
    offered, _, others = page.read_text(encoding="utf-8").partition("## In their own modules")
    documented = re.findall(r"^::: ([\w.]+)$", offered, re.MULTILINE)
    own = re.findall(r"^::: ([\w.]+)$", others, re.MULTILINE)
    assert documented and all(map(find_name, [*documented, *own]))
    for face in re.findall(r"Import these names from\s`([\w.]+)`", offered):
        names = importlib.import_module(face).__all__
        shown = [each for each in documented if not inspect.ismodule(find_name(each))]
        assert not [each for each in shown if each.rpartition(".")[2] not in names]
        assert not [each for each in own if each.rpartition(".")[2] in names]


@each_row("page", [page for page in PAGES if page != OLD_NAMES], ids=lambda page: page.name)
def test_every_name_that_a_page_imports_or_spells_out_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for dotted in re.findall(r"`(toolcell(?:_bridge)?(?:\.\w+)+)", text):
        find_name(dotted)
    for module, names in re.findall(r"^ *from (toolcell[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        for name in names.split(","):
            find_name(f"{module}.{name.strip()}")


def test_every_example_is_named_by_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page != OLD_NAMES)
    examples = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").rglob("*.py")]

    assert len(examples) > 30
    assert not [name for name in examples if name not in text]


def test_every_name_of_compat_that_the_page_for_newcomers_writes_exists() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\bcompat\.([a-zA-Z]\w+)", text))

    assert len(names) > 10
    assert all(hasattr(compat, name) for name in names)


@each_row("page", ["tests/PROMISES.md", "tests/ROBUSTNESS.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    texts = defaultdict(str)  # files of two folders may have one name
    for path in (ROOT / "tests").rglob("test_*.py"):
        texts[path.name] += path.read_text(encoding="utf-8")
    missing = [name for file, name in named if f"def {name}(" not in texts[file]]

    assert named and not missing


# docs/architecture.md: the files it names exist.

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED_FILE = re.compile(r"`((?:toolcell|toolcell_bridge|tests|docs|examples)/[\w./]*)`")
FOLDERS = {"toolcell": ROOT / "runtime", "toolcell_bridge": ROOT / "bridge"}


@each_row("name", sorted(set(NAMED_FILE.findall(ARCHITECTURE))))
def test_every_file_that_the_architecture_page_names_exists(name: str) -> None:
    assert (FOLDERS.get(name.split("/")[0], ROOT) / name).exists()
