"""A secret in a value is the same for runs, the audit log, what servers send back and MCP servers."""

from __future__ import annotations

import base64
import html
import json
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rows import each_row
from toolcell import PoolConfig, Runtime, Secrets
from toolcell.audit.redact import Redactor
from toolcell.egress.echoes import Echoes
from toolcell.mcp.client import hiding
from toolcell.support.secrets import MIN_SECRET_CHARS, REDACTED, SecretSearch, forms_of
from toolcell.tools import File, Image, RunContext, ToolContext, ToolRegistry, ToolResult
from toolcell_bridge.guest.values import to_plain

SECRET = 'hunter2-"quoted"\\\'<&>+/ and more'
TEXT = SECRET.encode()

FORMS: dict[str, str | bytes] = {
    "as it is": SECRET,
    "JSON": json.dumps(SECRET),
    "JSON with an escaped slash": json.dumps(SECRET).replace("/", "\\/"),
    "JSON in JSON": json.dumps(json.dumps({"x": SECRET})),
    "JSON for HTML": json.dumps(SECRET).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    "repr": repr(SECRET),
    "HTML": html.escape(SECRET),
    "HTML, quotation marks as they are": html.escape(SECRET, quote=False),
    "URL": quote(SECRET),
    "URL, all letters": "".join(f"%{byte:02x}" for byte in TEXT),
    "URL, twice": quote(quote(SECRET, safe="")),
    "hex": TEXT.hex(),
    "base64": base64.b64encode(b"user:" + TEXT).decode(),
    "base64 for URLs": base64.urlsafe_b64encode(TEXT).decode(),
    "encodeURIComponent": quote(SECRET, safe="!'()*"),
    "URLEncoder of Java": quote_plus(SECRET, safe="*").replace("~", "%7E"),
    "hex, with colons": TEXT.hex(":"),
    "hex, with dashes": TEXT.hex("-").upper(),
    "hex, as numbers": ", ".join(f"0x{byte:02x}" for byte in TEXT),
    "escapes of bytes": "".join(f"\\x{byte:02x}" for byte in TEXT),
    "JSON, every character": "".join(f"\\u{ord(each):04x}" for each in SECRET),
    "HTML, every character": "".join(f"&#{ord(each)};" for each in SECRET),
    "HTML, every character in hex": "".join(f"&#x{ord(each):X};" for each in SECRET),
    "octal": "".join(f"\\{byte:03o}" for byte in TEXT),
    "base64 in lines of mail": base64.encodebytes(b"-" * 30 + TEXT * 3).decode(),
    "base64 in lines of mail, in JSON": json.dumps(base64.encodebytes(b"-" * 30 + TEXT + b"-" * 30).decode()),
    "base64 in lines of PEM": "\r\n".join(textwrap.wrap(base64.b64encode(b"-" * 41 + TEXT + b"-" * 30).decode(), 64)),
    "base64 in JSON of PHP": base64.b64encode(TEXT).decode().replace("/", "\\/"),
    "UTF-8": b"\xff" + TEXT + b"\x00",
    "UTF-16": SECRET.encode("utf-16"),
}

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

Hide = Callable[[Any], Any]
USERS: dict[str, Hide] = {
    "RunContext(secrets=)": Secrets({"KEY": SECRET}).redact_value,
    "AuditLog(secrets=)": Redactor([SECRET]).clean_all,
    "Egress(secrets=)": lambda value: getattr(Echoes({"KEY": SECRET}), "clean" if type(value) is bytes else "clean_text")(value),
    "add_mcp_server(env=)": lambda value: hiding({"KEY": SECRET})(value.decode("latin-1") if type(value) is bytes else value),
}  # fmt: skip


@each_row("user", USERS)
@each_row("form", FORMS)
def test_a_secret_is_found_in_the_same_forms_by_everybody(form: str, user: str) -> None:
    given = FORMS[form]
    found = USERS[user](given)
    text, before = (each.decode("latin-1") if type(each) is bytes else each for each in (found, given))

    assert text != before and ("{KEY}" in text or REDACTED in text)
    assert not any(each in text for each in forms_of(SECRET))
    assert "quoted" not in text and TEXT.hex()[8:16] not in text


OTHERS = {
    "of two languages": 'пароль-"Ключ"',
    "of several lines": "-----BEGIN KEY-----\nTUlJRXZR\nSUJBREFO\n-----END KEY-----\n",
}


@each_row("user", [Secrets, Redactor])
@each_row("kind", OTHERS)
def test_other_secrets_are_found_as_text_and_as_bytes(kind: str, user: Any) -> None:
    secret = OTHERS[kind]
    hide = user({"KEY": secret}).redact_value if user is Secrets else user([secret]).clean_all
    bare = secret.strip()
    forms = [
        secret,
        bare,
        *(bare.replace("\n", each) for each in ("\r\n", " ", "")),
        repr(bare),
        ascii(bare),
        json.dumps(bare, ensure_ascii=False),
    ]
    as_bytes = [each.encode() for each in forms] + [bare.encode("utf-16-le"), bare.encode("utf-16-be")]

    for form in (*forms, *as_bytes):
        shown = str(hide(form))
        assert REDACTED in shown and "TUlJ" not in shown and "пароль" not in shown and "\\xd0" not in shown, form


