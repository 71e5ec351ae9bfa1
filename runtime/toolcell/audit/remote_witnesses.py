"""Witnesses on other machines: an HTTP endpoint, and syslog."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from toolcell.audit.signatures import Head
from toolcell.audit.witness import WitnessFailed, from_lines, read_lines, to_line
from toolcell.errors import AuditError, UsageError

TOKEN_VARIABLE: Final = "TOOLCELL_WITNESS_TOKEN"
"""Holds what is sent to an HTTP witness as a bearer token."""
TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 << 20


class HttpWitness:
    """An endpoint that keeps what is posted to it.

    `POST URL` with a head as JSON is answered with a status of 2xx when the head is kept, `GET URL?log=ID` with a list
    of heads. Redirects are failures: a head would go elsewhere than was said.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        parts = check_url(url)
        self.name = url
        self._timeout_s = timeout_s
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        if token and parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise UsageError(f"{url} is not https: everybody on the way could read the token")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def push(self, head: Head) -> None:
        """Post a head.

        Raises:
            WitnessFailed: it was not answered with 2xx.
        """
        self._ask(urllib.request.Request(self.name, to_line(head).encode(), self._json_headers(), method="POST"))

    def heads(self, log: str) -> list[Head]:
        """Return the heads that the endpoint answers with.

        Raises:
            WitnessFailed: the answer is no list of heads.
        """
        url = f"{self.name}?{urllib.parse.urlencode({'log': log})}"
        answer = self._ask(urllib.request.Request(url, headers=self._json_headers()))
        try:
            listed = json.loads(answer)
            return [head for head in map(Head.from_dict, listed) if head.log == log]
        except (ValueError, TypeError, RecursionError, AuditError) as exc:
            raise WitnessFailed(f"{self.name} did not answer with a list of heads: {exc}") from exc

    def _json_headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Accept": "application/json", **self._headers}

    def _ask(self, request: urllib.request.Request) -> bytes:
        return ask(self.name, request, MAX_ANSWER_BYTES, self._timeout_s)


def check_url(url: str) -> urllib.parse.SplitResult:
    """Return the parts of a witness's URL.

    Raises:
        UsageError: it is none, or has a part that must not be recorded.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a witness: want https://HOST/PATH")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(f"the URL of a witness has no password and no query; a token goes into ${TOKEN_VARIABLE}")
    return parts


def ask(name: str, request: urllib.request.Request, most_bytes: int, timeout_s: float) -> bytes:
    """Return what a witness answers. It follows no redirect.

    Raises:
        WitnessFailed: the answer is not 2xx, too long or too slow.
    """
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s) as answer:
            data = _read(answer, most_bytes, timeout_s)
    except urllib.error.HTTPError as exc:
        exc.close()
        raise WitnessFailed(f"{name} answered with {exc.code}") from exc
    except (OSError, http.client.HTTPException, ValueError) as exc:
        raise WitnessFailed(f"{name}: {exc}") from exc
    if len(data) > most_bytes:
        raise WitnessFailed(f"{name} answered with more than {most_bytes} bytes")
    return data


def _read(answer: http.client.HTTPResponse, most_bytes: int, timeout_s: float) -> bytes:
    """Read an answer to its end, or past the most that is wanted: a timeout of the socket bounds each read only."""
    data, deadline = bytearray(), time.monotonic() + timeout_s
    while len(data) <= most_bytes and (part := answer.read1(most_bytes + 1 - len(data))):
        data += part
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer did not end within {timeout_s:g} s")
    return bytes(data)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a failure of every redirect."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow none."""


MARK: Final = b"toolcell-head "
"""Stands before each head in a line of syslog."""
PRIORITY: Final = 13 * 8 + 5
"""Facility `log audit`, severity `notice`. Source: RFC 5424, section 6.2.1."""


class SyslogWitness:
    """Syslog: a local socket such as /dev/log, or HOST:PORT over UDP. Nobody confirms that a message arrived.

    Heads cannot be read from where they are sent. To verify, name the file in which they were received.
    """

    def __init__(self, address: str) -> None:
        self.name = f"syslog:{address}"
        self._address = address

    def push(self, head: Head) -> None:
        """Send a message.

        Raises:
            WitnessFailed: it could not be sent.
        """
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        text = f"<{PRIORITY}>1 {at} {socket.gethostname() or '-'} toolcell {os.getpid()} head - "
        try:
            self._send(text.encode("ascii", "replace") + MARK + to_line(head).encode())
        except (OSError, ValueError) as exc:
            raise WitnessFailed(f"{self.name}: {exc}") from exc

    def _send(self, message: bytes) -> None:
        host, separator, port = self._address.rpartition(":")
        if separator and port.isdecimal():
            family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            self._send_to(family, kind, target, message)
        elif stat.S_ISREG(os.stat(self._address).st_mode):
            raise OSError(f"{self._address} is a file, and heads are sent to a socket")
        else:
            self._send_to(socket.AF_UNIX, socket.SOCK_DGRAM, self._address, message)

    @staticmethod
    def _send_to(family: int, kind: int, target: Any, message: bytes) -> None:
        with socket.socket(family, kind) as out:
            out.settimeout(TIMEOUT_S)
            out.connect(target)
            out.send(message)

    def heads(self, log: str) -> Iterator[Head]:
        """Yield the heads in a file that syslog wrote.

        Raises:
            WitnessFailed: the address is no such file.
        """
        path = Path(self._address)
        if not path.is_file():
            raise WitnessFailed(
                f"{self.name} cannot be read: name the file in which it was received, syslog:/var/log/..."
            )
        yield from (head for head in from_lines(read_lines(path), MARK) if head.log == log)
