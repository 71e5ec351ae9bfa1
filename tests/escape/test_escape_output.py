"""Attacks by output and exceptions: PROMISES.md, "output"."""

from __future__ import annotations

import pytest

from escape.attack import MIB, Victim, outside
from escape.prologues import BASICS

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

OUTPUT_BYTES = 4096
FLOOD_BYTES = MIB // 4
MARK_BYTES = 200
"""For the line that says how much is missing, once per stream."""

FLOODS = {
    "print": "print('x' * 1000)",
    "one character at a time": "sys.stdout.write('x')\nsys.stdout.flush()",
    "lone surrogates": "print('\\ud800' * 300)",
    "raw writes to 1": "os.write(1, b'x' * 1000)",
    "raw writes to 2": "os.write(2, b'\\xff' * 1000)",
    "the C library": "libc.puts(b'x' * 1000)",
    "warnings": "warnings.warn('x' * 1000)",
    "one byte at a time, raw": "os.write(1, b'x')",
    "threads": "[thread.start() for thread in threads]\n[thread.join() for thread in threads]\n"
    "threads = [threading.Thread(target=print, args=('x' * 100,)) for _ in range(8)]",
}
WITHOUT_END = """
import ctypes, os, sys, threading, warnings
threads = []
warnings.simplefilter("always")
libc = ctypes.CDLL(None)
written = 0
while written < bound:
    {flood}
    written += 1
libc.fflush(None)
sys.stdout.flush()
"""


def flood_source(kind: str) -> str:
    return WITHOUT_END.format(flood=FLOODS[kind].replace("\n", "\n    "))


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_output_is_cut_counted_and_ended(kind: str, victim: Victim) -> None:
    plain = outside("import sys\nsys.stdout.reconfigure(errors='surrogatepass')\n" + flood_source(kind), bound=400)
    assert len(plain.output) >= 400
    limits = {"output_bytes": OUTPUT_BYTES, "output_flood_bytes": FLOOD_BYTES, "wall_s": 240, "cpu_s": 240}
    inside = victim.run(flood_source(kind), bound=10**9, limits=limits)
    assert inside.outcome == "output_limit"
    kept = inside.result.logs
    assert kept.truncated
    assert inside.result.error is not None
    assert kept.stdout_bytes + kept.stderr_bytes >= inside.result.error.used > FLOOD_BYTES
    assert len(kept.stdout.encode()) <= OUTPUT_BYTES + MARK_BYTES
    assert len(kept.stderr.encode()) <= OUTPUT_BYTES + MARK_BYTES
    assert inside.growth_bytes < 32 * MIB
    victim.assert_healthy()


@pytest.mark.conforms("Q-b11")
def test_output_past_the_limit_is_dropped_with_a_marker_and_the_script_goes_on(victim: Victim) -> None:
    source = "for number in range(5000):\n    print('line', number)\nset_result('went on')"
    assert len(outside(source).output) > 10 * OUTPUT_BYTES
    inside = victim.run(source, limits={"output_bytes": OUTPUT_BYTES})
    assert (inside.outcome, inside.value) == ("ok", "went on")
    logs = inside.result.logs
    assert logs.truncated
    assert logs.stdout_bytes > 10 * OUTPUT_BYTES
    assert "line 0\n" in logs.text
    assert "line 4999\n" in logs.text
    assert "dropped" in logs.text
    assert len(logs.text) <= OUTPUT_BYTES + MARK_BYTES


def test_output_of_many_children_is_one_scripts_output(victim: Victim) -> None:
    source = """
import os
for _ in range(8):
    if os.fork() == 0:
        for _ in range(bound):
            os.write(1, b'x' * 4096)
        os._exit(0)
for _ in range(8):
    os.wait()
"""
    assert len(outside(source, bound=10).output) == 8 * 10 * 4096
    inside = victim.run(source, bound=10**9, limits={"output_flood_bytes": 4 * MIB, "wall_s": 20})
    assert inside.outcome == "output_limit"
    assert inside.growth_bytes < 32 * MIB
    victim.assert_healthy()


