"""Show what plain data cannot: a last value's picture or HTML, and matplotlib's open figures, as files.

All of it runs code of the script and of libraries, here in the sandbox. What raises becomes the problem of its file.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from toolcell_bridge.guest.files import CHUNK_BYTES
from toolcell_bridge.guest.pictures import Picture
from toolcell_bridge.guest.placeholder import Placeholder
from toolcell_bridge.wire.messages import FilePart, FileProblem

MOST_FIGURES = 10
"""Most figures of one script."""

MOST_PROBLEMS = 10
"""Most problems of what one script displays. Then only text is shown."""

PROBLEM_CHARS = 300

HTML = "text/html"

METHODS = (("_repr_png_", "png", "image/png"), ("_repr_html_", "html", HTML))
"""What objects have that notebooks show."""

PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, list, dict, tuple, set, frozenset, Picture, Placeholder}
)
"""Classes of values that show nothing: they are the result itself. A placeholder must not be looked at: that would
end its dry run."""

CANARY = "_ipython_canary_method_should_not_exist_"
"""An object that has this attribute has any: notebooks ask for it, too."""

PNG = b"\x89PNG\r\n\x1a\n"

FIGURES = "matplotlib._pylab_helpers"
"""The module of matplotlib that knows the open figures."""

Shown = tuple[str, str, Callable[[], Any]]
"""Name and media type of a file, and what makes its content: bytes, text, or None where there is nothing to show."""


def is_possible(value: object) -> bool:
    """Whether there may be something to show. Costs next to nothing."""
    return FIGURES in sys.modules or type(value) not in PLAIN


def show(value: object, prefix: str, files: int, files_bytes: int) -> Iterator[FilePart | FileProblem]:
    """Make the files, within count and size, and close the open figures. Each file's name begins with `prefix`."""
    yield from _files(_everything(value, prefix), files, files_bytes)


class Display:
    """`display(*values)` of one script: shows values now, as files that are sent when the script has ended.

    What has neither a picture nor HTML is printed, and so is the text of what has HTML.
    """

    def __init__(self, prefix: str, files: int, files_bytes: int) -> None:
        self._prefix = prefix
        self._files = self._most = files
        self._bytes = files_bytes
        self._number = self._problems = 0
        self.made: list[FilePart | FileProblem] = []

    def __call__(self, *values: object) -> None:
        """Show each value, as a notebook does."""
        for value in values:
            if type(value) is not Placeholder:
                self._show(value)

    def _show(self, value: object) -> None:
        made: list[FilePart | FileProblem] = []
        if self._problems < MOST_PROBLEMS:
            self._number += 1
            made = list(
                _files(
                    _of_display(value, f"{self._prefix}display-{self._number}"), self._files, self._bytes, self._most
                )
            )
        for message in made:
            if isinstance(message, FilePart):
                self._files -= message.last
                self._bytes -= len(message.data)
            else:
                self._problems += 1
        self.made += made
        if not any(isinstance(message, FilePart) and message.media_type.startswith("image/") for message in made):
            sys.stdout.write(f"{value!r}\n")


def text_of(value: object) -> str:
    """Return the text of a value of which there is HTML alone. It is empty if its class has no text of its own."""
    try:
        return "" if type(value).__repr__ is object.__repr__ else repr(value)
    except (Exception, SystemExit):  # its HTML is shown all the same
        return ""


def _of_display(value: object, name: str) -> Iterator[Shown]:
    kind = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    if kind is not None and issubclass(type(value), kind):
        figure: Any = value
        yield f"{name}.png", "image/png", partial(_png_of, figure)
        sys.modules[FIGURES].Gcf.destroy_fig(figure)
    elif type(value) is Picture:
        yield f"{name}.{value.media_type.partition('/')[2]}", value.media_type, lambda: value
    else:
        yield from _of_value(value, name)


