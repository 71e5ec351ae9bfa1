"""Notebooks of common packages show with this kernel what they show with ipykernel, as far as it is harmless."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import numpy
import papermill
import pytest
from nbclient import NotebookClient
from PIL import Image

from kernel.conftest import PACKAGES
from toolcell.kernel import spec
from toolcell.kernel.mime_bundles import safe_bundle

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

NAME = "toolcell-packages"

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
    spec.install(NAME, PACKAGES, for_user=True)


def notebook_of(cells: list[str]) -> Any:
    metadata = {"kernelspec": {"name": NAME, "display_name": NAME, "language": "python"}}
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=metadata)


def executed(cells: list[str], kernel: str, folder: Path) -> list[Any]:
    """Return the outputs of each cell."""
    notebook = notebook_of(cells)
    client = NotebookClient(
        notebook, kernel_name=kernel, timeout=240, allow_errors=True, resources={"metadata": {"path": str(folder)}}
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


def executed_by_papermill(sources: list[str], folder: Path) -> list[list[Any]]:
    """Return the outputs of each cell, up to the first that fails: papermill ends there."""
    nbformat.write(notebook_of(sources), folder / "in.ipynb")
    with suppress(papermill.PapermillExecutionError):
        papermill.execute_notebook(
            str(folder / "in.ipynb"), str(folder / "out.ipynb"), kernel_name=NAME, cwd=str(folder), progress_bar=False
        )
    cells = nbformat.read(folder / "out.ipynb", as_version=4).cells
    return [cell.outputs for cell in cells if cell.cell_type == "code" and "execution_count" in cell]


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


PUBLIC = {
    "a first look at a table": [
        "%pip install -q pandas numpy",
        "import pandas as pd\nimport numpy as np\npd.set_option('display.precision', 2)",
        "!ls *.csv",
        "!head -n 3 sales.csv",
        "df = pd.read_csv('sales.csv', parse_dates=['day'])\ndf.head()",
        "df.info()",
        "df.groupby('city')['euros'].agg(['sum', 'mean']).sort_values('sum', ascending=False)",
    ],
    "arrays": [
        "import numpy as np\nrng = np.random.default_rng(0)\na = rng.integers(0, 9, (3, 4))\na",
        "a.T @ a",
        "np.linalg.eigvalsh(a @ a.T).round(3)",
        "%whos ndarray",
        "a.reshape(5, 5)",
    ],
    "a time series": [
        "%matplotlib inline\nimport pandas as pd\ns = pd.Series(range(10), index=pd.date_range('2024-01-01', periods=10))",
        "s.rolling(3).mean().tail(3)",
        "s.resample('W').sum().to_frame('sum')",
        "s.plot(title='s');",
    ],
    "words of a text": [
        "%%writefile poem.txt\nroses are red\nviolets are blue",
        "!cat poem.txt",
        "!wc -w poem.txt",
        "import re\nfrom collections import Counter\nwords = Counter(re.findall(r'\\w+', open('poem.txt').read()))\nwords.most_common(1)",
        "lines = !cat poem.txt | tail -n 1\nlines",
    ],
    "a regression by hand": [
        "import numpy as np\nX = np.c_[np.ones(20), np.arange(20)]\ny = X @ [1.0, 2.0]",
        "%%capture noise\nfor step in range(3):\n    print(step)",
        "print(noise.stdout.split())",
        "w, losses = np.zeros(2), []\nfor _ in range(200):\n    error = X @ w - y\n    w -= 0.005 * X.T @ error / len(y)\n    losses.append(float((error ** 2).mean()))\nround(losses[-1], 3)",
        "assert losses[-1] > losses[0], 'it has learned'",
    ],
    "tasks": [
        "import asyncio\nasync def double(n):\n    await asyncio.sleep(0)\n    return 2 * n",
        "await asyncio.gather(*(double(n) for n in range(3)))",
        "later = asyncio.ensure_future(double(21))",
        "await later",
        "also = asyncio.create_task(double(4))",
        "await also, asyncio.create_task(double(5), name='last').get_name()",
    ],
    "classes": [
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int = 0\n    def _repr_html_(self): return f'<b>{self.x}</b>'",
        "Point(3)",
        "display(Point(1), Point(2))",
        "Point()",
        "raise ExceptionGroup('two', [ValueError(1), KeyError('a')])",
    ],
    "files and folders": [
        "import os, json, pathlib\npathlib.Path('out').mkdir(exist_ok=True)\nfor name in 'ab': json.dump({'n': name}, open(f'out/{name}.json', 'w'))",
        "!ls out",
        "!cat out/*.json",
        "%cd out",
        "!pwd | wc -l",
        "%cd ..",
        "!ls nothing",
        "sorted(os.listdir('out'))",
    ],
    "the machine": [
        "!echo begin",
        "!git --version && ls",
        "%%bash\necho hello",
        "import subprocess\nsubprocess.run(['uname'], capture_output=True, text=True).stdout",
        "%nothing_like_it",
        "%load_ext nothing_like_it",
        "!echo end",
    ],
    "a gallery of charts": [
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nimport numpy as np",
        "x = np.linspace(0, 6, 50)\nplt.plot(x, np.sin(x), label='sin')\nplt.legend()",
        "fig, ax = plt.subplots(figsize=(3, 2))\nax.bar(['a', 'b'], [1, 2])\nplt.show()",
        "%matplotlib notebook\nplt.scatter(x, x ** 2)\nplt.show()",
        "import matplotlib\nmatplotlib.use('TkAgg')\nplt.hist(x)\nplt.show()",
    ],
}
"""Ten notebooks of the kind that people share. They have `sales.csv` beside them, and the last one chooses windows."""

NO_PROGRAM = "there is no shell and no program in a sandbox: an error output says what works"
DIFFERENT = {
    ("pillow", 2): "the first file that a cell writes is said to stay in the sandbox",
    ("a first look at a table", 0): "pip is not run: the kernel says what is there",
    ("a gallery of charts", 3): "drawn as inline: the interactive picture of ipykernel needs a comm",
    ("a gallery of charts", 4): "drawn as inline: with ipykernel there is a window, or an error without a screen",
    ("classes", 4): "a group of exceptions is an error output; with ipykernel it is only printed",
    ("files and folders", 1): "one name in a line, as in a pipe: no terminal has columns",
    ("files and folders", 3): "the workspace is another folder",
    ("files and folders", 5): "the workspace is another folder",
    ("the machine", 1): NO_PROGRAM,
    ("the machine", 2): NO_PROGRAM,
    ("the machine", 3): NO_PROGRAM,
    ("the machine", 4): "an unknown magic is an error output; with ipykernel it is only printed",
}
"""Cells that differ from ipykernel's, by notebook and number, each with its reason."""


