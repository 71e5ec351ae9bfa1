"""Ways out of the sandbox through tools: PROMISES.md, "tools"."""

from __future__ import annotations

from typing import Any

import pytest

from escape.attack import ENDED_S, SECRET_PATTERN, Victim, outside
from escape.prologues import BRIDGE, basics, over_the_bridge

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("Q-b21")]

NAMES = [
    "", " ", ".", "..", "/", "touch ", " touch", "Touch", "TOUCH", "touch\n", "touch\0", "tou\u0441h", "t\u200bouch",
    "touch.__call__", "__call__", "__class__", "__init__", "__dict__", "__import__", "__reduce__", "_dispatch", "registry",
    "registry.touch", "self.touch", "touch;touch", "touch()", "os.system", "eval", "execute_code", "execute_plan", "../touch",
    "toolcell.list_tools.", "toolcell.touch", "toolcell", "x" * 10_000, "%s%n", "{0.__class__}", "\u202ehcuot", "None", "0",
]  # fmt: skip


def test_only_names_that_were_offered_can_be_called(victim: Victim) -> None:
    """Outside: what a dispatcher that looks names up on an object would find."""
    naive = """
class Tools:
    def touch(self, tag): return "done"
set_result([name for name in names if callable(getattr(Tools(), name, None))])
"""
    assert "__init__" in outside(naive, names=NAMES).value

    source = basics("""
told = {}
for name in names:
    try:
        told[name] = ["answered", call_tool(name, {"tag": "reached"})]
    except Exception as error:
        told[name] = [type(error).__name__, getattr(error, "code", None)]
set_result(told)
""")
    inside = victim.run(source, names=NAMES)
    assert inside.effects == []
    assert {told[0] for told in inside.value.values()} == {"ToolError"}
    victim.assert_healthy()


