"""Tell from a script's text what of it no replay repeats. The text is searched, and never parsed or executed."""

from __future__ import annotations

import re
from typing import Final

_UNREPEATABLE: Final = {
    "/dev/urandom or /dev/random": (r"/dev/u?random",),
    "ssl.RAND_bytes or cryptography": (r"\bRAND_(?:bytes|pseudo_bytes)\b|\bcryptography\b",),
    "random() or randomblob() of SQLite": (r"\bsqlite3\b", r"(?i)(?<![.\w])random(?:blob)?\s{0,9}\("),
    "what other programs draw": (r"\bsubprocess\b|\bos\.(?:exec|spawn|posix_spawn|system|popen)",),
    "random numbers of C code": (r"\bctypes\b|\bcffi\b",),
    "hashes by address": (r"(?<![.\w])id\(",),
}
"""What no replay repeats, and patterns that all occur in scripts that use it."""


def unrepeatable(script: str) -> list[str]:
    """Return a note for each thing that a script seems to use and that does not repeat."""
    return [
        f"the script seems to use {name}, which does not repeat"
        for name, patterns in _UNREPEATABLE.items()
        if all(re.search(pattern, script) is not None for pattern in patterns)
    ]
