"""`python -m benchmarks.catalogue_tokens`: what a catalogue of 500 tools costs a model, in tokens.

First, the tools alone, as each way of telling about them writes them. Then a task of ten tool calls: an agent with a
scripted model does it for real, with a real sandbox, and the input tokens of all of its requests are added up. These
are messages and tool definitions, as JSON in OpenAI's format; a provider may render them in other words.

Tokens are those of the encoding o200k_base (GPT-4o and later). tiktoken downloads its encodings when it is used;
bpe-openai has the same ones in its wheel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import anyio
import bpe_openai

from toolcell import Limits, PoolConfig, Runtime, ToolRegistry
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import Reply, ScriptedModel, calls
from toolcell.calls.options import Origin
from toolcell.mcp.listing import own_tools
from toolcell.tools import ToolDefinition, ToolOptions
from toolcell.tools.spec import ToolSpec

ENCODING = "o200k_base"
TOOLS = 500
SPACES = ("billing", "crm", "mail", "calendar", "storage", "tickets", "chat", "wiki", "monitoring", "hr")
VERBS = ("create", "update", "delete", "list", "get")
THINGS = ("invoice", "customer", "message", "meeting", "folder", "issue", "channel", "page", "alert", "employee")
CUSTOMERS = ("ada", "bob", "cyd", "dee")
PLENTY = 10**7
"""Characters: enough for all tools in any form."""


@cache
def encoding() -> Any:
    """Return the encoding."""
    return bpe_openai.get_encoding(ENCODING)


def tokens(text: str) -> int:
    """Count the tokens of a text."""
    return len(encoding().encode(text))


# The tools

RECORD = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "owner": {"type": "string"}, "amount": {"type": "number"}},
    "required": ["id", "owner"],
}


def schema_of(verb: str, thing: str) -> dict[str, Any]:
    """Return the parameters of one tool, as such tools have them."""
    fields: dict[str, Any] = {
        "id": {"type": "string", "description": f"Which {thing}, by its id."},
        "owner": {"type": "string", "description": f"Id of the person whom the {thing} belongs to."},
        "text": {"type": "string", "description": f"Text of the {thing}, as people read it."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Words to file it under."},
        "month": {"type": "string", "description": "Only of this month, such as 2026-03."},
        "limit": {"type": "integer", "minimum": 1, "default": 20, "description": "Most results."},
    }
    taken = {"create": ("owner", "text", "tags"), "update": ("id", "text", "tags"), "list": ("owner", "month", "limit")}
    names = taken.get(verb, ("id",))
    required = {"create": ["owner", "text"], "list": []}.get(verb, ["id"])
    properties = {name: fields[name] for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def answer(verb: str, thing: str, args: Mapping[str, Any]) -> Any:
    """Answer a call."""
    row = {"id": args.get("id", f"{thing}-1"), "owner": args.get("owner", "ada"), "amount": 120.5}
    return [row | {"id": f"{thing}-{who}", "owner": who} for who in CUSTOMERS] if verb == "list" else row


@dataclass(frozen=True)
class _Several:
    """Tools that are registered together."""

    specs: list[ToolSpec]

    def to_specs(self) -> list[ToolSpec]:
        return self.specs


def catalogue(count: int = TOOLS, **options: Any) -> ToolRegistry:
    """Return a registry of so many tools, at most 500: fifty in each of ten namespaces."""
    specs = []
    for number in range(count):
        space, verb, thing = SPACES[number % 10], VERBS[number // 10 % 5], THINGS[number // 50]
        named = f"{verb.capitalize()} {'several' if verb == 'list' else 'one'} {thing} in {space}."
        text = f"{named}\n\nReturns what is stored. Fails when the {thing} or the right to {verb} it is missing."
        returns = {"type": "array", "items": RECORD} if verb == "list" else RECORD
        definition = ToolDefinition(f"{space}.{verb}_{thing}", text, schema_of(verb, thing))
        specs.append(
            ToolSpec.positional(definition, partial(answer, verb, thing), ToolOptions(returns=returns, **options))
        )
    registry = ToolRegistry()
    registry.add(_Several(specs))
    return registry


def shown() -> dict[str, int]:
    """Return the tokens of 500 tools by how a model is told of them."""
    registry = catalogue()
    listed = json.dumps([definition.to_openai() for definition in registry.definitions()])
    stubs = registry.to_python()
    runtime = Runtime(registry)
    registry.enable_tool_search()
    search = [each.to_openai() for each in registry.definitions(Origin.MODEL, shown_chars=0)]
    mcp = [tool.model_dump(by_alias=True, exclude_none=True) for tool in own_tools(runtime, False, False)]
    found = registry.describe_tools(["billing.list_invoice", "mail.create_message", "crm.get_customer"], detail="full")
    return {
        "definitions of plain tool calling": tokens(listed),
        "stubs": tokens(stubs),
        "a line each": tokens(registry.subset([*catalogue()]).describe_tools(detail="signatures")),
        "names": tokens(registry.subset([*catalogue()]).describe_tools(detail="names")),
        "`search_tools` alone": tokens(json.dumps(search)),
        "stubs of three tools that a search found": tokens(found),
        "all that `toolcell mcp` lists": tokens(json.dumps(mcp)),
    }


# A task of ten calls: list the invoices, look up four customers, write to each, and tell the team.

TASK = "Remind every customer with an open invoice of March, and tell the team in chat what was sent."
DONE = "All four customers were reminded, and the team knows."
FIRST = [("billing.list_invoice", {"month": "2026-03"})]
LOOK_UP = [("crm.get_customer", {"id": who}) for who in CUSTOMERS]
REMIND = [
    ("mail.create_message", {"owner": who, "text": f"Dear {who}, invoice-{who} of 120.5 is open."}) for who in CUSTOMERS
]
TELL = [("chat.create_message", {"owner": "team", "text": "Reminded ada, bob, cyd, dee."})]
STEPS = [*FIRST, *LOOK_UP, *REMIND, *TELL]
SEARCHES = ["list invoices billing", "get customer crm", "create message mail", "create message chat"]
FIND = f"""for query in {SEARCHES!r}:
    print(search_tools(query, limit=2, detail="full"))"""
SCRIPT = """
sent = []
for invoice in tools.billing.list_invoice(month="2026-03"):
    customer = tools.crm.get_customer(id=invoice["owner"])
    text = f"Dear {customer['id']}, {invoice['id']} of {invoice['amount']} is open."
    tools.mail.create_message(owner=customer["id"], text=text)
    sent.append(customer["id"])
