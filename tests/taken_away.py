"""A plugin of pytest: the modules that TAKEN_AWAY names, with spaces between them, cannot be imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

NAMES = os.environ.get("TAKEN_AWAY", "").split()


class TakenAway:
    """First in `sys.meta_path`: whatever asks for one of the modules fails."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{gone}.") for gone in NAMES):
            raise ModuleNotFoundError(f"{name} was taken away", name=name)
        return None


sys.meta_path.insert(0, TakenAway)
