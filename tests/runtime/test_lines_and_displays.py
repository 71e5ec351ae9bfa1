"""The line of every call, `from tools import`, what objects show, and the cures of mistakes with awaitables and networks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typing_extensions import TypedDict

from rows import each_row
from toolcell import Outcome, PoolConfig, SyncRuntime, ToolError, ToolRegistry

pytestmark = pytest.mark.isolation


class Receipt(TypedDict):
    id: int


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    async def double(n: int) -> int:
        """Return twice the number."""
        return 2 * n

    @registry.tool(read_only=True)
    async def rows() -> list[int]:
        """Return three numbers."""
        return [1, 2, 3]

    @registry.tool
    async def put_item(item: dict[str, int], note: str = "none") -> Receipt:
        """Put an item on its shelf.

        Args:
            item: What to put.
        """
        return {"id": item["n"]}

    @registry.tool(read_only=True)
    async def get_item() -> dict[str, int]:
        """Return an item from its shelf."""
        return {"n": 1}

    with SyncRuntime(registry, pool=PoolConfig(warm=1)) as opened:
        yield opened


LINES = {
    "gather": "import asyncio\nawait asyncio.gather(\n    call_tool_async('double', n=1),\n    call_tool_async('double', n=2))",
    "wait_for": "import asyncio\n\nx = await asyncio.wait_for(call_tool_async('double', n=1), 5)",
    "a task": "import asyncio\n\ntask = asyncio.create_task(call_tool_async('double', n=1))\nawait task",
    "to_thread": "import asyncio\n\nx = await asyncio.to_thread(tools.double, n=1)",
    "pool.map": "from concurrent.futures import ThreadPoolExecutor as P\n\nwith P(2) as pool: list(pool.map(tools.double, [1, 2]))",
    "a thread": "import threading\n\nt = threading.Thread(target=tools.double, args=(1,)); t.start(); t.join()",
    "map": "x = [\n1]\nlist(map(tools.double, x))",
}


@each_row("name", LINES)
def test_every_call_has_a_line_of_the_script(runtime: SyncRuntime, name: str) -> None:
    result = runtime.execute_code(LINES[name])

    assert result.outcome is Outcome.OK, result.error
    assert result.calls
    expected = {3, 4} if name == "gather" else {3}
    assert {call.line for call in result.calls} <= expected


@each_row(
    "source",
    [
        "from tools import double\nset_result(double(n=2))",
        "from tools import double as d, rows\nset_result(d(n=2))",
        "import tools\nset_result(tools.double(n=2))",
        "import tools as t\nset_result(t.double(2))",
        "from tools import *\nset_result(double(2))",
    ],
)
def test_tools_can_be_imported(runtime: SyncRuntime, source: str) -> None:
    result = runtime.execute_code(source)

    assert (result.value, result.error) == (4, None)


def test_an_import_of_an_unknown_tool_fails_and_a_module_of_the_workspace_comes_first(runtime: SyncRuntime) -> None:
    unknown = runtime.execute_code("from tools import dubble")
    own = runtime.execute_code("import tools\nset_result(tools.mine)", files={"tools.py": b"mine = 7"})

    assert unknown.error is not None and unknown.error.type == "ImportError"
    assert own.value == 7


def test_a_session_imports_the_tools_of_each_of_its_scripts(runtime: SyncRuntime) -> None:
    other = ToolRegistry()

    @other.tool
    async def triple(n: int) -> int:
        """Return three times the number."""
        return 3 * n

    with runtime.session() as session:
        assert session.execute_code("from tools import double\nset_result(double(n=1))").value == 2
        assert session.execute_code("from tools import triple\nset_result(triple(n=1))", tools=other).value == 3


SHOWN = {
    "a method": ("class A:\n    def _repr_html_(self): return '<b>x</b>'\nA()", ["result.html"]),
    "a property": (
        "class A:\n    @property\n    def _repr_html_(self): return lambda: '<b>x</b>'\nA()",
        ["result.html"],
    ),
    "an attribute of the object": ("class A: pass\na = A()\na._repr_html_ = lambda: '<b>x</b>'\na", ["result.html"]),
    "nothing": ("class A:\n    def _repr_html_(self): return None\nA()", []),
    "a class": ("class A:\n    def _repr_html_(self): return '<b>x</b>'\nA", []),
    "no method": ("class A: _repr_html_ = 'text'\nA()", []),
    "an object with every attribute": ("class A:\n    def __getattr__(self, name): return lambda *a: 'x'\nA()", []),
    "a mock": ("from unittest.mock import MagicMock\nMagicMock()", []),
    "a property that is not there": (
        "class A:\n    @property\n    def _repr_html_(self): raise AttributeError('off')\nA()",
        [],
    ),
}


@each_row("name", SHOWN)
def test_what_an_object_shows_never_fails_a_run(runtime: SyncRuntime, name: str) -> None:
    source, files = SHOWN[name]

    result = runtime.execute_code(source)

    assert result.outcome is Outcome.OK, result.error
    assert [file.name for file in result.files if not file.problem] == files


@each_row(
    "body",
    ["raise ValueError('no')", "1 / 0", "return 5", "raise SystemExit(3)"],
)
@each_row("decorator", ["", "@property\n    "])
def test_whatever_goes_wrong_with_a_display_is_the_problem_of_its_file(
    runtime: SyncRuntime, body: str, decorator: str
) -> None:
    result = runtime.execute_code(f"class A:\n    {decorator}def _repr_html_(self): {body}\nA()")

    assert result.outcome is Outcome.OK, result.error
    assert all(file.problem for file in result.files)


HELP = """put_item(*, item: dict[str, int], note: str = 'none') -> PutItemResult
    Put an item on its shelf.

    Args:
        item: What to put.

    class PutItemResult(TypedDict):
        id: int"""


@each_row(
    "source",
    [
        "help(tools.put_item)",
        "from tools import put_item\nhelp(put_item)",
        "import inspect\nprint(tools.put_item.__name__, inspect.signature(tools.put_item), sep='')\n"
        "for line in inspect.getdoc(tools.put_item).split('\\n'): print('    ' + line)",
        "import functools\n@functools.wraps(tools.put_item)\ndef f(**values): pass\nhelp(f)",
    ],
)
def test_a_tool_describes_itself_as_a_function_does(runtime: SyncRuntime, source: str) -> None:
    result = runtime.execute_code(source)

    assert result.error is None
    assert HELP.replace(" ", "") in "\n".join(map(str.rstrip, result.logs.stdout.splitlines())).replace(" ", "")
    assert not result.calls


def test_a_tool_is_described_where_the_host_cannot_be_asked(runtime: SyncRuntime) -> None:
    source = "import os, sys\nif not os.fork():\n    print(tools.put_item.__doc__); sys.stdout.flush(); os._exit(0)\nos.wait()"
    assert runtime.execute_code(source).logs.stdout == "None\n"


def test_a_tool_of_a_class_takes_no_self(runtime: SyncRuntime) -> None:
    assert runtime.execute_code("class Shelf:\n    double = tools.double\nShelf().double(4)").value == 8


def test_a_coroutine_that_is_never_awaited_names_no_file_of_ours(runtime: SyncRuntime) -> None:
    source = "import json\njson.dumps(call_tool_async('double', n=1))"
    result = runtime.execute_code(source)

    assert "sys:1: RuntimeWarning: coroutine 'call_tool_async' was never awaited" in result.logs.stderr
    assert "toolcell" not in result.logs.stderr


def test_what_a_script_was_warned_of_is_not_repeated_when_its_value_is_drawn(runtime: SyncRuntime) -> None:
    source = (
        "import warnings\nclass Drawn:\n    def _repr_html_(self):\n"
        "        warnings.warn('of the drawing', stacklevel=2)\n        return '<b>x</b>'\n"
        "drawn = Drawn()\ndrawn._repr_html_()\ndrawn"
    )
    assert runtime.execute_code(source).logs.stderr.count("UserWarning: of the drawing") == 1


CURES = {
    "import asyncio\nasync with asyncio.TaskGroup() as group: group.create_task(tools.rows())": "call_tool_async",
    "import json\njson.dumps(call_tool_async('double', n=1))": "await it first",
    "tools.put_item(tools.get_item())": "this is the value of one argument: write item=...",
    "call_tool('put_item', tools.get_item())": "this is the value of one argument: write item=...",
    "call_tools_parallel([('put_item', {'n': 1})])": "this is the value of one argument: write item=...",
    "import asyncio\nawait asyncio.gather(tools.rows(), tools.rows())": "call_tool_async",
    "import asyncio\nawait asyncio.wait_for(tools.rows(), 1)": "call_tool_async",
    "import asyncio\nawait asyncio.sleep(0)\nasyncio.create_task(tools.rows())": "call_tool_async",
    "async for x in tools.rows(): pass": "call_tool_async",
    "import pip": "install_package(NAME)",
    "from pip._internal import main": "install_package(NAME)",
    "import os\nos.system('pip install pandas')": "install_package(NAME)",
    "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'pandas'])": "install_package(NAME)",
    "x = 2\nif x &gt; 1: pass": "escaped as HTML",
    "x = gt_ = 1\nx &gt; gt_": "escaped as HTML",
    "print(&quot;a&quot;)": "escaped as HTML",
    "open('own.csv', 'w')\nopen('/mnt/data/own.csv')": "the workspace has 'own.csv'",
    "open('own.csv', 'w')\nopen('/mnt/data/other.csv')": "the workspace has 'own.csv'",
    "raise ValueError('half \\ud800')": "half \\ud800",
    "raise ExceptionGroup('half \\ud800', [KeyError('\\udfff')])": "KeyError: '\\udfff'",
    "raise SystemExit('half \\ud800')": "half \\ud800",
    "exec(compile('1 +', 'half \\ud800', 'exec'))": "half \\ud800",
    "def f(): raise KeyError('own')\nf.__code__ = f.__code__.replace(co_name='half \\ud800')\nf()": "'own'",
    "import builtins\nraise OSError(2, 'half \\ud800', 'own \\udfff')": "own \\udfff",
    "!pip install pandas": "install_package(NAME)",
    "%pip install pandas": "install_package(NAME)",
    "pip install pandas": "install_package(NAME)",
    "%matplotlib inline": "commands of notebooks",
    "import urllib.request\nurllib.request.urlopen('http://example.com')": "a sandbox has no network",
    "import socket\nsocket.getaddrinfo('example.com', 80)": "a sandbox has no network",
    "import socket\nsocket.create_connection(('example.com', 80))": "a sandbox has no network",
    "try: import tabulate\nexcept ImportError as exc: raise ImportError('use pip') from exc": "packages=['tabulate']",
    "try: import jinja2\nexcept ImportError: raise AttributeError('.style requires jinja2')": "packages=['jinja2']",
    "raise ImportError('no usable engine; use pip')": "--packages NAME",
    "for n in range(12): open(f'{n:02}.csv', 'w')\nopen('sales.csv')": "has '00.csv', '01.csv',",
    "import os\nfor name in os.listdir(): os.remove(name)\nopen('sales.csv')": "no files: its host gives them",
    """
