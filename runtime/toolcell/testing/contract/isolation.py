"""Isolation: what a script cannot reach, and that no run sees anything of the run before it or beside it."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from pathlib import Path

import anyio

from toolcell.results import Outcome
from toolcell.testing.contract.case import CaseGroup
from toolcell.testing.harness import (
    LIMITS,
    BackendHarness,
    expect,
    expect_equal,
)

isolation_cases = CaseGroup("isolation")

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


@isolation_cases
async def no_environment(harness: BackendHarness) -> None:
    """A script cannot read the host's environment anywhere."""
    secret = f"secret-{uuid.uuid4().hex}"
    os.environ["TOOLCELL_CONTRACT"] = secret
    try:
        async with BackendHarness(harness.make_backend, warm=0) as own:
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


@isolation_cases
async def no_files(harness: BackendHarness) -> None:
    """A script can neither open a world-readable file of the host nor create one there."""
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
        expect_equal(await harness.value(source), [], "what could be opened")
        expect_equal(os.listdir(folder), ["secret.txt"], "the folder afterwards")


isolation_cases.value(
    "nothing_to_write_but_the_workspace",
    "A script cannot write to folders of the system or of the interpreter.",
    """
import json, os
places = ["/", "/usr", "/etc", "/lib", "/dev", os.path.dirname(json.__file__), os.path.dirname(os.__file__)]
written = []
for place in places:
    try:
        open(os.path.join(place, "left"), "w").close(); written.append(place)
    except OSError: pass
set_result(written)
""",
    [],
)


@isolation_cases
async def no_network(harness: BackendHarness) -> None:
    """A script cannot connect to a TCP listener of the host, to an abstract socket, or to a socket file."""
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
        expect_equal(await harness.value(REACH + source), [False] * 4, "reached: tcp, the internet, a file, a name")


@isolation_cases
async def no_processes(harness: BackendHarness) -> None:
    """A script can neither read the host process's command line nor open its memory."""
    source = """
import os
def attempt(action, *arguments):
    try: action(*arguments); return True
    except (OSError, AttributeError): return False
name = attempt(lambda: open(f"/proc/{host}/cmdline").read()) and open(f"/proc/{host}/cmdline").read()
set_result([bool(name) and name == cmdline, attempt(lambda: open(f"/proc/{host}/mem").read(0)) and name == cmdline])
"""
    cmdline = Path("/proc/self/cmdline").read_text() if Path("/proc/self/cmdline").exists() else "?"
    value = await harness.value(source, inputs={"host": os.getpid(), "cmdline": cmdline})
    expect_equal(value, [False, False], "the host was seen, its memory was opened")


@isolation_cases
async def no_descriptors(harness: BackendHarness) -> None:
    """A script inherits no file or folder of the host as a descriptor."""
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import fcntl, os, stat
kinds = []
for descriptor in range(3, 1024):
    try: mode = os.fstat(descriptor).st_mode
    except OSError: continue
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH: continue  # opens nothing more than a path does
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISBLK(mode): kinds.append(descriptor)
set_result(kinds)
"""
        async with BackendHarness(harness.make_backend, warm=0) as own:
            expect_equal(await own.value(source), [], "descriptors of files and folders")


isolation_cases.value(
    "no_privilege",
    "A script cannot act as root, has no capabilities and cannot gain any.",
    """
import os, socket
try: status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
except OSError: status = {}  # /proc is not readable
raised = []
for name, action in {
    "root": lambda: os.setuid(0), "chroot": lambda: os.chroot("/"), "nice": lambda: os.nice(-5),
    "host name": lambda: socket.sethostname("x"), "device": lambda: os.mknod("d", 0o020666, 259),
}.items():
    try: action(); raised.append(name)
    except OSError: pass
set_result([raised if os.getuid() else [], int(status.get("CapEff", "0"), 16)])
""",
    [[], 0],
)


single_use_cases = CaseGroup("single_use")


@single_use_cases
async def files(harness: BackendHarness) -> None:
    """The next run starts with an empty workspace."""
    await harness.value("import os\nos.mkdir('mine')\nopen('mine/secret', 'w').write('x')\nos.chmod('mine', 0)")
    expect_equal(await harness.value("import os\nos.listdir('.')"), [], "the next workspace")


@single_use_cases
async def tmp(harness: BackendHarness) -> None:
    """A script can write to /tmp and /dev/shm, and the next run does not find the files."""
    source = """