def test_notebooks_differ_from_ipykernel_only_where_there_is_a_reason(tmp_path: Path) -> None:
    cells = [((title, at), cell) for title, cells in (NOTEBOOKS | PUBLIC).items() for at, cell in enumerate(cells)]
    sources = [cell for _, cell in cells]
    shown = [executed(sources, kernel, with_sales(tmp_path / kernel)) for kernel in ("python3", NAME)]
    differ = {
        place: (our, their)
        for (place, _), theirs, ours in zip(cells, *shown, strict=True)
        if (our := _in_words(ours)) != (their := _in_words(map(harmless, theirs)))
    }

    assert differ.keys() == DIFFERENT.keys(), [differ.get(each) for each in differ.keys() ^ DIFFERENT.keys()]


@pytest.mark.parametrize("title", ["a time series", "classes"])
def test_papermill_shows_what_nbclient_shows_up_to_the_first_cell_that_fails(title: str, tmp_path: Path) -> None:
    ours = executed(PUBLIC[title], NAME, with_sales(tmp_path / "nbclient"))
    papermills = executed_by_papermill(PUBLIC[title], with_sales(tmp_path / "papermill"))
    end = next((at + 1 for at, outputs in enumerate(ours) if _fails(outputs)), len(ours))

    assert [*map(_in_words, papermills)] == [*map(_in_words, ours[:end]), *([[]] * (len(ours) - end))]


def with_sales(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sales.csv").write_text("day,city,euros\n2024-01-01,Rome,3.5\n2024-01-02,Oslo,4\n")
    return folder


def _fails(outputs: list[Any]) -> bool:
    return any(each.output_type == "error" and each.ename and each.traceback for each in outputs)


def harmless(output: Any) -> Any:
    """Return an output of ipykernel without what this kernel does not show."""
    if "data" in output:
        output.data = safe_bundle(output.data)
    return output


def _in_words(outputs: Iterable[Any]) -> list[Any]:
    """Return outputs as they can be compared: without what differs from one terminal to the next."""
    found = []
    for output in outputs:
        if any(
            "plotly" in mime for mime in output.get("data", ())
        ):  # ipykernel's also has the page's program of plotly
            output.data = {mime: form for mime, form in output.data.items() if "plotly" in mime}
        elif output.output_type == "stream":
            output.text = output.text.replace("\r\n", "\n")
        found.append(comparable(output))
    return found
