"""Files that a run returns: PROMISES.md, "returned files"."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from escape.attack import MIB, Victim, outside
from escape.prologues import BASICS, BRIDGE

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

NAIVE = """
import glob
def collect(names):
    '''Globs, follows links and reads: what a host does that trusts names.'''
    found = {}
    for name in names:
        for path in glob.glob(name, root_dir=".", include_hidden=True) or [name]:
            try:
                found[path] = open(path, "rb").read(100).decode("utf-8", "replace")
            except OSError:
                continue
    return found
"""

WAYS = {
    "absolute path": "names = [secret]",
    "dotdot": "names = ['../' * 30 + secret]",
    "dotdot in the middle": "os.makedirs('a/b')\nnames = ['a/b/' + '../' * 30 + secret]",
    "symlink": "os.symlink(secret, 'link')\nnames = ['link']",
    "symlink to a folder": "os.symlink(os.path.dirname(secret), 'folder')\nnames = ['folder/' + os.path.basename(secret)]",
    "symlink to the root": "os.symlink('/', 'root')\nnames = ['root' + secret]",
    "chain of symlinks": "os.symlink(secret, 'a')\nos.symlink('a', 'b')\nos.symlink('b', 'c')\nnames = ['c']",
    "symlink of a parent": "os.mkdir('d')\nos.symlink('../../../../../../../..', 'd/up')\nnames = ['d/up' + secret]",
    "glob": "os.symlink(os.path.dirname(secret), 'folder')\nnames = ['folder/*']",
    "glob of dots": "names = ['.' * 2 + '/*', '../' * 30 + secret[:-1] + '?']",
    "descriptor": "names = [f'/dev/fd/{os.open(\".\", os.O_RDONLY)}/../../../../../../..' + secret]",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_returned_file_is_never_one_of_the_host(way: str, victim: Victim, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    source = BASICS + f"{WAYS[way]}\n"
    plain = outside(source + NAIVE + "set_result(list(collect(names).values()))", secret=str(secret))
    if way not in ("descriptor", "glob of dots"):
        assert "the host's own" in plain.value

    inside = victim.run(source + "set_result(1, files=names)", secret=str(secret))
    assert inside.outcome in ("ok", "error")
    assert all(file.data is None or b"the host" not in file.data for file in inside.result.files)


@pytest.mark.parametrize(
    "way", ["/etc/passwd", "/usr/lib", "../../etc/passwd", "link", "/dev/zero", "/dev/urandom", "/"]
)
def test_nor_one_of_the_sandbox_outside_the_workspace(way: str, victim: Victim) -> None:
    source = BASICS + "os.symlink('/etc/passwd', 'link')\n"
    plain = outside(source + NAIVE + "set_result(collect(names))", names=["/etc/passwd"])
    assert plain.value["/etc/passwd"]
    inside = victim.run(source + "set_result(1, files=names)", names=[way])
    assert len(inside.result.files) >= 1
    assert all(file.data is None and file.problem for file in inside.result.files)


KINDS = {
    "fifo": "os.mkfifo('odd')",
    "socket": "__import__('socket').socket(1).bind('odd') if not isolated else os.mkfifo('odd')",
    "folder": "os.makedirs('odd/empty')",
    "link to itself": "os.symlink('odd', 'odd')",
    "link to nothing": "os.symlink('nothing', 'odd')",
    "no permission": "open('odd', 'w').close(); os.chmod('odd', 0)",
    "missing": "pass",
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_come_out_and_nothing_blocks(kind: str, victim: Victim) -> None:
    source = BASICS + f"open('here', 'w').close()\n{KINDS[kind]}\n"
    assert outside(source + "set_result(1)").value == 1
    inside = victim.run(source + "set_result(1, files=['odd'])", limits={"wall_s": 5})
    assert inside.outcome in ("ok", "error")
    assert all(file.data is None for file in inside.result.files)
    victim.assert_healthy()


def test_a_file_that_is_swapped_while_it_is_read_never_becomes_another(victim: Victim) -> None:
    """A thread replaces the file by a link, a fifo, a directory and back, as fast as it can."""
    swap = f"""{BASICS}
import sys, threading
sys.setswitchinterval(1e-6)
open("good", "w").write("good")
os.symlink("/etc/passwd", "bad")
stop = False
def swapping():
    while not stop:
        for source in ("bad", "good"):
            os.link(source, "next", follow_symlinks=False)
            os.replace("next", "name")
threading.Thread(target=swapping, daemon=True).start()
while not os.path.lexists("name"):
    pass
"""
    racy = (
        swap
        + """
caught = 0
for _ in range(2_000_000):
    if not os.path.islink("name"):
        try:
            caught += open("name").read() != "good"
        except OSError:
            continue
    if caught:
        break
stop = True
set_result(caught)
"""
    )
    assert outside(racy).value >= 1
    inside = victim.run(swap + "for number in range(300):\n    set_result(number, files=['name'])\nstop = True")
    assert inside.outcome == "ok"
    assert all(file.data in (None, b"good") for file in inside.result.files)


def test_a_file_that_grows_while_it_is_read_stays_within_the_limit(victim: Victim) -> None:
    source = f"""{BASICS}
import threading
open("name", "wb").write(b"x" * 1000)
def growing():
    with open("name", "ab", buffering=0) as file:
        for _ in range(100_000):
            if attempt(file.write, b"x" * 1000) != "ok":
                break
