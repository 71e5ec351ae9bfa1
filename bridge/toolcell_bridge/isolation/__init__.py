"""What a process raises around itself before it runs code it does not trust.

One module per wall. Each holds its plan as frozen data, raises it with plain system calls, and probes whether this
machine has it. Importable anywhere; callable on Linux only. Nothing here knows the bridge, the guest or the host.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Probe"]


@dataclass(frozen=True, slots=True)
class Probe:
    """One wall on this machine: tried for real, not guessed from version numbers."""

    name: str
    live: bool
    detail: str
    """What is there ("ABI 7"), or why it is not."""

    fix: str = ""
    """What an operator does to get it; empty when it is live."""
