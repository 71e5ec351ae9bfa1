"""The characters that show nothing, or change how others look: the host escapes them, and no file name has one.

Source: Unicode 15.0, DerivedCoreProperties.txt (Default_Ignorable_Code_Point) and DerivedGeneralCategory.txt (Cf).
Three are added that are symbols to Unicode and blank on the screen: U+2800 (braille blank), U+FFFC (object replacement)
and U+1D159 (null notehead).
"""

from __future__ import annotations

import re
from typing import Final

INVISIBLE: Final = (
    "\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890-\u0891\u08e2\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\U000110bd\U000110cd"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Ranges for a character class of `re`."""

_FOUND: Final = re.compile(f"[{INVISIBLE}]")


def is_visible(text: str) -> bool:
    """Return whether a name shows all of its characters: printable ones alone, and no space but U+0020."""
    return text.isprintable() and _FOUND.search(text) is None