tools.chat.create_message(owner="team", text=f"Reminded {', '.join(sent)}.")
set_result({"reminded": sent})"""


def plain(steps: Sequence[tuple[str, Mapping[str, Any]]]) -> Reply:
    """Return a response that calls these tools, by the names that providers know."""
    return calls(*((name.replace(".", "__"), args) for name, args in steps))


ONE_A_TURN: list[Reply] = [plain([step]) for step in STEPS]
AT_ONCE: list[Reply] = [plain(steps) for steps in (FIRST, LOOK_UP, REMIND, TELL)]
SEARCHED: list[Reply] = [calls(*(("search_tools", {"query": query, "limit": 2}) for query in SEARCHES)), *AT_ONCE]
IN_CODE: list[Reply] = [calls(("execute_code", {"code": SCRIPT}))]
FOUND_IN_CODE: list[Reply] = [calls(("execute_code", {"code": FIND})), *IN_CODE]


@dataclass(frozen=True)
class Way:
    """One way of doing the task."""

    name: str
    replies: list[Reply]
    code: bool = False
    shown_chars: int = PLENTY
    origins: frozenset[Origin] = frozenset(Origin)


ONLY_CODE = frozenset({Origin.CODE})
WAYS = (
    Way("plain tool calling, one call a turn", ONE_A_TURN),
    Way("plain tool calling, four turns of calls", AT_ONCE),
    Way("`search_tools`, then plain tool calling", SEARCHED, shown_chars=32_000),
    Way("`execute_code` with all stubs", IN_CODE, True, origins=ONLY_CODE),
    Way("`execute_code` with names, as it is by default", FOUND_IN_CODE, True, 32_000),
    Way("`execute_code` with a search alone", FOUND_IN_CODE, True, 1_000),
)


async def measure(way: Way) -> tuple[int, int]:
    """Do the task; return the requests to the model and their input tokens together."""
    registry = catalogue(callable_from=way.origins)
    made: list[str] = []
    registry.before_call(lambda call: made.append(call.name))
    model = ScriptedModel([*way.replies, DONE])
    async with Runtime(registry, pool=PoolConfig(warm=1), limits=Limits(wall_s=600)) as runtime:
        options: dict[str, Any] = {"code_execution": runtime} if way.code else {}
        agent = Agent(model, tools=registry, max_iterations=20, shown_chars=way.shown_chars, **options)
        result = await agent.run(TASK)
    assert result.content == DONE, result
    assert sorted(name for name in made if "." in name) == sorted(name for name, _ in STEPS), made
    return len(model.requests), sum(request_tokens(each.messages, each.tools) for each in model.requests)


def request_tokens(messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolDefinition]) -> int:
    """Return the input tokens of one request, as JSON in OpenAI's format."""
    return tokens(json.dumps(list(messages))) + tokens(json.dumps([tool.to_openai() for tool in tools]))


async def measure_all() -> dict[str, tuple[int, int]]:
    """Return the requests and input tokens of every way."""
    return {way.name: await measure(way) for way in WAYS}


def main(write: Callable[[str], None] = print) -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    write(f"| {TOOLS} tools, told as | tokens |\n|---|---:|")
    for name, count in shown().items():
        write(f"| {name} | {count:,} |")
    write("\n| A task of ten calls | requests | input tokens |\n|---|---:|---:|")
    for name, (requests, count) in anyio.run(measure_all).items():
        write(f"| {name} | {requests} | {count:,} |")


if __name__ == "__main__":
    main()
