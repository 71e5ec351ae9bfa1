"""`toolcell doctor --fix`: write the AppArmor profile that lets this interpreter make user namespaces.

Ubuntu from 23.10 on refuses them to ordinary users' programs, unless a profile that fits the program grants `userns`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

from toolcell.errors import UsageError

PROFILES: Final = Path("/etc/apparmor.d")
SWITCH: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
"""1 where AppArmor restricts user namespaces; Ubuntu's kernels have it."""

_PLAIN = re.compile(r"[A-Za-z0-9/._+@-]+")
"""A path without the signs that AppArmor reads as a pattern, a quote or the end of a rule."""


def write() -> str:
    """Write the profile, and return what to do next.

    Raises:
        UsageError: there is nothing to fix, or the file cannot be written here.
    """
    if not SWITCH.exists() or SWITCH.read_text().strip() != "1":
        raise UsageError(
            "doctor --fix: AppArmor does not restrict user namespaces here "
            f"({SWITCH} is not 1); `toolcell doctor` says what is missing"
        )
    program = os.path.realpath(sys.executable)
    if not _PLAIN.fullmatch(program):
        raise UsageError(f"doctor --fix: AppArmor would take the path of this interpreter for a pattern: {program!r}")
    file = PROFILES / f"toolcell{program.replace('/', '.')}"
    try:
        file.write_text(profile_of(program), encoding="ascii")
    except OSError as exc:
        again = f"sudo {sys.executable} -m toolcell doctor --fix"
        raise UsageError(f"doctor --fix: {file} cannot be written ({exc.strerror}); as root: {again}") from None
    return f"wrote {file}; load it with: sudo apparmor_parser --replace {file}"


def profile_of(program: str) -> str:
    """Return the profile of the program at this path: it grants user namespaces, and restricts nothing."""
    name = f"toolcell{program.replace('/', '.')}"
    return f"""# Written by `toolcell doctor --fix`: this interpreter may make the namespaces of sandboxes.
abi <abi/4.0>,
include <tunables/global>

profile {name} {program} flags=(unconfined) {{
  userns,

  include if exists <local/{name}>
}}
"""
