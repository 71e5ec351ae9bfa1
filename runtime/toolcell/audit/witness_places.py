"""Make the witness that a text names, as on the command line."""

from __future__ import annotations

import os

from toolcell.audit.timestamp_witness import TimestampWitness
from toolcell.audit.witness import FileWitness, Witness
from toolcell.errors import UsageError


def witness_of(place: str | Witness, log: str | os.PathLike[str]) -> Witness:
    """Return the witness of a log that a text names: file:PATH or rfc3161:URL#CERTIFICATES.pem.

    `log` is the directory of the log: time stamps are kept there.

    Raises:
        UsageError: it names none.
    """
    if not isinstance(place, str):
        return place
    kind, _, rest = place.partition(":")
    if kind == "file" and rest:
        return FileWitness(rest)
    if kind == "rfc3161":
        url, separator, certificates = rest.partition("#")
        if separator and url and certificates:
            return TimestampWitness(url, certificates, log)
    raise UsageError(
        f"{place!r} does not name a witness: want file:PATH or rfc3161:URL#CERTIFICATES.pem; "
        "another kind is an object with `name`, `push` and `heads`"
    )
