"""Large texts are looked through for secrets in one pass that costs the same for each byte, whatever the text is.

Work is counted in what is looked at closely, which does not depend on the machine's speed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile.attacks import SECRETS
from rows import each_row
from toolcell.audit import cutting
from toolcell.audit.cutting import MAX_PIECES
from toolcell.audit.redact import Redactor
from toolcell.support import packing
from toolcell.support.secrets import PIECE_BYTES, LiteralSearch

REDACTOR = Redactor(["hunter22", "\u20acuro and more"])
WORDS = sorted(literal for rules in (REDACTOR._rules_of, REDACTOR.words) for literal in rules)
SIZE = 3_000_000


def repeated(text: str) -> str:
    return text * (SIZE // len(text))


NEAR = {
    **{text[:12]: text for text in SECRETS},
    "a letter of secrets": repeated("b"),
    "all of their letters": repeated("_-k.z~w=q/x"),
    "words that lack their last letter": repeated(" ".join(word[:-1] for word in WORDS)),
    "words that lack their first letter": repeated(" ".join(word[1:] for word in WORDS)),
    "a secret that lacks its last letter": repeated("hunter2 "),
    "words of code": repeated("import token; auth = api.key\n"),
}


@each_row("name", NEAR)
def test_of_a_text_full_of_near_secrets_few_pieces_are_looked_at_closely(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    closely = Redactor.clean

    def count(self: Redactor, value: Any, *rest: Any) -> tuple[Any, int]:
        looked_at.append(len(value))
        return closely(self, value, *rest)

    monkeypatch.setattr(Redactor, "clean", count)
    cutting._summary(packing.pack(NEAR[name]), "size", REDACTOR)

    assert len(looked_at) <= MAX_PIECES + 1
    assert max(looked_at, default=0) <= 2 * PIECE_BYTES


def test_a_text_without_a_literal_is_not_looked_at_closely_at_all() -> None:
    assert REDACTOR.scan(NEAR["a letter of secrets"].encode()) is None
    assert REDACTOR.scan(b"toke" * SIZE) is None
    assert REDACTOR.scan(b"\xff" * SIZE) is None


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.data())
def test_the_search_of_large_data_finds_what_is_there_wherever_it_is(
    literals: list[bytes], data: st.DataObject
) -> None:
    search = LiteralSearch(literals)
    parts = data.draw(
        st.lists(st.sampled_from([b"", b"\x00", *(each[:-1] for each in literals), *literals]), max_size=8)
    )
    before = data.draw(st.integers(PIECE_BYTES - 50, PIECE_BYTES + 50)) * data.draw(st.integers(0, 1))
    text = b"\x00" * before + b"".join(parts)

    assert search(text) is any(literal in text for literal in literals)


def test_every_literal_is_found_in_large_data_at_the_edge_of_each_piece() -> None:
    for anchor, literal in REDACTOR._anchors.items():
        for before in (0, 4096, PIECE_BYTES - len(literal), PIECE_BYTES - 1, PIECE_BYTES):
            text = b"\x00" * before + literal + b"\x00" * 4096
            rules = REDACTOR.scan(text) or []
            assert anchor in {each for rule in rules for each in rule.anchors}, (literal, before)


def test_a_thousand_registered_secrets_are_found_in_large_data() -> None:
    pick = random.Random(1)
    secrets = [f"{pick.randbytes(12).hex()}\u20ac\n{number}" for number in range(1000)]
    search = LiteralSearch(secret.encode() for secret in secrets)
    room = b"x" * PIECE_BYTES

    assert not search(room)
    assert all(search(room + secret.encode()) for secret in secrets[::97])
