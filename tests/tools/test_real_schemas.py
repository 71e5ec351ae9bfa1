"""More than 2,000 schemas of real tools and APIs: each is registered, has stubs that ty accepts, and takes a valid call.

`real_schemas.md` says where `real_schemas.json.gz` comes from.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, SyncRuntime, ToolRegistry
from toolcell.control.type_check import described, stubs_of

HERE = Path(__file__).parent
TY = Path(sysconfig.get_path("scripts"), "ty")
pytestmark = pytest.mark.filterwarnings("ignore::toolcell.tools.ToolDescriptionWarning")  # real ones are short
BATCH = 250

received: dict[str, Any] = {}


@cache
def rows() -> list[dict[str, Any]]:
    return list(json.loads(gzip.decompress((HERE / "real_schemas.json.gz").read_bytes())))


def remember(name: str) -> Any:
    async def tool(args: dict[str, Any]) -> Any:
        received[name] = args
        return {"got": args}

    return tool


@pytest.fixture(scope="module")
def registry() -> ToolRegistry:
    made = ToolRegistry()
    for row in rows():
        function = remember(row["name"])
        made.register(row["name"], row["description"], row["parameters"], function, returns=row.get("returns"))
    return made


@pytest.mark.slow
def test_more_than_two_thousand_real_schemas_are_registered_and_offered_to_every_provider(
    registry: ToolRegistry,
) -> None:
    sources = Counter(name.partition(".")[0] for name in registry.names())
    assert len(registry) == len(rows()) >= 2_000
    assert min(sources[each] for each in ("everything", "filesystem", "memory")) >= 9
    assert min(sources[each] for each in ("google", "aws")) >= 500
    assert len({each["function"]["name"] for each in registry.to_provider_defs()}) == len(rows())


@pytest.mark.skipif(not TY.is_file(), reason="needs ty: pip install 'toolcell[types]'")
@each_row("kind", ["for models", "async", "for checks"])
def test_the_stubs_of_all_real_tools_are_accepted_by_ty(registry: ToolRegistry, kind: str, tmp_path: Path) -> None:
    text = {
        "for models": lambda: registry.to_python(),
        "async": lambda: registry.to_python(asynchronous=True),
        "for checks": lambda: stubs_of(described(registry)),
    }[kind]()
    (tmp_path / "stubs.pyi").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [TY, "check", "--output-format", "concise", "--python-version", "3.12", "stubs.pyi"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def batches() -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(rows()), BATCH):
        yield rows()[start : start + BATCH]


INCLUDES = """
def includes(got, sent):
    'True when what arrived is what was sent; objects may have the defaults of their schemas besides.'
    if isinstance(sent, dict):
        return isinstance(got, dict) and all(key in got and includes(got[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return len(got) == len(sent) and all(map(includes, got, sent))
    return type(got) is type(sent) and got == sent
"""
SCRIPT = f"""{INCLUDES}
answers = call_tools_parallel(calls, return_exceptions=True)
wrong = {{}}
for call, answer in zip(calls, answers, strict=True):
    if not (isinstance(answer, dict) and includes(answer["got"], call["args"])):
        wrong[call["tool"]] = repr(answer)[:300]
wrong
"""


@pytest.mark.isolation
def test_a_valid_call_of_each_real_tool_arrives_and_returns_as_it_was_sent(registry: ToolRegistry) -> None:
    received.clear()
    with SyncRuntime(registry, limits=Limits(wall_s=600, cpu_s=600, tool_calls=BATCH)) as runtime:
        for batch in batches():
            calls = [{"tool": row["name"], "args": row["call"]} for row in batch]
            result = runtime.execute_code(SCRIPT, inputs={"calls": calls})
            assert result.error is None, result.error
            assert result.value == {}
            assert [call.status for call in result.calls] == ["ok"] * len(batch)
    names: dict[str, Any] = {}
    exec(INCLUDES, names)
    assert [row["name"] for row in rows() if not names["includes"](received[row["name"]], row["call"])] == []
