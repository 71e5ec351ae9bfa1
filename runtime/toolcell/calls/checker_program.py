"""The program of a checker process: compiles schemas and checks values, one request after another, until it is killed.

It has one descriptor, the socket to the host, and no secret. It ends with the host, past its bounds, and when it is
idle for long.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgpack

from toolcell.calls.arguments import ArgumentChecker, InvalidArguments
from toolcell.calls.checker_process import NO_MEMORY, unpack, unpacker
from toolcell.calls.compiled_schema import compile_schema
from toolcell.calls.definition import ToolDefinition
from toolcell.calls.schema_walk import ValueCheck
from toolcell.errors import RegistrationError
from toolcell.support.lru import Lru

MAX_KEPT: Final = 500
MAX_KEPT_CHARS: Final = 4 << 20
"""Of schemas that are kept compiled. Source: compiled, 1 MiB of them takes about 35 MB."""
MAX_RESIDENT_BYTES: Final = 256 << 20
"""A process that keeps more makes room for a new one."""


def main(host: int, memory_bytes: int, idle_s: float) -> None:
    """Serve the host until it is gone."""
    _confine(host, memory_bytes)
    connection = socket.socket(fileno=0)
    gc.freeze()
    try:
        _serve(connection, idle_s)
    except MemoryError:
        os._exit(NO_MEMORY)
    except (OSError, StopIteration):
        pass  # the host is gone, or has no use for it
    os._exit(0)


def _confine(host: int, memory_bytes: int) -> None:
    if sys.platform == "linux":
        from toolcell_bridge.isolation.procfs import prefer_in_oom_killer
        from toolcell_bridge.isolation.syscalls import PR_SET_PDEATHSIG, prctl

        prefer_in_oom_killer("/proc/self")
        with contextlib.suppress(OSError):
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:
        os._exit(0)
    with contextlib.suppress(OSError):
        os.nice(5)
    for limit, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _serve(connection: socket.socket, idle_s: float) -> None:
    kept: Lru[str, Any] = Lru(MAX_KEPT, MAX_KEPT_CHARS)
    stream = connection.makefile("rb", buffering=0)
    while select.select([connection], [], [], idle_s)[0]:
        kind, cpu_s, spec, body = next(unpacker(stream))  # each has a buffer of its own, which does not stay
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = ANSWERS[kind](kept, spec, body)
        connection.sendall(msgpack.packb([time.process_time() - began, answer], unicode_errors="surrogatepass"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if _resident_bytes() > MAX_RESIDENT_BYTES:
            return


def _resident_bytes() -> int:
    """Return what this process holds now. The peak that `getrusage` tells begins with that of the host."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _compiled(kept: Lru[str, Any], spec: str, make: Callable[[Any], Any]) -> Any:
    """Return what is made of a specification, or the error that it has."""
    if (found := kept.use(spec)) is None:
        try:
            found = make(json.loads(spec))
        except RegistrationError as exc:
            found = exc
        kept.put(spec, found, len(spec))
    return found


def _schemas(kept: Lru[str, Any], spec: str, body: bytes) -> list[str]:
    return [_refusal(text) for text in unpack(body)]


def _refusal(schema: str) -> str:
    try:
        compile_schema(json.loads(schema))
    except RegistrationError as exc:
        return str(exc)
    return ""


def _value(kept: Lru[str, Any], spec: str, body: bytes) -> Any:
    check = _compiled(kept, spec, ValueCheck)
    problem = None if isinstance(check, RegistrationError) else check.problem(unpack(body))
    return None if problem is None else [problem.path, problem.message]


def _arguments(kept: Lru[str, Any], spec: str, body: bytes) -> Any:
    checker = _compiled(kept, spec, _checker)
    if isinstance(checker, RegistrationError):
        return "refused", [[(), str(checker)]], 1
    try:
        checked = checker.check(unpack(body))
    except InvalidArguments as exc:
        return "refused", [[each.path, each.message] for each in exc.problems], exc.steps
    changes = [[each.path, each.before, each.after] for each in checked.changes]
    return "fit", checked.args, changes, checked.warnings, checked.steps


def _checker(said: Any) -> ArgumentChecker:
    name, schema, coercion, extras, validate, makes_bytes = said
    return ArgumentChecker(ToolDefinition(name, "A tool.", schema), coercion, extras, validate, makes_bytes=makes_bytes)


ANSWERS: Final[dict[str, Callable[[Lru[str, Any], str, bytes], Any]]] = {
    "schemas": _schemas,
    "value": _value,
    "arguments": _arguments,
}
"""By the kind of a request."""
