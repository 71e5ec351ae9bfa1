"""Redaction: registered secrets in every spelling, known kinds of credentials, and fields with telling names."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from audit.ledger import Ledger
from rows import each_row
from toolcell.audit import records
from toolcell.audit.config import RecordConfig, ToolContent
from toolcell.audit.credentials import CREDENTIALS as RULES
from toolcell.audit.redact import Redactor
from toolcell.errors import UsageError
from toolcell.support import packing
from toolcell.support.secrets import LINE_BREAKS, MIN_SECRET_CHARS, REDACTED
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.columns import Column
from toolcell_bridge.wire.tables import Array, Axis, Table
from wire.table_examples import numbers, text

pytestmark = pytest.mark.quick

SECRET = 'hunter2-"quoted"\\é/and more'


def cleaned(redactor: Redactor, value: Any) -> Any:
    rules = redactor.scan(packing.pack(value))
    return value if rules is None else redactor.clean(value, rules)[0]


SPELLINGS = {
    "as it is": SECRET,
    "in a sentence": f"the value is {SECRET}, keep it",
    "in JSON": json.dumps({"x": SECRET}),
    "in JSON, not escaped": json.dumps({"x": SECRET}, ensure_ascii=False),
    "as Python shows it": repr([SECRET]),
    "in a URL": f"https://x.test/?q={urllib.parse.quote(SECRET)}",
    "in a form": urllib.parse.urlencode({"q": SECRET}),
    "in base64": base64.b64encode(SECRET.encode()).decode(),
    "in a URL, without slashes": urllib.parse.quote(SECRET, safe=""),
    "in a URL, in lower case": re.sub("%..", lambda match: match[0].lower(), urllib.parse.quote(SECRET, safe="")),
    "as ascii() shows it": ascii([SECRET]),
    "in JSON in JSON": json.dumps({"body": json.dumps({"x": SECRET})}),
    "in JSON as Python shows it": repr(json.dumps({"x": SECRET})),
    "in base64, as a password": base64.b64encode(f"user:{SECRET}".encode()).decode(),
    "in base64, one byte later": base64.b64encode(f"a{SECRET} and more".encode()).decode(),
    "in base64, two bytes later": base64.urlsafe_b64encode(f"ab{SECRET}".encode()).decode(),
    "in hex": SECRET.encode().hex(),
    "as bytes": b"\xff" + SECRET.encode() + b"\x00",
    "as a key": {SECRET: 1},
    "deep inside": [[{"a": [SECRET]}]],
}


@each_row("value", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_registered_secret_is_found_however_it_is_spelled(value: Any) -> None:
    packed = packing.pack(cleaned(Redactor([SECRET]), value))

    assert SECRET.encode() not in packed
    assert b"hunter2" not in packed
    assert b"dW50ZXIy" not in packed
    assert b"h1bnRlcj" not in packed
    assert b"odW50ZXI" not in packed
    assert base64.b64encode(SECRET.encode())[:-2] not in packed
    assert REDACTED.encode() in packed


long_enough = st.text(min_size=4, max_size=30).filter(lambda text: len(text.strip(LINE_BREAKS)) >= MIN_SECRET_CHARS)


@given(secret=long_enough, before=st.text(max_size=10), after=st.text(max_size=10))
def test_no_registered_secret_survives_in_any_text(secret: str, before: str, after: str) -> None:
    if secret in REDACTED:
        return  # what stands for a secret cannot be one
    text = cleaned(Redactor([secret]), before + secret + after)

    assert not [part for part in text.split(REDACTED) if secret in part]


def test_a_secret_of_digits_is_found_as_a_number() -> None:
    assert cleaned(Redactor(["123456"]), {"pin": 123456, "n": 1234567}) == {"pin": REDACTED, "n": 1234567}


@pytest.mark.slow
@each_row(("secret", "cell"), [("123456", "123456"), ("-12.50", "-12.5"), ("123456", "123456.00")])
def test_a_secret_of_digits_is_found_in_frames(secret: str, cell: str) -> None:
    """As a decimal, as a whole number, and as the float that pandas makes of it beside a missing one."""
    pandas = pytest.importorskip("pandas")
    secrets = Redactor([secret, secret.rstrip("0")])
    for value in (Decimal(cell), float(cell), *([int(float(cell))] if "-" not in cell else [])):
        assert REDACTED in str(cleaned(secrets, to_plain(pandas.DataFrame({"a": [value, None]}))))
        assert REDACTED in str(cleaned(secrets, to_plain(pandas.Series([value]).to_numpy())))
        assert REDACTED in str(cleaned(secrets, to_plain({"a": [value]})))


def test_a_secret_within_another_goes_with_it() -> None:
    assert cleaned(Redactor(["secret-one", "secret-one-and-two"]), "x secret-one-and-two y") == f"x {REDACTED} y"


NAMES = {
    "password": True, "db_password": True, "PASSWORD": True, "apiKey": True, "api_key": True, "x-api-key": True,
    "X-Auth-Token": True, "Authorization": True, "set-cookie": True, "client_secret": True, "aws_access_key": True,
    "private_key": True, "credentials": True, "max_tokens": False, "tokens": False, "tokenizer": False, "author": False,
    "secretary": False, "keyboard": False, "monkey": False, "cookie_policy": False, "accessible": False,
}  # fmt: skip


@each_row(("name", "is_sensitive"), NAMES.items())
def test_values_under_telling_names_are_hidden(name: str, is_sensitive: bool) -> None:
    value = cleaned(Redactor(), {"outer": {name: ["v"]}})

    assert value == {"outer": {name: REDACTED if is_sensitive else ["v"]}}


CREDENTIALS = [
    "sk-proj-abcdefghijklmnop1234",
    "sk_live_abcdefghijklmnop",
    "ghp_" + "a" * 36,
    "gho_" + "b" * 36,
    "ghs_" + "c" * 36,
    "github_pat_" + "d" * 40,
    "glpat-abcdefghij0123456789",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "AIza" + "e" * 35,
    "xoxb-123456789012-abcdefghij",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
]


@pytest.mark.parametrize("credential", CREDENTIALS, ids=lambda text: text[:8])
def test_well_known_credentials_are_hidden_wherever_they_stand(credential: str) -> None:
    for value in (credential, f"key={credential};", f'x = "{credential}"', f"\n{credential}\n"):
        assert credential not in cleaned(Redactor(), value)


TEXTS = {
    "Authorization: Bearer abcdefghijklmnop": f"Authorization: Bearer {REDACTED}",
    "postgres://user:s3cr3tpass@db/x": f"postgres://user:{REDACTED}@db/x",
    "password = getpass.getpass()": "password = getpass.getpass()",
    'password = "correct horse"': 'password = "correct horse"',
    "https://example.org/a@b": "https://example.org/a@b",
    "tasks-in-a-list-of-some-length": "tasks-in-a-list-of-some-length",
    "a passing remark about tokens": "a passing remark about tokens",
}


@pytest.mark.parametrize(("text", "expected"), TEXTS.items())
def test_known_kinds_of_tokens_are_hidden_in_a_text_and_the_rest_is_left_alone(text: str, expected: str) -> None:
    assert cleaned(Redactor(), text) == expected


def test_a_hidden_key_keeps_the_lines_of_a_script_where_they_are() -> None:
    source = 'key = """-----BEGIN PRIVATE KEY-----\nabc\ndef\n-----END PRIVATE KEY-----"""\nraise ValueError\n'
    hidden = cleaned(Redactor(), source)

    assert "abc" not in hidden
    assert hidden.split("\n").index("raise ValueError") == source.split("\n").index("raise ValueError")


def test_a_pattern_of_ones_own_hides_its_group() -> None:
    redactor = Redactor(patterns=[r"card (\d{4})", r"zone-[a-z]+"])

    assert cleaned(redactor, "card 1234 in zone-blue") == f"card {REDACTED} in {REDACTED}"


def test_a_pattern_that_is_none_is_refused_at_once(tmp_path: Any) -> None:
    (tmp_path / "audit.toml").write_text('redact_patterns = ["("]')
    with pytest.raises(UsageError, match="not a regular expression"):
        RecordConfig.from_toml(tmp_path / "audit.toml")


PIECES = [*(anchor for rule in RULES for anchor in rule.anchors), "passw", "secret", "token", "api", "zebra", "kr"]


@pytest.mark.slow
@given(st.lists(st.sampled_from(PIECES).flatmap(lambda piece: st.integers(0, len(piece)).map(lambda end: piece[:end]))))
def test_the_quick_scan_finds_what_looking_for_each_word_would(pieces: list[str]) -> None:
    redactor = Redactor(names=["token", "zebra", "kr"])
    text = "".join(pieces).encode()
    words = {anchor for rule in RULES for anchor in rule.anchors} | set(redactor.words)

    assert (redactor.scan(text) is not None) == any(word.encode() in text for word in words)


WORDS = ["Password", "passwd", "passphrase", "SECRET", "api_key", "apikey", "access-key", "private-key", "token",
         "to\u212aen", "\u017fecret", "ap\u0131_key", "author", "rapid", "access", "Cookies",
         "authorization", "credential"]  # fmt: skip
SPACES = ["", " ", "\t", "\n", "\u00a0", "\u2003", "\x85", "x"]
VALUES = ["hunter2hunter2hunter2", "x" * 40, "A1B2C3D4E5F6G7H8I9J0", "12345678", "id"]
QUOTES = ["", "", "'", '"', "b'", '\\"']
ASSIGNED = st.tuples(
    *map(st.sampled_from, (WORDS, QUOTES, SPACES, [":", "=", "", "=="], SPACES, QUOTES, VALUES, QUOTES))
).map("".join)
CREDENTIALS = ["sk-", "Bearer ", "basic ", "://u:", "eyJ", "ghp_", "sk_live_", "AKIA", "xoxb-", "glpat-"]
SPELLED = st.tuples(st.sampled_from(CREDENTIALS), st.sampled_from(VALUES), st.sampled_from(["", "@", "."])).map("".join)


@pytest.mark.slow
@settings(max_examples=500)
@example('to\u212aen = "hunter2hunter2"', False)
@example("\u017fecret='hunter2hunter2'", False)
@example('ap\u0131_key:"hunter2hunter2"', False)
@given(
    st.lists(st.one_of(ASSIGNED, SPELLED, st.sampled_from([*WORDS, *SPACES])), max_size=3).map(" ".join), st.booleans()
)
def test_what_the_quick_scan_spares_held_nothing(text: str, as_key: bool) -> None:
    """Where a word of ours is about at all: one that is spelled with a Kelvin sign alone is not looked for."""
    redactor = Redactor(["hunter3"])
    value = [{text: "a value"} if as_key else {"text": text}, "token"]
    rules = redactor.scan(packing.pack(value))

    assert (value if rules is None else redactor.clean(value, rules)[0]) == redactor.clean_all(value)


def test_redacting_twice_changes_nothing() -> None:
    value = {"password": "x", "text": "Bearer abcdefghijklmnop", "url": "a://b:cccc@d"}
    once = cleaned(Redactor(), value)

    rules = Redactor().scan(packing.pack(once))
    assert rules is not None
    assert Redactor().clean(once, rules) == (once, 0) or Redactor().clean(once, rules)[0] == once


HOSTILE = ["eyJ", "sk-", "a-", "://", "bearer ", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "xox", "AKIA", "basic a"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_long_text_made_to_be_slow_is_looked_through_to_its_end(piece: str) -> None:
    """A pattern that took quadratic time would take minutes for this one."""
    text = piece * (400_000 // len(piece)) + "(the end"

    assert cleaned(Redactor(["registered"]), text).endswith(("(the end", REDACTED))


# In the log


@pytest.mark.conforms("B-b5")
def test_an_exceptions_traceback_is_recorded(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, calls=[("crash", {"text": "planned by nobody"})])
    more = ledger.fields(records.CALL_ENDED)[0]["more"]

    assert re.search(r"\.crash:\d+ > ValueError", more["trace"])
    assert "planned by nobody" not in more["trace"]


def test_how_often_something_was_taken_out_is_recorded(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, 'x = "Bearer hunter2hunter2"', [("search", {"query": "x", "token": "y"})])

    assert ledger.fields(records.RUN_STARTED)[0]["more"] == {"redacted": 1}
    assert ledger.fields(records.CALL_STARTED)[0]["more"]["redacted"] == 1


def test_a_digest_says_nothing_about_a_secret(ledger: Ledger) -> None:
    """Else a log reader could try secrets until the digest fits."""
    for secret in ("first-secret", "other-secret"):
        with ledger.opened(secrets=[secret]) as recorder:
            ledger.run(recorder, f"x = '{secret}'", [], inputs={"a": secret}, value={"v": secret})
    first, second = ledger.fields(records.RUN_STARTED)
    one, other = ledger.fields(records.RUN_ENDED)

    assert first["sha256"] == second["sha256"]
    assert first["inputs_sha256"] == second["inputs_sha256"]
    assert one["value_sha256"] == other["value_sha256"]


def test_a_tools_definition_is_recorded_as_it_is(ledger: Ledger) -> None:
    """An argument called `token` is described there; it holds none."""

    @ledger.registry.tool
    async def login(token: str) -> str:
        """Log in somewhere with a token."""
        return token

    with ledger.opened() as recorder:
        ledger.run(recorder, calls=[("login", {"token": "very-secret-thing"})])

    definitions = {name: parameters for name, _, parameters, *_ in ledger.the_run().definitions}
    assert definitions["login"]["properties"]["token"] == {"type": "string"}
    assert ledger.fields(records.CALL_STARTED)[0]["args"] == {"token": REDACTED}


# What is kept of which tool


KEEPS = {"full": (True, True), "digest": (False, True), "omit": (False, False)}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("part", ["args", "results"])
def test_each_tool_is_recorded_in_full_by_digest_or_not(ledger: Ledger, keep: Any, part: str) -> None:
    tools = {"sea*": ToolContent(**{part: keep})}
    with ledger.opened(settings={"tools": tools}) as recorder:
        ledger.run(recorder, calls=[("search", {"query": "needle", "limit": 3}), ("fail", {"text": "needle"})])
    kind, name = {"args": (records.CALL_STARTED, "args"), "results": (records.CALL_ENDED, "value")}[part]
    fields = ledger.fields(kind)[0]
    in_full, by_digest = KEEPS[keep]

    assert (b"needle" in packing.pack([fields[name], fields["more"]])) is in_full
    assert ("sha256" in fields["more"].get(f"{name}_cut", {})) is (by_digest and not in_full)
    assert b"needle" in packing.pack(ledger.fields(kind)[1]["args" if part == "args" else "more"]), "another tool's"


def test_messages_and_tracebacks_of_a_tool_not_to_be_recorded_are_not(ledger: Ledger) -> None:
    tools = {"*": ToolContent(args="omit", results="omit")}
    with ledger.opened(settings={"tools": tools}) as recorder:
        calls = [("fail", {"text": "needle"}), ("crash", {"text": "needle"}), ("search", {"query": 5, "needle": 1})]
        ledger.run(recorder, calls=calls)

    assert b"needle" not in ledger.bytes_on_disk()
    assert [call.status for call in ledger.the_run().calls] == ["error"] * 3


def test_what_is_too_large_is_cut_after_redaction_and_named_by_digest(ledger: Ledger) -> None:
    secret = "s3cr3t-in-the-middle"
    large = "x" * 1000 + secret + "y" * 200_000
    with ledger.opened(secrets=[secret]) as recorder:
        ledger.run(
            recorder,
            f"# {'z' * 300_000}",
            [("search", {"query": large})],
            inputs={"big": large},
            value=large,
            printed=large,
        )
    disk = ledger.bytes_on_disk()
    run = ledger.the_run()

    assert secret.encode() not in disk
    assert len(disk) < 100_000  # of which most is SQLite's: a page for each table and index
    assert run.source is None
    for more, name in ((run.start["more"], "source"), (run.start["more"], "inputs"), (run.end["more"], "value")):
        assert more[f"{name}_cut"]["bytes"] > 100_000
        assert len(more[f"{name}_cut"]["sha256"]) == 64
    assert run.end["more"]["value_cut"]["head"].startswith("x" * 1000 + REDACTED[:5])
    assert run.calls[0].start_extra["args_cut"]["why"] == "size"
    assert run.end["logs"] is None


TOKEN = "sk-proj-" + "Ab3dEf6hIj9lMn2pQr5tUv8xYz1Bc4Ef7Hi0"


@pytest.mark.parametrize("secret", [SECRET, TOKEN], ids=["registered", "a known kind"])
def test_cells_and_labels_of_tables_are_redacted(secret: str) -> None:
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    polars = pytest.importorskip("polars")
    plain = pandas.DataFrame({"k": ["before", secret, "after"], "n": [1, 2, 3]})
    tables = [
        plain,
        plain["k"],
        plain.astype({"k": "category"}),
        plain.set_index("k"),
        plain.T,
        plain.rename(columns={"n": secret}),
        plain.rename_axis(columns=secret),
        plain.assign(k=[["x"], [secret], None]),
        polars.DataFrame({"k": ["before", secret]}),
        numpy.array(["before", secret, "after"]),
        numpy.array([["before", secret], ["a", "b"]], dtype=object),
        {"deep": [plain]},
    ]
    redactor = Redactor([SECRET])
    for value in tables:
        packed = packing.pack(cleaned(redactor, packing.unpack(packing.pack(value))))
        assert secret.encode() not in packed, value
        assert b"[redacted]" in packed
        assert SECRET.encode() not in packed


def in_a_frame(column: Column, *, label: Column | None = None) -> Table:
    return Table("pandas.DataFrame", column.length, Axis(), Axis((label or text("c"),), (None,)), [column])


DIGITS = "80917263"
ONE_CODE = numbers("i", 0)
HIDDEN = {
    "a missing text": in_a_frame(text("x", DIGITS, valid=b"\1")),
    "a missing number": in_a_frame(Column("int64", 2, numbers("q", 1, int(DIGITS)), valid=b"\1")),
    "under a mask": Array("numpy.ma", [1], text(DIGITS, valid=b"\0")),
    "a missing list": in_a_frame(Column("list", 1, valid=b"\0", detail=(text(DIGITS), 1))),
    "a number in a list": in_a_frame(Column("list", 1, detail=(Column("float64", 1, numbers("d", float(DIGITS))), 1))),
    "a missing category": in_a_frame(Column("category", 1, ONE_CODE, detail=(text("x", DIGITS, valid=b"\1"), False))),
    "a category without labels": in_a_frame(
        text("x"), label=Column("category", 1, ONE_CODE, detail=(text("c", DIGITS), False))
    ),
    "categories of lists": in_a_frame(
        Column("list", 1, detail=(Column("category", 1, ONE_CODE, detail=(text("x", DIGITS), False)), 1))
    ),
    "a time zone": in_a_frame(Column("datetime", 1, numbers("q", 0), detail=("s", f"Z{DIGITS}"))),
    "a dtype": in_a_frame(text("x", form=f"period[{DIGITS}]")),
    "a dtype in a list": in_a_frame(Column("list", 1, detail=(text("x", form=f"interval[{DIGITS}]"), 1))),
    "halves in two rows": in_a_frame(text(DIGITS[:4], DIGITS[4:])),
    "halves in two lists": in_a_frame(Column("list", 2, detail=(text(DIGITS[:4], DIGITS[4:]), 1))),
    "halves in two categories": Array(
        "numpy", [1], Column("category", 1, ONE_CODE, detail=(text(DIGITS[:4], DIGITS[4:]), True))
    ),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_a_secret_is_in_no_record_of_a_table_though_no_cell_shows_it(where: str) -> None:
    redactor, table = Redactor([DIGITS]), packing.unpack(packing.pack(HIDDEN[where]))
    found, count = redactor.clean(table, redactor.scan(packing.pack(table)) or ())
    assert count
    assert not isinstance(found, Table | Array)
    assert DIGITS not in str(found)
    assert DIGITS.encode() not in packing.pack(found)
    other = Redactor(["80917264"])
    assert other.clean(table, ()) == (table, 0)


@pytest.mark.parametrize("is_label", [True, False])
def test_a_secret_in_a_text_of_all_rows_does_not_make_a_record_large(is_label: bool) -> None:
    rows, long = 30_000, text(DIGITS + "x" * 30_000)
    column = Column("category", rows, bytes(rows), detail=(long, False))
    table = in_a_frame(Column("bool", rows, bytes(rows)), label=long) if is_label else in_a_frame(column)
    assert len(packing.pack(table)) < RecordConfig().value_bytes
    found, count = Redactor([DIGITS]).clean(table, ())
    assert count
    assert len(packing.pack(found)) < 200


def test_columns_with_telling_names_are_redacted_and_others_stay_tables() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"password": ["a1b2c3", "d4e5f6"], "n": [1, 2]})
    assert cleaned(Redactor(), packing.unpack(packing.pack(frame))) == [
        {"password": REDACTED, "n": 1},
        {"password": REDACTED, "n": 2},
    ]
    harmless = packing.unpack(packing.pack(frame.rename(columns={"password": "word"})))
    assert cleaned(Redactor(), harmless) is harmless
    digits = packing.unpack(packing.pack(pandas.DataFrame({"n": [1, 2345678]})))
    assert cleaned(Redactor(["2345678"]), digits) == [{"n": 1}, {"n": REDACTED}]