def _files(
    shown: Iterator[Shown], files: int, files_bytes: int, most: int | None = None
) -> Iterator[FilePart | FileProblem]:
    """`most`: the limit of which `files` are left."""
    count, left = 0, files_bytes
    for name, media_type, make in shown:
        try:
            content = _content(make(), media_type)
        except (Exception, SystemExit) as exc:
            yield FileProblem(name, 0, _problem(exc))
            continue
        if content is None:
            continue
        if count >= files:
            yield FileProblem(name, len(content), f"too many files (limit {files if most is None else most})")
        elif len(content) > left:
            yield FileProblem(name, len(content), f"too large ({len(content)} > {left} bytes left)")
        else:
            count, left = count + 1, left - len(content)
            for start in range(0, len(content), CHUNK_BYTES):
                piece = content[start : start + CHUNK_BYTES]
                yield FilePart(name, media_type, piece, start + CHUNK_BYTES >= len(content))


def close_figures() -> None:
    """Close the figures that a script of a session leaves open: they are not figures of the next one."""
    known: Any = sys.modules.get(FIGURES)
    if known is None:
        return
    try:
        for manager in list(known.Gcf.get_all_fig_managers()):
            known.Gcf.destroy(manager.num)
    except (Exception, SystemExit):  # the script may have changed matplotlib
        pass


def _everything(value: object, prefix: str) -> Iterator[Shown]:
    yield from _of_value(value, f"{prefix}result")
    try:
        yield from list(_of_figures(value, prefix))
    except Exception as exc:  # the script may have changed matplotlib
        yield f"{prefix}figure-1.png", "image/png", partial(_refuse, exc)


def _of_value(value: object, stem: str) -> Iterator[Shown]:
    if type(value) in PLAIN or isinstance(value, type):
        return
    for method, ending, media_type in METHODS:
        name = f"{stem}.{ending}"
        try:
            found = _method(value, method)
        except (Exception, SystemExit) as exc:
            if _has(type(value), method):  # else nobody said that there is something to show
                yield name, media_type, partial(_refuse, exc)
            continue
        if found is not None:
            yield name, media_type, found


def _method(value: Any, name: str) -> Callable[[], Any] | None:
    """Look a display method up on the object itself, as notebooks do: it may be a property, or made on demand."""
    found = getattr(value, name, None)
    is_of_class = _has(type(value), name)
    if not callable(found) or (not is_of_class and getattr(value, CANARY, None) is not None):
        return None  # proxies and mocks have every attribute
    return found  # type: ignore[no-any-return]


def _has(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in type.mro(kind))


def _of_figures(value: object, prefix: str) -> Iterator[Shown]:
    """The open figures, and the last value if it is a figure that pyplot does not know."""
    known: Any = sys.modules.get(FIGURES)
    if known is None:
        return
    managers = list(known.Gcf.get_all_fig_managers())
    figures = [manager.canvas.figure for manager in managers]
    kind = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    if kind is not None and issubclass(type(value), kind) and all(value is not figure for figure in figures):
        figures.append(value)
    for manager in managers:
        known.Gcf.destroy(manager.num)
    figures = [figure for figure in figures if len(figure.get_children()) > 1]  # the first child is its background
    for number, figure in enumerate(figures[:MOST_FIGURES], 1):
        yield f"{prefix}figure-{number}.png", "image/png", partial(_png_of, figure)
    if len(figures) > MOST_FIGURES:
        too_many = ValueError(
            f"{len(figures)} figures are open, and {MOST_FIGURES} are returned; save and close others"
        )
        yield f"{prefix}figure-{MOST_FIGURES + 1}.png", "image/png", partial(_refuse, too_many)


def _refuse(problem: BaseException) -> None:
    raise problem


def _png_of(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _content(made: object, media_type: str) -> bytes | None:
    """The content of a file as bytes.

    Raises:
        TypeError: it is of another kind.
    """
    if isinstance(made, tuple) and len(made) == 2:  # with metadata, as notebooks allow
        made = made[0]
    if made is None or not made:
        return None
    if media_type == HTML and isinstance(made, str):
        return made.encode("utf-8", "xmlcharrefreplace")
    if type(made) is Picture or (media_type == "image/png" and isinstance(made, bytes) and made.startswith(PNG)):
        return made
    raise TypeError(f"{type(made).__name__:.80} is not {media_type}")


def _problem(exc: BaseException) -> str:
    try:
        said = str(exc)
    except (Exception, SystemExit):
        said = ""
    return f"{type(exc).__name__}: {said}"[:PROBLEM_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")
