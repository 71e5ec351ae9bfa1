"""Shows one run: a tool, a runtime, a model's script that calls the tool, and the result."""

import anyio

from toolcell import Limits, Runtime, ToolRegistry

registry = ToolRegistry()


@registry.tool
async def web_search(query: str, limit: int = 10) -> list[dict[str, object]]:
    """Search the web for current information."""
    return [{"title": f"{query} #{n}", "score": round(1 / (n + 1), 2)} for n in range(limit)]


SCRIPT = """
results = call_tool('web_search', {'query': 'Go frameworks'})
filtered = [r for r in results if r.get('score', 0) > 0.3]
print('kept', len(filtered), 'of', len(results))
set_result({'top_results': filtered})
"""


async def main() -> None:
    async with Runtime(registry, limits=Limits(wall_s=10, memory_bytes=256 << 20)) as runtime:
        result = await runtime.execute_code(SCRIPT)
    print("outcome:", result.outcome)
    print("result: ", result.value)
    print("printed:", result.logs.text.strip())
    for call in result.calls:
        print(f"called:  {call.name}({dict(call.args)}) on line {call.line}: {call.status}")
    print("layers: ", ", ".join(sorted(result.isolation.layers)))


anyio.run(main)
