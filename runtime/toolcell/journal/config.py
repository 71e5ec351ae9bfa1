"""Settings of the directory of journals."""

from __future__ import annotations

from pathlib import Path

from toolcell.settings import SettingsModel, setting


class JournalConfig(SettingsModel):
    """Where the journals of runs are kept, and for how long."""

    directory: Path
    """Belongs to the host alone: it holds scripts, arguments and answers as they are, and the key of the tokens."""

    token_s: float = setting(default=7 * 86_400.0, gt=0, le=366 * 86_400)
    """Seconds until the token of a suspended run expires."""

    keep_s: float = setting(default=14 * 86_400.0, gt=0, le=3660 * 86_400)
    """Seconds after which the journal of a run that is not under way is removed, when a Runtime opens."""

    most_bytes: int | None = setting(default=None, gt=0)
    """Bytes of all that is kept. A run that would need more is refused. None: any number."""

    keep_ended: bool = True
    """False, for hosts with many runs: the journal of a run is written from its first call on, and removed when the run
    ends. A run that was interrupted before that is not carried on: it is run again."""
