"""Shows Oasis's own examples here: a tool of several functions, a registry, a plan, and code that filters a search."""

import json

from toolcell import Agent, Runtime, ToolContext, ToolDefinition, ToolRegistry, ToolResult
from toolcell.compat import to_content_error
from toolcell.testing import ScriptedModel, calls

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "City name (e.g. 'Jakarta', 'New York')"}},
    "required": ["city"],
}
QUERY = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "Search query"},
        "limit": {"type": "integer", "description": "Max results (default 10)"},
    },
    "required": ["query"],
}


class Weather:
    def __init__(self, api_key: str) -> None:
        self.api_key = api_key

    def definitions(self) -> list[ToolDefinition]:
        return [ToolDefinition("get_weather", "Get current weather for a city.", CITY)]

    async def execute(self, ctx: ToolContext, name: str, args: dict[str, str]) -> ToolResult:
        if args["city"] == "Atlantis":
            return ToolResult.fail("city not found: " + args["city"])  # a business error, and no exception
        return ToolResult.ok(f"Weather in {args['city']}: 28°C, sunny")


class Search:
    def definitions(self) -> list[ToolDefinition]:
        return [ToolDefinition("web_search", "Search the web for information.", QUERY)]

    async def execute(self, ctx: ToolContext, name: str, args: dict[str, str]) -> ToolResult:
        rows = [{"title": f"{args['query']} #{n}", "score": 0.95 - n / 10} for n in range(3)]
        return ToolResult.ok(json.dumps(rows))  # text that is JSON: a script gets it as data


# NewToolRegistry, Add, AllDefinitions, Execute
registry = ToolRegistry()
registry.add(Weather("weather-api-key"))
registry.add(Search())
print([definition.name for definition in registry.definitions()])
for city in ("Jakarta", "Atlantis"):
    print(to_content_error(registry.execute_sync("get_weather", {"city": city})))

# NewLLMAgent with WithTools, WithPlanExecution and WithCodeExecution
STEPS = [{"tool": "web_search", "args": {"query": query}} for query in ("Go errors", "Go testing")]
CODE = """
results = call_tool('web_search', {'query': 'Go frameworks'})
filtered = [r for r in results if r.get('score', 0) > 0.8]
set_result({'top_results': filtered})
"""
model = ScriptedModel([calls(("execute_plan", {"steps": STEPS})), calls(("execute_code", {"code": CODE})), "Done."])
agent = Agent(model, name="researcher", tools=registry, plan_execution=True, code_execution=Runtime(registry))
run = agent.run_sync("Research Go.")
for step in run.steps:
    print(f"{step.name}: {step.output}")
print(run.content)
