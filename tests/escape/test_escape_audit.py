"""What a hostile run leaves in the audit log: PROMISES.md, "evidence"."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from escape.attack import Victim, outside
from escape.prologues import over_the_bridge
from escape.test_escape_ten_probes import PROBES

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("EX-46")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Iterator[Victim]:
    """A host that keeps a log in `folder`, with its keys and heads beside it."""
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config"), "XDG_STATE_HOME": str(folder / "state")}
    host = Victim(record=str(folder / "log"), environment=home | cache_home())
    yield host
    host.close()


def cache_home() -> dict[str, str]:
    """Keep what was prepared for guests, so that it is prepared once."""
    return {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")}


def records(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the record holds."""
    return [(event.kind, event.fields) for event in Ledger(folder / "log").found()]


def everything_in(record: Path) -> bytes:
    return b"".join(path.read_bytes() for path in record.parent.glob(f"{record.name}*"))


def test_every_probe_leaves_a_start_and_an_end(recorded: Victim, folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("escaped")
    assert outside(PROBES["io.open"], secret=str(secret)).value == "escaped"
    recorded.start()
    before = records(folder)
    for source in PROBES.values():
        recorded.run(source, secret=str(secret), target=str(folder / "t"), victim=str(secret), port=9)
    recorded.run("import os\nos.write(1, b'\\0\\0\\0\\5forged result')\nos._exit(0)")
    kinds = [kind for kind, _ in records(folder)][len(before) :]
    expected = len(PROBES) + 1
    assert (kinds.count("run_started"), kinds.count("run_ended")) == (expected, expected)
    sources = [fields["source"] for kind, fields in records(folder) if kind == "run_started"]
    assert sum("escaped" in source for source in sources) >= 5


FORGERY = over_the_bridge("""
line = '\\n{"kind":"run_ended","outcome":"ok"}\\r\\n\\x1b[2J\\u2028\\u202e\\0'
send(message(CALL, 1, "touch", {"tag": line}, -5))
receive()
send(message(LOG, 1, line * 10) + message(RESULT, {line: line}, [line]))
send(message(DONE, False, {"type": line, "message": line, "traceback": line, "denied": True}))
stay()
""")


def test_nothing_a_guest_says_becomes_a_record(recorded: Victim, folder: Path) -> None:
    """Line ends, escapes and false claims about its outcome stay inside the fields in which it sent them."""
    assert '"kind":"run_ended"' in repr(outside(FORGERY, bridge=True).believed)
    recorded.start()
    before = records(folder)
    recorded.run(FORGERY)
    found = records(folder)[len(before) :]
    ended = [fields for kind, fields in found if kind == "run_ended"]
    assert len(ended) == 1
    assert ended[-1]["outcome"] == "error"
    assert [fields["tool"] for kind, fields in found if kind == "call_started"] == ["touch"]


LEAKY = "import traceback\ntry:\n    raise KeyError(secret)\nexcept KeyError:\n    set_result(traceback.format_exc())"


def test_the_log_holds_no_secret_of_the_host(recorded: Victim, folder: Path) -> None:
    """The log describes every run, and holds nothing of the host's environment and memory."""
    assert (
        recorded.secret
        in outside("import os\nset_result(dict(os.environ))", environment={"S": recorded.secret}).value["S"]
    )
    recorded.run("call_tool('touch', {'tag': 'x'})\nopen('/proc/self/environ')")
    assert b"touch" in everything_in(folder / "log")
    assert recorded.secret.encode() not in everything_in(folder / "log")


def test_the_log_holds_of_a_tool_that_failed_only_what_its_exception_said(recorded: Victim, folder: Path) -> None:
    assert recorded.secret in outside(LEAKY, secret=recorded.secret).value
    told = recorded.run(
        "try:\n    call_tool('fails', {'how': 'cause'})\nexcept Exception as error:\n    set_result(str(error))"
    )
    assert recorded.secret not in told.value
    assert b"RuntimeError: could not connect" in everything_in(folder / "log")
    assert recorded.secret.encode() not in everything_in(folder / "log")
