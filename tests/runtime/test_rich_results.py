"""What a script's last value shows in a notebook, and the figures it leaves open, come back as files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rows import each_row
from sandbox.forty_packages import USUAL
from toolcell import Limits, PoolConfig, SyncRuntime
from toolcell_bridge.guest import files, rich
from toolcell_bridge.wire.messages import FilePart, FileProblem

PNG = rich.PNG + b"pixels"


class Picture:
    """Shows what it was given."""

    def __init__(self, png: object = None, html: object = None) -> None:
        self.png, self.html = png, html

    def _repr_png_(self) -> object:
        return _made(self.png)

    def _repr_html_(self) -> object:
        return _made(self.html)


def _made(content: object) -> object:
    if isinstance(content, BaseException):
        raise content
    return content


def shown(value: object, most: int = 9, files_bytes: int = 1000) -> dict[str, Any]:
    """Each file's content, or its problem."""
    found: dict[str, Any] = {}
    for message in rich.show(value, "", most, files_bytes):
        if isinstance(message, FileProblem):
            found[message.name] = message.problem
        else:
            assert isinstance(message, FilePart)
            found[message.name] = found.get(message.name, b"") + message.data
    return found


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for matplotlib's module that knows the open figures."""
    open_figures: dict[int, Any] = {}

    class Figure:
        def __init__(self, parts: int = 2, problem: BaseException | None = None) -> None:
            self.parts, self.problem = parts, problem
            number = len(open_figures) + 1
            open_figures[number] = SimpleNamespace(num=number, canvas=SimpleNamespace(figure=self))

        def get_children(self) -> list[int]:
            return list(range(self.parts))

        def savefig(self, file: Any, **_: Any) -> None:
            _made(self.problem)
            file.write(PNG)

    module: Any = ModuleType(rich.FIGURES)
    module.Gcf = SimpleNamespace(get_all_fig_managers=open_figures.values, destroy=open_figures.pop)
    classes: Any = ModuleType("matplotlib.figure")
    classes.Figure = Figure
    monkeypatch.setitem(sys.modules, rich.FIGURES, module)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", classes)
    return SimpleNamespace(Figure=Figure, open=open_figures, module=module)


def test_the_picture_and_the_html_of_a_value_are_files() -> None:
    assert shown(Picture(PNG, "<b>ü</b>")) == {"result.png": PNG, "result.html": "<b>ü</b>".encode()}
    assert shown(Picture((PNG, {"width": 3}), "\ud800")) == {"result.png": PNG, "result.html": b"&#55296;"}
    assert shown(Picture(None, "")) == {}


@each_row("value", [1, "text", None, [1], {"_repr_png_": 1}, object(), Picture], ids=lambda value: type(value).__name__)
def test_a_value_that_shows_nothing_makes_no_file(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, rich.FIGURES, raising=False)
    assert shown(value) == {}


@each_row(
    "problem",
    [ValueError("no\ud800"), SystemExit(3), MemoryError(), RecursionError("deep" * 999), 7, b"GIF8", [PNG]],
    ids=lambda problem: type(problem).__name__,
)
def test_a_picture_that_cannot_be_made_is_a_problem_of_its_file_only(problem: object) -> None:
    found = shown(Picture(problem, "<p>"))
    assert isinstance(found["result.png"], str) and 0 < len(found["result.png"].encode()) <= 1024
    assert found["result.html"] == b"<p>"


def test_a_metaclass_that_raises_is_asked_for_nothing() -> None:
    class Meta(type):
        def __getattr__(cls, name: str) -> object:
            raise ValueError(name)

    assert shown(Meta("Odd", (), {})()) == {}


def test_an_interrupt_ends_the_making_of_a_picture() -> None:
    with pytest.raises(KeyboardInterrupt):
        shown(Picture(KeyboardInterrupt()))


