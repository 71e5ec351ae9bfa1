"""`SyncClient`: a blocking `Client` for scripts and notebooks. Its event loop runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from toolcell.errors import UsageError
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
        """Refuse: a map's record and its retries need the journals of a `Runtime` in this process."""
        raise UsageError("map needs a Runtime in this process; call execute_code for each input, in threads if need be")

    def feed(self, **options: Any) -> NoReturn:
        """Refuse: what is fed runs in a sandbox of a `Runtime` in this process."""
        raise UsageError("feed needs a Runtime in this process; execute_code takes the whole script")

    def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for; see `Client.suspended_runs`."""
        return self._opened().call(self.client.suspended_runs)

    def kept_sessions(self) -> list[str]:
        """Return the names of sessions whose journals are at the service; see `Client.kept_sessions`."""
        return self._opened().call(self.client.kept_sessions)

    def interrupted_runs(self) -> list[str]:
        """Return the ids of runs that `resume` can carry on without a token; see `Client.interrupted_runs`."""
        return self._opened().call(self.client.interrupted_runs)
