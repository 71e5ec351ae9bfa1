"""Make the witness that a text names, as on the command line."""

from __future__ import annotations

import os

from toolcell.audit.git_witness import GitWitness
from toolcell.audit.remote_witnesses import HttpWitness, SyslogWitness
from toolcell.audit.timestamp_witness import TimestampWitness
from toolcell.audit.witness import FileWitness, Witness
from toolcell.errors import UsageError


def witness_of(place: str | Witness, log: str | os.PathLike[str]) -> Witness:
    """Return the witness of a log that a text names: file:PATH, https://..., git:PATH, git:PATH#REMOTE, syslog:PATH...

    `log` is the directory of the log: time stamps are kept there.

    Raises:
        UsageError: it names none.
    """
    if not isinstance(place, str):
        return place
    kind, _, rest = place.partition(":")
    if kind == "file" and rest:
        return FileWitness(rest)
    if kind in ("http", "https") and rest.startswith("//"):
        return HttpWitness(place)
    if kind == "git" and rest:
        path, separator, remote = rest.rpartition("#")
        return GitWitness(path, remote=remote) if separator and path else GitWitness(rest)
    if kind == "syslog" and rest:
        return SyslogWitness(rest)
    if kind == "rfc3161":
        url, separator, certificates = rest.partition("#")
        if separator and url and certificates:
            return TimestampWitness(url, certificates, log)
    raise UsageError(
        f"{place!r} is no witness: want file:PATH, https://HOST/PATH, git:PATH, git:PATH#REMOTE, syslog:SOCKET, "
        "syslog:HOST:PORT or rfc3161:URL#CERTIFICATES.pem"
    )
