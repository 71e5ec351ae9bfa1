"""Idempotency keys: a request that is sent again is answered again, and never carried out again.

Before a run begins, its key is written to one SQLite file; when it has ended, the answer is. A key that another
process began is under way as long as that process lives, which it shows by a lock that the kernel frees with it. A key
whose process died has no answer: such a run is never started again, and the answer says which run it was.

A request with a key goes on when its client has gone: the client comes back with the same key for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio
from starlette.requests import Request
from starlette.responses import Response

from toolcell.errors import SandboxUnavailable, StoreError, ToolcellError
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem, problem_in
from toolcell.service.tenants import Tenant
from toolcell.support import daemon_threads
from toolcell.support.files import is_locked, lock, make_private_folder
from toolcell.support.http_protocol import CONNECTION
from toolcell.support.lifetime import Lifetime
from toolcell.support.log import logger_of
from toolcell.support.sqlite import SqliteDatabase

KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
"""Printable ASCII, so that a key can be a header."""

_TABLES: Final = """
CREATE TABLE requests (
    tenant TEXT, key TEXT, sha256 BLOB NOT NULL, run TEXT NOT NULL, owner TEXT NOT NULL, began_at REAL NOT NULL,
    status INTEGER, type TEXT, body BLOB, PRIMARY KEY (tenant, key)
);
CREATE INDEX requests_by_time ON requests (tenant, began_at);
CREATE INDEX answers_by_time ON requests (tenant, began_at) WHERE body IS NOT NULL;
CREATE TABLE totals (tenant TEXT PRIMARY KEY, keys INTEGER NOT NULL, bytes INTEGER NOT NULL)
"""

_TRIGGERS: Final = (
    """CREATE TRIGGER request_added AFTER INSERT ON requests BEGIN
    INSERT INTO totals VALUES (new.tenant, 1, 0) ON CONFLICT (tenant) DO UPDATE SET keys = keys + 1;
    END""",
    """CREATE TRIGGER answer_changed AFTER UPDATE OF body ON requests BEGIN
    UPDATE totals SET bytes = bytes + coalesce(length(new.body), 0) - coalesce(length(old.body), 0)
    WHERE tenant = new.tenant;
    END""",
    """CREATE TRIGGER request_removed AFTER DELETE ON requests BEGIN
    UPDATE totals SET keys = keys - 1, bytes = bytes - coalesce(length(old.body), 0) WHERE tenant = old.tenant;
    END""",
    "DELETE FROM totals",
    "INSERT INTO totals SELECT tenant, count(*), coalesce(sum(length(body)), 0) FROM requests GROUP BY tenant",
)
"""Keep `totals`: nobody counts a hundred thousand rows for each request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of the request that has a key."""

    state: Literal["begun", "running", "answered", "interrupted", "other request", "full"]
    """`begun`: the key is new, so carry the request out. `interrupted`: its process died before it had an answer.
    `other request`: the key was used for one. `full`: the tenant has as many keys as are kept."""
    run_id: str = ""
    is_here: bool = False
    """A running one is carried out by this process."""
    status: int = 0
    media_type: str = ""
    body: bytes | None = None
    """The answer. None: it was too large, or is too old, to be kept."""
    retry_after_s: float = 0.0
    """When the oldest key of a full tenant is forgotten."""


class IdempotencyStore:
    """The keys of all tenants, in `folder`. Several processes may use it at once.

    A key is never forgotten before `keep_s`: forgetting it early would run its request twice. Answers are: the oldest
    go first when a tenant has more than `answer_bytes` of them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_s: float = 86_400.0,
        rows: int = 100_000,
        answer_bytes: int = 256 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`rows`, `answer_bytes`: of each tenant. `clock` is `time.time` where none is given."""
        self._database = SqliteDatabase(
            folder / "requests.sqlite", [_TABLES.split(";"), _TRIGGERS], application_id=0x746C6972
        )
        self._keep_s, self._rows, self._answer_bytes, self._clock = keep_s, rows, answer_bytes, clock or time.time
        self._lives = folder / "lives"
        self._owner = ""
        self._life: int | None = None

    def open(self) -> None:
        """Show that this process lives. Forget the processes that do not, and what is older than `keep_s`."""
        make_private_folder(self._lives)
        self._owner = secrets.token_hex(16)
        with self._alone():  # between making its file and locking it, a process looks dead
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._life = os.open(self._lives / self._owner, flags, 0o600)
            lock(self._life, wait=True)
            for path in self._lives.glob("[0-9a-f]*"):
                if not self._is_alive(path.name):
                    path.unlink(missing_ok=True)
        with self._database.writing() as connection:
            self._forget(connection, self._clock())

    def close(self) -> None:
        """Let go of the file. What this process began and did not finish is interrupted from now on."""
        self._database.close()
        if self._life is not None:
            (self._lives / self._owner).unlink(missing_ok=True)
            os.close(self._life)
            self._life = None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        descriptor = os.open(self._lives / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock(descriptor, wait=True)
            yield
        finally:
            os.close(descriptor)

    def begin(self, tenant: str, key: str, digest: bytes, run_id: str) -> Entry:
        """Take a key for a request, or return what became of the request that has it. `digest`: of the request."""
        now = self._clock()
        with self._database.writing() as connection:
            row = connection.execute(f"{_SELECT} WHERE tenant = ? AND key = ?", (tenant, key)).fetchone()
            if row is not None:
                entry = self._entry(digest, *row)
                if row[3] >= now - self._keep_s or entry.state == "running":
                    return entry
                self._forget(connection, now, tenant, key)
            if self._totals(connection, tenant)[0] >= self._rows:
                self._forget(connection, now, tenant)
            if self._totals(connection, tenant)[0] >= self._rows:
                oldest = connection.execute("SELECT min(began_at) FROM requests WHERE tenant = ?", (tenant,)).fetchone()
                return Entry("full", retry_after_s=max(1.0, oldest[0] + self._keep_s - now))
            connection.execute(
                "INSERT INTO requests (tenant, key, sha256, run, owner, began_at) VALUES (?, ?, ?, ?, ?, ?)",
                (tenant, key, digest, run_id, self._owner, now),
            )
        return Entry("begun", run_id)

    def _entry(self, digest: bytes, sha256: bytes, run_id: str, owner: str, _: float, *answer: Any) -> Entry:
        if sha256 != digest:
            return Entry("other request", run_id)
        if answer[0] is not None:
            return Entry("answered", run_id, False, *answer)
        return Entry("running" if self._is_alive(owner) else "interrupted", run_id, owner == self._owner)

    def _forget(
        self, connection: sqlite3.Connection, now: float, tenant: str | None = None, key: str | None = None
    ) -> None:
        """Delete what is older than `keep_s` and not under way, of all or of a tenant or a key."""
        connection.create_function("is_alive", 1, self._is_alive)
        wanted = {name: value for name, value in (("tenant", tenant), ("key", key)) if value is not None}
        connection.execute(
            f"DELETE FROM requests WHERE {''.join(f'{name} = :{name} AND ' for name in wanted)}"
            "began_at < :before AND (status IS NOT NULL OR NOT is_alive(owner))",
            {**wanted, "before": now - self._keep_s},
        )

    def finish(self, tenant: str, key: str, status: int, media_type: str, body: bytes) -> None:
        """Keep the answer of a request that this process carried out. The oldest answers of a tenant that has too many
        bytes of them are dropped; their keys stay."""
        kept = body if len(body) <= self._answer_bytes else None
        with self._database.writing() as connection:
            connection.execute(
                "UPDATE requests SET status = ?, type = ?, body = ? "
                "WHERE tenant = ? AND key = ? AND owner = ? AND status IS NULL",
                (status, media_type, kept, tenant, key, self._owner),
            )
            while self._totals(connection, tenant)[1] > self._answer_bytes:
                connection.execute(
                    "UPDATE requests SET body = NULL WHERE rowid = (SELECT rowid FROM requests "
                    "WHERE tenant = ? AND body IS NOT NULL ORDER BY began_at LIMIT 1)",
                    (tenant,),
                )

    def release(self, tenant: str, key: str) -> None:
        """Free a key whose request did not begin, so that it can be sent again."""
        with self._database.writing() as connection:
            connection.execute(
                "DELETE FROM requests WHERE tenant = ? AND key = ? AND owner = ? AND status IS NULL",
                (tenant, key, self._owner),
            )

    @staticmethod
    def _totals(connection: sqlite3.Connection, tenant: str) -> tuple[int, int]:
        row = connection.execute("SELECT keys, bytes FROM totals WHERE tenant = ?", (tenant,)).fetchone()
        return row or (0, 0)

    def _is_alive(self, owner: str) -> bool:
        """Return True while the process holds its lock."""
        return owner == self._owner or is_locked(self._lives / owner)


_SELECT: Final = "SELECT sha256, run, owner, began_at, status, type, body FROM requests"


def digest_of(*parts: bytes | str) -> bytes:
    """Return the digest of a request. Parts are told apart: ("ab", "c") and ("a", "bc") differ."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.digest()


