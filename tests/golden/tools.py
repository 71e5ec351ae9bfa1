"""Tools, scripts and models with which the golden files were written, and with which they are carried on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from toolcell import Agent, Flow, Policy, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.control import JournalConfig

HERE = Path(__file__).parent
FILES = HERE / "files"

POLICY = Policy(flows=[Flow("private", "public", "deny")])

WAITING = """
import random
before = [call_tool('note', text='before'), random.random()]
[*before, call_tool('pay', to='ada', euros=3), random.random()]
"""
"""Waits for its payment."""

BROKEN = "mail = call_tool('mail')\ncall_tool('note', text='once')\nraise ValueError('to be mended')"

MENDED = """
mail = call_tool('mail')
noted = call_tool('note', text='once')
paid = call_tool('pay', to='ada', euros=2)
try:
    call_tool('post', text=mail)
except ToolError as error:
    refused = str(error)
[mail, noted, paid, refused]
"""
"""Waits for its payment; what comes before it is answered from the run that it repairs. It has read a letter."""

DRAFTED = "first = call_tool('note', text='a')\nsecond = call_tool('pay', to='ada', euros=first)\n[first, second]"

SESSION = (
    "import random\nclass Box: pass\nbox = Box()\nbox.seen = random.random()",
    "noted = call_tool('note', text='s')",
)
SESSION_PAYS = "paid = call_tool('pay', to='ada', euros=noted)\n[paid, box.seen, random.random(), type(box).__name__]"

MAP = (
    "if n == 1: raise ValueError('of one')\ncall_tool('note', text=str(n)) if n < 2 else call_tool('look', text=str(n))"
)

RECORDED = """
import random
seen = [call_tool('look', text='x'), random.random(), OUTPUT_DIR is not None]
try:
    call_tool('fail', text='why')
except ToolError as error:
    seen.append(str(error))
print('printed')
open('out.txt', 'w').write('of the script')
set_result(seen, files=['out.txt'])
"""


class Ledger:
    """A registry whose tools note each call. A host that is to be killed at a call kills itself there."""

    def __init__(self, killed_at: str = "") -> None:
        self.made: list[str] = []
        self.registry = registry = ToolRegistry()

        def write(text: str) -> int:
            if text == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.made.append(text)
            return len(self.made)

        @registry.tool
        async def note(text: str) -> int:
            """Write a line into the ledger."""
            return write(f"note {text}")

        @registry.tool(requires_approval=True)
        async def pay(to: str, euros: int) -> str:
            """Send money to somebody."""
            write(f"pay {to} {euros}")
            return f"paid {to} {euros}"

        @registry.tool(read_only=True)
        async def look(text: str) -> str:
            """Look something up."""
            write(f"look {text}")
            return f"saw {text}"

        @registry.tool(read_only=True, reads="private")
        async def mail() -> str:
            """Read all the mail there is."""
            write("mail")
            return "a letter"

        @registry.tool(sends="public")
        async def post(text: str) -> str:
            """Post a text where everybody can read it."""
            write(f"post {text}")
            return "posted"

        @registry.tool(read_only=True)
        async def fail(text: str) -> str:
            """Fail, and say why."""
            raise ValueError(text)


def runtime(ledger: Ledger, folder: Path, **options: Any) -> SyncRuntime:
    """Return a Runtime whose journals are in `folder`."""
    config = JournalConfig(directory=folder, token_s=366 * 86_400)
    return SyncRuntime(ledger.registry, journal=config, policy=POLICY, pool=PoolConfig(warm=0), **options)


def agent(ledger: Ledger, opened: Any, *, is_again: bool = False) -> Agent:
    """Return an agent whose model pays, itself and by a script, and then says that it is done."""
    script = "[call_tool('note', text='by a script'), call_tool('pay', to='bob', euros=5)]"
    turn = calls(("pay", {"to": "ada", "euros": 4}), ("execute_code", {"code": script}))
    replies: list[Any] = ["done"] if is_again else [turn, "done"]
    return Agent(ScriptedModel(replies), tools=ledger.registry, code_execution=opened, on_approval="suspend")
