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
    first: str
    """The first script of a session."""
    then: str
    """Every other script of it. Its value is 2."""


PRINTS = "for i in range(COUNT):\n    print(f'{i:099}')"

REQUESTS = """
import http.client
connection = http.client.HTTPConnection("127.0.0.1", PORT)
for _ in range(COUNT):
    connection.request("GET", "/")
    connection.getresponse().read()
"""

CPYTHON = Scripts(
    once="set_result(call_tool('echo', {'q': 1}))",
    calls="for i in range(COUNT):\n    call_tool('echo', {'q': i})\nset_result(COUNT)",
    pipeline=START_MARK + "set_result(len(call_tools_parallel([('echo', {'q': i}) for i in range(COUNT)])))",
    fan_out=START_MARK + "set_result(len(call_tools_parallel([('nap', {'q': i}) for i in range(COUNT)])))",
    text=START_MARK + "set_result('x' * COUNT)",
    records=START_MARK + f"set_result({RECORDS})",
    first="x = 1\nset_result(x)",
    then="set_result(x + 1)",
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
    first="x = 1\nx",
    then="x + 1",
)


def counted(script: str, count: int) -> str:
    """Return the script for this many calls, bytes or records."""
    return script.replace("COUNT", str(count))
