"""The programs of docs/own-loop.md run as they stand, with the official SDKs, against servers that check what they are sent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.api_server import ApiServer, completion, message, ok, serving, text, tool_use
from toolcell.tools import ToolCall

PAGE = Path(__file__).parents[2] / "docs" / "own-loop.md"
CALLS = (("price", {"item": "tea"}), ("order", {"item": "tea", "count": 2}), ("order", {"item": "tea", "count": 3}))
TOLD = ["3.5", "ordered 2 x tea", "at most 2 pieces"]


def program(heading: str) -> str:
    page = PAGE.read_text(encoding="utf-8")
    first, own = (
        re.findall(r"```python\n(.*?)```", part, re.DOTALL)[0] for part in (page, page.split(f"## {heading}")[1])
    )
    return f"{first}\n{own}"


def run(source: str, server: ApiServer) -> list[str]:
    addresses = {"OPENAI_BASE_URL": f"{server.url}/v1", "ANTHROPIC_BASE_URL": server.url}
    environment = os.environ | addresses | {"OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def response(*output: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
    }


def output_text(said: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": said, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}


def function_call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"c{number}",
        "name": name,
        "arguments": arguments,
    }


def json_of(arguments: dict[str, Any]) -> str:
    return repr(arguments).replace("'", '"')


NUMBERED = [(number, name, arguments) for number, (name, arguments) in enumerate(CALLS)]


def test_chat_completions() -> None:
    pytest.importorskip("openai")
    asked = completion(None, *((f"c{number}", name, json_of(arguments)) for number, name, arguments in NUMBERED))
    with serving(ok(asked), ok(completion("Done."))) as server:
        printed = run(program("Chat Completions"), server)

    first, second = server.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["price", "order"]
    assert [call["id"] for call in second["messages"][1]["tool_calls"]] == ["c0", "c1", "c2"]
    answers = second["messages"][2:]
    assert [(each["role"], each["tool_call_id"]) for each in answers] == [("tool", f"c{number}") for number in range(3)]
    check([each["content"] for each in answers], printed)


def test_responses() -> None:
    pytest.importorskip("openai")
    asked = response(*(function_call(number, name, json_of(arguments)) for number, name, arguments in NUMBERED))
    with serving(ok(asked), ok(response(output_text("Done.")))) as server:
        printed = run(program("Responses"), server)

    first, second = server.requests
    assert [(tool["type"], tool["name"], tool["strict"]) for tool in first["tools"]] == [
        ("function", "price", False),
        ("function", "order", False),
    ]
    answers = second["input"][4:]
    assert [(each["type"], each["call_id"]) for each in answers] == [
        ("function_call_output", f"c{number}") for number in range(3)
    ]
    check([part["text"] for each in answers for part in each["output"]], printed)


def test_messages() -> None:
    pytest.importorskip("anthropic")
    asked = message(
        *(tool_use(f"c{number}", name, **arguments) for number, name, arguments in NUMBERED), stop="tool_use"
    )
    with serving(ok(asked), ok(message(text("Done.")))) as server:
        printed = run(program("Messages"), server)

    first, second = server.requests
    assert [tool["name"] for tool in first["tools"]] == ["price", "order"]
    answers = second["messages"][2]["content"]
    assert [(each["tool_use_id"], each["is_error"]) for each in answers] == [("c0", False), ("c1", False), ("c2", True)]
    check([part["text"] for each in answers for part in each["content"]], printed)


def check(told: list[str], printed: list[str]) -> None:
    """Check what the model and the person were told. The calls have the ids of the model's transcript."""
    assert told[:2] == TOLD[:2] and TOLD[2] in told[2]
    assert printed == [
        "c1: order({'item': 'tea', 'count': 2})",
        "c2: order({'item': 'tea', 'count': 3})",
        "Done.",
    ]


PICTURE = '''
@registry.tool
async def draw() -> bytes:
    """Draw a chart of the prices."""
    return b"\\x89PNG\\r\\n\\x1a\\n"


print('''


def test_each_shows_the_model_a_picture() -> None:
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    replies = {
        "Chat Completions": [completion(None, ("c0", "draw", "{}")), completion("Done.")],
        "Responses": [response(function_call(0, "draw", "{}")), response(output_text("Done."))],
        "Messages": [message(tool_use("c0", "draw"), stop="tool_use"), message(text("Done."))],
    }
    programs = [PICTURE.join(program(heading).rsplit("print(", 1)) for heading in replies]
    one_after_the_other = f"for program in {programs!r}: exec(program, {{}})"
    with serving(*(ok(each) for heading in replies for each in replies[heading])) as server:
        assert run(one_after_the_other, server) == ["Done."] * 3

    for sent in map(str, server.requests[1::2]):
        assert sent.count("iVBORw0KGgo=") == 1 and "(image/png, 8 bytes)" in sent


def test_the_id_of_a_call_of_the_responses_api_is_the_one_that_its_answer_refers_to() -> None:
    assert ToolCall.read(function_call(7, "draw", "{}")).id == "c7"