EVIL = {
    "a message of 100 MB": "raise ValueError('x' * 100_000_000)",
    "a message that raises": "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E",
    "a message that never comes": "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
    "a message that is not text": "class T(str):\n    def __len__(self): return 1 << 60\n    def encode(self, *a): raise E\n"
    "class E(Exception):\n    def __str__(self): return T('t')\nraise E",
    "a name of 100 MB": "raise type('E' * 100_000_000, (Exception,), {})('m')",
    "a chain that never ends": "class E(Exception):\n    @property\n    def __cause__(self): return E()\nraise E",
    "a loop of causes": "a, b = ValueError(1), ValueError(2)\na.__cause__, b.__cause__ = b, a\nraise a",
    "a group of groups": "g = ValueError('x' * 1000)\nfor _ in range(200): g = ExceptionGroup('g' * 1000, [g] * 2)\nraise g",
    "a traceback of a million frames": "import sys\nsys.setrecursionlimit(10**6)\ndef f(n):\n    if n: return f(n - 1)\n"
    "    raise ValueError\nf(50_000)",
    "a syntax error of 10 MB": "compile('x' * 10_000_000 + ' y', '<code>', 'exec')",
    "a syntax error that lies": "e = SyntaxError('m')\ne.filename, e.lineno, e.offset, e.text = '<code>', 10**18, -10**18, 5\nraise e",
    "notes": "e = ValueError('m')\ne.__notes__ = ['n' * 1000] * 100_000\nraise e",
    "an exit code that is not a number": "class C:\n    def __str__(self): raise KeyError\nraise SystemExit(C())",
    "surrogates and controls": "raise ValueError('\\ud800\\x1b]0;owned\\x07\\u202e\\u2028')",
    "an error while reporting": "import sys\nsys.modules['toolcell_bridge.guest.errors'].describe = lambda *a: 1 / 0\nraise ValueError",
    "streams that are gone": "import sys\nsys.stdout = sys.stderr = None\nprint('x')\nraise ValueError",
}


@pytest.mark.parametrize("kind", EVIL)
def test_an_exception_is_reported_within_bounds_whatever_it_does(kind: str, victim: Victim) -> None:
    """Outside, whoever formats the exception runs the script's code or prints all of it; inside that is the guest's
    own trouble, and the host takes plain text of a bounded size."""
    plain = outside(
        BASICS
        + """
def formatted():
    import traceback
    try:
        exec(evil, {})
    except BaseException as error:
        return len(traceback.format_exc()) > 0
set_result(True if attempt(formatted) else False)
""",
        evil=EVIL[kind],
        within_s=0.5,
        may_fail=True,
    )
    assert plain.value is not False

    inside = victim.run(EVIL[kind], limits={"wall_s": 0.7, "memory_bytes": 512 * MIB})
    assert inside.outcome in ("error", "timeout", "killed", "memory_limit", "protocol_error")
    error = inside.result.error
    assert error is not None
    assert len(error.type) <= 200
    assert len(error.message) <= 17_000
    assert len(error.traceback) <= 66_000
    assert inside.growth_bytes < 32 * MIB
    victim.assert_healthy()


RESULTS = {
    "repr that raises": "class V:\n    def __repr__(self): raise SystemExit(0)\nset_result(V())",
    "dict that never ends": "class V(dict):\n    def items(self):\n        while True: yield ('k', 1)\nset_result(V(a=1))",
    "list in itself": "v = []\nv.append(v)\nset_result(v)",
    "depth": "v = []\nfor _ in range(100_000): v = [v]\nset_result(v)",
    "width": "set_result([[]] * 3_000_000)",
    "text of 100 MB": "set_result('x' * 100_000_000)",
    "number of 100 MB": "set_result(1 << 800_000_000)",
    "generator": "set_result(iter(int, 1))",
    "str that lies": "class V(str):\n    def encode(self, *a): return b'x' * 10**9\n    def isascii(self): return True\n"
    "set_result([V('\\ud800')])",
    "dataclass that changes": "import dataclasses\n@dataclasses.dataclass\nclass V:\n    a: int = 0\n"
    "V.__dataclass_fields__['b'] = 5\nset_result(V())",
    "model_dump that recurses": "class V:\n    def model_dump(self): return V()\nset_result(V())",
}


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.conforms("Q-b7", "T6")
def test_a_result_that_is_no_plain_data_is_refused_in_the_script(kind: str, victim: Victim) -> None:
    """Without isolation nothing converts the value: the attack succeeds if the value exists and would be passed on."""
    source = RESULTS[kind]
    taken = "taken = []\n" + source.replace("set_result(", "taken.append(") + "\nset_result(len(taken))"
    assert outside(taken, within_s=10).value == 1
    inside = victim.run(source, limits={"wall_s": 10, "memory_bytes": 512 * MIB})
    assert inside.outcome in ("error", "memory_limit", "ok")
    if inside.outcome == "ok":
        assert inside.value in ({"a": 1}, [1], ["\ud800"])
    assert inside.growth_bytes < 32 * MIB
    victim.assert_healthy()


def test_control_characters_in_output_stay_data(victim: Victim) -> None:
    """The host passes text on unchanged, as text. Nothing on the way interprets it."""
    text = "\x1b]52;c;b3duZWQ=\x07\x1b[2J\u202egnirts\u2028\x00\r\n"
    source = f"print({text!r}, end='')"
    assert b"\x1b]52" in outside(source).output
    inside = victim.run(source)
    assert inside.result.logs.stdout == text
    assert "\\u001b" in inside.result.to_json()
    assert "\x1b" not in inside.result.to_json()
