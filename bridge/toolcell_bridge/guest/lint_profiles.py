"""The names of the lint profiles, and what each needs imported. The host reads them without loading lint itself."""

from __future__ import annotations

from typing import Literal

Profile = Literal["off", "standard", "strict"]

POLICIES = "toolcell_bridge.guest.lint_policies"

PRELOAD: dict[Profile, tuple[str, ...]] = {"off": (), "standard": (POLICIES,), "strict": (POLICIES,)}
"""Modules to import while RestrictedPython can still be found: inside a sandbox it is not on the path."""
