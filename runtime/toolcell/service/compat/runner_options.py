"""What `HttpRunner` takes and returns: its options, a request, a result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from toolcell.config import KIB, MIB, SettingsModel


class RunnerOptions(SettingsModel):
    """How `HttpRunner` runs scripts, and how it is reached for their tool calls."""

    other_names: ClassVar = {
        "timeout": "timeout_s", "max_output": "max_output_bytes", "max_file_size": "max_file_bytes",
        "retry_delay": "retry_delay_s", "retries": "max_retries",
    }  # fmt: skip

    timeout_s: PositiveFloat = 30.0
    """Of a script that names none."""

    max_output_bytes: PositiveInt = 64 * KIB
    """Bytes kept of a script's logs."""

    callback_addr: str = "127.0.0.1:0"
    """Where the callback server listens. It starts with the first script. Port 0 is any free one."""

    callback_advertise: str = ""
    """Address that the service is told, with or without a port. Needed when the server listens at every address."""

    callback_external: str = ""
    """Base URL under which you serve `HttpRunner.callback_app` yourself. No server is started then."""

    callback_token: bool = True
    """Demand the run's token with each call. Turn it off only for a service that does not know `callback_token`."""

    max_file_bytes: PositiveInt = 10 * MIB
    """A larger returned file keeps its name and type, and loses its data."""

    max_retries: int = 2
    """Attempts in all. 1 or less: one."""

    retry_delay_s: float = Field(default=0.5, ge=0)
    """Before the second attempt. It doubles with each further one."""

    token: str = Field(default="", repr=False)
    """Sent to the service as `Authorization: Bearer`."""

    assume_idempotent: bool = False
    """Send a request again although it may have run, to a service that does not say that it runs each id once."""

    @field_validator("max_retries")
    @classmethod
    def _once_at_least(cls, value: int) -> int:
        return max(1, value)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file for a script, or from it."""

    name: str
    mime: str = ""
    data: bytes | None = field(default=None, repr=False)
    """None when it was not sent."""


@dataclass(frozen=True, slots=True)
class CodeRequest:
    """A script to run."""

    code: str
    timeout_s: float = 0.0
    """0: that of the options."""
    session_id: str = ""
    """Empty: the script has a workspace of its own, which is deleted afterwards."""
    files: tuple[CodeFile, ...] = ()
    runtime: str = "python"
    execution_id: str = ""
    """Empty: a new one. Sent again with the same one, the script does not run again."""


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What a script left behind."""

    output: str
    """JSON text of what `set_result` was given; empty without a result."""
    logs: str
    exit_code: int
    """0 when the script reached its end, -1 when it was ended from outside."""
    error: str = ""
    files: tuple[CodeFile, ...] = ()
    raw: Any = field(default=None, repr=False, compare=False)
    """The answer of the service as it came."""

    @property
    def ok(self) -> bool:
        """True when the script reached its end."""
        return self.exit_code == 0 and not self.error
