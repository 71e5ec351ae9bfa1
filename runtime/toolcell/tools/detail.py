"""Tools as text for a model, in three degrees of detail, and the most detailed one that a budget has room for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, Literal, TypeVar, get_args

from toolcell.errors import UsageError
from toolcell.support.checks import check_count, check_one_of
from toolcell.support.lru import Lru
from toolcell.support.text import one_line
from toolcell.tools.stubs import Described, python_signature, python_stub, python_stubs

Made = TypeVar("Made")


class Recent(Generic[Made]):
    """Remembers what was made of the last few sequences of objects. Used from several threads at once."""

    def __init__(self, size: int) -> None:
        self._made: Lru[tuple[object, ...], tuple[tuple[object, ...], Made]] = Lru(size)
        """By the ids of the objects, with the objects: while they are held, no others get their ids."""
        self._lock = threading.Lock()

    def get(self, objects: Sequence[object], make: Callable[[], Made], *more: object) -> Made:
        """Return what was made of exactly these objects, or make it. `more`: plain values that it depends on too."""
        key = (*map(id, objects), *more)
        with self._lock:
            if (found := self._made.use(key)) is not None:
                return found[1]
        made = make()  # without the lock: making it twice does no harm
        with self._lock:
            self._made.put(key, (tuple(objects), made))
        return made


Detail = Literal["names", "signatures", "full"]
"""`names`; `signatures`, each on a line with the first line of its description; `full`, stubs with docstrings."""

DETAILS: Final = get_args(Detail)
SHOWN_CHARS: Final = 32_000
"""Most characters of tools that a model is shown before it asks: about 8,000 tokens."""
MAX_SIGNATURE_CHARS: Final = 400
MAX_SUMMARY_CHARS: Final = 120
MAX_TEXT_CHARS: Final = 200_000
"""Most characters of tools that a script or a model asked for."""


def check_detail(detail: object) -> None:
    """Refuse what is not a degree of detail.

    Raises:
        UsageError: names those there are.
    """
    check_one_of("detail", detail, DETAILS)


def check_shown_chars(shown_chars: object) -> None:
    """Refuse what is not a budget.

    Raises:
        UsageError: it is not a whole number of at least 0.
    """
    check_count("shown_chars", shown_chars, 0)


def signature_line(tool: Described) -> str:
    """Return a tool on one line: what it takes, what it returns, and what it is for."""
    definition, returns = tool
    signature = one_line(python_signature(definition, returns), MAX_SIGNATURE_CHARS)
    purpose = one_line(definition.description.strip().partition("\n")[0].strip(), MAX_SUMMARY_CHARS)
    return f"{signature}  # {purpose}"


def tools_text(tools: Sequence[Described], detail: Detail) -> str:
    """Write tools in one degree of detail.

    Raises:
        UsageError: there is no such degree, or the text would be too long to be read.
    """
    check_detail(detail)
    objects = [part for tool in tools for part in tool]
    text = _texts.get(objects, lambda: _tools_text(tools, detail, MAX_TEXT_CHARS), detail)
    if text is None:
        weaker = "" if detail == "names" else f", or a detail before {detail!r} of {', '.join(DETAILS)}"
        raise UsageError(
            f"{len(tools)} tools as detail={detail!r} are more than {MAX_TEXT_CHARS} characters; ask for fewer{weaker}"
        )
    return text


def _tools_text(tools: Sequence[Described], detail: Detail, max_chars: int) -> str | None:
    """Return the text; None when it is longer than that. What would be far too long is not written."""
    parts, length = list[str](), 0
    if detail == "full" and sum(len(definition.description) for definition, _ in tools) > max_chars:
        return None
    for tool in tools:
        match detail:
            case "names":
                parts.append(tool[0].name)
            case "signatures":
                parts.append(signature_line(tool))
            case "full":
                parts.append(python_stub(*tool))
        length += len(parts[-1])
        if length > max_chars:
            return None
    text = python_stubs(tools) if detail == "full" else ("\n" if detail == "signatures" else ", ").join(parts)
    return text if len(text) <= max_chars else None


_texts = Recent[str | None](8)
"""A script may ask for the same again and again."""
_shown = Recent[tuple[Detail | None, str]](16)


def shown_within(tools: Sequence[Described], shown_chars: int) -> tuple[Detail | None, str]:
    """Return the most detailed text of tools that has at most so many characters. (None, "") when none has."""

    def best() -> tuple[Detail | None, str]:
        for detail in reversed(DETAILS):
            if (text := _tools_text(tools, detail, shown_chars)) is not None:
                return detail, text
        return None, ""

    return _shown.get([part for tool in tools for part in tool], best, shown_chars)
