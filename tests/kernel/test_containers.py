"""The sandbox of a kernel may be a container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from toolcell.kernel import spec

from .conftest import Notebook

pytestmark = pytest.mark.docker


def test_a_notebook_runs_in_a_container(jupyter: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("from the folder")
    spec.install("toolcell-docker", ["--backend", "docker", "--save"], for_user=True)
    cells = [
        "import os\nos.path.exists('/.dockerenv'), open('beside.txt').read()",
        "print('out')\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'))",
        "open('written.txt', 'w').write('of the cell');",
        "1 / 0",
        "import asyncio\nawait asyncio.sleep(0, 'after')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook, kernel_name="toolcell-docker", timeout=200, allow_errors=True, resources=resources
    ).execute()

    where, shown, written, failed, after = [cell.outputs for cell in notebook.cells]
    assert where[0].data["text/plain"] == "(True, 'from the folder')"
    assert shown[0].text == "out\n" and shown[1].data["text/html"] == "<b>bold</b>"
    assert written == [] and (tmp_path / "written.txt").read_text() == "of the cell"
    assert failed[0].ename == "ZeroDivisionError"
    assert after[0].data["text/plain"] == "'after'"


def test_a_cell_in_a_container_asks_and_is_interrupted_and_its_names_stay(notebooks: Callable[..., Notebook]) -> None:
    notebook = notebooks("--backend", "docker")
    assert notebook.run("kept = input('name? ')", answers=["Bo"]).reply["status"] == "ok"
    ident = notebook.begin("import time\nprint('go')\nwhile True: time.sleep(0.01)")
    notebook.manager.interrupt_kernel()

    assert notebook.outcome_of(ident).reply["ename"] == "KeyboardInterrupt"
    assert notebook.run("kept").data == {"text/plain": "'Bo'"}
