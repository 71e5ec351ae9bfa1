"""Arguments that no tool was made for, as Python expressions: a guest evaluates them as well as the host."""

from __future__ import annotations

from typing import Any

_INTEGERS = [
    "0", "-0", "1", "-1", "2**31", "2**53 + 1", "2**63 - 1", "2**63", "-2**63", "-2**63 - 1", "2**64 - 1", "2**64",
    "-2**64", "10**30", "10**350", "-10**4999", "True", "False", "1 << 20_000",
]  # fmt: skip
_FLOATS = [
    "0.0", "-0.0", "0.1", "1e300", "-1e300", "1e15", "1e16", "1e17", "9.3e18", "1.8e19", "5e-324", "3.7", "2.0**63",
    "-2.0**63", "float('nan')", "float('inf')", "-float('inf')", "1e308 * 10",
]  # fmt: skip
_NUMBERS_AS_TEXT = [
    "'0'", "'-0'", "'+1'", "'1_000'", "' 1 '", "'1e3'", "'1e300'", "'1e9999'", "'1e-9999'", "'-1e9999'", "'0x10'",
    "'9' * 30", "'9' * 350", "'9' * 399", "'9' * 401", "'9' * 5000", "'1' + '0' * 18", "'9223372036854775808'",
    "'-9223372036854775809'", "'.'", "'.5'", "'5.'", "'1e'", "'NaN'", "'nan'", "'Infinity'", "'-inf'", "'٣'", "'²'",
    "'1.' + '0' * 300", "'0.' + '9' * 300", "'1e+0003'", "'--1'", "'1,000'", "'None'", "'null'", "'true'", "'True'",
]  # fmt: skip
_TEXTS = [
    "''", "' '", "'\\x00'", "'a\\x00b'", "'\\ud800'", "'a\\udfff'", "'\\ud83d\\ude00'", "'\\U0001f600'", "'\\ufeff'",
    "'\\u202e'", "'\\r\\n'", "'x' * 100_001", "'é' * 9_001", "'A' * 40_000", "'%s%n'", "'{}'", "'{0.__class__}'",
    "'../../etc/passwd'", "'\\x1b[31m'", "'a' * 64 + '!'", "'-' * 999", "'://'", "'====' ", "'not base64 !'",
    "'YQ'", "'YQ=='", "'\\\\'", "'\"'", "'$ref'", "'{{steps[0]}}'", "'$steps[0]'", "'2024-99-99'", "'2024-01-01'",
    "'9999999999999999-01-01'", "'P99999999999999Y'", "'25:99'", "'00000000-0000-0000-0000-00000000000g'", "'red'",
]  # fmt: skip
_JSON_AS_TEXT = [
    "'['", "'{'", "'[' * 300", "'[' * 300 + ']' * 300", "'{\"a\":' * 300 + '1' + '}' * 300", "'[' * 5_000",
    "'[' * 64 + ']' * 64", "'[' * 65 + ']' * 65", "'[NaN]'", "'[Infinity]'", "'[-Infinity]'", "'[1e999]'",
    "'[\"\\\\ud800\"]'", "'[\"\\\\udc00\\\\ud800\"]'", "'{\"\\\\ud800\": 1}'", "'[' + '9' * 30 + ']'",
    "'[' + '9' * 5000 + ']'", "'{\"x\": ' + '9' * 350 + '}'", "'[1,]'", "'[1] [2]'", "'[\"a\"'", "'{\"a\": 1, \"a\": 2}'",
    "'[' + '1,' * 2_000 + '1]'", "'[' + '[],' * 2_000 + '[]]'", "'{\"__proto__\": 1}'", "'{\"\": 1}'", "' [1]'",
    "'\\ufeff[1]'", "'[\"' + 'x' * 9_000 + '\"]'", "'[\"[1]\"]'", "'[\"[[[[\"]'", "'{\"x\": \"{\\\\\"x\\\\\": 1}\"}'",
]  # fmt: skip
_LISTS = [
    "[]", "[[]]", "[None]", "[1, '1', 1.0, True]", "['\\ud800']", "[float('nan')]", "[2**64]", "[10**30]",
    "list(range(1100))", "[[]] * 300", "['x'] * 300", "[b'x']", "[{}]", "[[[[[[]]]]]]", "['[' * 300]",
    "['9' * 350]", "[None] * 300", "(1, 2)", "((), ())", "[{'x': 1}] * 100", "nested(63)", "nested(64)", "nested(65)",
    "nested(500)", "[nested(62)]",
]  # fmt: skip
_OBJECTS = [
    "{}", "{'x': {}}", "{'': ''}", "{'\\ud800': 1}", "{'a' * 10_000: 1}", "{'x': None}", "{'x': '9' * 350}",
    "{'x': '[' * 300}", "{'x': float('nan')}", "{'x': 10**30}", "{1: 2}", "{None: 1}", "{(1, 2): 3}", "{True: 1, 'True': 2}",
    "{b'k': 1}", "{f'k{i}': i for i in range(200)}", "{'$ref': '#'}", "{'__class__': 'x'}", "{'self': 1}",
    "{'x': 1, 'y': 2, 'z': 3}", "{'x': [1, {'x': [2]}]}", "deep_dict(63)", "deep_dict(65)", "deep_dict(500)",
    "{'type': 'cat', 'name': 'Tom'}", "{'type': 'bird'}", "{'type': []}", "{'kind': {}}",
]  # fmt: skip
_OTHERS = [
    "None", "b''", "b'\\xff\\xfe'", "b'x' * 9_000", "bytearray(b'x')", "memoryview(b'xyz')", "datetime.datetime(1, 1, 1)",
    "datetime.date(9999, 12, 31)", "datetime.time(23, 59)", "datetime.timedelta(days=-999999999)", "decimal.Decimal('NaN')",
    "decimal.Decimal('1e999999')", "decimal.Decimal('sNaN')", "fractions.Fraction(1, 3)", "uuid.UUID(int=0)",
    "pathlib.PurePosixPath('/etc')", "set()", "{1, 'a', None}", "frozenset({(1, 2)})", "range(10)", "range(10**30)",
    "1j", "...", "NotImplemented", "object()", "print", "int", "math", "(x for x in [1])", "iter([])", "ValueError('x')",
    "types.SimpleNamespace(x=1)", "collections.OrderedDict(a=1)", "collections.deque([1])", "collections.Counter('aab')",
    "collections.ChainMap({'a': 1})", "types.MappingProxyType({'a': 1})", "enum.Enum('E', 'A').A", "enum.IntEnum('E', 'A').A",
    "enum.Flag('F', 'A B').A", "type('S', (str,), {})('x')", "type('I', (int,), {})(1)", "type('D', (dict,), {})(x=1)",
    "itself()", "circle()", "{'x': itself()}", "Angry()", "AngryMapping()", "AngryText('x')", "EndlessMapping()",
    "float('1e-310')", "dict(zip('abcdef', 'ghijkl'))",
]  # fmt: skip