import os
before = [name for place in ("/tmp", "/dev/shm") for name in os.listdir(place)]
for place in ("/tmp", "/dev/shm"): open(f"{place}/left-by-a-script", "w").write("x")
set_result(before)
"""
    await harness.value(source)
    expect("left-by-a-script" not in await harness.value(source), "a file of the run before is there")


@single_use_cases
async def state(harness: BackendHarness) -> None:
    """The next run finds no name, module, patch, setting or environment variable of the run before it."""
    spoil = """
import builtins, json, os, sys, types
leftover = 1
builtins.leftover = json.dumps = os.leftover = lambda *_: "spoiled"
os.environ["LEFTOVER"] = "1"
sys.modules["leftover"] = types.ModuleType("leftover")
sys.path.insert(0, "/leftover")
sys.setrecursionlimit(77)
os.chdir("/")
os.umask(0o777)
"""
    look = """
import builtins, json, os, sys
set_result([name for name, found in {
    "a global": "leftover" in globals(), "a builtin": hasattr(builtins, "leftover"), "a patch": json.dumps(1) != "1",
    "an attribute": hasattr(os, "leftover"), "a variable": "LEFTOVER" in os.environ,
    "a module": "leftover" in sys.modules,
    "a path": "/leftover" in sys.path, "a setting": sys.getrecursionlimit() == 77, "a folder": os.getcwd() == "/",
}.items() if found])
"""
    await harness.value(spoil)
    expect_equal(await harness.value(look), [], "what the next run finds of the one before")


@single_use_cases
async def processes(harness: BackendHarness) -> None:
    """Processes that a script left behind are gone when the next run starts, also those that left its process group."""
    leave = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        while True: time.sleep(0.01)
    os._exit(0)
os.wait()
set_result(1)
"""
    await harness.value(leave)
    look = """
import os
def mine(pid):
    try: return os.stat(f"/proc/{pid}").st_uid == os.getuid() and "toolcell" in open(f"/proc/{pid}/cmdline").read()
    except OSError: return False
try: numbers = [name for name in os.listdir("/proc") if name.isdigit()]
except OSError: numbers = []
set_result(len([number for number in numbers if mine(number)]))
"""
    expect(await harness.value(look) <= 3, "the next run sees processes that are not its own")


@single_use_cases
async def randomness(harness: BackendHarness) -> None:
    """Two runs draw different random numbers."""
    source = "import os, random, uuid\nset_result([random.random(), os.urandom(8), str(uuid.uuid4())])"
    first, second = await harness.value(source), await harness.value(source)
    expect(not [pair for pair in zip(first, second, strict=True) if pair[0] == pair[1]], f"twice {first}")


@single_use_cases
async def after_every_end(harness: BackendHarness) -> None:
    """A sandbox is not used again after a run that failed, died or timed out."""
    for source in ("leftover = 1\nraise ValueError", "leftover = 1\nimport os\nos._exit(1)"):
        await harness.run(source, Outcome.ERROR, Outcome.KILLED)
        expect_equal(await harness.value("set_result('leftover' in globals())"), False, "a name of the run before")
    stopped = "leftover = 1\nimport time\ntime.sleep(60)"
    await harness.run(stopped, Outcome.TIMEOUT, limits=LIMITS.model_copy(update={"wall_s": 0.3}))
    expect_equal(await harness.value("set_result('leftover' in globals())"), False, "a name of the run before")


@single_use_cases
async def side_by_side(harness: BackendHarness) -> None:
    """Runs at the same time do not see each other's files, names or answers."""
    values: dict[int, object] = {}
    source = """
import os
open("mine", "w").write(str(me))
call_tool("meet", name="side by side", size=4)
set_result([call_tool("echo", q=me), open("mine").read(), os.listdir(".")])
"""

    async def one(index: int) -> None:
        values[index] = await harness.value(source, inputs={"me": index})

    async with anyio.create_task_group() as tasks:
        for index in range(4):
            tasks.start_soon(one, index)
    expect_equal(values, {index: [index, str(index), ["mine"]] for index in values}, "what each saw")


@single_use_cases
async def one_sandbox_for_two_runs(harness: BackendHarness) -> None:
    """Within one sandbox, the next run finds names and files of the run before it."""
    async with harness.connection() as connection:
        for number, source in enumerate(("x = 40\nopen('f', 'w').write('2')", "set_result(x + int(open('f').read()))")):
            result = await connection.run(source, harness.registry, LIMITS, number + 1)
            expect(connection.is_usable, "the sandbox cannot be used again")
    expect_equal(result.value, 42, "the value of the second run")
