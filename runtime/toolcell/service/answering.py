"""Answers as JSON: small ones at once, others in a thread, none too large.

A script can call tools with 32 MB of control characters, which are six times as long in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from toolcell.results import Array, Table
from toolcell.service.problems import Problem
from toolcell.support import daemon_threads
from toolcell.support.exact_json import TooLong, exact_json_bytes, exact_json_text, is_small, left_out

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Cut:
    """How much stays of each part of an answer that is too large."""

    chars: int
    elements: int


CUTS: Final = (Cut(65_536, 20_000), Cut(4_096, 1_000), Cut(256, 64))
"""One after the other, until the answer fits."""


class Answers:
    """Writes the answers to one tenant."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of one answer."""
        self._most = most

    async def text(self, data: object) -> bytes:
        """Return the JSON of an answer. Of one that is too large, long texts and lists are cut, and say so.

        Raises:
            Problem: it is too large all the same (507).
        """
        if is_small(data):
            return exact_json_text(data).encode()
        return await daemon_threads.run_large(self._fitting, data)

    async def response(self, data: object, status: int = 200) -> Response:
        """Return the answer to a request.

        Raises:
            Problem: as from `text`.
        """
        return Response(await self.text(data), status, media_type=JSON)

    def _fitting(self, data: object) -> bytes:
        for each in _smaller(data):
            try:
                return exact_json_bytes(each, self._most)
            except TooLong:
                pass
        detail = f"it has more than {self._most} bytes, though long texts and lists were left out"
        raise Problem(507, "answer_too_large", "The answer is too large", detail)


def _smaller(data: object) -> Iterator[object]:
    yield data
    data = _without_files(data)
    yield data
    for cut in CUTS:
        yield _cut(data, cut)


def _without_files(data: object) -> object:
    """Return an answer without the content of its files: half of base64 is none."""
    if not (isinstance(data, Mapping) and isinstance(files := data.get("files"), list | tuple)):
        return data
    why = (
        "it was left out, because the answer is too large; "
        "write it in a session, and fetch it from /v1/sessions/{name}/files/{path}"
    )
    return {
        **data,
        "files": [
            {**each, "data": None, "problem": each["problem"] or why} if "data" in each else each for each in files
        ],
    }


def _cut(value: Any, cut: Cut) -> Any:
    match value:
        case str() if len(value) > cut.chars:
            return f"{value[: cut.chars]} (cut: {len(value) - cut.chars} more characters; the answer is too large)"
        case bytes() | bytearray() if len(value) > cut.chars:
            return left_out(f"{len(value)} bytes; the answer is too large")
        case Array() | Table() if value.nbytes > cut.chars:
            return left_out(f"{value!r}, {value.nbytes} bytes; the answer is too large")
        case Mapping():
            kept = {name: _cut(value[name], cut) for name in [*value][: cut.elements]}
            more = len(value) - len(kept)
            return kept | left_out(f"{more} more members; the answer is too large") if more else kept
        case list() | tuple():
            found = [_cut(each, cut) for each in value[: cut.elements]]
            more = len(value) - len(found)
            return [*found, f"(cut: {more} more elements; the answer is too large)"] if more else found
    return value
