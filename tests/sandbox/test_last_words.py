"""What a launcher or a zygote says before it ends is the error of whoever waits for it, in whatever order it arrives."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable

import anyio
import pytest

from rows import each_row
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process.backend import NamespacedZygote
from toolcell_bridge.entry.launcher import FAILED

SETTINGS = b"settings"


def end_with_words_and_something_unread(peer: socket.socket) -> None:
    peer.send(FAILED + b"unshare: Operation not permitted")
    peer.close()  # with the settings unread: the kernel reports ECONNRESET before it hands over the words


def end_with_words_before_the_settings(peer: socket.socket) -> None:
    peer.recv(1024)
    end_with_words_and_something_unread(peer)


WAYS: dict[str, tuple[Callable[[socket.socket], None], bool]] = {
    "it ends with something unread": (end_with_words_and_something_unread, True),
    "it ends before it is sent anything": (end_with_words_and_something_unread, False),
    "it ends after it has read a part": (end_with_words_before_the_settings, True),
}
"""What the process does, and whether it was sent its settings before that."""


def zygote_of(program: str) -> tuple[NamespacedZygote, socket.socket]:
    """A zygote that is another program, and that program's end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    return NamespacedZygote(process, ours, 1), theirs


@each_row("way", WAYS)
def test_the_words_of_a_process_that_ends_are_the_error(way: str) -> None:
    end, is_sent_before = WAYS[way]
    zygote, theirs = zygote_of("")
    if not is_sent_before:
        end(theirs)
    for _ in range(2):
        zygote.send_first(SETTINGS)
    if is_sent_before:
        end(theirs)

    with pytest.raises(SandboxUnavailable, match="unshare: Operation not permitted"):
        anyio.run(zygote.wait_ready)


def test_what_a_dying_interpreter_writes_is_the_error() -> None:
    zygote, theirs = zygote_of("import sys; sys.exit('libpython3.so: cannot open shared object file')")
    theirs.close()
    zygote.send_first(SETTINGS)

    with pytest.raises(SandboxUnavailable, match=r"libpython3\.so: cannot open shared object file"):
        anyio.run(zygote.wait_ready)


WITHOUT_NAMESPACES = """
    import os
    from toolcell_bridge.isolation.syscalls import CLONE_NEWUSER, unshare
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file: file.write(text)
    with open("/proc/sys/user/max_user_namespaces", "w") as file: file.write("0")
"""


@pytest.mark.isolation
def test_a_machine_without_user_namespaces_is_told_so_by_run_and_doctor() -> None:
    script = textwrap.dedent(WITHOUT_NAMESPACES) + textwrap.dedent("""
        from typer.testing import CliRunner
        from toolcell.cli import build
        for words in (["run", "--profile", "full", "-c", "1"], ["doctor", "--profile", "container"]):
            done = CliRunner().invoke(build(words[:1]), words)
            print(done.exit_code, done.output)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert "unshare: No space left on device" in done.stdout, done
    assert "user.max_user_namespaces" in done.stdout
    assert "profile container  runs" in done.stdout
