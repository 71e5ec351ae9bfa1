"""The scripts, one dialect per guest: CPython with toolcell's functions, and Monty's subset with awaitable calls.

A script that is timed from its own start calls `echo` first: the host takes the time when that call comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

ECHO = {"q": 1}
"""What the one call sends and gets back."""

MARK = "call_tool('echo', {'q': 1})\n"

RECORDS = "[{'id': i, 'name': 'row ' + str(i), 'score': i / 7, 'note': str(i) + 'x' * 180} for i in range(COUNT)]"


@dataclass(frozen=True, slots=True)
class Scripts:
    """The workloads in one dialect."""

    once: str
    calls: str
    pipeline: str
    fan_out: str
    text: str
    records: str


CPYTHON = Scripts(
    once="set_result(call_tool('echo', {'q': 1}))",
    calls="for i in range(COUNT):\n    call_tool('echo', {'q': i})\nset_result(COUNT)",
    pipeline=MARK + "set_result(len(call_tools_parallel([('echo', {'q': i}) for i in range(COUNT)])))",
    fan_out=MARK + "set_result(len(call_tools_parallel([('nap', {'q': i}) for i in range(COUNT)])))",
    text=MARK + "set_result('x' * COUNT)",
    records=MARK + f"set_result({RECORDS})",
)

MONTY = Scripts(
    once="call_tool('echo', {'q': 1})",
    calls="for i in range(COUNT):\n    call_tool('echo', {'q': i})\nCOUNT",
    pipeline="import asyncio\nawait call_tool('echo', {'q': 1})\n"
    "len(await asyncio.gather(*[call_tool('echo', {'q': i}) for i in range(COUNT)]))",
    fan_out="import asyncio\nawait call_tool('echo', {'q': 1})\n"
    "len(await asyncio.gather(*[call_tool('nap', {'q': i}) for i in range(COUNT)]))",
    text=MARK + "'x' * COUNT",
    records=MARK + RECORDS,
)


def counted(script: str, count: int) -> str:
    """The script for this many calls, bytes or records."""
    return script.replace("COUNT", str(count))
