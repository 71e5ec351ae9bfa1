"""Time stamps of RFC 3161 as a witness: an authority of openssl on loopback, answers that lie, and tokens on disk."""

from __future__ import annotations

import base64
import datetime
import fcntl
import hashlib
import http.server
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from audit.test_audit_retention import KEEP_LITTLE, SMALL
from toolcell.audit import keys, records
from toolcell.audit.format import read_log_id, segment_path, split_segment
from toolcell.audit.keys import HmacKey
from toolcell.audit.signatures import Head, default_heads_dir, read_prune_record
from toolcell.audit.timestamp_witness import (
    BAD_TOKEN,
    MAX_ANSWER_BYTES,
    TOKENS_FILE,
    TimestampWitness,
    forget_tokens,
)
from toolcell.audit.verification import Report
from toolcell.audit.witness import WitnessFailed, to_line
from toolcell.audit.witness_check import UNWITNESSED, WITNESS_BEHIND
from toolcell.audit.witness_places import witness_of
from toolcell.cli import exits
from toolcell.errors import UsageError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, for the authority")
SLOW = {"checkpoint_s": 3600}
SETTINGS = """
[tsa]
signer_cert = {home}/tsa.pem
signer_key = {home}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4
digests = sha512
serial = {home}/serial
"""


def make_authority(home: Path) -> None:
    """Write an issuer's certificate, and the key and certificate of an authority that it issued."""
    home.mkdir()
    issuer, signer = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"issuer {home.name}")])
    signed = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    now = datetime.datetime.now(datetime.UTC)
    for name, subject, own, extension in (
        ("issuer", root, issuer, x509.BasicConstraints(ca=True, path_length=None)),
        ("tsa", signed, signer, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])),
    ):
        builder = x509.CertificateBuilder(root, subject, own.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        made = builder.add_extension(extension, critical=True).sign(issuer, hashes.SHA256())
        (home / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    (home / "tsa.key").write_bytes(signer.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    (home / "settings").write_text(SETTINGS.format(home=home))


def stamp(home: Path, query: bytes) -> bytes:
    (home / "query").write_bytes(query)
    command = ["openssl", "ts", "-reply", "-config", "settings", "-section", "tsa", "-queryfile", "query"]
    return subprocess.run(command, cwd=home, check=True, capture_output=True).stdout


class Authority:
    """An authority that answers queries over HTTP; `answer` says how."""

    def __init__(self, home: Path) -> None:
        make_authority(home)
        self.home = home
        self.answer: Callable[[bytes], Iterator[bytes]] = lambda query: iter([stamp(home, query)])
        self.status = 200
        self.url = ""

    @property
    def place(self) -> str:
        return f"rfc3161:{self.url}#{self.home / 'issuer.pem'}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    authority = Authority(tmp_path_factory.mktemp("tsa") / "home")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/timestamp-query"
            query = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(authority.status)
            self.send_header("Content-Type", "application/timestamp-reply")
            self.end_headers()
            try:
                for part in authority.answer(query):
                    self.wfile.write(part)
            except OSError:
                self.close_connection = True  # the client has read enough

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    authority.url = f"http://127.0.0.1:{server.server_address[1]}/tsr"
    yield authority
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def authority(running: Authority, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(running, "answer", running.answer)  # what a test changes is undone
    monkeypatch.setattr(running, "status", 200)
    return running


@pytest.fixture
def head() -> Head:
    return Head.sign("log", "chain", 7, b"\7" * 32, 1, HmacKey.generate())


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def witness(authority: Authority, log: Path) -> TimestampWitness:
    made = witness_of(authority.place, log)
    assert isinstance(made, TimestampWitness)
    return made


def endless() -> Iterator[bytes]:
    while True:
        yield bytes(4096)


def test_a_log_is_stamped_and_verified_with_the_authoritys_certificate(ledger: Ledger, authority: Authority) -> None:
    for _ in range(2):
        ledger.fill(1, witnesses=[authority.place], settings=SLOW | {"require_witness": True})
    asked = witness(authority, ledger.directory)
    stamps = [*asked.stamps(read_log_id(ledger.directory))]
    now = datetime.datetime.now(datetime.UTC)

    assert ledger.verify(witnesses=[asked], strict=True).ok
    assert len(stamps) >= 2 and all(each.at and abs(now - each.at) < datetime.timedelta(hours=1) for each in stamps)
    assert {each["witness"] for each in ledger.fields(records.WITNESSED)} == {f"rfc3161:{authority.url}"}
    assert (ledger.directory / TOKENS_FILE).stat().st_mode & 0o777 == 0o600
    assert [*asked.heads("another log")] == []


@pytest.mark.parametrize("attack", ["end cut off", "tokens removed", "newest token removed", "written anew"])
def test_a_log_that_its_tokens_contradict_is_found(ledger: Ledger, authority: Authority, attack: str) -> None:
    for _ in range(2):
        ledger.fill(1, witnesses=[authority.place], settings=SLOW | {"require_witness": True})
    asked, path = witness(authority, ledger.directory), ledger.directory / TOKENS_FILE
    match attack:
        case "end cut off":
            segment = segment_path(ledger.chain(), 1)
            segment.write_bytes(segment.read_bytes()[: [*split_segment(segment.read_bytes())][-1].offset])
            expected = {"cut_off"}
        case "tokens removed":
            path.unlink()
            expected = {UNWITNESSED}
        case "newest token removed":
            first = path.read_bytes().splitlines()[1]
            path.write_bytes(first)
            expected = {WITNESS_BEHIND}
        case "written anew":
            shutil.rmtree(ledger.chain())
            ledger.fill(1, settings=SLOW)
            expected = {"chain_missing", UNWITNESSED}
    shutil.rmtree(default_heads_dir())

    assert kinds(ledger.verify(witnesses=[asked])) == expected


def test_a_token_on_disk_that_is_not_one_of_its_head_is_found_and_located(
    ledger: Ledger, authority: Authority, tmp_path: Path
) -> None:
    ledger.fill(1, witnesses=[authority.place], settings=SLOW | {"require_witness": True})
    path, log = ledger.directory / TOKENS_FILE, read_log_id(ledger.directory)
    good = [json.loads(line) for line in path.read_bytes().splitlines() if line]
    assert len(good) >= 2
    make_authority(tmp_path / "foreign")
    foreign = TimestampWitness(authority.url, tmp_path / "foreign" / "issuer.pem", ledger.directory)
    lies = [
        good[0] | {"answer": good[1]["answer"]},
        good[0] | {"answer": "no base64"},
        good[0] | {"answer": 7},
        good[0] | {"answer": good[0]["answer"][:400]},
        good[0] | {"head": good[0]["head"] | {"seq": 10**6}},
    ]
    others = [
        [],
        1,
        {},
        {"head": 1},
        {"head": {}},
        good[0] | {"witness": []},
        good[0] | {"witness": "rfc3161:http://x"},
    ]
    lines = [json.dumps(each).encode() for each in (*lies, *others, *good)]
    path.write_bytes(b"\n".join([*lines, b"[" * 100_000, b"\xff", b"x" * 300_000, b""]))
    report = ledger.verify(witnesses=[witness(authority, ledger.directory)])

    assert kinds(report) == {BAD_TOKEN}
    assert [f"line {number} of {TOKENS_FILE}" in each.message for number, each in enumerate(report.findings, 1)] == [
        True
    ] * len(lies)
    assert len([*foreign.stamps(log)]) == len(lies) + len(good)
    assert kinds(ledger.verify(witnesses=[foreign])) == {BAD_TOKEN, UNWITNESSED}
    assert "unable to get local issuer certificate" in [*foreign.stamps(log)][-1].problem


def test_an_answer_that_is_no_token_of_the_head_is_refused_and_not_kept(
    authority: Authority, head: Head, tmp_path: Path
) -> None:
    make_authority(tmp_path / "foreign")
    first = [b""]

    def remembered(query: bytes) -> Iterator[bytes]:
        first[0] = first[0] or query
        yield stamp(authority.home, first[0])

    def of_other_text(query: bytes) -> Iterator[bytes]:
        digest = hashlib.sha512(to_line(head).encode()).digest()
        assert digest in query
        yield stamp(authority.home, query.replace(digest, bytes(64)))

    authority.answer = remembered
    (tmp_path / "kept").mkdir()
    witness(authority, tmp_path / "kept").push(head)
    lies: list[tuple[str, Callable[[bytes], Iterator[bytes]]]] = [
        ("Nonce mismatch", remembered),
        ("Mismatch between messages", of_other_text),
        ("unable to get local issuer", lambda query: iter([stamp(tmp_path / "foreign", query)])),
        ("not a response of RFC 3161", lambda query: iter([b"garbage" * 100])),
        ("not a response of RFC 3161", lambda query: iter([])),
        ("not a response of RFC 3161", lambda query: iter([stamp(authority.home, query)[:-1]])),
        ("refused with status 2", lambda query: iter([stamp(authority.home, b"garbage")])),
        (f"more than {MAX_ANSWER_BYTES} bytes", lambda query: endless()),
    ]
    asked = witness(authority, tmp_path)
    for said, lie in lies:
        authority.answer = lie
        with pytest.raises(WitnessFailed, match=said):
            asked.push(head)
    for authority.status in (302, 503):
        with pytest.raises(WitnessFailed, match=f"answered with {authority.status}"):
            asked.push(head)
    assert not (tmp_path / TOKENS_FILE).exists()


def test_no_changed_byte_of_an_answer_changes_when_it_was_stamped(
    authority: Authority, head: Head, tmp_path: Path
) -> None:
    asked = witness(authority, tmp_path)
    asked.push(head)
    (line,) = [each for each in (tmp_path / TOKENS_FILE).read_bytes().splitlines() if each]
    answer, data = base64.b64decode(json.loads(line)["answer"]), to_line(head).encode()
    at = asked.stamped_at(answer, data)
    chosen = random.Random(7)
    refused = 0
    for _ in range(400):
        changed = bytearray(answer)
        changed[chosen.randrange(len(changed))] ^= 1 << chosen.randrange(8)
        try:
            assert asked.stamped_at(bytes(changed), data) == at  # bytes that nobody signs, such as names of fields
        except ValueError:
            refused += 1
    assert refused > 350


def test_an_answer_that_never_ends_is_given_up(authority: Authority, head: Head, tmp_path: Path) -> None:
    is_over = threading.Event()

    def drip(query: bytes) -> Iterator[bytes]:
        while not is_over.wait(0.01):
            yield b"\0"

    authority.answer = drip
    asked = TimestampWitness(authority.url, authority.home / "issuer.pem", tmp_path, timeout_s=0.2)
    try:
        with pytest.raises(WitnessFailed, match=r"did not end within 0\.2 s"):
            asked.push(head)
    finally:
        is_over.set()


def test_a_head_of_an_answer_that_never_ends_is_given_up_too(authority: Authority, head: Head, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
                while not is_over.wait(0.02):
                    connection.sendall(b"a")

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        asked = TimestampWitness(url, authority.home / "issuer.pem", tmp_path, timeout_s=0.2)
        try:
            with pytest.raises(WitnessFailed, match=r"did not end within 0\.2 s"):
                asked.push(head)
        finally:
            is_over.set()
            thread.join()


def test_retention_removes_the_tokens_of_what_it_removes(ledger: Ledger, authority: Authority) -> None:
    options = {"witnesses": [authority.place], "settings": SMALL | SLOW}
    for _ in range(3):
        ledger.fill(6, **options)
    path = ledger.directory / TOKENS_FILE
    others = [b"no token\n", path.read_bytes().split(b"\n")[1].replace(ledger.verify().log.encode(), b"0" * 32) + b"\n"]
    with open(path, "ab") as file:
        file.writelines(others)
    first = min(stamp.head.seq for stamp in witness(authority, ledger.directory).stamps(ledger.verify().log))
    with ledger.log(**{**options, "settings": SMALL | SLOW | KEEP_LITTLE}) as log:
        assert log.prune() > 0
    pruned, kept = read_prune_record(ledger.chain()), path.read_bytes()
    seqs = [stamp.head.seq for stamp in witness(authority, ledger.directory).stamps(ledger.verify().log)]

    assert pruned is not None and first < pruned.seq == min(seqs)
    assert all(each in kept for each in others)
    assert ledger.verify(witnesses=[witness(authority, ledger.directory)]).ok
    assert path.stat().st_mode & 0o777 == 0o600
    assert {each.name for each in ledger.directory.iterdir() if each.is_file()} >= {TOKENS_FILE}
    assert not [*ledger.directory.glob(".*")]


def test_a_token_that_is_written_while_the_file_is_replaced_is_not_lost(
    authority: Authority, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, replaced = tmp_path / TOKENS_FILE, fcntl.flock, list[int]()
    path.write_bytes(b"")

    def after_it_was_replaced(file: int, how: int) -> None:
        if not replaced:
            (tmp_path / "new").write_bytes(b"")
            os.replace(tmp_path / "new", path)
        replaced.append(how)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_it_was_replaced)
    witness(authority, tmp_path)._keep(head, b"an answer")

    assert len(replaced) == 2
    assert json.loads(path.read_bytes())["head"]["seq"] == head.seq
    assert forget_tokens(tmp_path, head.log, head.chain, head.seq) == 0
    assert forget_tokens(tmp_path, head.log, head.chain, head.seq + 1) == 1
    assert path.read_bytes() == b"\n"
    path.unlink()
    assert forget_tokens(tmp_path, head.log, head.chain, 99) == 0


@pytest.mark.parametrize("is_required", [True, False])
def test_without_its_authority_a_log_is_closed_or_open_as_it_was_set(
    ledger: Ledger, authority: Authority, is_required: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = f"rfc3161:http://127.0.0.1:{port}/tsr#{authority.home / 'issuer.pem'}"
    options = {"witnesses": [place], "settings": SLOW | {"require_witness": is_required}}
    if is_required:
        with pytest.raises(WitnessFailed, match="connection attempts failed"):
            ledger.fill(1, **options)
    else:
        for _ in range(2):
            ledger.fill(1, **options)
        assert ledger.verify().ok
        assert kinds(ledger.verify(witnesses=[witness_of(place, ledger.directory)])) == {UNWITNESSED}


def test_the_command_line_verifies_time_stamps(ledger: Ledger, authority: Authority, tmp_path: Path) -> None:
    signer = keys.own_signer()
    assert isinstance(signer, HmacKey)
    ledger.key = signer
    ledger.fill(1, witnesses=[authority.place], settings=SLOW)
    arguments = ("verify", ledger.directory, "--witness", authority.place)

    assert invoke(*arguments)[0] == exits.OK
    make_authority(tmp_path / "foreign")
    status, out, _ = invoke(*arguments[:-1], f"rfc3161:{authority.url}#{tmp_path / 'foreign' / 'issuer.pem'}")
    assert status == exits.BROKEN and BAD_TOKEN in out and "unable to get local issuer certificate" in out


@pytest.mark.parametrize("place", ["rfc3161:", "rfc3161:http://host/tsr", "rfc3161:#c.pem", "rfc3161:http://host/#"])
def test_an_authority_without_a_url_or_certificates_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rfc3161:URL#CERTIFICATES\.pem"):
        witness_of(place, tmp_path)


def test_certificates_and_urls_that_cannot_be_used_are_refused(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("no certificate")
    for url, name, said in (
        ("http://host/", tmp_path / "nothing", "No such file"),
        ("http://host/", tmp_path, "directory"),
        ("http://host/", tmp_path / "text", "no certificates in PEM"),
        ("http://u:p@host/", authority.home / "issuer.pem", "neither a password"),
        ("file:///etc/passwd", authority.home / "issuer.pem", "not the URL"),
    ):
        with pytest.raises(UsageError, match=said):
            TimestampWitness(url, name, tmp_path)
    monkeypatch.setitem(sys.modules, "rfc3161_client", None)
    with pytest.raises(UsageError, match=r"toolcell\[audit\]"):
        witness(authority, tmp_path)


def test_no_link_or_pipe_in_place_of_the_tokens_is_read_or_written(
    authority: Authority, head: Head, tmp_path: Path
) -> None:
    path = tmp_path / TOKENS_FILE
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to(tmp_path / "target"), lambda: path.mkdir()):
        make()
        asked = witness(authority, tmp_path)
        with pytest.raises(WitnessFailed, match="cannot be kept"):
            asked.push(head)
        with pytest.raises(WitnessFailed, match="cannot read"):
            [*asked.heads("log")]
        path.rmdir() if path.is_dir() else path.unlink()
    assert not (tmp_path / "target").exists()