async def interrupted_problem(tenant: Tenant, run_id: str) -> Problem:
    """Return the answer to a request whose run was interrupted.

    Shape: `calls` has each call with `tool`, `args` and `state`, which is `answered`, `in doubt` or `not begun`.
    """
    calls, told = await daemon_threads.run_sync(tenant.runtime.calls_of_interrupted, run_id), ""
    if calls is None:
        calls, told = await _recorded(tenant, run_id)
    elif any(each["state"] == "in doubt" for each in calls):
        told = "; a call in doubt had begun and has no answer: its tool may have done its work"
    count = f"calls that it had begun: {len(calls)}"
    members: dict[str, Any] = {"run_id": run_id, "calls": calls}
    detail = f"the service ended while it carried out run {run_id}, and does not begin it again; {count}{told}"
    return Problem(409, "interrupted", "The run was interrupted", detail, **members)


async def _recorded(tenant: Tenant, run_id: str) -> tuple[list[dict[str, Any]], str]:
    """Return what the record has of a run that cannot go on: it has ended, or had not begun."""
    try:
        run = await tenant.recorded.load(run_id)
    except (Problem, ToolcellError):
        return [], "; the record has no run of this id, so it had not begun"
    calls = [
        {"tool": each["tool"], "args": each["args"], "state": "in doubt" if each["status"] is None else "answered"}
        for each in (call.to_dict() for call in run.calls)
        if each["parent"] is None
    ]
    return calls, f"; the record has its end, with the outcome {run.outcome}" if run.end else ""


