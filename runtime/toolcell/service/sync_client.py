"""`SyncClient`: a blocking `Client` for scripts and notebooks. Its event loop runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from toolcell.results import Suspension
from toolcell.service.client import Client
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

    def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for; see `Client.suspended_runs`."""
        return self._opened().call(self.client.suspended_runs)

    def kept_sessions(self) -> list[str]:
        """Return the names of sessions whose journals are at the service; see `Client.kept_sessions`."""
        return self._opened().call(self.client.kept_sessions)

    def forget_session(self, name: str) -> None:
        """Remove the journal of a closed session; see `Client.forget_session`."""
        self._opened().call(partial(self.client.forget_session, name))

    def interrupted_runs(self) -> list[str]:
        """Return the ids of runs that `resume` can carry on without a token; see `Client.interrupted_runs`."""
        return self._opened().call(self.client.interrupted_runs)
