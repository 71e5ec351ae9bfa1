"""Shows a library of `AgentTool` records here: a derived schema, prepared arguments, updates, details, hooks, order."""

from typing import Any

from pydantic import BaseModel, Field

from toolcell import Agent, ToolDefinition, ToolResult
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import AgentTool, Block, Call, Event, Text


class SearchArgs(BaseModel):
    query: str = Field(description="Search query", min_length=1)
    limit: int = Field(10, description="Max results", ge=1, le=50)


class DeleteArgs(BaseModel):
    path: str = Field(description="File to delete")


def fill_limit(arguments: dict[str, Any]) -> dict[str, Any]:
    if "limit" not in arguments:
        arguments["limit"] = 10
    return arguments


async def search(call_id: str, args: dict[str, Any], on_update: Any) -> ToolResult:
    on_update(details="connecting")
    rows = [f"{args['query']} {n}" for n in range(args["limit"])]
    on_update(details=f"{len(rows)} rows")
    return ToolResult(parts=(Text("\n".join(rows)),), details={"rows": len(rows)})


async def delete(args: dict[str, Any]) -> ToolResult:
    raise OSError(f"cannot delete {args['path']}")  # an error result: the run goes on


tools = [
    AgentTool(
        ToolDefinition.from_model("search_docs", "Search the documentation.", SearchArgs),
        label="Search",
        prepare=fill_limit,
        execute=search,
    ),
    AgentTool(
        ToolDefinition.from_model("delete_file", "Delete a file for good.", DeleteArgs),
        execute=delete,
        mode="sequential",  # any batch that it is in runs one call at a time
    ),
]


def before_tool_call(call: Call) -> Block | None:
    return Block("file deletion is disabled in this session") if call.args.get("path") == "/etc/hosts" else None


def show(event: Event) -> None:
    if event.type == "tool_execution_update":
        print(f"  ToolUpdate {event.tool}: {event.update['details']}")
    elif event.type == "tool_execution_end" and event.result is not None:
        print(f"  ToolEnd {event.tool}: details {event.result.details}, is_error {event.is_error}")


model = ScriptedModel(
    [
        calls(("search_docs", {"query": "hooks", "limit": "2"}), ("search_docs", {"query": ""})),
        calls(("delete_file", {"path": "/etc/hosts"}), ("delete_file", {"path": "/tmp/x"})),
        "I found two pages and deleted nothing.",
    ]
)
agent = Agent(model, tools=tools)  # parallel_tools=False runs every batch one call at a time
agent.registry.add_hook(before=before_tool_call)
agent.subscribe(show)
run = agent.run_sync("Tidy up.")
for message in run.messages:
    if message["role"] == "tool":
        print("the model read:", message["content"].partition("\n\n")[0].replace("\n", " | "))
print(run.content)