EXPRESSIONS = (
    *_INTEGERS,
    *_FLOATS,
    *_NUMBERS_AS_TEXT,
    *_TEXTS,
    *_JSON_AS_TEXT,
    *_LISTS,
    *_OBJECTS,
    *_OTHERS,
)

HELPERS = """
import base64, collections, collections.abc, datetime, decimal, enum, fractions, json, math, pathlib, types, uuid

def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value

def deep_dict(levels):
    value = 1
    for _ in range(levels):
        value = {"x": value}
    return value

def itself():
    value = []
    value.append(value)
    return value

def circle():
    value = {}
    value["x"] = [value]
    return value

class Angry:
    def __getattribute__(self, name):
        if name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        raise KeyError(name)
    def __repr__(self):
        raise RuntimeError("no repr")
    __str__ = __len__ = __iter__ = __eq__ = __hash__ = __repr__

class AngryMapping(collections.abc.Mapping):
    def __getitem__(self, key):
        raise RuntimeError("no item")
    def __iter__(self):
        raise RuntimeError("no keys")
    def __len__(self):
        raise RuntimeError("no length")

class AngryText(str):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __len__ = isascii = encode = strip = lstrip = __str__

class EndlessMapping(collections.abc.Mapping):
    def __getitem__(self, key):
        return EndlessMapping()
    def __iter__(self):
        return iter(["x"])
    def __len__(self):
        return 1
"""


def scope() -> dict[str, Any]:
    """Names that the expressions use."""
    names: dict[str, Any] = {}
    exec(HELPERS, names)
    return names