@dataclass
class Note:
    text: str


class Words(BaseModel):
    text: str


class Silent:
    def __str__(self) -> str:
        return f"key {SECRET}"


OBJECTS = {
    "a dataclass": Note(SECRET),
    "a model": Words(text=SECRET),
    "an exception": ValueError(SECRET),
    "a path": PurePosixPath(f"/keys/{SECRET}"),
    "an object with a text": Silent(),
}


@each_row("kind", OBJECTS)
async def test_an_event_has_no_object_that_shows_a_secret(kind: str) -> None:
    events: list[str] = []
    registry, run = ToolRegistry(), RunContext(secrets=Secrets({"KEY": SECRET}))
    run.events.subscribe(lambda event: events.append(f"{event.to_json()} {event}"))

    @registry.tool
    async def act(ctx: ToolContext) -> str:
        """Tell of an object that holds the secret, and of one that does not."""
        ctx.emit("used", key=[OBJECTS[kind]], other=Note("harmless"))
        return "done"

    await registry.dispatch("act", {}, context=run)

    used = next(each for each in events if "harmless" in each)
    assert REDACTED in used and "Note(text='harmless')" in used
    assert not [each for each in events if "quoted" in each]


def searches_noted(monkeypatch: pytest.MonkeyPatch, size: int) -> set[bool]:
    """Return a set to which each search of a text longer than `size` adds whether it is in the main thread."""
    threads, hide = set[bool](), SecretSearch.hide

    def note(self: SecretSearch, text: str) -> tuple[str, int]:
        if len(text) > size:
            threads.add(threading.current_thread() is threading.main_thread())
        return hide(self, text)

    monkeypatch.setattr(SecretSearch, "hide", note)
    return threads


