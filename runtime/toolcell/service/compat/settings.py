"""`CompatSettings`: what the compatible front is told by its environment, `SANDBOX_ADDR` and the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Self

from pydantic import Field, PositiveFloat, PositiveInt

from toolcell.asgi import is_loopback
from toolcell.config import MIB, SettingsModel
from toolcell.errors import UsageError

DEFAULT_TIMEOUT_S: Final = 30.0
MAX_TIMEOUT_S: Final = 300.0
BODY_BYTES: Final = 32 * MIB
"""Of one request."""
CALL_S: Final = 120.0
"""Seconds that a script waits for the answer to one tool call."""
BODY_S: Final = 60.0
"""Seconds that a request has to arrive whole."""
DRAIN_S: Final = 30.0
"""Seconds that runs under way have to end after SIGTERM."""
EVICT_EVERY_S: Final = 300.0

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_TOKEN_CHARS = 16


class CompatSettings(SettingsModel):
    """How the front listens, where it keeps workspaces, and what one run may use."""

    addr: str = ":9000"
    """SANDBOX_ADDR: address and port. Without an address it is every one if there is a token, else loopback."""

    workspace: str = "/var/sandbox"
    """SANDBOX_WORKSPACE: the folder of the workspaces, one folder for each session."""

    python_bin: str = ""
    """SANDBOX_PYTHON_BIN: the interpreter of the scripts; empty for the service's own."""

    node_bin: str = ""
    """SANDBOX_NODE_BIN: read for compatibility. There is no node runtime; scripts for it get the answer 400."""

    max_concurrent: PositiveInt = Field(default=4, le=4096)
    """SANDBOX_MAX_CONCURRENT: runs at once. The next request gets 503 at once."""

    session_ttl_s: PositiveFloat = Field(default=3600.0, le=30 * 86_400)
    """SANDBOX_SESSION_TTL: a workspace that nobody used for so long is deleted. A duration such as 1h30m or seconds."""

    max_output_bytes: PositiveInt = 512 * 1024
    """SANDBOX_MAX_OUTPUT: bytes kept of what a script prints."""

    max_file_bytes: PositiveInt = 10 * MIB
    """SANDBOX_MAX_FILE_SIZE: a larger returned file has a name and a type, and no data."""

    token: str = Field(default="", repr=False)
    """SANDBOX_TOKEN: what a client must send as `Authorization: Bearer`, or as the password of its URL."""

    callback_hosts: tuple[str, ...] = ()
    """SANDBOX_CALLBACK_HOSTS: hosts, or host:port, that tool calls may be sent to. None named: every one."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the SANDBOX_* variables. One that is empty counts as not set.

        Raises:
            UsageError: names the variable and its value.
        """
        given: dict[str, object] = {}
        for field, (name, read) in _VARIABLES.items():
            text = environment.get(name, "").strip()
            if not text:
                continue
            try:
                given[field] = read(text)
                cls(**{field: given[field]})
            except ValueError as exc:
                shown = "(not shown)" if field == "token" else repr(text)
                raise UsageError(f"{name}={shown}: {exc}") from exc
        return cls(**given)

    def listens_at(self, *, has_tokens: bool = False) -> tuple[str, int]:
        """Return the address and port to listen at. `has_tokens`: clients are asked for another kind of token.

        Raises:
            UsageError: the address is none, or others could run code here without a token.
        """
        host, port = split_address(self.addr)
        if self.token and len(self.token) < _TOKEN_CHARS:
            raise UsageError(f"SANDBOX_TOKEN has {len(self.token)} characters; use {_TOKEN_CHARS} or more")
        is_guarded = bool(self.token) or has_tokens
        if not host:
            return ("0.0.0.0" if is_guarded else "127.0.0.1"), port
        if not (is_guarded or is_loopback(host)):
            raise UsageError(
                f"SANDBOX_ADDR={self.addr!r} lets other machines run code here without a token; set SANDBOX_TOKEN, "
                "or listen at 127.0.0.1"
            )
        return host, port

    def may_call(self, host: str, port: int) -> bool:
        """True when tool calls may be sent to this host."""
        named = {host.lower(), f"{host.lower()}:{port}", f"[{host.lower()}]:{port}"}
        return not self.callback_hosts or not named.isdisjoint(each.lower() for each in self.callback_hosts)


def split_address(text: str) -> tuple[str, int]:
    """Read `:9000`, `127.0.0.1:9000` or `[::1]:9000`.

    Raises:
        UsageError: it is none of these.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535 or (":" in bare and bare == host):
        raise UsageError(f"{text!r:.80} is no address; write :9000, 127.0.0.1:9000 or [::1]:9000")
    return bare, int(port)


def duration_s(text: str) -> float:
    """Read a duration such as 90s, 1h30m or 500ms; a plain number is seconds.

    Raises:
        UsageError: it is none.
    """
    parts = list(_PART.finditer(text))
    if parts and "".join(part.group(0) for part in parts) == text:
        return sum(float(part.group(1)) * _UNITS[part.group(2)] for part in parts)
    try:
        return float(text)
    except ValueError as exc:
        raise UsageError(f"{text!r:.80} is no duration; write 1h, 90m, 1h30m or 3600s") from exc


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for each in text.split(",") if (name := each.strip()))


_VARIABLES: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "addr": ("SANDBOX_ADDR", str), "workspace": ("SANDBOX_WORKSPACE", str), "python_bin": ("SANDBOX_PYTHON_BIN", str),
    "node_bin": ("SANDBOX_NODE_BIN", str), "max_concurrent": ("SANDBOX_MAX_CONCURRENT", int),
    "session_ttl_s": ("SANDBOX_SESSION_TTL", duration_s), "max_output_bytes": ("SANDBOX_MAX_OUTPUT", int),
    "max_file_bytes": ("SANDBOX_MAX_FILE_SIZE", int), "token": ("SANDBOX_TOKEN", str),
    "callback_hosts": ("SANDBOX_CALLBACK_HOSTS", _names),
}  # fmt: skip
