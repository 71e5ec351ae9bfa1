"""Landlock on a real kernel: only what was listed stays accessible."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import socket
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolcell.sandbox.process import probes
from toolcell_bridge.isolation import landlock

pytestmark = [pytest.mark.quick, pytest.mark.isolation]
Child = Callable[..., Any]

RESTRICT = """
import json, pathlib
from toolcell_bridge.isolation import capabilities, landlock
paths = json.loads(sys.argv[1])
capabilities.set_no_new_privileges()
abi = landlock.supported_abi()
ruleset = landlock.create_ruleset(abi)
for kind, each in paths.items():
    for path in each:
        landlock.add_path(ruleset, path, getattr(landlock, kind.upper()), abi)
landlock.restrict_self(ruleset, abi)
os.close(ruleset)
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """(open to the guest, closed to it), each with one file."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for each in (inside, outside):
        each.mkdir()
        (each / "file").write_text("content")
    return inside, outside


def plan(**paths: Path | str) -> str:
    return "{" + ", ".join(f'"{kind}": ["{path}"]' for kind, path in paths.items()) + "}"


TOUCHES = {
    "reading": "open(at + '/file').close()",
    "writing": "open(at + '/file', 'a').close()",
    "listing": "os.listdir(at)",
    "creating": "open(at + '/new', 'x').close()",
    "making a directory": "os.mkdir(at + '/directory')",
    "making a link": "os.symlink('/etc/passwd', at + '/link')",
    "truncating": "os.truncate(at + '/file', 1)",
    "removing": "os.unlink(at + '/file')",
}


@pytest.mark.parametrize("what", TOUCHES)
@pytest.mark.conforms("Q-b1")
def test_a_path_that_was_not_listed_cannot_be_touched(child: Child, places: tuple[Path, Path], what: str) -> None:
    if what == "truncating" and landlock.supported_abi() < 3:
        pytest.skip("truncation is governed from ABI 3 on")
    inside, outside = places
    script = f"at = sys.argv[2]\nprint(outcome(lambda: {TOUCHES[what]}))"
    assert child(RESTRICT + script, plan(read_write=inside), str(outside)).lines == ["EACCES"]
    assert child(RESTRICT + script, plan(read_write=inside), str(inside)).lines == ["ok"]
    assert child(script, "", str(outside)).lines == ["ok"]


@pytest.mark.parametrize("what", TOUCHES)
def test_a_path_listed_for_reading_can_only_be_read(child: Child, places: tuple[Path, Path], what: str) -> None:
    script = f"at = sys.argv[2]\nprint(outcome(lambda: {TOUCHES[what]}))"
    expected = "ok" if what in ("reading", "listing") else "EACCES"
    if what == "truncating" and landlock.supported_abi() < 3:
        expected = "ok"
    assert child(RESTRICT + script, plan(read=places[0]), str(places[0])).lines == [expected]


def test_only_a_path_listed_for_execution_can_be_executed(child: Child, places: tuple[Path, Path]) -> None:
    program = places[0] / "program"
    program.write_bytes(Path("/bin/true").resolve().read_bytes())
    program.chmod(0o755)
    script = """
        pid = os.fork()
        if pid == 0:
            os._exit(0 if outcome(os.execv, sys.argv[2], ["program"]) == "EACCES" else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    everything = '{"read_exec": ["/"]}'
    marker = script.replace("os._exit(0 if", "os._exit(7 if")
    assert child(RESTRICT + _plain(marker), '{"read": ["/"]}', str(program)).lines == ["7"]
    assert child(RESTRICT + _plain(marker), everything, str(program)).lines == ["0"]


def test_moving_within_a_writable_tree_works_and_out_of_it_does_not(child: Child, places: tuple[Path, Path]) -> None:
    inside, outside = places
    script = """
        at, other = sys.argv[2:]
        os.mkdir(at + "/one"), os.mkdir(at + "/two"), open(at + "/one/file", "x").close()
        print(outcome(os.rename, at + "/one/file", at + "/two/file"))
        print(outcome(os.rename, at + "/two/file", other + "/stolen"), outcome(os.link, at + "/file", other + "/hard"))
    """
    lines = child(RESTRICT + _plain(script), plan(read_write=inside), str(inside), str(outside)).lines
    assert lines[0] == ("ok" if landlock.supported_abi() >= 2 else "EXDEV")
    assert set(lines[1].split()) <= {"EACCES", "EXDEV"}


def test_no_tcp_connection_leaves_or_arrives(child: Child) -> None:
    if landlock.supported_abi() < 4:
        pytest.skip("TCP is governed from ABI 4 on")
    script = """
        import socket
        print(outcome(socket.socket().connect, ("127.0.0.1", int(sys.argv[2]))))
        print(outcome(socket.socket().bind, ("127.0.0.1", 0)))
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert child(_plain(script), "", port).lines == ["ok", "ok"]
        assert child(RESTRICT + _plain(script), '{"read": ["/"]}', port).lines == ["EACCES", "EACCES"]


def test_signals_and_abstract_sockets_stay_inside(child: Child) -> None:
    if landlock.supported_abi() < 6:
        pytest.skip("scopes exist from ABI 6 on")
    script = """
        import socket
        print(outcome(os.kill, os.getppid(), 0))
        print(outcome(socket.socket(socket.AF_UNIX).connect, "\\0" + sys.argv[2]))
        print(outcome(os.kill, os.getpid(), 0))
    """
    name = f"toolcell-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen()
        assert child(_plain(script), "", name).lines == ["ok", "ok", "ok"]
        assert child(RESTRICT + _plain(script), '{"read": ["/"]}', name).lines == ["EPERM", "EPERM", "ok"]


def test_a_ruleset_prepared_by_a_parent_binds_each_child_that_takes_it(child: Child, places: tuple[Path, Path]) -> None:
    script = """
        from toolcell_bridge.isolation import capabilities, landlock
        at, other = sys.argv[1:]
        abi = landlock.supported_abi()
        ruleset = landlock.create_ruleset(abi)
        landlock.add_path(ruleset, at, landlock.READ, abi)
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                capabilities.set_no_new_privileges()
                landlock.restrict_self(ruleset)
                os._exit(outcome(os.listdir, at) == "ok" and outcome(os.listdir, other) == "EACCES")
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(outcome(os.listdir, other), os.get_inheritable(ruleset))
    """
    assert child(script, str(places[0]), str(places[1])).lines == ["1", "1", "ok False"]


def test_every_abi_up_to_the_kernels_can_be_asked_for() -> None:
    for abi in range(landlock.FLOOR_ABI, landlock.supported_abi() + 1):
        ruleset = landlock.create_ruleset(abi)
        landlock.add_path(ruleset, "/", landlock.READ, abi)
        landlock.add_path(ruleset, "/dev/null", landlock.READ_WRITE, abi)
        os.close(ruleset)


def test_a_rule_for_a_missing_path_is_refused_and_leaves_no_descriptor(tmp_path: Path) -> None:
    gc.collect()  # what tests before this one left open is not ours
    abi = landlock.supported_abi()
    ruleset = landlock.create_ruleset(abi)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        landlock.add_path(ruleset, str(tmp_path / "absent"), landlock.READ, abi)
    after = len(os.listdir("/proc/self/fd"))
    os.close(ruleset)
    assert after == before


def test_each_abi_governs_all_that_came_before_it_and_more() -> None:
    governed = [landlock.handled(abi) for abi in range(1, landlock.NEWEST_ABI + 1)]
    for older, newer in itertools.pairwise(governed):
        assert older.fs & newer.fs == older.fs
        assert older.net & newer.net == older.net
        assert older.scopes & newer.scopes == older.scopes
    assert governed[0] == landlock.Handled(0x1FFF, 0, 0)
    assert governed[6] == landlock.Handled(0xFFFF, 0b11, 0b11)  # measured against ABI 7
    assert governed[-1] == landlock.Handled(0x1FFFF, 0b1111, 0b11)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ENOMEM])
def test_a_kernel_without_landlock_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(landlock, "syscall", refuse)
    probe = probes.probe_landlock()
    assert not probe.live
    assert os.strerror(code) in probe.detail
    assert probe.fix


def _plain(script: str) -> str:
    """Undo a test's indentation, so that a script can follow another."""
    return textwrap.dedent(script)
