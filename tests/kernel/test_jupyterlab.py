"""A notebook in JupyterLab itself, in a browser."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import httpx
import nbformat
import pytest
from playwright.sync_api import Page, sync_playwright

from kernel.conftest import INSTALLING_S, PACKAGES
from machine import CHROMIUM
from toolcell.kernel import spec

LAB = os.environ.get("JUPYTER_LAB") or which("jupyter-lab")
"""JupyterLab's program. It may be of another environment: kernels are found by their folders."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        LAB is None, reason="jupyterlab is not installed: set JUPYTER_LAB to what `.ci/jupyterlab` prints"
    ),
]

PATIENCE_MS = INSTALLING_S * 1000  # the first cell waits for the packages
CELLS = [
    "import sys\nprint('a text')\nprint('to stderr', file=sys.stderr)",
    "import matplotlib.pyplot as plt\nplt.figure(figsize=(3, 1.5))\nplt.plot([1, 3, 2]);",
    "import pandas as pd\npd.DataFrame({'city': ['Rome', 'Oslo'], 'degrees': [31.0, 17.5]})",
    "def inverse(x): return 1 / x\ninverse(0)",
    "name = input('name? ')\nname * 2",
    "import time\nwhile True: time.sleep(0.01)",
    "'name' in globals()",
]


@pytest.fixture
def page(jupyter: Path, tmp_path: Path) -> Iterator[Page]:
    """The notebook, opened."""
    spec.install("toolcell-lab", PACKAGES, for_user=True)
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS],
        metadata={"kernelspec": {"name": "toolcell-lab", "display_name": "Python (toolcell)", "language": "python"}},
    )
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / "lab.ipynb")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = ["--allow-root", "--no-browser", f"--port={port}", "--IdentityProvider.token=token"]
    options += [f"--ServerApp.root_dir={tmp_path / 'notebooks'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([str(LAB), *options], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/api", timeout=60)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()
                time.sleep(0.1)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            opened = browser.new_page(viewport={"width": 1100, "height": 1700})
            opened.set_default_timeout(PATIENCE_MS)
            opened.goto(f"http://127.0.0.1:{port}/lab/tree/lab.ipynb?token=token")
            opened.wait_for_selector(".jp-CodeCell")
            opened.wait_for_selector("text='Python (toolcell) | Idle'")
            yield opened
            browser.close()
    finally:
        process.terminate()
        process.wait()


def begin(page: Page, number: int) -> None:
    page.locator(".jp-CodeCell .cm-content").nth(number).click()
    page.keyboard.press("Shift+Enter")


def shown(page: Page, number: int) -> str:
    """Run a cell to its end, and return the text of its outputs."""
    begin(page, number)
    return over(page, number)


def over(page: Page, number: int) -> str:
    page.wait_for_function(
        "number => /\\[\\d+\\]/.test(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[number].textContent)",
        arg=number,
    )
    page.wait_for_selector("text='Python (toolcell) | Idle'")
    return "\n".join(page.locator(".jp-CodeCell").nth(number).locator(".jp-OutputArea-output").all_inner_texts())


def test_a_notebook_in_jupyterlab(page: Page, tmp_path: Path) -> None:
    cells = page.locator(".jp-CodeCell")

    assert shown(page, 0).count("a text") == 1 and cells.nth(0).locator("[data-mime-type$=stderr]").count() == 1
    shown(page, 1)
    pictures = cells.nth(1).locator(".jp-RenderedImage img")
    assert pictures.count() == 1 and pictures.evaluate("each => each.naturalWidth") > 100
    shown(page, 2)
    assert cells.nth(2).locator("table").count() == 1 and cells.nth(2).locator("td").all_inner_texts()[:2] == [
        "Rome",
        "31.0",
    ]
    failed = shown(page, 3)
    assert failed.count("ZeroDivisionError: division by zero") == 1 and "[31m" not in failed

    begin(page, 4)
    page.fill(".jp-Stdin-input", "Bo")
    page.keyboard.press("Enter")
    assert "BoBo" in over(page, 4)

    begin(page, 5)
    page.wait_for_selector("text='Python (toolcell) | Busy'")
    page.click("[data-command='notebook:interrupt-kernel'], [title^='Interrupt the kernel']")
    assert over(page, 5).count("KeyboardInterrupt") >= 1
    assert "True" in shown(page, 6)

    page.click("[title^='Restart the kernel']")
    page.click(".jp-Dialog button.jp-mod-warn")
    page.wait_for_selector("text='Python (toolcell) | Idle'")
    assert "False" in shown(page, 6)
    page.screenshot(path=tmp_path / "lab.png")
