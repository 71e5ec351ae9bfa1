"""What 500 tools cost a model: the tables of docs/tools.md, and the limits that documentation promises."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest
from benchmarks.catalogue_tokens import WAYS, measure_all, shown

from house import ROOT

pytestmark = pytest.mark.isolation
FIGURE = re.compile(r"^\| (?P<name>[^|]+) \|(?: (?P<requests>\d+) \|)? (?P<tokens>[\d,]+) \|$", re.MULTILINE)
TOLERANCE = 0.15
"""Descriptions are reworded now and then."""


def written_figures() -> dict[str, tuple[int | None, int]]:
    text = Path(ROOT, "docs", "tools.md").read_text(encoding="utf-8")
    section = text.partition("### What many tools cost a model\n")[2].partition("\n## ")[0]
    return {
        found["name"]: (int(found["requests"]) if found["requests"] else None, int(found["tokens"].replace(",", "")))
        for found in FIGURE.finditer(section)
    }


@pytest.mark.slow
def test_the_page_has_what_is_measured() -> None:
    told = {name: (None, tokens) for name, tokens in shown().items()}
    measured = {**anyio.run(measure_all), **told}
    written = written_figures()

    assert written.keys() == measured.keys()
    for name, (requests, tokens) in measured.items():
        assert written[name][0] == requests, name
        assert written[name][1] == pytest.approx(tokens, rel=TOLERANCE), name


def test_an_mcp_client_pays_less_than_a_thousand_tokens_for_five_hundred_tools() -> None:
    costs = shown()

    assert costs["all that `toolcell mcp` lists"] < 1_000
    assert costs["names"] < costs["a line each"] < costs["stubs"] < costs["definitions of plain tool calling"]


def test_every_way_does_the_task_with_fewer_tokens_than_plain_tool_calling() -> None:
    figures = written_figures()
    plain = figures[WAYS[0].name][1]

    assert all(figures[way.name][1] < plain for way in WAYS[1:])
