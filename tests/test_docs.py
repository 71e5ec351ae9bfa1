"""What the documentation says is true: links lead somewhere, programs run, figures and names agree."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from toolcell import Outcome
from toolcell.tools.options import ToolOptions
from toolcell_bridge.wire.messages import TAGS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "sandbox_images").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PROGRAM = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
"""A program of the README, followed by what it prints."""
CITED = re.compile(r"\bconforms\(([^)]*)\)")
DEFINED = re.compile(r"^\| ([A-Z][A-Z]?(?:-b|-)?\d+) \| \S", re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment under which GitHub offers a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if fragment:
            assert fragment in map(anchor, HEADING.findall(target.read_text(encoding="utf-8"))), link


def test_the_readme_begins_with_the_demo_and_the_tests() -> None:
    assert re.findall(r"^\$ (make \w+)", README, re.MULTILINE)[:2] == ["make demo", "make test"]


@pytest.mark.isolation
def test_programs_of_the_readme_print_what_it_says() -> None:
    programs = PROGRAM.findall(README)
    assert programs
    for source, printed in programs:
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == printed


def test_figures_of_the_readme_are_those_of_the_benchmarks_page() -> None:
    results = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+), (ms|us|4 clients) \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    for title, _, figures in rows:
        section = re.split(rf"^ {re.escape(title)}", results, flags=re.MULTILINE)[1].split("\n\n")[0]
        assert set(figures.split(" | ")) <= set(section.split()), title


def test_every_requirement_that_a_test_cites_is_defined_on_the_conformance_page() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    cited = {name for marker in CITED.findall(tests) for name in re.findall(r'"([^"]+)"', marker)}
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    defined = DEFINED.findall(page.partition("## Requirements without a test")[0])

    assert len(cited) > 300
    assert not cited - set(defined)
    assert len(defined) == len(set(defined))


def test_the_table_of_messages_is_the_one_in_the_code() -> None:
    page = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([\w, ]+) \|", page, re.MULTILINE)

    assert [(int(tag), name, columns.split(", ")) for tag, name, columns in rows] == [
        (tag, kind.__name__, [field.name for field in fields(kind)]) for tag, kind in TAGS.items()
    ]


def test_the_pages_name_every_outcome_and_every_tool_option() -> None:
    scripts, tools = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("scripts.md", "tools.md"))
    row = next(line for line in scripts.splitlines() if line.startswith("| `outcome` |"))

    assert set(re.findall(r"`(\w+)`", row)[1:]) == {str(outcome) for outcome in Outcome}
    assert set(re.findall(r"`(\w+)`", tools)) >= {field.name for field in fields(ToolOptions)} - {"is_agent"}
