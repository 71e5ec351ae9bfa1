"""`SyncClient`: a blocking `Client` for scripts and notebooks. Its event loop runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from toolcell.service.client import Client
from toolcell.support.loop_thread import blocking
from toolcell.sync import SyncRuntime


class SyncClient(SyncRuntime):
    """A blocking `Client` with the same arguments, and the methods of `SyncRuntime`."""

    runtime: Any

    def __init__(self, url: str, **options: Any) -> None:
        self._begin(Client(url, **options))

    @property
    def client(self) -> Client:
        """The client, for what may be read from any thread."""
        found: Client = self.runtime
        return found

    def map(self, source: str, inputs: Iterable[Mapping[str, Any]], **options: Any) -> NoReturn:
        """Refuse; see `Client.map`."""
        self.client.map(source, inputs, **options)

    suspended_runs = blocking(Client.suspended_runs)
    interrupted_runs = blocking(Client.interrupted_runs)
    kept_sessions = blocking(Client.kept_sessions)
    forget_session = blocking(Client.forget_session)
