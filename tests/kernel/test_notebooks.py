"""Notebooks of common packages show with this kernel what they show with ipykernel, as far as it is harmless."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import numpy
import papermill
import pytest
from nbclient import NotebookClient
from PIL import Image

from toolcell.kernel import spec
from toolcell.kernel.mime_bundles import safe_bundle, safe_lines

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

NAME = "toolcell-packages"
PACKAGES = "pandas,matplotlib,seaborn,scikit-learn,plotly,sympy,networkx,polars,duckdb,pillow,jinja2"

NOTEBOOKS = {
    "pandas": [
        "import pandas as pd\ndf = pd.DataFrame({'city': ['Rome', 'Oslo', 'Rome'], 'degrees': [31.0, 17.5, 29.0]})\ndf",
        "df.groupby('city').degrees.agg(['mean', 'count'])",
        "df.describe()",
        "pd.DataFrame([range(30)])",
        "df.style.set_uuid('x').format(precision=1)",
        "df.info()",
        "display(df.head(1), df.city)\ndf.missing_column",
    ],
    "matplotlib": [
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nfig, axes = plt.subplots(1, 2)\naxes[0].plot([1, 3, 2]); axes[1].bar(['a', 'b'], [2, 1])",
        "plt.plot([1, 2])\nprint('between')\nplt.show()\nplt.hist([1, 2, 2, 3])\nplt.title('second')",
        "fig",
        "%config InlineBackend.close_figures = False\nplt.plot([1, 2]);",
        "plt.plot([2, 1]);\nplt.get_fignums()",
        "%config InlineBackend.close_figures = True\nplt.close('all')",
        "plt.plot([3, 1])\n1 / 0",
    ],
    "seaborn": [
        "import pandas as pd, seaborn as sns\nsns.set_theme()\ndata = pd.DataFrame({'x': range(20), 'y': [n % 7 for n in range(20)]})",
        "sns.scatterplot(data=data, x='x', y='y');",
        "sns.heatmap(data.corr(), annot=True)",
    ],
    "scikit-learn": [
        "from sklearn.datasets import load_iris\nfrom sklearn.linear_model import LogisticRegression\nfrom sklearn.model_selection import train_test_split\nX, y = load_iris(return_X_y=True)\nparts = train_test_split(X, y, random_state=0)",
        "model = LogisticRegression(max_iter=1000).fit(parts[0], parts[2])\nprint(round(model.score(parts[1], parts[3]), 3))",
        "model.predict(parts[1][:5])",
    ],
    "plotly": [
        "import plotly.graph_objects as go\nfigure = go.Figure(go.Scatter(x=[1, 2, 3], y=[3, 1, 2]))\nfigure",
        "figure.update_layout(title='shown').show()",
    ],
    "sympy": [
        "import sympy as sp\nsp.init_printing()\nx = sp.symbols('x')\nsp.integrate(sp.exp(-x**2), (x, -sp.oo, sp.oo))",
        "sp.Matrix([[1, x], [x, 1]]).inv()",
        "print(sp.solve(x**2 - 2, x))",
    ],
    "networkx": [
        "import networkx as nx\ngraph = nx.path_graph(5)\nprint(nx.shortest_path(graph, 0, 4))\ngraph",
        "nx.draw(graph, pos=nx.circular_layout(graph), with_labels=True)",
    ],
    "polars": [
        "import polars as pl\nframe = pl.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'x']})\nframe",
        "frame.group_by('b').agg(pl.col('a').sum()).sort('b')",
        "frame.lazy().filter(pl.col('a') > 1).collect()",
    ],
    "duckdb": [
        "import duckdb\nduckdb.sql('select 6 * 7 as answer').fetchall()",
        "import pandas as pd\nnumbers = pd.DataFrame({'n': range(5)})\nduckdb.sql('select sum(n) as total from numbers').df()",
        "print(duckdb.sql('select n, n * n as square from numbers'))",
    ],
    "pillow": [
        "from PIL import Image, ImageDraw\nimage = Image.new('RGB', (64, 32), 'white')\nImageDraw.Draw(image).ellipse((8, 4, 40, 28), fill='red')\nimage",
        "display(image.rotate(90, expand=True))\nimage.size",
        "image.save('out.png')\nfrom IPython.display import Image as Shown\nShown('out.png')",
    ],
}


@pytest.fixture(scope="session", autouse=True)
def _installed(jupyter: Path) -> None:
    spec.install(NAME, ["--packages", PACKAGES, "--memory-bytes", "4GiB"], for_user=True)


def notebook_of(cells: list[str]) -> Any:
    metadata = {"kernelspec": {"name": NAME, "display_name": NAME, "language": "python"}}
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=metadata)


def executed(cells: list[str], kernel: str, folder: Path) -> list[Any]:
    """Return the outputs of each cell."""
    notebook = notebook_of(cells)
    client = NotebookClient(
        notebook, kernel_name=kernel, timeout=60, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def comparable(output: Any) -> Any:
    """Return an output without what differs from one run to the next."""
    match output.output_type:
        case "stream":
            return output.name, steady(output.text)
        case "error":
            return output.ename, output.evalue
        case kind:
            return kind, {mime: _form(mime, form) for mime, form in output.data.items()}


def _form(mime: str, form: Any) -> Any:
    if mime == "image/png":
        return Picture(Image.open(io.BytesIO(base64.b64decode(form))).convert("RGB"))
    return steady(form) if isinstance(form, str) else form


class Picture:
    """A picture, which equals one that looks the same."""

    def __init__(self, image: Image.Image) -> None:
        self.pixels = numpy.asarray(image, dtype=float)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Picture)
        return self.pixels.shape == other.pixels.shape and float(abs(self.pixels - other.pixels).mean()) < 1

    def __repr__(self) -> str:
        return f"<picture {self.pixels.shape}>"


def steady(text: str) -> str:
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    return re.sub(r"(memory usage: ).*", r"\1", text)


def in_order(outputs: list[Any], *, package: str) -> list[Any]:
    found = [comparable(output) for output in outputs]
    if package == "plotly":  # ipykernel's also has the page's program of plotly
        found = [(kind, {mime: form for mime, form in data.items() if "plotly" in mime}) for kind, data in found]
        found = [each for each in found if each[1]]
    return found


def executed_by_papermill(sources: list[str], folder: Path) -> list[list[Any]]:
    """Return the outputs of each cell, up to the first that fails: papermill ends there."""
    nbformat.write(notebook_of(sources), folder / "in.ipynb")
    with suppress(papermill.PapermillExecutionError):
        papermill.execute_notebook(
            str(folder / "in.ipynb"), str(folder / "out.ipynb"), kernel_name=NAME, cwd=str(folder), progress_bar=False
        )
    cells = nbformat.read(folder / "out.ipynb", as_version=4).cells
    return [cell.outputs for cell in cells if cell.cell_type == "code" and "execution_count" in cell]


@pytest.mark.parametrize("package", NOTEBOOKS)
def test_a_notebook_shows_what_it_shows_with_ipykernel(package: str, tmp_path: Path) -> None:
    cells = NOTEBOOKS[package]
    runs = {
        "nbclient": lambda folder: executed(cells, NAME, folder),
        "papermill": lambda folder: executed_by_papermill(cells, folder),
    }
    shown = {"ipykernel": executed(cells, "python3", tmp_path)}
    for output in [each for outputs in shown["ipykernel"] for each in outputs]:
        if "data" in output:
            output.data = safe_bundle(output.data)
        elif "evalue" in output:
            output.evalue = safe_lines(output.evalue)
    for name, run in runs.items():
        (tmp_path / name).mkdir()
        shown[name] = run(tmp_path / name)

    assert any(shown["nbclient"])
    for each in (outputs for name in runs for outputs in shown[name]):
        each[:] = [output for output in each if not str(output.get("text")).startswith("[toolcell] ")]
    for name in runs:
        for cell, our, their in zip(cells, shown[name], shown["ipykernel"], strict=True):
            assert in_order(our, package=package) == in_order(their, package=package), (name, cell)


@pytest.mark.parametrize("kernel", [[], ["-k", NAME]], ids=["of the notebook", "of the command"])
def test_papermill_gives_parameters_and_keeps_outputs(kernel: list[str], tmp_path: Path) -> None:
    notebook = notebook_of(["n = 1", "import pandas as pd\npd.DataFrame({'n': range(n)})", "print(n)", "1 / 0", "n"])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    if kernel:
        notebook.metadata["kernelspec"] |= {"name": "python3"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "-p", "n", "3", "--no-progress-bar", *kernel]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "%|" not in done.stderr
    out = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    table, printed, failed, after = [cell.outputs for cell in out.cells if cell.cell_type == "code"][-4:]
    assert "<td>2</td>" in table[0].data["text/html"] and printed[0].text == "3\n"
    assert [each.ename for each in failed] == ["ZeroDivisionError"] and after == []
    assert out.metadata["papermill"]["parameters"] == {"n": 3}
