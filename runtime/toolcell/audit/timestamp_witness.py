"""A time stamping authority as a witness (RFC 3161): it signs that it was shown a head, and when, and keeps nothing.

Its tokens are kept in the log's directory, so whoever can write there can remove them. Nobody can make one, or change
when it was made, without the authority's key.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import itertools
import json
import os
import re
import stat
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from toolcell.audit.chain_check import Finding
from toolcell.audit.signatures import Head
from toolcell.audit.witness import MAX_LINE_BYTES, WitnessFailed, to_line
from toolcell.errors import AuditError, UsageError
from toolcell.support.file_lock import lock
from toolcell.support.loop_thread import LoopThread

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

TOKENS_FILE: Final = "timestamps.jsonl"
"""In the log's directory. Each line is an answer of an authority, with its name and the head that it was shown."""
TIMEOUT_S: Final = 5.0
HEADERS: Final = {
    "Content-Type": "application/timestamp-query",
    "Accept": "application/timestamp-reply",
    "Accept-Encoding": "identity",
}
MAX_ANSWER_BYTES: Final = 64 << 10
"""An answer has a token and a few certificates: 2 to 8 KB."""
MAX_TOKEN_LINE_BYTES: Final = MAX_ANSWER_BYTES * 4 // 3 + MAX_LINE_BYTES
MAX_CERTIFICATES_BYTES: Final = 1 << 20
MAX_REMEMBERED: Final = 100_000
"""Tokens found good that are not checked a second time. Checking one takes 2 ms."""
MIN_NONCE: Final = 1 << 61
"""Nonces from here to its double are 8 bytes without a sign byte, so each encoding of them is the same."""
MAX_BAD_TOKENS: Final = 100
"""Reported of one witness: one is enough."""
BAD_TOKEN: Final = "bad_stamp"


@dataclass(frozen=True, slots=True)
class Stamp:
    """A head, and what its token says of it."""

    line: int
    head: Head
    at: datetime | None
    """When the authority signed. None when the token is not one of this head by an authority that is trusted."""
    problem: str = ""