def test_files_that_are_shown_stay_within_count_and_bytes() -> None:
    assert shown(Picture(PNG, "x" * 50), files_bytes=60) == {
        "result.png": PNG,
        "result.html": "too large (50 > 46 bytes left)",
    }
    assert shown(Picture(PNG, "x"), most=1) == {"result.png": PNG, "result.html": "too many files (limit 1)"}
    large = "x" * (2 * rich.CHUNK_BYTES + 1)
    assert shown(Picture(None, large), files_bytes=len(large)) == {"result.html": large.encode()}


def test_open_figures_are_returned_and_closed(figures: Any) -> None:
    for parts in (2, 1, 2):  # the second one is empty
        figures.Figure(parts)
    assert rich.is_possible(None)
    assert shown(None) == {"figure-1.png": PNG, "figure-2.png": PNG}
    assert not figures.open


def test_a_figure_that_is_the_last_value_is_returned_once_open_or_closed(figures: Any) -> None:
    figure = figures.Figure()
    assert list(shown(figure)) == ["figure-1.png"]
    assert list(shown(figure)) == ["figure-1.png"]


def test_a_figure_that_cannot_be_drawn_is_a_problem_of_its_file_only(figures: Any) -> None:
    figures.Figure(2, ValueError("image size is too large"))
    figures.Figure()
    assert shown(None) == {"figure-1.png": "ValueError: image size is too large", "figure-2.png": PNG}
    assert not figures.open


def test_of_many_open_figures_the_first_are_returned_and_the_others_reported(figures: Any) -> None:
    for _ in range(500):
        figures.Figure()
    found = shown(None, most=64)
    assert [name for name, content in found.items() if content == PNG] == [f"figure-{n}.png" for n in range(1, 11)]
    assert len(found) == 11 and "500 figures are open" in found["figure-11.png"]


def test_a_matplotlib_that_the_script_has_broken_is_a_problem_of_a_file(figures: Any) -> None:
    figures.module.Gcf = None
    assert "AttributeError" in shown(None)["figure-1.png"]


# In real sandboxes.

CLASS = """
class Shown:
    def _repr_png_(self): return b"\\x89PNG\\r\\n\\x1a\\n" + b"p" * 600
    def _repr_html_(self): return "<i>" + 1 // zero
zero = 0
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    with SyncRuntime(packages=USUAL, pool=PoolConfig(warm=1)) as opened:
        yield opened


@pytest.mark.isolation
def test_a_run_returns_what_its_last_value_shows_unless_it_sets_its_result(runtime: SyncRuntime) -> None:
    result = runtime.execute_code(CLASS + "Shown()")
    assert result.ok and not result.has_value and not result.logs.text
    picture, html = result.files
    assert (picture.name, picture.media_type, picture.size) == ("result.png", "image/png", 608)
    assert (html.name, html.data) == ("result.html", None) and "ZeroDivisionError" in (html.problem or "")
    assert not runtime.execute_code(CLASS + "set_result(1)\nShown()").files
    without = runtime.execute_code(CLASS + "Shown()", limits=Limits(files=0))
    assert without.ok and not without.files and "was not kept as the result" in without.logs.text


HTML_ALONE = {
    "text": ("def __repr__(self): return 'a table'", "a table\n"),
    "no text of its own": ("pass", ""),
    "text that fails": ("def __repr__(self): raise SystemExit(3)", ""),
    "a picture too": (f"def _repr_png_(self): return {PNG!r}\n  def __repr__(self): return 'x'", ""),
}


@pytest.mark.isolation
@each_row("case", HTML_ALONE)
def test_the_text_of_a_last_value_that_has_html_alone_is_printed(runtime: SyncRuntime, case: str) -> None:
    method, printed = HTML_ALONE[case]
    result = runtime.execute_code(f"class Shown:\n  def _repr_html_(self): return '<b>'\n  {method}\nShown()")
    assert (result.ok, result.has_value, result.logs.text) == (True, False, printed), result.error
    assert result.files[-1].name == "result.html"


@pytest.mark.isolation
def test_a_query_as_last_value_is_named_beside_its_html(runtime: SyncRuntime) -> None:
    members = (
        "{'__module__': 'polars.lazyframe.frame', '_repr_html_': lambda self: '<b>', '__repr__': lambda self: 'x'}"
    )
    result = runtime.execute_code(f"type('LazyFrame', (), {members})()")
    assert [file.name for file in result.files] == ["result.html"], result.error
    assert not result.has_value and result.logs.stdout == ""
    assert (
        "was not kept as the result: cannot send result: a query that was not run: send x.collect()"
        in result.logs.stderr
    )


PICTURES = {"Figure": "matplotlib.figure", "Artist": "matplotlib.artist", "Image": "PIL.Image"}


@pytest.mark.isolation
@each_row("kind", PICTURES)
def test_nobody_is_told_to_save_a_picture_that_was_shown(runtime: SyncRuntime, kind: str) -> None:
    source = """
