"""The stores that the tests of the built-in tools run over, and a PostgreSQL server of the tests' own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from machine import POSTGRES_SERVER as SERVER
from machine import postgres_programs
from toolcell.builtin import PostgresStore, SqliteStore, Store

_NUMBERS = itertools.count()


@asynccontextmanager
async def open_store(request: pytest.FixtureRequest | None, kind: str, directory: Path) -> AsyncIterator[Store]:
    """Yield an empty store of a kind, open."""
    made = _store(request, kind, directory)
    await made.init()
    try:
        yield made
    finally:
        await made.close()
        if SERVER in os.environ and isinstance(made, PostgresStore):
            import psycopg
            import psycopg.sql

            with psycopg.connect(os.environ[SERVER], autocommit=True) as connection:
                connection.execute(
                    psycopg.sql.SQL("DROP SCHEMA {} CASCADE").format(psycopg.sql.Identifier(made.schema))
                )


def _store(request: pytest.FixtureRequest | None, kind: str, directory: Path) -> Store:
    match kind:
        case "memory":
            return SqliteStore(":memory:")
        case "sqlite":
            return SqliteStore(directory / "store.db")
        case _:
            assert request is not None
            return PostgresStore(request.getfixturevalue("postgres_server"), schema=new_schema())


def new_schema() -> str:
    """Return the name of a schema that no other test uses."""
    return f"test_{os.getpid()}_{next(_NUMBERS)}"


@contextmanager
def running_server() -> Iterator[str]:
    """Yield the address of a server: the one that is named, or one that is started on a socket in a new directory."""
    if given := os.environ.get(SERVER):
        yield given
        return
    programs = postgres_programs()
    assert programs is not None, "a test that wants a server carries the mark postgres"
    directory = Path(tempfile.mkdtemp(prefix="toolcell-postgres-"))
    try:
        with _started(programs, directory):
            yield f"host={directory} user=toolcell dbname=postgres"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _started(programs: Path, directory: Path) -> Iterator[None]:
    user = _user()
    if user:
        shutil.chown(directory, user)
    data = str(directory / "data")

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [str(programs / program), *arguments],
            user=user,
            cwd=directory,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )

    run("initdb", "--pgdata", data, "--username=toolcell", "--auth=trust", "--encoding=UTF8", "--no-sync")
    settings = f"-c listen_addresses= -c unix_socket_directories={directory} -c fsync=off -c max_connections=40"
    log = str(directory / "log")
    run("pg_ctl", "start", "--wait", "--timeout=60", "--pgdata", data, "--log", log, "--options", settings)
    try:
        yield
    finally:
        run("pg_ctl", "stop", "--wait", "--mode=immediate", "--pgdata", data)


def _user() -> str | None:
    """Return who runs the server: it refuses to run as root."""
    if os.getuid():
        return None
    return "postgres" if Path("/etc/passwd").read_text(encoding="utf-8").find("\npostgres:") >= 0 else "nobody"