ARGUMENTS: dict[str, Any] = {
    "missing": {},
    "extra": {"tag": "forged", "count": 2},
    "dunder": {"tag": "forged", "__class__": "x"},
    "self": {"tag": "forged", "self": None},
    "context": {"tag": "forged", "context": {"run_id": "x"}},
    "number": {"tag": 5},
    "list": {"tag": ["forged"]},
    "nested": {"tag": {"tag": {"tag": "forged"}}},
    "none": {"tag": None},
    "empty name": {"": "forged"},
    "positional": {"0": "forged"},
    "mixed case": {"Tag": "forged"},
    "starred": {"*args": ["forged"], "**kwargs": {"tag": "forged"}},
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_are_checked_against_the_schema_before_the_tool_runs(kind: str, victim: Victim) -> None:
    naive = "reached = []\ndef touch(**arguments): reached.append(arguments)\ntouch(**given)\nset_result(len(reached))"
    assert outside(naive, given=ARGUMENTS[kind]).value == 1
    source = f"""{BRIDGE}
send(message(CALL, 1, "touch", given, None))
answer = receive()
send(message(RESULT, answer[0], []) + message(DONE, True, None))
stay()
"""
    inside = victim.run(source, given=ARGUMENTS[kind])
    if inside.value == 3:  # mended, as a model's would be: then the record says what was asked
        assert len(inside.effects) == 1
        assert isinstance(inside.effects[0], str)
    else:
        assert (inside.value, inside.effects) == (4, [])
    assert len(inside.result.calls) == 1


def test_the_budget_of_calls_is_kept_by_the_host(victim: Victim) -> None:
    """By guest code that counts nothing, in one write, with refusals ignored."""
    source = over_the_bridge("""
send(b"".join(message(CALL, number, "touch", {"tag": str(number)}, None) for number in range(1, 101)))
for _ in range(100):
    receive()
send(message(RESULT, "done", []) + message(DONE, True, None))
stay()
""")
    assert len(outside(source, bridge=True).believed) == 102
    inside = victim.run(source, limits={"tool_calls": 5})
    assert len(inside.effects) <= 5
    assert len(inside.result.calls) <= 5
    assert inside.result.usage.calls <= 5


def test_a_script_past_its_budget_gets_an_error_and_no_tool(victim: Victim) -> None:
    source = basics("""
made = 0
try:
    for number in range(bound):
        call_tool("touch", {"tag": str(number)}) if isolated else None
        made += 1
finally:
    set_result(made)
""")
    assert outside(source, bound=50).value == 50
    inside = victim.run(source, bound=10**6, limits={"tool_calls": 7})
    assert (inside.value, len(inside.effects), inside.outcome) == (7, 7, "call_limit")


def test_no_more_calls_run_at_once_than_allowed(victim: Victim) -> None:
    source = over_the_bridge("""
send(b"".join(message(CALL, number, "wait_forever", {}, None) for number in range(1, 51)))
stay()
""")
    assert len(outside(source, bridge=True).believed) == 50
    inside = victim.run(source, limits={"concurrent_calls": 3, "wall_s": 0.5})
    assert inside.outcome == "timeout"
    assert len(inside.effects) <= 3
    victim.assert_healthy()


def test_more_calls_than_a_host_remembers_end_the_run(victim: Victim) -> None:
    source = over_the_bridge("""
for start in range(1, 5001, 100):
    send(b"".join(message(CALL, number, "wait_forever", {}, None) for number in range(start, start + 100)))
stay()
""")
    assert len(outside(source, bridge=True).believed) == 5000
    inside = victim.run(source, limits={"tool_calls": 100_000, "wall_s": 10})
    assert inside.outcome in ("protocol_error", "call_limit")
    assert len(inside.effects) <= 20
    victim.assert_healthy()


@pytest.mark.parametrize("how", ["cause", "message"])
def test_what_went_wrong_inside_a_tool_stays_with_the_host(how: str, victim: Victim) -> None:
    """The secret stands in the exception's cause, notes, attributes and locals; and in its message, for `message`."""
    leaky = """
import re, traceback
def tool():
    local = secret
    try:
        raise KeyError(secret)
    except KeyError as cause:
        raise RuntimeError(secret) from cause
try:
    tool()
except RuntimeError:
    set_result(len(re.findall(pattern, traceback.format_exc())))
"""
    assert outside(leaky, secret=victim.secret, pattern=SECRET_PATTERN).value == 2

    source = basics("""
import gc, traceback
def everything(error):
    seen, told = set(), []
    def look(value, depth):
        if id(value) in seen or depth > 6:
            return
        seen.add(id(value))
        told.append(f"{value!r:.2000}{value!s:.2000}")
        for each in (getattr(value, "__dict__", {}), getattr(value, "args", ()), getattr(value, "__cause__", None),
                     getattr(value, "__context__", None), getattr(value, "__notes__", ())):
            look(each, depth + 1)
        if isinstance(value, (list, tuple, dict)):
            for each in (value.values() if isinstance(value, dict) else value):
                look(each, depth + 1)
    look(error, 0)
    return told + traceback.format_exception(error)
try:
    call_tool("fails", {"how": how})
except Exception as error:
    set_result(["failed", everything(error), call_tools_parallel([("fails", {"how": how})], return_exceptions=True)[0].args])
""")
    inside = victim.run(source, how=how)
    assert inside.value[0] == "failed"
    assert victim.secret not in repr(inside.value)
    assert victim.secret not in repr(inside.result.logs)
    assert "victim.py" not in repr(inside.value)
    assert "Traceback" not in inside.value[1][0]
    if how == "cause":
        assert victim.secret not in repr(inside.result)


def test_an_error_about_arguments_tells_nothing_of_the_host(victim: Victim) -> None:
    source = basics("""
told = []
for given in ({}, {"text": 5}, {"text": "x", "more": 1}, {"text": None}, {"text": [[]] * 100}):
    try:
        told.append(call_tool("echo", given))
    except Exception as error:
        told.append([str(error), repr(vars(error))])
told.append(list_tools())
set_result(told)
""")
    naive = "def echo(text: str): pass\ntry:\n    echo()\nexcept TypeError as error:\n    import traceback\n    set_result(traceback.format_exc())"
    assert "<code>" in outside(naive).value
    told = repr(victim.run(source).value)
    assert all(
        word not in told
        for word in ("/work", "site-packages", "victim.py", "pydantic", "Traceback", "0x", victim.secret)
    )


ODD = [
    "9" * 5000, "9" * 1_000_000, "1e999999999", "-inf", "nan", "0x" + "f" * 100_000, "1_0" * 1000, "[" * 100_000, "{" * 100_000,
    '{"a":' * 20_000, "[" + "1," * 500_000 + "1]", '{"a":1,"a":2}', "\\u0000", "true" * 100_000, " " * 1_000_000 + "1",
    "\u0661\u0662", "1" + "\u200b", "NULL", "\ud7ff", "1e-400", "[[]]", '{"__class__": 1}', "-" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("field", ["count", "ratio", "numbers", "table", "flag"])
def test_text_that_should_have_been_something_else_never_stalls_or_breaks_the_host(field: str, victim: Victim) -> None:
    """A host that mends arguments parses them: numbers of a million digits, JSON of a hundred thousand levels."""
    naive = "import json\ntry:\n    json.loads(odd)\nexcept RecursionError:\n    set_result('overflow')"
    assert outside(naive, odd="[" * 100_000).value == "overflow"
    source = basics("""
told = []
for odd in odds:
    given = {"count": 1, "ratio": 1.5, "numbers": [1], "table": {"a": 1.0}, "flag": True, field: odd}
    try:
        told.append(call_tool("typed", given)[:100])
    except Exception as error:
        told.append(type(error).__name__)
set_result(told)
""")
    inside = victim.run(source, field=field, odds=ODD, limits={"wall_s": 2 * ENDED_S})
    assert inside.outcome == "ok"
    assert len(inside.value) == len(ODD)
    assert inside.result.usage.wall_s < ENDED_S
    victim.assert_healthy()


ODD_CALLS = over_the_bridge("""
import random
chance = random.Random(seed)
def odd(depth=0):
    kind = chance.randrange(12)
    if kind < 6 or depth > 5:
        return chance.choice([None, True, -1, 1 << 63, (1 << 64) - 1, 1e308, float("nan"), "", "\\0", "%s{0}", "\\u202e", b"\\xff"])
    if kind < 9:
        return [odd(depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(["text", "tag", "how", "", "__class__", "a" * 300, "\\n"]): odd(depth + 1) for _ in range(4)}
names = ["echo", "touch", "fails", "typed", "toolcell.list_tools", "nothing", "", "execute_code", "{0.x}", "%s", "\\n"]
for number in range(1, 91):
    arguments = odd()
    arguments = arguments if isinstance(arguments, dict) else {"text": arguments}
    send(message(CALL, number, chance.choice(names), arguments, chance.choice([None, 1, -1, 1 << 63])))
    receive()
send(message(RESULT, "survived", []) + message(DONE, True, None))
stay()
""")


@pytest.mark.parametrize("seed", range(4))
def test_no_call_however_odd_raises_in_the_host(seed: int, victim: Victim) -> None:
    assert len(outside(ODD_CALLS, bridge=True, seed=seed).believed) == 92
    inside = victim.run(ODD_CALLS, seed=seed)
    assert (inside.outcome, inside.value) == ("ok", "survived")
    assert 70 <= len(inside.result.calls) <= 90  # asking for the list of tools is not a call


def test_answers_of_concurrent_runs_go_to_the_run_that_asked(victim: Victim) -> None:
    source = basics("""
call_tool("meet", {"place": "start", "count": 4})
told = call_tools_parallel([("echo", {"text": f"{me}-{number}"}) for number in range(50)])
set_result([text == f"{me}-{number}" for number, text in enumerate(told)].count(True))
""")
    confused = "answers = []\nfor me in 'ab':\n    answers.append(me)\nset_result([answers.pop(0), answers.pop(0)] == ['b', 'a'])"
    assert outside(confused).value is False  # in order only because nobody else asked
    runs = victim.run_together([(source, {"me": me}) for me in "abcd"])
    assert [run.value for run in runs] == [50] * 4