logger = logger_of("toolcell.service.idempotency")

HEADER: Final = "idempotency-key"
"""Source: draft-ietf-httpapi-idempotency-key-header."""
REPLAYED: Final = {"Idempotency-Replayed": "true"}
LONGEST_WAIT_S: Final = 300.0
RETRY_S: Final = 1
_WAIT: Final = re.compile(r"(?:^|[,;]\s*)wait=([0-9]{1,6})(?:$|\s*[,;])")

CarryOut = Callable[[Request], Awaitable[Response]]
"""Gets the request without its client: it does not end when the client goes."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """What is asked with a key."""

    http: Request
    principal: Principal
    tenant: Tenant
    sent: bytes
    """The body as it came."""
    run_id: str
    began: anyio.Event
    """Set once something may have been done."""


class IdempotentRequests:
    """The requests of a service that have keys."""

    def __init__(self, store: IdempotencyStore) -> None:
        self._store = store
        self._here: dict[tuple[str, str], asyncio.Future[Response | Problem]] = {}
        """What is carried out by this process, by tenant and key."""
        self._lifetime = Lifetime("IdempotentRequests", self._open)

    async def open(self) -> None:
        """Open the store."""
        await self._lifetime.open()

    async def close(self) -> None:
        """Cancel what is carried out, and close the store. What had no answer yet is interrupted."""
        await self._lifetime.close()

    async def _open(self, stack: AsyncExitStack) -> None:
        await daemon_threads.run_sync(self._store.open)
        stack.callback(self._store.close)
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._tasks.cancel_scope.cancel)

    async def answer(self, request: KeyedRequest, carry_out: CarryOut) -> Response:
        """Carry a request out if its key is new; otherwise answer with what became of the one that had it.

        Raises:
            Problem: the key is malformed (400), was used for another request (422), its request is under way or was
                interrupted (409), or the tenant has too many keys (429).
        """
        tenant, key = request.tenant.name, key_of(request.http)
        if "text/event-stream" in request.http.headers.get("accept", "").lower():
            detail = "a stream of events is not kept, so send a key with Accept: application/json"
            raise Problem(400, "invalid_key", "The Idempotency-Key is wrong", detail)
        url = request.http.url
        # An answer is for nobody who might not have got it.
        lacking = [scope for scope in Scope if scope is not Scope.OPERATOR and not request.principal.may(scope)]
        digest = digest_of(request.http.method, url.path, url.query, request.sent, *lacking)
        until = anyio.current_time() + wanted_wait_s(request.http)
        while True:
            entry = await self._entry(tenant, key, digest, request.run_id)
            match entry.state:
                case "begun":
                    return await self._begin(request, key, carry_out)
                case "answered":
                    if entry.body is None:
                        raise _not_kept(entry.run_id)
                    return Response(entry.body, entry.status, REPLAYED, entry.media_type)
                case "running":
                    if not entry.is_here or not await self._wait_ended((tenant, key), until):
                        raise _in_progress(entry.run_id)
                case "interrupted":
                    raise await interrupted_problem(request.tenant, entry.run_id)
                case "other request":
                    detail = f"{key!r} was used for another request; a new request needs a new key"
                    raise Problem(422, "key_reused", "The Idempotency-Key was used before", detail)
                case "full":
                    headers = {"Retry-After": f"{entry.retry_after_s:.0f}"}
                    detail = "as many keys are kept as may be, and none is forgotten before its time"
                    raise Problem(429, "too_many_keys", "Too many keys", detail, headers=headers)

    async def _entry(self, tenant: str, key: str, digest: bytes, run_id: str) -> Entry:
        try:
            return await daemon_threads.run_sync(self._store.begin, tenant, key, digest, run_id)
        except StoreError as exc:
            logger.error("the store of keys: %s", exc)
            headers = {"Retry-After": f"{RETRY_S}"}
            detail = "the key could not be noted, so nothing was begun"
            raise Problem(503, "store_error", "The store of keys cannot be used", detail, headers=headers) from exc

    async def _wait_ended(self, place: tuple[str, str], until: float) -> bool:
        """Wait until a request has ended. Return False if it has not."""
        if (found := self._here.get(place)) is None:
            return False
        return bool((await asyncio.wait([found], timeout=max(0.0, until - anyio.current_time())))[0])

    async def _begin(self, request: KeyedRequest, key: str, carry_out: CarryOut) -> Response:
        # Between the note in the store and this task there is no await: the note is always followed by the work.
        under_way: asyncio.Future[Response | Problem] = asyncio.get_running_loop().create_future()
        self._here[request.tenant.name, key] = under_way
        self._tasks.start_soon(self._carry_out, request, key, carry_out, under_way)
        await asyncio.wait([under_way])
        if under_way.cancelled():
            raise _in_progress(request.run_id)
        answer = under_way.result()
        if isinstance(answer, Problem):
            raise answer
        return answer

    async def _carry_out(
        self, request: KeyedRequest, key: str, carry_out: CarryOut, under_way: asyncio.Future[Response | Problem]
    ) -> None:
        try:
            answer, is_final = await self._answer_of(request, carry_out)
            kept = answer.response() if isinstance(answer, Problem) else answer
            with anyio.CancelScope(shield=True):
                await self._note(request.tenant.name, key, kept if is_final else None)
            under_way.set_result(answer)
        finally:
            del self._here[request.tenant.name, key]
            under_way.cancel()

    async def _answer_of(self, request: KeyedRequest, carry_out: CarryOut) -> tuple[Response | Problem, bool]:
        """Return the answer, and whether it is final: anything may have been done before it."""
        is_about_start = False
        try:
            scope = {name: each for name, each in request.http.scope.items() if name != CONNECTION}
            return await carry_out(Request(scope, _never)), True
        except Problem as exc:
            problem = exc
        except ToolcellError as exc:
            problem, is_about_start = problem_in(request.http, exc), isinstance(exc, SandboxUnavailable)
        except Exception:
            logger.exception("request %s failed", request.run_id)
            problem = Problem(500, "internal_error", "The service failed", "its log has the reason")
        is_final = request.began.is_set() and not is_about_start
        if is_final:
            problem.extra.setdefault("run_id", request.run_id)
        return problem, is_final

    async def _note(self, tenant: str, key: str, answer: Response | None) -> None:
        """Keep an answer; with None, free the key. A store that fails is logged: the run was made, and is answered."""
        try:
            if answer is None:
                await daemon_threads.run_sync(self._store.release, tenant, key)
                return
            media_type = answer.headers.get("content-type", "application/octet-stream")
            await daemon_threads.run_sync(
                self._store.finish, tenant, key, answer.status_code, media_type, bytes(answer.body)
            )
        except StoreError as exc:
            logger.error("the answer to key %r of %s could not be kept: %s", key, tenant, exc)


def key_of(http: Request) -> str:
    """Return the key of a request.

    Raises:
        Problem: it is none, or there are two (400).
    """
    keys = http.headers.getlist(HEADER)
    key = keys[0].strip() if keys else ""
    if len(keys) == 1 and len(key) > 2 and key[0] == key[-1] == '"':
        key = key[1:-1]  # the draft writes a string of structured fields
    if len(keys) != 1 or not KEY.fullmatch(key):
        detail = "send one Idempotency-Key of 1 to 255 printable ASCII characters without spaces"
        raise Problem(400, "invalid_key", "The Idempotency-Key is wrong", detail)
    return key


def wanted_wait_s(http: Request) -> float:
    """Return how long the client wants to wait for a request that is under way: `Prefer: wait=30`. Source: RFC 7240."""
    match = _WAIT.search(http.headers.get("prefer", ""))
    return min(LONGEST_WAIT_S, float(match[1])) if match else 0.0


def _in_progress(run_id: str) -> Problem:
    return Problem(
        409,
        "in_progress",
        "The request is under way",
        "it was sent before with this key; send it again for its answer, with `Prefer: wait=30` to wait for it",
        headers={"Retry-After": f"{RETRY_S}"},
        run_id=run_id,
    )


def _not_kept(run_id: str) -> Problem:
    detail = f"run {run_id} was made and has ended, but its answer was too large or is too old; it is not made again"
    return Problem(409, "answer_not_kept", "The answer is not kept any more", detail, run_id=run_id)


async def _never() -> Any:
    await anyio.sleep_forever()
