"""Take secrets out of what servers send back: a server may echo what it was sent, and write it in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from toolcell.support.secrets import LONGEST_FORM, SecretSearch

MIN_REACH: Final = 256
"""Bytes of a secret in its longest form, at least, for which the end of a piece waits."""

_IN_FORMS: Final = bytes([0, *range(0x20, 0x7F)])
"""What secrets and their forms consist of; a line break ends all of them."""


class Echoes:
    """Finds the secrets of one `Egress`, and puts their placeholders in their place."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._search = SecretSearch({value: f"{{{name}}}" for name, value in secrets.items()})
        longest = max(map(len, secrets.values()), default=0) * LONGEST_FORM
        self._reach = max(MIN_REACH, 1 << longest.bit_length())  # which does not tell how long the secret is

    def __bool__(self) -> bool:
        return bool(self._search)

    def clean(self, data: bytes) -> bytes:
        return self._search.hide_in_bytes(data)[0]

    def clean_text(self, text: str) -> str:
        """Do the same for a text."""
        return self._search.hide(text)[0]

    def held_back(self, data: bytes) -> int:
        """Return how many bytes at the end have to wait for what follows: a secret may be among them both.

        Bytes that could be in any secret decide, not those of these secrets: who sees what waits, and chooses what a
        server sends, could guess a secret letter by letter.
        """
        tail = data[-self._reach :] if self._search else b""
        return len(tail) - len(tail.rstrip(_IN_FORMS))
