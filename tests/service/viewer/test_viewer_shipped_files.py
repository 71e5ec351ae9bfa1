"""The files of others that the viewer ships are those of their npm packages, and only they and ours are there."""

from __future__ import annotations

import json

import pytest

from machine import VIEWER_LOCK as LOCK
from machine import npm_packages
from toolcell.service.viewer.app import STATIC

OURS = {"viewer.css", "viewer.js", "charts.js", "icon.svg"}
FROM_NPM = {
    "htmx.min.js": "htmx.org/dist/htmx.min.js",
    "htmx.LICENSE": "htmx.org/LICENSE",
    "sse.min.js": "htmx-ext-sse/dist/sse.min.js",
    "sse.LICENSE": "htmx-ext-sse/LICENSE",
    "uPlot.iife.min.js": "uplot/dist/uPlot.iife.min.js",
    "uPlot.min.css": "uplot/dist/uPlot.min.css",
    "uPlot.LICENSE": "uplot/LICENSE",
}


def test_every_shipped_file_is_ours_or_of_a_package_with_its_licence() -> None:
    assert {path.name for path in STATIC.iterdir()} == OURS | set(FROM_NPM)
    packages = {name.partition("/")[0] for name in FROM_NPM.values()}
    assert packages == {name.rpartition("/")[2] for name in json.loads(LOCK.read_text())["packages"] if name}


@pytest.mark.npm
def test_the_shipped_files_are_those_of_the_locked_packages() -> None:
    folder = npm_packages("viewer-packages", LOCK)
    for name, path in FROM_NPM.items():
        assert (STATIC / name).read_bytes() == (folder / "node_modules" / path).read_bytes(), name


def test_our_scripts_make_no_html_of_text_and_ask_nobody_else() -> None:
    for name in OURS - {"icon.svg"}:
        text = (STATIC / name).read_text(encoding="utf-8")
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "://",
            "Function(",
        ):
            assert forbidden not in text, (name, forbidden)
