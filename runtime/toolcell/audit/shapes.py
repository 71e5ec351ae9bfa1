"""The kinds of events, and what each of their fields may hold. Anybody who can write the file can add an event, so no
reader trusts the types in one.

Values of scripts and tools may be anything. All other fields have the shapes that their readers rely on. This module
knows neither files nor encodings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

Shape = Callable[[Any], bool]
"""True when a value has the shape."""

RELATIONS: Final = ("resumes", "repairs", "commits", "reverts", "repeats")
"""How a run goes on from another one: the key under which `who` has the id of that."""

MAX_INTEGER: Final = (1 << 63) - 1
"""What SQLite and most readers of JSON can hold."""


def anything(value: Any) -> bool:
    """True for every value: it comes from a script or a tool."""
    return True


def text(value: Any) -> bool:
    """A text."""
    return type(value) is str


def data(value: Any) -> bool:
    """A byte string."""
    return type(value) is bytes


def flag(value: Any) -> bool:
    """True or false."""
    return type(value) is bool


def integer(value: Any) -> bool:
    """A number that counts something."""
    return type(value) is int and 0 <= value <= MAX_INTEGER


def whole(value: Any) -> bool:
    """Any whole number: a seed, or a line as a guest claims it."""
    return type(value) is int


def number(value: Any) -> bool:
    """A finite amount."""
    if type(value) is float:
        return -1e18 < value < 1e18
    return type(value) is int and abs(value) <= MAX_INTEGER


def optional(shape: Shape) -> Shape:
    """None, or a value of this shape."""
    return lambda value: value is None or shape(value)


def each(shape: Shape) -> Shape:
    """A list of values of this shape."""
    return lambda value: type(value) is list and all(map(shape, value))


def row(*shapes: Shape) -> Shape:
    """A list of so many values, each of its own shape."""

    count = len(shapes)

    def fits(value: Any) -> bool:
        if type(value) is not list or len(value) != count:
            return False
        for shape, item in zip(shapes, value, strict=True):  # noqa: SIM110 - a generator takes twice as long
            if not shape(item):
                return False
        return True

    return fits


def one_of(*shapes: Shape) -> Shape:
    """A value of any of these shapes."""
    return lambda value: any(shape(value) for shape in shapes)


def mapping(**shapes: Shape) -> Shape:
    """A mapping from texts. These keys may be missing, and have these shapes; others hold anything."""

    def fits(value: Any) -> bool:
        if type(value) is not dict:
            return False
        if not value:
            return True
        if not all(map(text, value)):
            return False
        for name, shape in shapes.items():  # noqa: SIM110 - a generator takes twice as long
            if name in value and not shape(value[name]):
                return False
        return True

    return fits


def table(**shapes: Shape) -> Shape:
    """A mapping that is empty or has all of these keys, of these shapes."""
    fits = mapping(**shapes)
    return lambda value: fits(value) and (not value or shapes.keys() <= value.keys())


_tool = one_of(row(text, optional(text), anything), row(text, optional(text), anything, anything))
_cut = table(why=text)
_more = optional(
    mapping(
        args_cut=_cut,
        value_cut=_cut,
        source_cut=_cut,
        inputs_cut=_cut,
        logs_cut=_cut,
        corrected=each(anything),
        rewritten_by=each(text),
        decided=mapping(decision=text, by=text, reason=text),
        answered_from=text,
        hosts=each(text),
        secret_names=each(text),
        decisions=each(mapping(call=text, tool=text, decision=text, by=text, reason=text)),
        waits=each(mapping(call=text, tool=text, why=text, digest=text)),
    )
)
_limits = table(wall_s=number, cpu_s=number, memory_bytes=integer, tool_calls=integer)
_isolation = mapping(backend=text, layers=mapping(), environment=mapping(packages=each(text), preload=each(text)))
_usage = table(wall_s=number, cpu_s=optional(number), start_s=number, peak_memory_bytes=optional(integer))
_error = mapping(type=text, message=text, line=optional(whole), column=optional(whole))

SHAPES: Final[dict[str, dict[str, Shape]]] = {
    "opened": {
        "host": text, "pid": integer, "toolcell": text, "python": text, "key": text, "algorithm": text,
        "after": optional(row(text, integer, data)), "more": _more,
    },
    "pruned": {"chain": text, "seq": integer, "hash": data, "count": integer, "reason": text, "more": _more},
    "run_started": {
        "id": text, "sort": text, "source": optional(text), "sha256": optional(text), "inputs": anything,
        "inputs_sha256": optional(text), "files": each(row(text, integer, text, optional(data))),
        "tools": optional(text), "terms": optional(text), "lint": optional(text),
        "seed": optional(whole), "clock": optional(number),
        "sandbox": optional(text), "who": mapping(**dict.fromkeys((*RELATIONS, "decided_by"), text)), "more": _more,
    },
    "call_started": {
        "number": integer, "call": text, "parent": optional(integer), "tool": text, "origin": text,
        "line": optional(whole), "args": anything, "more": _more,
    },
    "call_ended": {
        "number": integer, "status": text, "duration_us": integer, "value": anything, "code": optional(text),
        "more": _more,
    },
    "run_ended": {
        "outcome": text, "value": anything, "has_value": flag, "value_sha256": optional(text),
        "logs": optional(each(row(text, text))), "logs_bytes": optional(row(integer, integer, flag)),
        "files": each(row(text, optional(text), integer, optional(text), optional(text))), "error": optional(_error),
        "usage": _usage, "calls": row(integer, integer), "more": _more,
    },
    "key_changed": {"old": text, "new": text, "algorithm": text, "public": text, "more": _more},
}  # fmt: skip
"""Kind of an event to its fields, in order, with their shapes.

`opened` begins each chain: `after` is the newest event of the record then, as [chain, seq, hash]. `tools` and `terms`
(the run settings: limits, policy, isolation, rules about requests) are the same for many runs, so each is a blob, and
a run names its digest. `sort` is the run's kind. `more` holds what few events of a kind have: redactions, digests of
values that were left out, corrections, decisions, agents.
"""

BLOB_SHAPES: Final[dict[str, dict[str, Shape]]] = {
    "tools": {"definitions": each(_tool)},
    "terms": {"limits": _limits, "policy": mapping(), "isolation": _isolation, "egress": each(mapping(host=text))},
}
"""The same for blobs, by the field of `run_started` that names one."""