class Shown:
    def _repr_png_(self): return {png}
Shown.__module__, Shown.__qualname__ = {module!r}, {kind!r}
Shown()"""
    for png, names, told in ((rich.PNG + b"x", ["result.png"], False), (None, [], True)):
        result = runtime.execute_code(source.format(png=png, module=PICTURES[kind], kind=kind))
        assert [file.name for file in result.files] == names, result.error
        assert not result.has_value and ("return it as a file" in result.logs.stderr) is told


@pytest.mark.isolation
def test_the_types_of_a_frame_are_text(runtime: SyncRuntime) -> None:
    result = runtime.execute_code("import pandas as pd\npd.DataFrame({'n': [1], 't': pd.to_datetime(['2026'])}).dtypes")
    assert result.ok and result.value.tolist()[0] == "int64" and result.value.tolist()[1].startswith("datetime64[")
    assert "values of type Int64DType arrive as str" in result.logs.stderr


@each_row("size", [0, 1, 4, 5, 8, 9, 1000])
def test_a_part_of_a_file_is_divided_to_fit_into_a_message(size: int) -> None:
    problem, part = FileProblem("a", 0, "missing"), FilePart("b", "text/plain", b"x" * size, True)
    first, *pieces = files.in_pieces([problem, part], 8)

    assert first == problem
    assert all(isinstance(piece, FilePart) and len(piece.data) <= 4 for piece in pieces)
    assert [piece.last for piece in pieces if isinstance(piece, FilePart)] == [False] * (len(pieces) - 1) + [True]
    assert b"".join(piece.data for piece in pieces if isinstance(piece, FilePart)) == b"x" * size


def test_a_file_that_grows_while_it_is_read_is_sent_as_long_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (files.CHUNK_BYTES + 1))
    parts = files.collect(["a"], str(tmp_path), files=1, files_bytes=files.CHUNK_BYTES * 4)
    first = next(parts)
    (tmp_path / "a").write_bytes(b"y" * files.CHUNK_BYTES * 3)
    assert [len(part.data) for part in (first, *parts) if isinstance(part, FilePart)] == [files.CHUNK_BYTES, 1]


@pytest.mark.isolation
def test_a_file_that_is_larger_than_a_message_arrives_whole(runtime: SyncRuntime) -> None:
    html = "class Html:\n  def _repr_html_(self): return 'x' * 100_000\n"
    for source in (f"{html}Html()", "open('f', 'w').write('x' * 100_000)\nset_result(1, files=['f'])"):
        result = runtime.execute_code(source, limits=Limits(frame_bytes=8192))
        assert result.ok and [(file.size, file.data) for file in result.files] == [(100_000, b"x" * 100_000)]


@pytest.mark.isolation
def test_figures_of_a_sessions_scripts_are_files_of_that_script_alone(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        first = session.execute_code("import matplotlib.pyplot as plt\nset_result(len(plt.plot([1, 3, 2])))")
        session.put_files({"a.txt": "a"})
        assert [file.name for file in session.files()] == ["a.txt"]
        second = session.execute_code("count = len(plt.get_fignums())\nplt.plot([1, 2])\ncount")
        third = session.execute_code("len(plt.get_fignums())")

    assert (first.value, first.files) == (1, ())
    [chart] = second.files
    assert (chart.name, chart.media_type) == ("script-3-figure-1.png", "image/png")
    assert chart.data is not None and chart.data.startswith(rich.PNG)
    assert (second.value, third.value, third.files) == (0, 0, ())


DISPLAYED = """
class Picture:
    def _repr_png_(self): return b"\\x89PNG\\r\\n\\x1a\\n" + b"x" * 10