class TimestampWitness:
    """An authority at a URL, and the log whose heads it stamps.

    `certificates` is a PEM file with the certificate that the authority's own was issued by, and those in between. The
    authority's must be marked for time stamping.
    """

    def __init__(
        self,
        url: str,
        certificates: str | os.PathLike[str],
        log: str | os.PathLike[str],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_url(url)
        self.name = f"rfc3161:{url}"
        self._url = url
        self._timeout_s = timeout_s
        self._roots = _load_certificates(Path(certificates))
        self._path = Path(log).absolute() / TOKENS_FILE
        self._good: dict[bytes, datetime] = {}

    def push(self, head: Head) -> None:
        """Let the authority stamp a head, check the token and keep it.

        Raises:
            WitnessFailed: there was no answer, its token is not one of this head, or it could not be written.
        """
        import rfc3161_client as tsp

        data = to_line(head).encode()
        builder = tsp.TimestampRequestBuilder(data, tsp.HashAlgorithm.SHA512, nonce=True, cert_req=True)
        query = builder.build()
        while not MIN_NONCE <= (query.nonce or 0) < 2 * MIN_NONCE:  # others come back encoded in another length
            query = builder.build()
        answer = ask(self.name, self._url, query.as_bytes(), self._timeout_s)
        try:
            self.stamped_at(answer, data, query.nonce)
        except ValueError as exc:
            raise WitnessFailed(f"{self.name}: {exc}") from exc
        self._keep(head, answer)

    def heads(self, log: str) -> Iterator[Head]:
        """Yield the heads that have a good token.

        Raises:
            WitnessFailed: the tokens cannot be read.
        """
        yield from (stamp.head for stamp in self.stamps(log) if stamp.at is not None)

    def stamps(self, log: str) -> Iterator[Stamp]:
        """Yield the heads of a log that the file has tokens of this authority for. Other lines are passed over.

        Raises:
            WitnessFailed: the file cannot be read.
        """
        for number, line in enumerate(self._lines(), 1):
            with suppress(ValueError, TypeError, KeyError, RecursionError, AuditError):
                plain = json.loads(line)
                head, text = Head.from_dict(plain["head"]), plain["answer"]
                if plain["witness"] == self.name and head.log == log:
                    yield self._stamp(number, head, text)

    def _stamp(self, number: int, head: Head, text: Any) -> Stamp:
        """Check a token, or remember that it was checked."""
        data = to_line(head).encode()
        try:
            answer = base64.b64decode(text, validate=True)
            digest = hashlib.sha256(len(data).to_bytes(4, "big") + data + answer).digest()
            at = self._good.get(digest) or self.stamped_at(answer, data)
        except (ValueError, TypeError) as exc:
            return Stamp(number, head, None, str(exc))
        if len(self._good) < MAX_REMEMBERED:
            self._good[digest] = at
        return Stamp(number, head, at)

    def stamped_at(self, answer: bytes, data: bytes, nonce: int | None = None) -> datetime:
        """Return when an answer says that data was stamped.

        Raises:
            ValueError: it does not say so, or nobody whom we trust does.
        """
        import rfc3161_client as tsp

        try:
            parsed = tsp.decode_timestamp_response(answer)
        except ValueError as exc:
            raise ValueError("the answer is not a response of RFC 3161") from exc
        if parsed.status != tsp.PKIStatus.GRANTED:
            said = " ".join(parsed.status_string)
            raise ValueError(f"the authority refused with status {parsed.status}: {said!r:.200}")
        try:
            tsp.VerifierBuilder(roots=list(self._roots), nonce=nonce).build().verify_message(parsed, data)
            return parsed.tst_info.gen_time.astimezone(UTC)
        except (ValueError, tsp.VerificationError) as exc:
            raise ValueError(f"the token is not one of this head by a trusted authority: {_why(exc)}") from exc

    def _keep(self, head: Head, answer: bytes) -> None:
        plain = {"witness": self.name, "head": head.to_dict(), "answer": base64.b64encode(answer).decode()}
        try:
            with _locked(self._path, os.O_CREAT) as file:
                # What a full disk or a power failure left of a line must not spoil this one.
                data = f"\n{json.dumps(plain, sort_keys=True)}\n".encode()
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
        except OSError as exc:
            raise WitnessFailed(f"{self.name}: the token cannot be kept in {self._path}: {exc.strerror}") from exc

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of the file. A file that is not there has none: then the log says what is missing."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                _require_regular(descriptor)
                while line := file.readline(MAX_TOKEN_LINE_BYTES + 1):
                    yield line
        except FileNotFoundError:
            return
        except OSError as exc:
            raise WitnessFailed(f"{self.name}: cannot read the tokens in {self._path}: {exc.strerror}") from exc


def check_url(url: str) -> None:
    """Check the URL of an authority.

    Raises:
        UsageError: it is none, or has a part that must not be recorded.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not the URL of a time stamping authority: want https://HOST/PATH")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError("the URL of a witness must have neither a password nor a query: it is recorded in the log")


def ask(name: str, url: str, query: bytes, timeout_s: float) -> bytes:
    """Return what an authority answers. A redirect is a failure: a head would go elsewhere than was said.

    Raises:
        WitnessFailed: the answer is not 2xx, too long or too slow.
    """
    loop = LoopThread()  # a blocking client bounds each read, and not all of them together
    try:
        return loop.call(partial(_answer, name, url, query, timeout_s))
    finally:
        loop.stop()


async def _answer(name: str, url: str, query: bytes, timeout_s: float) -> bytes:
    import httpx

    data = bytearray()
    try:
        with anyio.fail_after(timeout_s):
            async with (
                httpx.AsyncClient(timeout=None) as client,
                client.stream("POST", url, content=query, headers=HEADERS) as answer,
            ):
                if not answer.is_success:
                    raise WitnessFailed(f"{name} answered with {answer.status_code}")
                async for part in answer.aiter_raw():
                    data += part
                    if len(data) > MAX_ANSWER_BYTES:
                        raise WitnessFailed(f"{name} answered with more than {MAX_ANSWER_BYTES} bytes")
    except TimeoutError as exc:
        raise WitnessFailed(f"{name}: the answer did not end within {timeout_s:g} s") from exc
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as exc:
        raise WitnessFailed(f"{name}: {exc}") from exc
    return bytes(data)


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[FileIO]:
    """Open the tokens to be written, alone: who appends a token must not do it to a file that is being replaced.

    Raises:
        OSError: the file is not there, is not a regular one, or cannot be locked.
    """
    flags |= os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with FileIO(os.open(path, flags, 0o600), "r+") as file:
            _require_regular(file.fileno())
            lock(file.fileno(), wait=True)
            if os.fstat(file.fileno()).st_nlink:  # else it was replaced meanwhile
                yield file
                return


def forget_tokens(directory: Path, log: str, chain: str, seq: int) -> int:
    """Remove the tokens of heads before `seq`, whose records retention has removed; return how many.

    The token of the last removed record stays: it says that the authority was told of the removal. Lines that are no
    tokens of this chain stay as they are.

    Raises:
        OSError: the tokens cannot be read or written. The file is as it was.
    """
    path, removed = directory / TOKENS_FILE, 0
    draft = path.with_name(f".{TOKENS_FILE}.{os.urandom(8).hex()}")
    try:
        with _locked(path) as file, open(draft, "xb", opener=_private) as kept:
            reader = BufferedReader(file)
            while line := reader.readline(MAX_TOKEN_LINE_BYTES + 1):
                if _is_before(line, log, chain, seq):
                    removed += 1
                else:
                    kept.write(line)
            if removed:
                kept.flush()
                os.fsync(kept.fileno())
                os.replace(draft, path)
    except FileNotFoundError:
        return 0
    finally:
        draft.unlink(missing_ok=True)
    return removed


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _is_before(line: bytes, log: str, chain: str, seq: int) -> bool:
    with suppress(ValueError, TypeError, KeyError, RecursionError, AuditError):
        head = Head.from_dict(json.loads(line)["head"])
        return (head.log, head.chain) == (log, chain) and head.seq < seq
    return False


def check_tokens(witness: TimestampWitness, log: str) -> Iterator[Finding]:
    """Find tokens that were changed, belong to another head, or were made by nobody whom we trust."""
    bad = (stamp for stamp in witness.stamps(log) if stamp.at is None)
    for stamp in itertools.islice(bad, MAX_BAD_TOKENS):
        head, where = stamp.head, f"line {stamp.line} of {TOKENS_FILE} ({witness.name})"
        yield Finding(BAD_TOKEN, head.chain, None, head.seq, None, f"{where}: {stamp.problem}")


def _why(exc: Exception) -> str:
    """Return what the library says, without the error stack of OpenSSL that it appends."""
    said, _, stack = str(exc).partition(": ErrorStack")
    reason = re.search(r'data: "Verify error: *([^"]*)"', stack)
    return f"{said:.200}" + (f": {reason[1]:.100}" if reason else "")


def _require_regular(descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _load_certificates(path: Path) -> list[Certificate]:
    """Return the certificates in a PEM file.

    Raises:
        UsageError: there is none, or the extra is not installed.
    """
    try:
        import rfc3161_client  # noqa: F401
        from cryptography.x509 import load_pem_x509_certificates
    except ImportError as exc:
        raise UsageError("time stamps need the rfc3161-client package: pip install 'toolcell[audit]'") from exc
    try:
        with open(path, "rb") as file:
            return load_pem_x509_certificates(file.read(MAX_CERTIFICATES_BYTES))
    except OSError as exc:
        raise UsageError(f"cannot read the authority's certificates from {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"{path} has no certificates in PEM: {exc}") from exc