threading.Thread(target=growing, daemon=True).start()
"""
    assert outside(source + "while os.path.getsize('name') < 100_000: pass\nset_result(1)").value == 1
    limits = {"files_bytes": 50_000, "disk_bytes": 4 * MIB}
    inside = victim.run(source + "for _ in range(200):\n    set_result(1, files=['name'])", limits=limits)
    assert inside.outcome in ("ok", "protocol_error")
    assert sum(len(file.data or b"") for file in inside.result.files) <= 50_000


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        ("open('f', 'wb').truncate(1 << 30)", {"files_bytes": 100_000, "disk_bytes": 2 << 30}),
        ("open('f', 'wb').write(b'x' * 200_000)", {"files_bytes": 100_000}),
        ("[open(f'f{n}', 'wb').write(b'x' * 10_000) for n in range(20)]", {"files_bytes": 100_000}),
        ("[open(f'f{n}', 'w').close() for n in range(200)]", {"files": 10}),
        ("names = [f'missing{n}' for n in range(10_000)]", {"files": 10}),
        ("open('f0', 'w').close(); names = ['f0'] * 10_000", {"files": 10}),
        ("os.makedirs('d' * 50 + '/e' * 50); names = ['d*'] * 500", {"files": 10}),
    ],
    ids=["sparse", "large", "many and large", "many", "ten thousand missing", "one ten thousand times", "globs"],
)
def test_count_and_size_of_returned_files_are_bounded(make: str, limits: dict[str, int], victim: Victim) -> None:
    source = BASICS + f"names = ['f', *(f'f{{n}}' for n in range(300))]\n{make}\n"
    assert outside(source + "set_result(len(names))").value >= 301
    inside = victim.run(source + "set_result(1, files=names)", limits=limits)
    assert inside.outcome in ("ok", "error", "protocol_error")
    sent = [file for file in inside.result.files if file.data is not None]
    assert len(sent) <= limits.get("files", 64)
    assert sum(len(file.data or b"") for file in sent) <= limits.get("files_bytes", 32 * MIB)
    assert len(inside.result.files) <= limits.get("files", 64) + 1100
    assert inside.growth_bytes < 96 * MIB
    victim.assert_healthy()


FORGED_NAMES = [
    "../escaped", "../../../etc/cron.d/owned", "/etc/passwd", "/", "..", ".", "", "a/../../b", "a//b", "./a", "a/", "a\0b",
    "a\nb", "a\rb", "a\x1b[2Jb", "a\u202eb", "a\u2028b", "a\u200bb", "\ufeffa", "a\\..\\..\\b", "C:\\a", "x" * 5000,
    "d/" * 2000 + "f", "a\x7fb", "a\u0085b",
]  # fmt: skip


@pytest.mark.parametrize("name", FORGED_NAMES, ids=[f"{name[:20]!r}-{len(name)}" for name in FORGED_NAMES])
def test_a_file_name_from_a_patched_guest_is_refused_or_harmless(name: str, victim: Victim) -> None:
    """A caller joins the names of returned files to a directory, and prints them on a terminal."""
    source = f"""{BRIDGE}
send(message(RESULT, 1, [name]) + message(PART, name, "text/html", b"data", True) + message(DONE, True, None))
stay()
"""
    assert outside(source, bridge=True, name=name).believed[1][1] == name
    inside = victim.run(source, name=name)
    for file in inside.result.files:
        parts = file.name.split("/")
        assert file.name == name == "" or not file.name.startswith("/")
        assert file.data is None or (file.name and not {"", ".", ".."} & set(parts))
        assert not any(unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") for char in file.name)
        assert len(file.name) <= 4096


@pytest.mark.parametrize("kind", ["text/html\r\nX-Forged: 1", "x" * 100_000, "\x1b[2J", "\u202e", "a\0b"])
def test_a_media_type_from_a_patched_guest_is_refused_or_harmless(kind: str, victim: Victim) -> None:
    source = f"""{BRIDGE}
send(message(RESULT, 1, ["a"]) + message(PART, "a", kind, b"data", True) + message(DONE, True, None))
stay()
"""
    assert outside(source, bridge=True, kind=kind).believed[1][2] == kind
    for file in victim.run(source, kind=kind).result.files:
        assert file.media_type.isprintable()
        assert len(file.media_type) <= 255


def test_names_made_in_the_workspace_are_refused_or_harmless(victim: Victim) -> None:
    """The kernel allows all bytes but two in a name."""
    source = f"""{BASICS}
names = ["a\\nb", "a\\x1b[2J", "\\u202egnp.exe", "-rf", "~", "$HOME", "`id`", "a;b", "%00", "con", "a b", "*", "[a]", "?"]
for name in names:
    open(name, "w").write("x")
set_result(1) if not isolated else set_result(1, files=[*names, "."])
"""
    assert outside(source).value == 1
    inside = victim.run(source)
    assert inside.outcome in ("ok", "error")
    for file in inside.result.files:
        assert not any(unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs") for char in file.name)


def test_a_piece_of_one_file_never_ends_up_in_another(victim: Victim) -> None:
    """A result in the middle of a file discards that file. What follows is a new file."""
    source = f"""{BRIDGE}
send(message(PART, "a", "", b"AAAA", False) + message(RESULT, 1, []) + message(PART, "b", "", b"BBBB", True))
send(message(PART, "c", "", b"CCCC", False) + message(DONE, True, None))
stay()
"""
    assert len(outside(source, bridge=True).believed) == 5
    files = victim.run(source).result.files
    assert {file.name: file.data for file in files} in ({"b": b"BBBB"}, {})
