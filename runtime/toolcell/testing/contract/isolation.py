"""What a backend that says it isolates keeps a script from: not a proof of its walls, but that they are there."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from pathlib import Path

from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import BackendHarness, expect, expect_equal

promises = Promises("walls")

REACH = """
import socket
def reached(*address, family=socket.AF_INET, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as sock:
            sock.settimeout(2)
            sock.connect(*address)
            return True
    except OSError:
        return False
"""


@promises
async def no_environment(stand: BackendHarness) -> None:
    """The host's environment is nowhere to be read."""
    secret = f"secret-{uuid.uuid4().hex}"
    os.environ["TOOLCELL_CONTRACT"] = secret
    try:
        async with BackendHarness(stand.make_backend, warm=0) as own:
            source = """
import glob, os
texts = [repr(dict(os.environ)).encode()]
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try: texts.append(open(path, "rb").read())
    except OSError: pass
set_result(any(b"secret-" in text for text in texts))
"""
            expect_equal(await own.value(source), False, "the host's variable was found")
    finally:
        del os.environ["TOOLCELL_CONTRACT"]


@promises
async def no_files(stand: BackendHarness) -> None:
    """A file of the host that anybody may read is not there, and none can be left."""
    with tempfile.TemporaryDirectory(prefix="toolcell-contract-") as folder:
        Path(folder).chmod(0o777)
        path = Path(folder, "secret.txt")
        path.write_text("secret")
        source = f"""
found = []
for path, mode in (({str(path)!r}, "r"), ({str(path)!r}, "w"), ({folder + "/left"!r}, "w"), ({__file__!r}, "a")):
    try: open(path, mode); found.append([path, mode])
    except OSError: pass
set_result(found)
"""
        expect_equal(await stand.value(source), [], "what could be opened")
        expect_equal(os.listdir(folder), ["secret.txt"], "the folder afterwards")


@promises
async def nothing_to_write_but_the_workspace(stand: BackendHarness) -> None:
    """The system's own folders cannot be written, nor the interpreter's."""
    source = """
import json, os
places = ["/", "/usr", "/etc", "/lib", "/dev", os.path.dirname(json.__file__), os.path.dirname(os.__file__)]
written = []
for place in places:
    try:
        open(os.path.join(place, "left"), "w").close(); written.append(place)
    except OSError: pass
set_result(written)
"""
    expect_equal(await stand.value(source), [], "folders that could be written")


@promises
async def no_network(stand: BackendHarness) -> None:
    """A listener on the host's own address, one in its abstract namespace, and one in a file cannot be reached."""
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        tempfile.TemporaryDirectory(prefix="toolcell-contract-") as folder,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        Path(folder).chmod(0o777)
        where, name = f"{folder}/socket", f"\0toolcell-contract-{uuid.uuid4().hex}"
        for sock, address in ((named, where), (abstract, name)):
            sock.bind(address)
            sock.listen()
        os.chmod(where, 0o777)
        source = f"""
set_result([reached(("127.0.0.1", {tcp.getsockname()[1]})), reached(("1.1.1.1", 53)),
            reached({where!r}, family=socket.AF_UNIX), reached({name!r}, family=socket.AF_UNIX)])
"""
        expect_equal(await stand.value(REACH + source), [False] * 4, "reached: tcp, the internet, a file, a name")


@promises
async def no_processes(stand: BackendHarness) -> None:
    """The host's process can neither be seen by its number and name, nor signalled, nor traced."""
    source = """
import os
def attempt(action, *arguments):
    try: action(*arguments); return True
    except (OSError, AttributeError): return False
name = attempt(lambda: open(f"/proc/{host}/cmdline").read()) and open(f"/proc/{host}/cmdline").read()
set_result([bool(name) and name == cmdline, attempt(lambda: open(f"/proc/{host}/mem").read(0)) and name == cmdline])
"""
    cmdline = Path("/proc/self/cmdline").read_text() if Path("/proc/self/cmdline").exists() else "?"
    value = await stand.value(source, inputs={"host": os.getpid(), "cmdline": cmdline})
    expect_equal(value, [False, False], "the host was seen, its memory was opened")


@promises
async def no_descriptors(stand: BackendHarness) -> None:
    """A script inherits nothing of the host's but its bridge and its output."""
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import fcntl, os, stat
kinds = []
for descriptor in range(3, 1024):
    try: mode = os.fstat(descriptor).st_mode
    except OSError: continue
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH: continue  # a name: it opens nothing that a path would not
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode): kinds.append(descriptor)
set_result(kinds)
"""
        async with BackendHarness(stand.make_backend, warm=0) as own:
            expect_equal(await own.value(source), [], "descriptors of files and folders")


@promises
async def no_privilege(stand: BackendHarness) -> None:
    """A script is not root outside, has no capabilities and cannot get any."""
    source = """
import os, socket
try: status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
except OSError: status = {}  # it cannot even look
raised = []
for name, action in {
    "root": lambda: os.setuid(0), "chroot": lambda: os.chroot("/"), "nice": lambda: os.nice(-5),
    "host name": lambda: socket.sethostname("x"), "device": lambda: os.mknod("d", 0o020666, 259),
}.items():
    try: action(); raised.append(name)
    except OSError: pass
set_result([raised if os.getuid() else [], int(status.get("CapEff", "0"), 16)])
"""
    expect_equal(await stand.value(source), [[], 0], "what was allowed, and capabilities")


@promises
async def layers_say_so(stand: BackendHarness) -> None:
    """Every live layer is named with a detail."""
    async with stand.connection() as connection:
        expect(len(connection.sandbox.layers) >= 1, "no layer is named")
