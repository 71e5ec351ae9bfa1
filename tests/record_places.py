"""Places of records for tests: a file, or a schema of its own in a PostgreSQL server; and a way to that server that breaks."""

from __future__ import annotations

import selectors
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from builtin_stores import new_schema


def record_url(server: str, schema: str = "", **changes: str) -> str:
    """Return the URL of a new record. `server`: an address as libpq takes it."""
    import psycopg.conninfo

    given = psycopg.conninfo.conninfo_to_dict(server) | {"schema": schema or new_schema()} | changes
    return "postgresql://?" + "&".join(f"{name}={quote(str(value), safe='')}" for name, value in given.items())


def schema_of(url: str) -> str:
    return url.rpartition("schema=")[2].partition("&")[0]


def connected(url: str) -> Any:
    """Connect as any other program would."""
    import psycopg

    base, schema = url.rpartition("&schema=")[0], schema_of(url)
    return psycopg.connect(base, autocommit=True, options=f"-c search_path={schema}")


def rows(place: Path | str, query: str) -> list[tuple[Any, ...]]:
    """Return what a statement finds, as any other program sees it. Also for changes."""
    if isinstance(place, Path):
        with closing(sqlite3.connect(place, isolation_level=None)) as db:
            return db.execute(query).fetchall()
    with closing(connected(place)) as db:
        found = db.execute(query)
        return found.fetchall() if found.description else []


def drop(url: str) -> None:
    with closing(connected(url)) as db:
        db.execute(f'DROP SCHEMA IF EXISTS "{schema_of(url)}" CASCADE')


class Way:
    """A way to a server, on a socket in a folder of its own, that a test can break."""

    def __init__(self, server: str, folder: Path) -> None:
        import psycopg.conninfo

        given = psycopg.conninfo.conninfo_to_dict(server)
        host, port = str(given.get("host") or "localhost"), given.get("port") or "5432"
        self._there: Any = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, int(port))
        self.folder = folder
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self.is_open = threading.Event()
        """Bytes go through."""
        self.is_open.set()
        self.is_refusing = False
        self.swallow: bytes | None = None
        """The connection that sends this breaks before the answer comes back; a COMMIT is done then."""
        self.hold: bytes | None = None
        """The connection that sends this breaks, and the server gets it with `give` and notices nothing before."""
        self.is_noticed = True
        """The server notices that a connection broke."""
        self._left: list[tuple[socket.socket, bytes]] = []
        """Those of which it did not, and what it is to get."""
        self._is_over = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_refusing:
                near.close()
                continue
            far = socket.socket(socket.AF_UNIX if isinstance(self._there, str) else socket.AF_INET)
            far.connect(self._there)
            with self._lock:
                self._pairs[near] = far
            thread = threading.Thread(target=self._carry, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as ready, suppress(OSError, ValueError):
            for each in (near, far):
                ready.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    source: Any = key.fileobj
                    self.is_open.wait()
                    data = source.recv(1 << 16)
                    if source is near and self.hold is not None and self.hold in data:
                        self.hold = None
                        self._close(near, far, data)
                        return
                    if source is near and self.swallow is not None and self.swallow in data:
                        self.swallow = None
                        far.sendall(data)
                        if data.count(b"COMMIT"):  # each other answer may wait for what is sent after it
                            far.recv(1 << 16)
                        data = b""
                    if not data:
                        self._close(near, far)
                        return
                    (far if source is near else near).sendall(data)
        self._close(near, far)

    def _close(self, near: socket.socket, far: socket.socket, held: bytes = b"") -> None:
        is_left = held or not self.is_noticed
        with self._lock:
            self._pairs.pop(near, None)
            self._left += [(far, held)] if is_left else []
        for each in (near,) if is_left else (near, far):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Break every connection."""
        with self._lock:
            pairs = [*self._pairs.items()]
        for near, far in pairs:
            for each in (near, far) if self.is_noticed else (near,):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def give(self) -> None:
        """Have the server get what was held."""
        for far, held in self._left:
            with suppress(OSError):
                far.sendall(held)

    def close(self) -> None:
        self._is_over = True
        self.is_open.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)
        for far, _ in self._left:
            far.close()


@contextmanager
def way_to(server: str, folder: Path) -> Iterator[Way]:
    way = Way(server, folder)
    try:
        yield way
    finally:
        way.close()
