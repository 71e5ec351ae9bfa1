"""The state of a session by value: what is kept and brought back, what is named as lost, and what a guest makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import journals
from rows import each_row
from toolcell import ExecutionResult, Limits, Outcome, SessionError, SyncRuntime, ToolRegistry
from toolcell.sandbox.process.backend import ProcessSandbox
from toolcell.sessions import kept_state
from toolcell.sessions.blocking import SyncSession
from toolcell.tools import Approve

pytestmark = pytest.mark.isolation

made: list[str] = []


CUT = Limits(cpu_s=0.3)
"""Ends a loop that computes. By its own time, in which it comes to the loop also where the machine is busy with others."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy an interrupted script takes long to end."""
    monkeypatch.setattr(ProcessSandbox, "interrupted_s", 10.0)


def tools() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    def write(text: str) -> int:
        """Append a line to the ledger."""
        made.append(text)
        return len(made)

    @registry.tool(name="box.double")
    def double(number: int) -> int:
        """Return twice a whole number."""
        return 2 * number

    @registry.tool(requires_approval=True)
    def pay(to: str) -> str:
        """Send some money to somebody."""
        made.append(f"pay {to}")
        return f"paid {to}"

    return registry


@pytest.fixture(scope="module")
def opened() -> Iterator[SyncRuntime]:
    with SyncRuntime(tools()) as runtime:
        yield runtime


@pytest.fixture
def runtime(opened: SyncRuntime) -> SyncRuntime:
    made.clear()
    return opened


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[SyncRuntime]:
    made.clear()
    with SyncRuntime(tools(), record=tmp_path / "journals" / "runs.db") as runtime:
        yield runtime


def value(session: SyncSession, source: str) -> Any:
    result = session.execute_code(source)
    assert result.ok, result.error
    return result.value


def began(result: ExecutionResult) -> str:
    assert result.session is not None
    return result.session.began


