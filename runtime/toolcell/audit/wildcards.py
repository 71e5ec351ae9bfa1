"""Compare new values with recorded ones from which secrets were taken out: there, anything may stand.

Nobody has to know the secrets for it, and no difference that is shown says what may be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolcell.support.packing import pack, unpack
from toolcell.support.secrets import REDACTED
from toolcell_bridge.wire.tables import Array, Table

MAX_DEPTH: Final = 100


def is_redacted(recorded: Any, depth: int = 0) -> bool:
    """True when something was taken out of a recorded value."""
    match recorded:
        case str():
            return REDACTED in recorded
        case bytes():
            return REDACTED.encode() in recorded
        case Mapping() if depth < MAX_DEPTH:
            return any(is_redacted(key) or is_redacted(item, depth + 1) for key, item in recorded.items())
        case list() | tuple() if depth < MAX_DEPTH:
            return any(is_redacted(item, depth + 1) for item in recorded)
    return False


def fits(recorded: Any, got: Any, depth: int = 0) -> bool:
    """True when a value is the recorded one as far as that says, in time that is linear in both."""
    if depth >= MAX_DEPTH:
        return bool(recorded == got)
    match recorded, got:
        case (str(), _) if recorded == REDACTED:
            return True  # a value under a telling name is hidden whole, whatever its type
        case (str(), str()) | (bytes(), bytes()):
            return _text_fits(recorded, got)
        case (Mapping(), Mapping()):
            if is_redacted([*recorded]):
                pairs = zip(recorded.items(), got.items(), strict=False)
                return len(recorded) == len(got) and all(
                    fits(key, other, depth + 1) and fits(item, value, depth + 1)
                    for (key, item), (other, value) in pairs
                )
            same = recorded.keys() == got.keys()
            return same and all(fits(item, got[key], depth + 1) for key, item in recorded.items())
        case (list() | tuple(), list() | tuple()):
            pairs = zip(recorded, got, strict=False)
            return len(recorded) == len(got) and all(fits(one, other, depth + 1) for one, other in pairs)
        case (list(), Array() | Table()):  # of a table from which something was taken out, the rows are recorded
            return fits(recorded, unpack(pack(got.plain())), depth)
    return type(recorded) is type(got) and bool(recorded == got or (recorded != recorded and got != got))


def _text_fits(recorded: Any, got: Any) -> bool:
    first, *others = recorded.split(REDACTED if isinstance(recorded, str) else REDACTED.encode())
    if not others:
        return bool(recorded == got)
    if len(recorded.splitlines()) != len(got.splitlines()):
        return False  # what stands for a secret has as many lines
    *middle, last = others
    if not got.startswith(first) or not got.endswith(last) or len(got) < len(first) + len(last):
        return False
    at, end = len(first), len(got) - len(last)
    for piece in middle:
        found = got.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def shown_for(recorded: Any, got: Any) -> Any:
    """Return a new value as it may be shown beside a recorded one: only what that holds, if secrets were taken out."""
    return _only_known(recorded, got) if is_redacted(recorded) else got


def _only_known(recorded: Any, got: Any, depth: int = 0) -> Any:
    if depth >= MAX_DEPTH:
        return REDACTED
    match recorded, got:
        case (Mapping(), Mapping()):
            return {
                key if key in recorded else REDACTED: _only_known(recorded.get(key), item, depth + 1)
                for key, item in got.items()
            }
        case (list() | tuple(), list() | tuple()):
            beside = [*recorded, *[None] * (len(got) - len(recorded))]
            return [_only_known(one, other, depth + 1) for one, other in zip(beside, got, strict=False)]
        case _ if fits(recorded, got):
            return recorded
        case (_, None | bool() | int() | float()) if recorded is not None:
            return got
    return REDACTED