class Table:
    def _repr_html_(self): return "<b>"
    def __repr__(self): return "a table"
class Broken:
    def _repr_png_(self): raise ValueError("no")
    def __repr__(self): return "broken"
display(Picture(), Table(), 3)
"""


@pytest.mark.isolation
def test_what_is_displayed_comes_back_whatever_the_script_returns_or_raises(runtime: SyncRuntime) -> None:
    shown = [("display-1.png", "image/png"), ("display-2.html", "text/html")]
    for end in ("set_result(1)", "5", "1 / 0", "raise SystemExit(3)"):
        result = runtime.execute_code(DISPLAYED + end)
        assert [(file.name, file.media_type) for file in result.files] == shown, end
        assert result.logs.stdout == "a table\n3\n"
    result = runtime.execute_code(DISPLAYED + "open('a', 'w').close()\nset_result(1, files=['a'])")
    assert [file.name for file in result.files] == ["a", *(name for name, _ in shown)]
    assert runtime.execute_code("def display(x): return x\nset_result(display(2))").value == 2
    assert runtime.execute_code("set_result(display)", inputs={"display": 4}).value == 4


@pytest.mark.isolation
@each_row("most", [0, 32])
def test_a_flood_of_displays_stays_within_the_limits_and_says_so(runtime: SyncRuntime, most: int) -> None:
    source = DISPLAYED + "for _ in range(100): display(Picture(), Broken())\nset_result(1)"
    result = runtime.execute_code(source, limits=Limits(files=most))
    assert (result.outcome, result.value) == ("ok", 1), result.error
    whole = [file for file in result.files if file.problem is None]
    assert len(whole) <= most and len(result.files) <= most + rich.MOST_PROBLEMS + 1
    assert any("too many files" in (file.problem or "") for file in result.files) or most == 32


@pytest.mark.isolation
def test_displays_give_way_to_the_files_of_the_result(runtime: SyncRuntime) -> None:
    source = DISPLAYED + "for n in range(2): open(str(n), 'w').write('x')\nset_result(1, files=['0', '1'])"
    result = runtime.execute_code(source, limits=Limits(files=2))
    assert [(file.name, file.problem) for file in result.files] == [
        ("0", None),
        ("1", None),
        ("display-1.png", "there is no room beside the other files, nor for 1 more"),
    ]


@pytest.mark.isolation
@pytest.mark.slow
def test_charts_images_and_frames_that_are_shown_are_files() -> None:
    source = """
import pandas as pd, plotly.graph_objects as go
from PIL import Image
go.Figure(go.Bar(y=[1])).show()
Image.new("RGB", (2, 2)).show()
pd.DataFrame({"g": ["a"], "v": [1]}).groupby("g").agg({"v": ["sum", "mean"]})
"""
    with SyncRuntime(packages=USUAL) as runtime:
        result = runtime.execute_code(source)
    assert [file.name for file in result.files] == ["result.html", "display-1.html", "display-2.png"], result.error
    assert (result.logs.stderr, result.value.rows()) == ("", [{"g": "a", "v_sum": 1, "v_mean": 1.0}])