CASES = {
    "shared object": ("a = []\nb = [a, a]", "b[0].append(1)\n[a, b[0] is b[1], b[1] is a]", [[1], True, True]),
    "cycle": ("a = []\na.append(a)", "a[0] is a", True),
    "closure with shared variable": (
        "def make():\n  n = 0\n  def up():\n    nonlocal n\n    n += 1\n  def get(): return n\n  return up, get\n"
        "up, get = make()\nup()",
        "up()\nget()",
        2,
    ),
    "recursive closure": (
        "def make():\n  def fact(n): return 1 if n < 2 else n * fact(n - 1)\n  return fact\nf = make()",
        "f(5)",
        120,
    ),
    "global of a function": ("n = 1\ndef up():\n  global n\n  n += 1", "up()\nn += 10\nup()\nn", 13),
    "function that calls a later one": ("def f(): return g()", "def g(): return 3\nf()", 3),
    "function of a lost name": (
        "gen = (i for i in [1])\ndef f(): return 'gen' in globals()\nwhile True: pass",
        "f()",
        False,
    ),
    "function with a cache": (
        "import functools\n@functools.cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "def make():\n  @functools.lru_cache(maxsize=3)\n  def f(n): return n and f(n - 1) + 1\n  return f\n"
        "f = make()\nclass A:\n  @functools.lru_cache\n  def g(self): return 5\n  @functools.cached_property\n"
        "  def p(self): return 6\na = A()\na.p",
        "[fib(20), f(4), f.cache_parameters()['maxsize'], a.g(), a.p, A().p]",
        [6765, 4, 3, 5, 6, 6],
    ),
    "function of many types": (
        "import functools\n@functools.singledispatch\ndef f(x): return 0\n@f.register\ndef _(x: int): return 1\n"
        "class A:\n  @functools.singledispatchmethod\n  def m(self, x): return 0\n  @m.register\n"
        "  def _(self, x: str): return 2",
        "[f(''), f(1), A().m(1), A().m('')]",
        [0, 1, 0, 2],
    ),
    "types of types": (
        "import typing\nU = typing.NewType('U', int)\nP = typing.ParamSpec('P')\nTs = typing.TypeVarTuple('Ts')\n"
        "T = typing.TypeVar('T')\nclass S(typing.Generic[T]):\n  def __init__(self, x: T): self.x = x\n"
        "class D(typing.TypedDict):\n  a: U\nclass N(typing.NamedTuple):\n  a: int = 1\ns = S[U](U(4))",
        "[s.x, U(3), D(a=2)['a'], N().a, P.__name__, Ts.__name__]",
        [4, 3, 2, 1, "P", "Ts"],
    ),
    "aliases of types": (
        "import sys\nif sys.version_info >= (3, 12):\n  exec('type X = int; type L[T] = list[T]')\nelse:\n  X = L = int\n"
        "def f(x: X): return x",
        "[f(1), getattr(X, '__value__', X) is int]",
        [1, True],
    ),
    "class that notes its subclasses": (
        "class A:\n  seen = []\n  def __init_subclass__(cls, tag, **k): A.seen.append(tag)\nclass B(A, tag=1): pass\n"
        "class C(A, tag=2): pass\nclass D(B, C, tag=3): pass",
        "class E(D, tag=4): pass\nA.seen",
        [1, 2, 3, 4],
    ),
    "metaclass that notes its classes": (
        "made = {}\nclass M(type):\n  def __new__(meta, name, bases, names):\n"
        "    made[name] = super().__new__(meta, name, bases, names)\n    return made[name]\n"
        "  def __init__(cls, *a):\n    super().__init__(*a)\n    cls.n = len(made)\nclass A(metaclass=M): pass\n"
        "class B(A): pass",
        "class C(B): pass\n[sorted(made), made['B'] is B, B.n, C.n]",
        [["A", "B", "C"], True, 2, 3],
    ),
    "object that is pickled as a name": (
        "class Missing:\n  def __reduce__(self): return 'MISSING'\nMISSING = Missing()\nlist_ = [MISSING]\n"
        "class Own:\n  def __init__(self, n): self.n = n\n  def __reduce__(self): return Own, (self.n + 1,)\no = Own(1)",
        "[list_[0] is MISSING, o.n >= 2]",
        [True, True],
    ),
    "defaults and attributes": ("def f(a, b=[1], *, c={'x': 2}): return a, b, c\nf.n = 4", "[*f(0), f.n]", None),
    "decorator": (
        "import functools\ndef d(f):\n  @functools.wraps(f)\n  def g(*a): return f(*a) + 1\n  return g\n"
        "@d\ndef h(x):\n  'doc'\n  return x",
        "[h(1), h.__name__, h.__doc__]",
        [2, "h", "doc"],
    ),
    "lambda": ("k = 2\nf = lambda x: x * k", "k = 3\nf(2)", 6),
    "class with super": (
        "class A:\n  def f(self): return 1\nclass B(A):\n  n = 0\n  def f(self): return super().f() + 1\nb = B()",
        "[b.f(), isinstance(b, B), isinstance(b, A), type(b) is B, B().f()]",
        [2, True, True, True, 2],
    ),
    "class attribute": ("class A: seen = []\nA.seen.append(1)\na = A()", "a.seen.append(2)\nA.seen", [1, 2]),
    "dataclass": ("import dataclasses\n@dataclasses.dataclass\nclass P:\n  x: int\np = P(1)", "[p == P(1), p.x]", None),
    "enum": ("import enum\nclass C(enum.Enum):\n  R = 1\nc = C.R", "c is C.R", True),
    "named tuple": ("import collections\nT = collections.namedtuple('T', 'a b')\nt = T(1, 2)", "t == T(1, 2)", True),
    "property and slots": (
        "class A:\n  __slots__ = ('x',)\n  @property\n  def y(self): return self.x + 1\na = A()\na.x = 1",
        "a.y",
        2,
    ),
    "own exception": (
        "class E(Exception):\n  def __init__(self, a, b):\n    super().__init__(a)\n    self.b = b\n"
        "try: raise E(1, 2)\nexcept E as exc: e = exc",
        "[type(e) is E, e.args == (1,), e.b]",
        [True, True, 2],
    ),
    "tool error": (
        "try: call_tool('nobody')\nexcept Exception as exc: e = exc",
        "[type(e) is ToolError, e.code]",
        None,
    ),
    "standard library": (
        "import collections, datetime, decimal, fractions, re, uuid, pathlib, itertools\n"
        "x = [collections.Counter('aab'), collections.deque([1], 5), collections.defaultdict(list), decimal.Decimal('1.5'),"
        " fractions.Fraction(1, 3), datetime.datetime(2020, 1, 1), re.compile('a+'), pathlib.Path('a'), range(5)]\n"
        "d = collections.OrderedDict(a=1)\ny = str(x)",
        "[str(x) == y, x[6].match('aa').end(), x[5] + datetime.timedelta(1) > x[5]]",
        [True, 2, True],
    ),
    "module": ("import json, os.path as p, collections.abc", "[json.loads('1'), p.join('a', 'b')]", [1, "a/b"]),
    "module of the workspace": (
        "open('own.py', 'w').write('N = 1\\ndef f(): return N')\nimport own\nf = own.f",
        "[own.N, f(), own.f is f]",
        [1, 1, True],
    ),
    "files": (
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'wb').write(b'\\0x')\nos.symlink('a/b/c', 'link')\n"
        "os.chmod('a/b/c', 0o700)\nopen('/tmp/t', 'w').write('t')\nos.chdir('a')",
        "import os, stat\n[open('b/c', 'rb').read(), os.readlink('../link'), oct(os.stat('b/c').st_mode), "
        "open('/tmp/t').read()]",
        [b"\0x", "a/b/c", "0o100700", "t"],
    ),
    "a working directory that is gone": ("import os\nos.mkdir('a')\nos.chdir('a')\nos.rmdir('../a')\nn = 1", "n", 1),
    "the time zone": (
        "import os, time\nos.environ['TZ'] = 'XYZ-3'\ntime.tzset()",
        "import time\n[time.tzname[0], time.localtime(0).tm_hour]",
        ["XYZ", 3],
    ),
    "files that are not to be read or written": (
        "import os\nos.makedirs('a/b/d')\nopen('a/b/c', 'w').write('c')\nopen('a/b/d/e', 'w').write('e')\n"
        "os.chmod('a/b/c', 0)\nos.chmod('a/b/d', 0o555)\nos.chmod('a/b', 0)",
        "modes = [os.stat('a/b').st_mode & 0o777]\nos.chmod('a/b', 0o700)\n"
        "modes += [os.stat(f'a/b/{name}').st_mode & 0o777 for name in 'cd']\nos.chmod('a/b/c', 0o400)\n"
        "[modes, open('a/b/c').read(), open('a/b/d/e').read()]",
        [[0, 0, 0o555], "c", "e"],
    ),
    "environment": (
        "import os, sys\nhad = os.environ.pop('HOME', '')\nos.environ['A'] = 'b'\nsys.path.append('/x')",
        "[bool(had), os.environ['A'], 'HOME' in os.environ, '/x' in sys.path]",
        [True, "b", False, True],
    ),
    "tools": (
        "call, t, ns, d = call_tool, tools.write, tools.box, tools.box.double\nout = set_result\nfrom tools import write",
        "[call('box.double', number=1), ns.double(2), d(3), t('x') > 0, write('y') > 0]",
        [2, 4, 6, True, True],
    ),
    "standard output": ("import sys\nout = sys.stdout\np = print", "p('hello')\nout is sys.stdout", True),
    "memory": ("v = memoryview(b'ab')", "[type(v).__name__, v.tolist()]", ["memoryview", [97, 98]]),
    "logger": ("import logging\nlog = logging.getLogger('x')", "log is logging.getLogger('x')", True),
    "annotations": ("x: int = 1", "__annotations__ == {'x': int}", True),
    "time": (
        "from time import time as now\nimport datetime\nfrom datetime import datetime as D",
        "now() > 0 and D.now() is not None",
        True,
    ),
    "warnings and recursion": (
        "import sys, warnings\nopen('own.py', 'w').write('class Of(Warning): pass')\nimport own\n"
        "class W(Warning): pass\nwarnings.simplefilter('error', W)\nwarnings.simplefilter('ignore', own.Of)\n"
        "warnings.filters.append(('ignore', None, None, None, 0))\nsys.setrecursionlimit(500)",
        "[[each[0], each[2] in (own.Of, W)] for each in warnings.filters[:2]] + [warnings.filters[-1][2],"
        " sys.getrecursionlimit()]",
        [["ignore", True], ["error", True], None, 500],
    ),
    "higher limit of recursion": ("import sys\nsys.setrecursionlimit(4321)", "sys.getrecursionlimit()", 4321),
    "decimal context": ("import decimal\ndecimal.getcontext().prec = 5", "str(decimal.Decimal(1) / 3)", "0.33333"),
    "partial and methods": (
        "import functools, operator\nf = functools.partial(pow, 2)\ng = [1].append\nh = operator.itemgetter(1)",
        "[f(3), h([1, 2])]",
        [8, 2],
    ),
}
"""What a script leaves; what a later one does with it; the value of that, None for what it was before."""