import urllib.request

class NoAnswer(Exception):
    pass

try:
    urllib.request.urlopen('http://example.com')
except OSError:
    raise NoAnswer('as requests and httpx do')
""": "a sandbox has no network",
}


@each_row("source", CURES)
def test_a_mistake_says_what_to_write(runtime: SyncRuntime, source: str) -> None:
    result = runtime.execute_code(source)

    assert result.outcome is Outcome.ERROR
    assert result.error is not None
    assert CURES[source] in result.error.message


@pytest.mark.parametrize(
    "source",
    [
        "import urllib.request\ntry: urllib.request.urlopen('http://example.com')\nexcept OSError: {}['rates']",
        "import urllib.request\nurllib.request.urlopen('file:///rates.csv')",
    ],
)
def test_an_error_that_no_network_would_mend_does_not_speak_of_one(runtime: SyncRuntime, source: str) -> None:
    error = runtime.execute_code(source).error

    assert error is not None and "rates" in error.message
    assert "network" not in error.message


@pytest.mark.parametrize("source", ["from . import neighbour", "raise ImportError('this needs version 3')"])
def test_an_import_that_no_package_would_mend_does_not_ask_for_one(runtime: SyncRuntime, source: str) -> None:
    error = runtime.execute_code(source).error

    assert error is not None and error.type == "ImportError"
    assert "packages" not in error.message


WRITTEN = {
    "~~~python\nset_result(3)\n~~~": 3,
    "Here:\n": None,
    ">>> x = 1\n>>> for n in range(2):\n...     x += 1\n...\n>>> x\n2\n>>> set_result(x)": 3,
    "In [1]: def f():\n   ...:     return 3\n   ...:\n\nIn [2]: f()\nOut[2]: 5\n\nIn [3]: set_result(f())": 3,
    "~~~3": -4,
    "# -*- coding: latin-1 -*-\nset_result('\xe9')": "\xe9",
    "# -*- coding: no-such-one -*-\nset_result(3)": 3,
    "...\nset_result(3)": 3,
}


def test_a_script_is_read_as_it_is_pasted(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        for run in (runtime.execute_code, session.execute_code):
            assert {source: run(source).value for source in WRITTEN} == WRITTEN


def test_a_line_of_a_pasted_script_keeps_its_number(runtime: SyncRuntime) -> None:
    error = runtime.execute_code(">>> x = 1\n>>> x\n1\n>>> 1 / 0").error
    assert error is not None and error.line == 4


def test_a_version_that_is_not_there_is_not_said_to_be_installed() -> None:
    with SyncRuntime(packages=["idna"]) as runtime:
        version = runtime.execute_code("import importlib.metadata\nimportlib.metadata.version('idna')").value
        there = ("", ">=2", f"=={version}", "~=3.0", "!=1.0,<99", "==3.*", "[all]>=2")
        others = (">=99", "<2", "==2.*", "~=2.0", f"!={version}", f">{version}")
        found = {each: runtime.execute_code(f"install_package('idna{each}')").ok for each in (*there, *others)}
        told = runtime.execute_code("install_package('idna>=99')").error

    assert tuple(each for each, is_there in found.items() if not is_there) == others
    assert told is not None and f"idna {version} is there" in told.message and "idna>=99" in told.message


FAILS_WHILE_A_PARSER_RUNS = """
import ast, gc
class Bad:
    def __init__(self): self.me = self
    def __del__(self): return {'a': 1}['a'] + {'a': 1}['b'] * 2
