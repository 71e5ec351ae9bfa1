"""Shows agentsm's own examples here: the builder, a raw tool, errors as data, a sub-agent and a blacklist."""

from typing import Any

from toolcell import Agent, ToolRegistry
from toolcell.compat import Err, Ok
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Tool

search = (
    Tool("search", "Search the web for current information.")
    .param("query", "string", "The search query")
    .param_opt("limit", "integer", "Max results (default 5)")
    .call(lambda args: f"Results for '{args['query']}' (limit {args.get('limit', 5)}): ...")
)
calculator = (
    Tool("calculator", "Multiply two numbers.")
    .param("left", "integer", "The first number")
    .param("right", "integer", "The second number")
    .call(lambda args: Ok(str(args["left"] * args["right"])))
)


def fetch(args: dict[str, Any]) -> Ok | Err:
    if args["url"].startswith("file://"):
        return Err(f"Cannot fetch local file URLs for security reasons: {args['url']}")
    return Ok("Page content here")


# ToolRegistry::new, register, len, has, execute
registry = ToolRegistry([search])
URL = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
registry.register("fetch", "Fetch a page of the web by its URL.", URL, fetch)
registry.register("delete_files", "Delete all files of the user.", None, lambda args: "never reached")
print(f"Registered {len(registry)} tools; has 'fetch'? {registry.has('fetch')}")
print(registry.execute_sync("fetch", {"url": "https://example.org"}).text)
print(sorted(registry.schemas()[0]))

# AgentBuilder::new("math").add_tool(calc_tool).as_tool(...)
math = Agent(ScriptedModel([calls(("calculator", {"left": 137, "right": 48})), "6576"]), tools=[calculator])

# AgentBuilder::new("task") with .tool, .add_subagent, .parallel_tools, .blacklist_tool, .build, .run
model = ScriptedModel(
    [
        calls(("fetch", {"url": "file:///etc/passwd"}), ("search", {"query": "rust"}), ("delete_files", {})),
        calls(("math_specialist", {"task": "137 * 48"})),
        "It is 6576.",
    ]
)
agent = Agent(model, tools=registry, parallel_tools=True, error_style="ERROR:", max_iterations=15)
agent.add_subagent(math.as_tool("math_specialist", "A specialist for complex mathematical proofs."))
agent.blacklist("delete_files")
run = agent.run_sync("How much is 137 times 48?")
for message in run.messages:
    if message["role"] == "tool":
        print("observation:", message["content"])
print(run.content, f"({run.iterations} steps, {run.stop_reason})")
