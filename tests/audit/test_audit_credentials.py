"""Credentials of well-known services, literals assigned to names of secrets, and halves of secrets at a cut."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.ledger import Ledger
from rows import each_row
from toolcell import Secrets
from toolcell.audit import records
from toolcell.audit.credentials import PREFIXED
from toolcell.audit.log import AuditLog
from toolcell.audit.redact import Redactor
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, Outcome
from toolcell.run.output import Capture
from toolcell.support import packing
from toolcell.support.secrets import MIN_HALF_CHARS, REDACTED
from toolcell.tools import RunContext


def cleaned(redactor: Redactor, value: Any) -> Any:
    rules = redactor.scan(packing.pack(value))
    return value if rules is None else redactor.clean(value, rules)[0]


def body(size: int, alphabet: str = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8z") -> str:
    return (alphabet * size)[:size]


HEX = "0123456789abcdef"
CREDENTIALS = {
    "OpenAI": "sk-proj-" + body(40),
    "Anthropic": "sk-ant-api03-" + body(90),
    "Stripe": "sk_test_" + body(24),
    "Stripe, webhook": "whsec_" + body(32),
    "GitHub, app": "ghu_" + body(36),
    "GitHub, refresh": "ghr_" + body(40),
    "GitLab": "glpat-" + body(20),
    "toolcell, service": "tcs_" + body(16, HEX) + "_" + body(43),
    "GitLab, runner": "glrt-" + body(20),
    "GitLab, deploy": "gldt-" + body(20),
    "Hugging Face": "hf_" + body(34, "aBcDeFgHiJ"),
    "Groq": "gsk_" + body(52),
    "xAI": "xai-" + body(80),
    "Replicate": "r8_" + body(37),
    "Perplexity": "pplx-" + body(48),
    "Google, API": "AIza" + body(35),
    "Google, OAuth client": "GOCSPX-" + body(28),
    "Google, OAuth access": "ya29." + body(60),
    "Azure, Entra ID": "abc8Q~" + body(34),
    "Azure, storage": "AccountName=x;AccountKey=" + body(86) + "==;",
    "Azure, service bus": "SharedAccessKey=" + body(43) + "=",
    "DigitalOcean": "dop_v1_" + body(64, HEX),
    "Slack, bot": "xoxb-123456789012-123456789012-" + body(24),
    "Slack, app": "xapp-1-A0123-456-" + body(40),
    "Slack, hook": "https://hooks.slack.com/services/T0000/B0000/" + body(24),
    "Discord, bot": "MTIzNDU2Nzg5MDEyMzQ1Njc4.GaBcDe." + body(38),
    "Discord, hook": "https://discord.com/api/webhooks/123456789/" + body(68),
    "Telegram": "123456789:AA" + body(33),
    "AWS": "AKIA" + body(16, "ABCDEFGHJ234567"),
    "npm": "npm_" + body(36),
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + body(60),
    "Docker Hub": "dckr_pat_" + body(27),
    "SendGrid": "SG." + body(22) + "." + body(43),
    "Shopify": "shpat_" + body(32, HEX),
    "Databricks": "dapi" + body(32, HEX),
    "Vault": "hvs." + body(24),
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0." + body(30),
    "PGP": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n" + body(60) + "\n-----END PGP PRIVATE KEY BLOCK-----",
    "OpenSSH": "-----BEGIN OPENSSH PRIVATE KEY-----\n" + body(60) + "\n-----END OPENSSH PRIVATE KEY-----",
}
PLACES = ("{}", "value: {};", '{{"x": "{}"}}', "{}\nnext", "({})", "at {}, in the middle")


@each_row("credential", CREDENTIALS.values(), ids=CREDENTIALS)
def test_credentials_of_well_known_services_are_hidden(credential: str) -> None:
    for place in PLACES:
        hidden = cleaned(Redactor(), place.format(credential))

        assert REDACTED in hidden
        assert credential not in hidden
        assert not any(piece in hidden for piece in (body(20), body(20, HEX), "ABCDEFGHJ2345"))


def test_each_row_of_the_table_is_tried_by_its_literal() -> None:
    """A pattern whose literal it need not contain would never run."""
    for service, anchors, begins, _ in PREFIXED:
        alphabet = {anchor.rstrip("_-.").lower() for anchor in anchors.split()}
        assert alphabet, service
        assert len(begins) >= 3


# Speed


PIECES = ["token=", "password: ", "k", "_", "-", "aK", "sk-", "eyJ", "://a:", "x", "bearer ", "api_key,", "glpat-"]


@each_row("piece", PIECES)
def test_no_text_is_much_slower_than_another(piece: str) -> None:
    """Time grows with the length, and stays within a multiple of what plain words take in the same moment.

    Of patterns no calls can be counted. The least of some measurements counts: other work only adds to it.
    """

    def seconds(text: str) -> float:
        started = time.thread_time()
        cleaned(Redactor(["hunter22-hunter22"]), [text])
        return time.thread_time() - started

    hostile = (piece * 50_000)[:50_000]
    ordinary = ("a few plain words with a token in them, as one writes " * 1000)[:50_000]

    assert any(seconds(hostile) < 25 * seconds(ordinary) + 0.005 for _ in range(5))


# Registration


@pytest.mark.quick
@each_row("secret", ["", "abc", 12345, b"hunter22", None])
def test_a_secret_that_could_not_be_hidden_is_refused_when_it_is_registered(secret: Any, tmp_path: Any) -> None:
    with pytest.raises(UsageError):
        AuditLog(tmp_path / "log", secrets=[secret])
    with pytest.raises(UsageError, match="'key'"):
        Secrets({"key": secret})


# Halves


@settings(max_examples=40)
@given(cut=st.integers(0, 60), secret=st.text("abcdefgh -%12", min_size=12, max_size=30))
def test_the_beginning_of_a_registered_secret_is_hidden_where_the_rest_was_cut_off(cut: int, secret: str) -> None:
    text = f"{'.' * 20}{secret}"[:cut]
    kept = cleaned(Redactor([secret]), text)

    left = max(MIN_HALF_CHARS, (len(secret) + 1) // 2)
    assert secret[:left] not in kept


@pytest.mark.quick(every_row=True)
@pytest.mark.parametrize("secret", ["hunter22-hunter23-hunter24", "two words of a secret", "ghp_" + body(36)])
def test_output_that_was_cut_in_a_secret_keeps_no_part_of_it(ledger: Ledger, secret: str) -> None:
    """Wherever it was cut, and whichever side of the gap is looked at."""
    registered = [] if secret.startswith("ghp_") else [secret]
    with ledger.opened(secrets=registered) as recorder:
        for shift in range(60):
            capture = Capture(200)
            capture.feed("stdout", f"{'y ' * 40}{' ' * (20 - shift % 20)}{secret}{' z' * 300}")
            capture.feed("stderr", "in between\n")
            capture.feed("stdout", f"{' z' * 30} {secret}{' y' * (50 - shift)}")
            record = ledger.begin(recorder)
            record.end(ExecutionResult(record.context.run_id, Outcome.OK, 1, True, capture.logs()))
    disk = ledger.bytes_on_disk().decode("latin-1")
    for start in range(len(secret) - 9):
        assert secret[start : start + 9] not in disk, start

    cut = [[text for stream, text in each["logs"] if stream == "stdout"] for each in ledger.fields(records.RUN_ENDED)]
    assert len(cut) == 60 and all("bytes of stdout dropped" in gap for _, gap, _ in cut)
    beside = {each for before, _, after in cut for each in (before[-12:], after[:12])}
    sizes = range(3 if registered else 8, 12)  # of what is not registered, fewer characters are no part of anything
    starts, ends = (tuple(secret[:size] for size in sizes), tuple(secret[-size:] for size in sizes))
    assert not [each for each in beside if each.endswith(starts) or each.startswith(ends)]
    assert any(REDACTED in each for each in beside)


def test_a_private_key_of_which_the_beginning_was_dropped_is_hidden(ledger: Ledger) -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{chr(10).join(body(20) for _ in range(40))}\n-----END PRIVATE KEY-----\n"
    capture = Capture(600)
    capture.feed("stdout", "hello\n" * 60 + key + "the end\n" * 10)
    with ledger.opened() as recorder:
        record = ledger.begin(recorder)
        record.end(ExecutionResult(record.context.run_id, Outcome.OK, 1, True, capture.logs()))

    assert body(20) in capture.logs().stdout
    assert body(20).encode() not in ledger.bytes_on_disk()
    assert b"the end" in ledger.bytes_on_disk()


def test_a_result_is_cut_after_its_secrets_were_taken_out(ledger: Ledger) -> None:
    secret = "hunter22-hunter23-hunter24"

    @ledger.registry.tool(max_result_bytes=160)
    async def show(before: int) -> str:
        """Return a long text."""
        return "y " * before + secret + " z" * 300

    context = RunContext(secrets=Secrets({"key": secret}))
    with ledger.opened() as recorder:
        record = ledger.begin(recorder, context=context)
        for before in range(50):
            result = ledger.call(record, "show", {"before": before}, before + 1)
            assert secret[:8] not in result.text
        record.end_calls()


# Digests


def test_digests_of_input_files_confirm_no_guess(ledger: Ledger) -> None:
    """Small, large and very large ones: the digest is of what is left, or there is none."""
    padding = {"small": 10, "large": 100_000, "very large": 280_000}
    for name, size in padding.items():
        found = []
        for secret in ("hunter22-hunter22", "hunter33-hunter33"):
            data = f"{'x ' * size}\npassword='{secret}'\n".encode()
            with ledger.opened(secrets=["hunter22-hunter22", "hunter33-hunter33"]) as recorder:
                ledger.run(recorder, files=[("f", data)])
            entry = ledger.fields(records.RUN_STARTED)[-1]["files"][0]
            assert hashlib.sha256(data).hexdigest() != entry[2]
            found.append(entry)
        assert found[0] == found[1], name


def test_a_digest_of_data_that_holds_no_secret_is_that_of_the_data(ledger: Ledger) -> None:
    data = bytes(range(256)) * 2100 + b"an access token, as one calls it"
    with ledger.opened(secrets=["hunter22-hunter22"]) as recorder:
        ledger.run(recorder, files=[("f", data)], value="a token " + "x" * 600_000)

    assert ledger.fields(records.RUN_STARTED)[0]["files"] == [["f", len(data), hashlib.sha256(data).hexdigest(), None]]
    cut = ledger.fields(records.RUN_ENDED)[0]["more"]["value_cut"]
    assert cut["sha256"] == ledger.fields(records.RUN_ENDED)[0]["value_sha256"]


def test_a_very_large_value_with_a_secret_has_no_digest(ledger: Ledger) -> None:
    secret = "hunter22-hunter22"
    for value in (
        [secret, "x" * 600_000],
        {"password": "y" * 100, "x": "x" * 600_000},
        "password='abcdefg' " * 32_000,
    ):
        with ledger.opened(secrets=[secret]) as recorder:
            ledger.run(recorder, value=value, calls=[], inputs={"v": value})
        ended, started = ledger.fields(records.RUN_ENDED)[-1], ledger.fields(records.RUN_STARTED)[-1]

        assert ended["value_sha256"] is None
        assert started["inputs_sha256"] is None
        assert "sha256" not in ended["more"]["value_cut"]
        assert ended["more"]["redacted"] >= 1
    assert secret.encode() not in ledger.bytes_on_disk()