gc.set_threshold(50)
text = "x = [" + ",".join("(a + b) * c" for _ in range(400)) + "]"
for _ in range(10):
    for _ in range(20): Bad()
    ast.parse(text)
"""


def test_a_destructor_that_fails_in_the_collector_does_not_break_a_parser(runtime: SyncRuntime) -> None:
    result = runtime.execute_code(FAILS_WHILE_A_PARSER_RUNS)

    assert result.ok, result.error
    assert "Exception ignored in" in result.logs.stderr and "KeyError: 'b'" in result.logs.stderr


def test_notes_of_what_a_tool_raises_are_told_as_its_words_are() -> None:
    registry = ToolRegistry()

    def raises(error: Exception) -> None:
        error.add_note("try the other one")
        raise error

    @registry.tool
    def refuses() -> int:
        """Refuse with words for the script."""
        raises(ToolError("not this"))
        return 0

    @registry.tool(expose_errors=True)
    def exposes() -> int:
        """Fail with words that may be read."""
        raises(ValueError("not this"))
        return 0

    @registry.tool
    def hides() -> int:
        """Fail with words that nobody may read."""
        raises(ValueError("not this"))
        return 0

    with SyncRuntime(registry) as runtime:
        told = [runtime.execute_code(f"tools.{name}()").error for name in ("refuses", "exposes", "hides")]
    assert ["not this\ntry the other one" in str(error and error.message) for error in told] == [True, True, False]
    assert "try" not in str(told[2])


def test_a_mistake_in_a_session_says_it_too(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        for source, cure in CURES.items():
            result = session.execute_code(source)
            assert result.error is not None and cure in result.error.message


@pytest.mark.parametrize(
    "given", ["{'itm': {'n': 1}}", "{'note': 'x'}", "{'n': 'text'}", "{}", "{'n': 1, 'note': 'x'}"]
)
def test_only_a_value_that_fits_an_argument_is_said_to_be_one(runtime: SyncRuntime, given: str) -> None:
    result = runtime.execute_code(f"tools.put_item({given})")

    assert result.error is not None and "missing required property" in result.error.message
    assert "this is the value" not in result.error.message
