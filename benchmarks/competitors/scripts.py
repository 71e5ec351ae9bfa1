"""The scripts in two dialects: CPython with toolcell's functions, and Monty's subset with awaitable calls.

A script that is timed from its own start calls `echo` first. The host takes the time when that call arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

ECHO = {"q": 1}
"""Arguments and result of the call in the script `once`."""

START_MARK = "call_tool('echo', {'q': 1})\n"

RECORDS = "[{'id': i, 'name': 'row ' + str(i), 'score': i / 7, 'note': str(i) + 'x' * 180} for i in range(COUNT)]"


@dataclass(frozen=True, slots=True)
class Scripts:
    """All scripts in one dialect."""

    once: str
    calls: str
    pipeline: str
    fan_out: str
    text: str
    records: str


CPYTHON = Scripts(
    once="set_result(call_tool('echo', {'q': 1}))",
    calls="for i in range(COUNT):\n    call_tool('echo', {'q': i})\nset_result(COUNT)",
    pipeline=START_MARK + "set_result(len(call_tools_parallel([('echo', {'q': i}) for i in range(COUNT)])))",
    fan_out=START_MARK + "set_result(len(call_tools_parallel([('nap', {'q': i}) for i in range(COUNT)])))",
    text=START_MARK + "set_result('x' * COUNT)",
    records=START_MARK + f"set_result({RECORDS})",
)

MONTY = Scripts(
    once="call_tool('echo', {'q': 1})",
    calls="for i in range(COUNT):\n    call_tool('echo', {'q': i})\nCOUNT",
    pipeline="import asyncio\nawait call_tool('echo', {'q': 1})\n"
    "len(await asyncio.gather(*[call_tool('echo', {'q': i}) for i in range(COUNT)]))",
    fan_out="import asyncio\nawait call_tool('echo', {'q': 1})\n"
    "len(await asyncio.gather(*[call_tool('nap', {'q': i}) for i in range(COUNT)]))",
    text=START_MARK + "'x' * COUNT",
    records=START_MARK + RECORDS,
)


def counted(script: str, count: int) -> str:
    """Return the script for this many calls, bytes or records."""
    return script.replace("COUNT", str(count))