@pytest.mark.parametrize("size", [10, 2_000_000])
async def test_a_large_result_is_looked_through_outside_of_the_event_loop(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, threads = ToolRegistry(), searches_noted(monkeypatch, size)
    after = ["in a list", "as text"]
    for kind in after:

        @registry.tool(name=kind.replace(" ", "_"))
        async def act() -> Any:
            """Return a large text with a secret in it."""
            text = "x" * size + SECRET
            return [text] if kind == "in a list" else text  # noqa: B023

        run = RunContext(secrets=Secrets({"KEY": SECRET}))
        result = await registry.dispatch(kind.replace(" ", "_"), {}, context=run)
        assert result.whole_text.count(REDACTED) == 1 and "quoted" not in result.whole_text

    assert threads == {size < 100}


@pytest.mark.parametrize("size", [10, 2_000_000])
async def test_long_calls_of_a_run_that_has_ended_are_looked_through_outside_of_the_event_loop(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, threads = ToolRegistry(), searches_noted(monkeypatch, size)

    @registry.tool
    async def put(data: list[str]) -> str:
        """Take texts, which may be long."""
        return "taken"

    source, given = "call_tool('put', data=['x' * size + key])", {"size": size, "key": SECRET}
    run = RunContext(secrets=Secrets({"KEY": SECRET}))
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        ran = await runtime.execute_code(source, inputs=given, context=run)
        draft = await runtime.execute_code(source, inputs=given, context=run, dry_run=True)

    for way in (ran.calls, draft.calls, draft.effects):
        assert REDACTED in str(way) and "quoted" not in str(way)
    assert threads == {size < 100}


DIGITS = "80917263"
NUMBERS = (80917263, 80917263.0, -80917263, Decimal("80917263.00"), complex(80917263, 1), "n 80917263", b"80917263")


@each_row("hide", [Secrets({"PIN": DIGITS}).redact_value, Redactor([DIGITS]).clean_all])
def test_a_secret_of_digits_is_found_as_a_number_wherever_it_is(hide: Hide) -> None:
    for number in NUMBERS:
        for value in (number, [number], {"a": {number: 1}}, {"a": [[number]]}, {number}):
            assert REDACTED in str(hide(value)), value
    for other in (8091726, 809172631, 80917263.5, True, None, float("nan"), Decimal("1e999999999")):
        assert str(hide([other])) == str([other])


def test_numbers_that_a_secret_may_become_are_found_and_short_ones_are_not() -> None:
    for secret, number in (
        ("00123456", 123456),
        ("-12.50", -12.5),
        ("+12.50", Decimal("12.5")),
        ("9" * 25, float(10**25)),
    ):
        assert Secrets({"a": secret}).redact_value(number) == REDACTED, secret
    assert Secrets({"a": "0001", "b": "1.50", "c": "9" * 400}).redact_value([1, 1.5, 0]) == [1, 1.5, 0]


def frames() -> dict[str, Any]:
    import numpy as np
    import pandas as pd

    number, plain = int(DIGITS), pd.DataFrame({"a": [1, int(DIGITS)], "b": ["x", "y"]})
    return {
        "a column of whole numbers": plain,
        "of decimals": pd.DataFrame({"a": [Decimal("1.5"), Decimal(f"{DIGITS}.00")]}),
        "of floats": plain.astype({"a": "float64"}),
        "of narrow floats": plain.astype({"a": "float32"}),
        "of text": plain.astype({"a": str}),
        "of bytes": pd.DataFrame({"a": [DIGITS.encode()]}),
        "of objects": pd.DataFrame({"a": pd.Series([{"x": number}, "y"], dtype=object)}),
        "of lists": pd.DataFrame({"a": [[1, number], [2]]}),
        "of categories": plain.astype({"a": "category"}),
        "a label": plain.rename(columns={"b": DIGITS}),
        "a label that is a number": plain[["b"]].rename(columns={"b": number}),
        "the index": plain.set_index("a"),
        "a level of the index": plain.set_index(["b", "a"]),
        "the name of the index": plain[["b"]].rename_axis(DIGITS),
        "a series": plain["a"],
        "an array": np.array([[1, number]]),
        "complex numbers": np.array([complex(1, number)]),
        "a record": np.array([(number, 1.5)], dtype=[("a", "i8"), ("b", "f8")]),
        "a masked array": np.ma.masked_array([1, number], mask=[False, False]),
    }  # fmt: skip


@pytest.mark.parametrize("hide", [Secrets({"PIN": DIGITS}).redact_value, Redactor([DIGITS]).clean_all])
def test_a_secret_of_digits_is_found_in_every_part_of_a_table(hide: Hide) -> None:
    pytest.importorskip("pandas")
    for where, frame in frames().items():
        shown = str(hide([to_plain(frame)]))
        assert REDACTED in shown and DIGITS not in shown and "8.0917" not in shown, where


async def test_a_result_has_no_secret_in_bytes_files_pictures_and_codes() -> None:
    registry = ToolRegistry()
    file = File(f"{SECRET}.txt", b"as " + TEXT)

    @registry.tool
    async def act(kind: str) -> Any:
        """Return a secret in one way of several."""
        picture = Image(b"\x89PNG\r\n\x1a\n" + TEXT)
        ways = {"bytes": {"a": [TEXT]}, "file": file, "picture": picture, "parts": (file, picture)}
        return ways.get(kind) or ToolResult.fail("no", code=f"http {SECRET}", files=(file,))

    for kind in ("bytes", "file", "picture", "parts", "failure"):
        run = RunContext(secrets=Secrets({"KEY": SECRET}))
        result = await registry.dispatch("act", {"kind": kind}, context=run)
        assert REDACTED in repr(result) and "quoted" not in repr(result), kind


def test_who_sees_what_is_hidden_cannot_guess_a_secret_by_halves() -> None:
    """A script may send guesses through a tool. In the log, which it does not see, texts are cut."""
    secret = "4000123412341234"
    guesses = [secret[:size] for size in range(8, 16)]

    assert Secrets({"CARD": secret}).redact_value(guesses) == guesses
    assert Echoes({"CARD": secret}).clean_text(" ".join(guesses)) == " ".join(guesses)
    assert Redactor([secret]).clean_all(guesses) == [REDACTED] * 8


words = st.text('abcé\n"', min_size=4, max_size=9).filter(lambda text: len(text.strip("\n")) >= MIN_SECRET_CHARS)


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.text('abcé\n"', max_size=9), max_size=6), st.booleans())
def test_no_secret_is_left_in_a_text_though_they_overlap(
    secrets: list[str], between: list[str], with_halves: bool
) -> None:
    search = SecretSearch(dict.fromkeys(secrets, "#"), with_halves=with_halves)
    text = "".join(part + secret for part, secret in zip(between, secrets * 6, strict=False))
    found, count = search.hide(text)

    assert not any(form in found for form in search.forms)
    assert (found != text) is bool(count)
    in_bytes = search.hide_in_bytes(text.encode())[0].decode("latin-1")
    assert not any(form in in_bytes for form in search.forms)


def test_a_large_text_is_looked_at_closely_only_where_a_secret_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [f"sk-proj-{number:08x}-key" for number in range(1000)]
    search, looked_at = SecretSearch(dict.fromkeys(secrets, REDACTED)), [0]
    match = SecretSearch._match

    def count(self: SecretSearch, text: str, at: int) -> tuple[int, str]:
        looked_at[0] += 1
        return match(self, text, at)

    monkeypatch.setattr(SecretSearch, "_match", count)
    assert search.hide("sk-other " * 500_000)[1] == 0
    assert looked_at == [0]
    assert search.hide("s and k " * 250_000 + secrets[7] + " s and k" * 250_000)[1] == 1
    assert looked_at == [1]