@each_row("case", CASES)
def test_what_is_brought_back_is_what_it_was(runtime: SyncRuntime, case: str) -> None:
    leaves, looks, expected = CASES[case]
    limits = CUT if "while True" in leaves else None
    with runtime.session() as session:
        session.execute_code(leaves, limits=limits)
        with session.fork() as copy:
            there = copy.execute_code(looks)
        session.put_down()
        back = session.execute_code(looks)

    assert there.ok and back.ok, (there.error, back.error)
    assert began(there) == "live" and began(back) == "value"
    assert back.value == there.value
    if expected is not None:
        assert back.value == expected


def test_a_script_that_is_out_of_time_is_not_run_again_when_its_session_was_put_down(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        # A generator is not kept by value: what could be run again would be. The time is enough on a busy machine.
        script = "x = call_tool('write', text='once')\ngen = (i for i in [1])\nimport time\ntime.sleep(600)"
        cut = session.execute_code(script, limits=Limits(wall_s=3))
        session.put_down()
        back = session.execute_code("x")

    assert cut.outcome is Outcome.TIMEOUT and cut.session is not None and not cut.session.lost
    assert (back.value, began(back), made) == (1, "value", ["once"])


def test_randomness_goes_on_where_it_was(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        value(session, "import random, uuid, secrets\nrandom.random()")
        with session.fork() as copy:
            draws = "[random.random(), str(uuid.uuid4()), secrets.token_hex(4), random.Random().random()]"
            assert value(copy, draws) == value(session, draws)


@pytest.mark.slow
def test_arrays_and_frames_are_brought_back_and_can_be_written_to() -> None:
    with SyncRuntime(packages=["numpy", "pandas"]) as runtime, runtime.session() as session:
        value(
            session,
            "import numpy as np, pandas as pd\na = np.arange(6.).reshape(2, 3)\nv = a[0]\nfixed = np.ones(2)\n"
            "fixed.flags.writeable = False\ndf = pd.DataFrame({'x': [1, 2], 't': ['a', None]}, index=['p', 'q'])\n"
            "g = df.groupby('x')\nnp.random.seed(3)\npd.set_option('display.max_rows', 7)",
        )
        session.put_down()
        back = session.execute_code(
            "a[0, 0] = 5\ndf.loc['p', 'x'] = 9\n[v.tolist(), fixed.flags.writeable, df.shape, int(g.ngroups), "
            "np.random.rand() == np.random.RandomState(3).rand(), pd.get_option('display.max_rows')]"
        )
    assert back.ok, back.error
    assert began(back) == "value"
    assert back.value[1:] == [False, [2, 2], 2, True, 7]


@pytest.mark.slow
def test_what_is_of_a_class_whose_module_was_not_imported_is_brought_back() -> None:
    records = pytest.importorskip("numpy").rec.array([(1, 2.5)], names="a, b")
    with SyncRuntime(packages=["numpy"]) as runtime, runtime.session() as session:
        assert session.execute_code("y = x", inputs={"x": records}).ok
        session.put_down()
        back = session.execute_code("[type(y).__name__, y.tolist(), y.a.tolist(), repr(y)[:4]]")
    assert (back.value, began(back)) == (["recarray", [[1, 2.5]], [1], "rec."], "value"), back.error


LOST = (
    "import socket, sqlite3, threading\ngen = (i for i in [1])\nhandle = open('f', 'w')\ndb = sqlite3.connect(':memory:')\n"
    "lock = threading.Lock()\nkept = [1, 2]\ndef f(): return gen\nholder = {'deep': [lock]}\n"
    "view = memoryview(bytearray(b'ab'))\nimport warnings\nwarnings.filters.append(('error', gen, Warning, None, 0))\n"
    "n = 0\nwhile True: n += 1"
)


def test_what_cannot_be_kept_is_named_with_its_reason_and_the_rest_is_there(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        cut = session.execute_code(LOST, limits=CUT)
        assert cut.outcome is Outcome.CPU_LIMIT
        assert cut.session is not None
        assert not cut.session.forgotten
        killed = session.execute_code("x = bytearray(10**9)")
        assert killed.session is not None
        assert killed.session.lost
        back = session.execute_code("[kept, n > 0, 'gen' in globals(), callable(f)]")
        later = session.execute_code("kept")

    assert back.value == [[1, 2], True, False, True]
    assert back.session is not None
    assert began(back) == "value"
    names = [each.partition(":")[0] for each in back.session.forgotten]
    assert sorted(names) == ["db", "gen", "handle", "holder", "lock", "view", "warnings.filters"]
    assert "generator" in next(each for each in back.session.forgotten if each.startswith("gen"))
    assert later.session is not None
    assert not later.session.forgotten


HOOKS = {
    "of a module that was imported": ("import multiprocessing.util", False),
    "of a module that a function imports": ("def load(): import multiprocessing.util\nload()", False),
    "of the script": ("import atexit\natexit.register(print, 'bye')", True),
    "of a module of the workspace": ("open('own.py', 'w').write(HOOK)\nimport own", True),
    "of an object": (
        "import weakref\nclass Box: pass\nbox = Box()\nweakref.finalize(box, print, 'bye')",
        True,
    ),
    "of logging": ("import logging\nlogging.basicConfig()", True),
}


@each_row("case", HOOKS)
def test_exit_hooks_are_lost_with_a_sandbox_but_not_those_that_modules_bring_with_them(
    runtime: SyncRuntime, case: str
) -> None:
    source, is_lost = HOOKS[case]
    with runtime.session() as session:
        value(session, "HOOK = 'import atexit\\natexit.register(print, 1)'\n" + source)
        session.put_down()
        back = session.execute_code("HOOK[:6]")

    assert back.value == "import" and back.session is not None
    assert back.session.began == ("journal" if is_lost else "value")


def test_files_of_a_session_are_after_keeping_its_state_what_they_were(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        value(
            session,
            "import os\nos.makedirs('a/b')\nopen('f', 'w').write('f')\nos.chmod('f', 0)\nos.chmod('a/b', 0o500)",
        )
        cut = session.execute_code("os.chmod('a', 0)\nwhile True: pass", limits=CUT)
        modes = session.execute_code(
            "modes = [os.stat(each).st_mode & 0o777 for each in 'af']\nos.chmod('a', 0o700)\n"
            "[*modes, os.stat('a/b').st_mode & 0o777]"
        )
    assert cut.session is not None and not cut.session.lost
    assert began(modes) == "live"
    assert modes.value == [0, 0, 0o500]


def test_what_is_of_a_module_that_is_gone_is_named_and_the_rest_is_there(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        value(
            session,
            "open('own.py', 'w').write('class A: pass\\ndef f(): return 1')\nopen('stays.py', 'w').write('x = 1')\n"
            "import own, stays, os, sys, types\nfrom own import f\na = own.A()\nos.remove('own.py')\n"
            "sys.modules['made'] = made = types.ModuleType('made')\nn = 1",
        )
        session.execute_code("while True: pass", limits=CUT)
        assert session.execute_code("bytearray(10**9)").session is not None
        back = session.execute_code("[n, stays.x, sorted({'own', 'f', 'a', 'made'} & set(globals()))]")
    assert back.value == [1, 1, []], back.error
    assert back.session is not None
    assert sorted(each.partition(":")[0] for each in back.session.forgotten) == ["a", "f", "made", "own"]


def test_a_paused_session_is_forked_by_value(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        value(session, "x = [1]")
        assert session.pause()
        session.fork().close()
        assert session.session._state.kept_state is not None
        back = session.execute_code("x")
    assert (back.value, began(back)) == ([1], "live")


def test_scripts_after_a_kept_state_are_run_again_on_it(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        session.execute_code("n = 0\nwhile True: n += 1", limits=CUT)
        n = value(session, "n")
        value(session, "gen = (i for i in range(5))\nnext(gen)\nm = call_tool('write', text='once')\nn += 1")
        value(session, "next(gen)")
        session.put_down()
        back = session.execute_code("[n, next(gen), m]")
    assert (back.value, began(back), made) == ([n + 1, 2, 1], "value", ["once"])


def test_a_state_that_cannot_be_loaded_is_rebuilt_by_running_the_scripts(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        value(session, "class Odd:\n  def __reduce__(self): return int, ('no number',)\nodd = Odd()\nx = 1")
        session.put_down()
        back = session.execute_code("[x, type(odd).__name__]")
    assert (back.value, began(back)) == ([1, "Odd"], "journal")


def test_a_state_that_cannot_be_loaded_and_not_be_rebuilt_is_an_error_that_says_so(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        session.execute_code(
            "class Odd:\n  def __reduce__(self): return int, ('no number',)\nodd = Odd()\nwhile True: pass",
            limits=CUT,
        )
        session.put_down()
        with pytest.raises(SessionError, match=r"cannot be brought back: .*no number.*; reset\(\) begins again"):
            session.execute_code("1")
        session.reset()
        assert value(session, "2") == 2


@each_row(
    "hides",
    [
        "import toolcell_bridge.guest.script_end as e\ne.keep_session = lambda room: None",
        "import toolcell_bridge.guest.script_end as e\ndef keep_session(room): set_result({'lost': 7})\n"
        "e.keep_session = keep_session",
        "import toolcell_bridge.guest.script_end as e\ndef keep_session(room):\n"
        "  open('state', 'w').write('x')\n  set_result({'lost': {'\\x1b[31m': '\\u202e' * 999, **{str(i): '' for i in range(99)}}}, "
        "files=['state'])\ne.keep_session = keep_session",
        "import toolcell_bridge.guest.script_end as e\ndef keep_session(room):\n  while True: pass\ne.keep_session = keep_session",
    ],
    ids=["sends nothing", "sends another type", "sends a false state", "never ends"],
)
def test_whatever_a_guest_sends_as_its_state_the_host_does_not_raise(
    runtime: SyncRuntime, hides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_state, "KEEP_S", 1.0)
    with runtime.session() as session:
        session.execute_code(f"x = 1\n{hides}\nwhile True: pass", limits=CUT)
        with suppress(SessionError):
            session.put_down()
            session.execute_code("x")
        session.reset()
        assert value(session, "2") == 2


def test_a_state_that_is_too_large_costs_the_session_nothing(
    runtime: SyncRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_state, "STATE_BYTES", 1 << 20)
    with runtime.session() as session:
        session.execute_code("x = bytes(2 << 20)\nwhile True: pass", limits=CUT)
        assert value(session, "len(x)") == 2 << 20
        with pytest.raises(SessionError, match="cannot be rebuilt: script 1 was interrupted"):
            session.put_down()


def test_a_sandbox_that_is_nearly_full_is_not_ended_by_keeping_its_state(runtime: SyncRuntime) -> None:
    with runtime.session(limits=Limits(memory_bytes=128 << 20)) as session:
        value(session, "x = [str(i) for i in range(700_000)]")
        session.execute_code("while True: pass", limits=Limits(cpu_s=0.3, memory_bytes=128 << 20))
        assert value(session, "len(x)") == 700_000


# In another process


EVERY_KIND = """
import collections, dataclasses, datetime, decimal, enum, functools, json, math, os, pathlib, random, re, sys, uuid
import sqlite3, threading
import numpy as np, pandas as pd

@dataclasses.dataclass
class Point:
    x: int
    tags: list = dataclasses.field(default_factory=list)
class Colour(enum.Enum): RED = 1
Pair = collections.namedtuple('Pair', 'a b')
def counter():
    n = 0
    def up():
        nonlocal n
        n += 1
        return n
    return up
@functools.lru_cache
def square(x): return x * x
up, double, add = counter(), lambda x: 2 * x, functools.partial(pow, 2)
up()
shared = [Point(1)]
also = {'same': shared}
numbers = [1, 2.5, 3j, 2**200, True, None, math.inf, b'b', 'é', (1,), {2}, frozenset({3}), range(4), slice(1, 2)]
times = [datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(3), decimal.Decimal('1.10')]
others = [Colour.RED, Pair(1, 2), re.compile('a+'), uuid.UUID(int=1), pathlib.Path('x'), collections.Counter('aab')]
array = np.arange(1_000_000.0)
frame = pd.DataFrame({'g': pd.Categorical(['u', 'v', 'u']), 'n': [1, None, 3], 't': pd.date_range('2026', periods=3)})
random.seed(4); random.random()
os.environ['MODE'] = 'dark'
os.makedirs('folder', exist_ok=True); open('folder/note.txt', 'w').write('kept'); os.chdir('folder')
sys.setrecursionlimit(1234)
generator, handle, database = (i for i in 'ab'), open('note.txt'), sqlite3.connect(':memory:')
lock, event = threading.Lock(), threading.Event()
thread = threading.Thread(target=event.wait, daemon=True); thread.start()
while True: pass
"""

EVERY_KIND_IS_THERE = """
shared[0].tags.append('t')
checks = {
    'functions': [up(), double(4), add(3), square(5)],
    'shared': also['same'][0].tags,
    'class': isinstance(shared[0], Point) and Point(1) == Point(1),
    'numbers': numbers == [1, 2.5, 3j, 2**200, True, None, math.inf, b'b', 'é', (1,), {2}, frozenset({3}), range(4),
                           slice(1, 2)],
    'times': [times[0].isoformat(), times[1].days, str(times[2])],
    'others': others[0] is Colour.RED and others[1].b == 2 and bool(others[2].match('aa')) and others[5]['a'] == 2,
    'array': [float(array.sum()), array.flags.writeable],
    'frame': [str(frame.dtypes.to_dict()), frame.n.isna().tolist()],
    'random': random.random() == [random_.random() for random_ in [random.Random(4)] for _ in 'ab'][1],
    'files': open('note.txt').read(),
    'environ': os.environ['MODE'],
    'lost': sorted({'generator', 'handle', 'database', 'lock', 'event', 'thread'} & set(globals())),
}
checks
"""

ANOTHER_PROCESS = """
import json, sys
from toolcell import Limits, SyncRuntime
folder, check = sys.argv[1], sys.stdin.read()
with SyncRuntime(packages=["numpy", "pandas"], record=folder + "/runs.db") as runtime:
    with runtime.session("a", restore=True) as session:
        restored = session.execute_code(check)
        with session.fork("b") as fork:
            forked = fork.execute_code(check)
    results = restored, forked
    print(json.dumps([[str(each.error or ""), each.session.began, each.value] for each in results]))
"""


@pytest.mark.slow
def test_the_life_of_a_session_with_state_of_every_kind(tmp_path: Path) -> None:
    """Interrupted, killed for its memory, put down, restored by another process, and forked there."""
    folder = tmp_path / "journals"
    with (
        SyncRuntime(packages=["numpy", "pandas"], record=folder / "runs.db") as runtime,
        runtime.session("a") as session,
    ):
        cut = session.execute_code(EVERY_KIND, limits=Limits(wall_s=10))
        assert cut.outcome is Outcome.TIMEOUT, cut.error
        killed = session.execute_code("x = bytearray(10**9)")
        assert killed.session is not None
        assert killed.session.lost
        back = session.execute_code(EVERY_KIND_IS_THERE)
        assert back.ok, back.error
        assert back.session is not None
        assert began(back) == "value"
        lost = dict(each.split(": ", 1) for each in back.session.forgotten)
        assert sorted(lost) == ["database", "event", "generator", "handle", "lock", "thread"]
        assert all(lost.values())
        session.put_down()

    program = [sys.executable, "-c", ANOTHER_PROCESS, str(folder)]
    done = subprocess.run(program, input=EVERY_KIND_IS_THERE, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    restored, forked = json.loads(done.stdout)
    assert [each[:2] for each in (restored, forked)] == [["", "value"], ["", "live"]]
    assert back.value == {
        "functions": [2, 8, 8, 25],
        "shared": ["t"],
        "class": True,
        "numbers": True,
        "times": ["2026-01-02T00:00:00+00:00", 3, "1.10"],
        "others": True,
        "array": [499999500000.0, True],
        "frame": [back.value["frame"][0], [False, True, False]],
        "random": True,
        "files": "kept",
        "environ": "dark",
        "lost": [],
    }
    assert "Categorical" in back.value["frame"][0]
    # Each time the state goes on from where it was.
    moved = {"functions", "shared", "random"}
    for calls, (_, _, checks) in enumerate((restored, forked), start=1):
        assert checks["functions"][0] == 2 + calls
        assert checks["shared"] == ["t"] * (1 + calls)
        assert {name: each for name, each in checks.items() if name not in moved} == {
            name: each for name, each in back.value.items() if name not in moved
        }


ONE_HOST = """
import json, sys
from toolcell import Policy, SyncRuntime
folder, profile = sys.argv[1:]
with SyncRuntime(packages=["packaging"], policy=Policy(profile=profile), record=folder + "/runs.db") as runtime:
    with runtime.session("a", restore="if_kept") as session:
        result = session.execute_code(sys.stdin.read())
        session.put_down()
        print(json.dumps([result.outcome, result.session.began, result.value]))
"""

PLACES = """
import os, pathlib, sys, tempfile, packaging.version
os.makedirs("data/lib")
note, other = pathlib.Path.home() / "note.txt", pathlib.PurePosixPath(tempfile.gettempdir(), "other.txt")
open(note, "w").write("kept")
open(other, "w").write("kept too")
pathlib.Path("data/lib/mine.py").write_text("class Mine: pass")
sys.path.append(os.path.abspath("data/lib"))
from mine import Mine
mine, version = Mine(), packaging.version.Version("1.2")
os.symlink(os.path.abspath("note.txt"), "link")
os.environ["DATA"] = "/usr:" + os.path.abspath("data")
os.environ["TMPDIR"] = os.path.abspath("data/lib")
os.chdir("data")
"""

PLACES_ARE_THERE = """
opened = [open(each).read() for each in (note, other, "../link")]
data, temporary = os.environ["DATA"].removeprefix("/usr:"), os.environ["TMPDIR"]
folders = os.listdir(data) + os.listdir(temporary), pathlib.Path.cwd() == pathlib.Path(data) == note.parent / "data"
imported = type(mine) is sys.modules["mine"].Mine, version < packaging.version.parse("2"), sys.path[-1] == temporary
[opened, folders, imported]
"""


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
def test_a_state_is_there_for_a_host_with_another_home_and_cache(profile: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", ONE_HOST, str(tmp_path), profile]
    found = []
    for script in (PLACES, PLACES_ARE_THERE):
        with tempfile.TemporaryDirectory() as home:
            env = {**os.environ, "HOME": home, "XDG_CACHE_HOME": f"{home}/cache"}
            done = subprocess.run(
                program, input=script, env=env, capture_output=True, text=True, check=False, timeout=90
            )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    there = [["kept", "kept too", "kept"], [["lib", "mine.py"], True], [True, True, True]]
    assert found == [["ok", "new", None], ["ok", "value", there]]


def test_a_state_is_there_in_another_runtime_and_goes_with_its_session(on_disk: SyncRuntime, tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    with on_disk.session("a") as session:
        session.execute_code("n = 0\ndef up():\n  global n\n  n += 1\nwhile True: up()", limits=CUT)
        value(session, "n = 7")
        session.put_down()
        value(session, "n = 8")
        session.put_down()
    assert len(journals.names(folder, "state")) == 2  # from which the scripts go on, and the latest
    with SyncRuntime(tools(), record=folder / "runs.db") as other:
        with other.session("a", restore=True) as session:
            back = session.execute_code("up()\nn")
            assert (back.value, began(back)) == (9, "value")
            session.reset()
            assert journals.names(folder, "state") == []
            session.execute_code("m = 1\nwhile True: pass", limits=CUT)
        assert len(journals.names(folder, "state")) == 1
        other.forget_session("a")
        assert journals.names(folder, "state") == []


@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_state_that_was_touched_is_refused(on_disk: SyncRuntime, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "journals"
    with on_disk.session("a") as session:
        session.execute_code("n = 1\nwhile True: pass", limits=CUT)
    ((data,),) = journals.rows(folder, "SELECT body FROM kept WHERE kind = 'state'")
    journals.forget(folder, "state") if how == "removed" else journals.replace(folder, "state", data, data[:-1] + b"!")
    with SyncRuntime(tools(), record=folder / "runs.db") as other, other.session("a", restore=True) as session:
        with pytest.raises(SessionError, match="its state cannot be read"):
            session.execute_code("n")
        session.reset()
        assert value(session, "1") == 1


def test_a_script_that_waits_is_carried_on_upon_a_kept_state_in_another_process(
    on_disk: SyncRuntime, tmp_path: Path
) -> None:
    with on_disk.session("a") as session:
        session.execute_code("n = 5\nwhile True: pass", limits=CUT)
        waiting = session.execute_code("[n, call_tool('pay', to='ada')]", on_approval="suspend")
        assert waiting.suspension is not None
        token = waiting.suspension.to_json()
        calls = [call.id for call in waiting.suspension.calls]
    with (
        SyncRuntime(tools(), record=tmp_path / "journals" / "runs.db") as other,
        other.session("a", restore=True) as session,
    ):
        done = session.resume(token, {call: Approve() for call in calls})
        assert done.value == [5, "paid ada"]
    assert made == ["pay ada"]


def test_a_fork_of_a_session_on_disk_has_a_state_of_its_own(on_disk: SyncRuntime, tmp_path: Path) -> None:
    with on_disk.session("a") as session:
        session.execute_code("n = 5\nwhile True: pass", limits=CUT)
        session.fork("b").close()
    on_disk.forget_session("a")
    with on_disk.session("b", restore=True) as session:
        assert value(session, "n") == 5


def test_a_dry_run_after_an_interrupted_script_has_its_state(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        session.execute_code("n = 5\nwhile True: pass", limits=CUT)
        draft = session.execute_code("n += 1\ncall_tool('pay', to=str(n))", dry_run=True)
        assert [each.args for each in draft.effects] == [{"to": "6"}]
        assert value(session, "n") == 5


def test_states_stand_in_the_audit_log_as_runs_without_their_content(tmp_path: Path) -> None:
    with SyncRuntime(tools(), record=tmp_path / "log") as runtime, runtime.session() as session:
        value(session, "secret = 'kept in the state alone'[:7] * 20_000")
        with session.fork() as copy:
            assert value(copy, "len(secret)") == 140_000
    done = subprocess.run(
        [sys.executable, "-m", "toolcell", "audit", "verify", str(tmp_path / "log")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = b"".join(each.read_bytes() for each in tmp_path.glob("log*"))
    assert b"keep_session(" in written
    assert b"bring_session_back" in written
    assert b"kept inkept in" not in written


def test_functions_of_earlier_scripts_keep_their_source(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        value(
            session,
            "import inspect, traceback\ndef fails(n):\n    def inner(m):\n        return n / m\n    return inner(0)",
        )
        with session.fork() as fork:
            session.put_down()
            for each in (fork, session):
                result = each.execute_code("set_result(inspect.getsource(fails))\nfails(1)")
                assert result.error is not None and '"<code>", line 4, in inner' in result.error.traceback
                assert "return n / m" in result.error.traceback
                assert [(frame.line, frame.function) for frame in result.error.frames][1:] == [
                    (5, "fails"),
                    (4, "inner"),
                ]
                printed = each.execute_code(
                    "try: fails(1)\nexcept ZeroDivisionError: traceback.print_exc()\ninspect.getsource(fails)"
                )
                assert "return n / m" in printed.logs.stderr and printed.value.startswith("def fails(n):")


def test_a_state_that_nobody_has_any_more_holds_no_file_open(tmp_path: Path) -> None:
    kept_state.StateFile(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        kept_state.StateFile(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
