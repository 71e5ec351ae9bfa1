"""Nothing of a run is seen by the next, or by one beside it."""

from __future__ import annotations

import anyio

from toolcell.results import Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, Broken, expect, expect_equal, expect_outcome, run_on
from toolcell_bridge.wire.messages import CallTool, RunScript, ToolReturn

promises = Promises("single_use")


@promises
async def files(stand: BackendHarness) -> None:
    """Files in the workspace are gone."""
    await stand.value("import os\nos.mkdir('mine')\nopen('mine/secret', 'w').write('x')\nos.chmod('mine', 0)")
    expect_equal(await stand.value("import os\nos.listdir('.')"), [], "the next workspace")


@promises
async def tmp(stand: BackendHarness) -> None:
    """Files in /tmp and /dev/shm are gone, and they can be written."""
    source = """
import os
before = [name for place in ("/tmp", "/dev/shm") for name in os.listdir(place)]
for place in ("/tmp", "/dev/shm"): open(f"{place}/left-by-a-script", "w").write("x")
set_result(before)
"""
    await stand.value(source)
    expect("left-by-a-script" not in await stand.value(source), "a file of the run before is there")


@promises
async def state(stand: BackendHarness) -> None:
    """Names, modules, patches, settings and the environment are as they were."""
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
    await stand.value(spoil)
    expect_equal(await stand.value(look), [], "what the next run finds of the one before")


@promises
async def processes(stand: BackendHarness) -> None:
    """Processes that a script left behind, whatever family they left, are gone: they do not go on writing."""
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
    await stand.value(leave)
    look = """
import os
def mine(pid):
    try: return os.stat(f"/proc/{pid}").st_uid == os.getuid() and "toolcell" in open(f"/proc/{pid}/cmdline").read()
    except OSError: return False
try: numbers = [name for name in os.listdir("/proc") if name.isdigit()]
except OSError: numbers = []
set_result(len([number for number in numbers if mine(number)]))
"""
    expect(await stand.value(look) <= 3, "the next run sees processes that are not its own")


@promises
async def randomness(stand: BackendHarness) -> None:
    """No two runs draw the same random numbers."""
    source = "import os, random, uuid\nset_result([random.random(), os.urandom(8), str(uuid.uuid4())])"
    first, second = await stand.value(source), await stand.value(source)
    expect(not [pair for pair in zip(first, second, strict=True) if pair[0] == pair[1]], f"twice {first}")


@promises
async def after_every_end(stand: BackendHarness) -> None:
    """A sandbox whose run ended badly is not used again."""
    for source in ("leftover = 1\nraise ValueError", "leftover = 1\nimport os\nos._exit(1)"):
        expect_outcome(await stand.run(source), Outcome.ERROR, Outcome.KILLED)
        expect_equal(await stand.value("set_result('leftover' in globals())"), False, "a name of the run before")
    stopped = "leftover = 1\nimport time\ntime.sleep(60)"
    expect_outcome(await stand.run(stopped, limits=LIMITS.model_copy(update={"wall_s": 0.3})), Outcome.TIMEOUT)
    expect_equal(await stand.value("set_result('leftover' in globals())"), False, "a name of the run before")


@promises
async def side_by_side(stand: BackendHarness) -> None:
    """Runs at the same time do not see each other's files, names or answers."""
    values: dict[int, object] = {}
    source = """
import os
open("mine", "w").write(str(me))
call_tool("meet", name="side by side", size=4)
set_result([call_tool("echo", q=me), open("mine").read(), os.listdir(".")])
"""

    async def one(index: int) -> None:
        values[index] = await stand.value(source, inputs={"me": index})

    async with anyio.create_task_group() as tasks:
        for index in range(4):
            tasks.start_soon(one, index)
    expect_equal(values, {index: [index, str(index), ["mine"]] for index in values}, "what each saw")


@promises
async def one_session_goes_on(stand: BackendHarness) -> None:
    """Within one sandbox, names and files of a run are there for the next: what sessions are made of."""

    async def dispatch(call: CallTool) -> ToolReturn:
        raise Broken(f"{call.name} was called")

    async with stand.connection() as connection:
        for number, source in enumerate(("x = 40\nopen('f', 'w').write('2')", "set_result(x + int(open('f').read()))")):
            run = RunScript(number + 1, source, {}, [], "off", 1 << 20, 8, 1 << 20, None, None)
            report = await run_on(connection, run, dispatch)
            expect(connection.is_usable, "the session cannot go on")
    expect_equal(report.value, 42, "the value of the second run")
