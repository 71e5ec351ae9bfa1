"""Shows an agent with seven built-in packages: it searches the web, computes, keeps files, remembers and plans ahead.

It runs offline: the web is two pages in this file, and the model's answers are scripted. Needs
`pip install '.[builtin,data]'`.
"""

import tempfile

import anyio
import httpx

from toolcell import Runtime, ToolRegistry
from toolcell.agents import Agent
from toolcell.builtin import (
    DataTools,
    Files,
    HashEmbeddings,
    Http,
    Knowledge,
    Remember,
    Schedule,
    Scheduler,
    SqliteStore,
    WebPolicy,
    WebSearch,
)
from toolcell.builtin.web.engines import SearchHit
from toolcell.testing import ScriptedModel, calls

PAGES = {
    "/prices": "<h1>Heat pump prices</h1><p>A heat pump costs 14,000 euros, 8 % less than last year.</p>",
    "/sales.csv": "year,country,sold\n2025,France,310\n2025,Poland,120\n2026,France,290\n2026,Poland,180\n",
}


def answer(request: httpx.Request) -> httpx.Response:
    kind = "text/csv" if request.url.path.endswith(".csv") else "text/html"
    found = PAGES.get(request.url.path)
    return httpx.Response(404 if found is None else 200, text=found or "", headers={"Content-Type": kind})


class OwnEngine:
    async def search(self, query: str, count: int) -> list[SearchHit]:
        return [SearchHit("Heat pump prices", "https://pumps.example/prices", "What a heat pump costs today.")]


def make_registry(workspace: str) -> tuple[ToolRegistry, SqliteStore]:
    store, embeddings = SqliteStore(":memory:"), HashEmbeddings()  # or a file, and a model's embeddings
    web = {"policy": WebPolicy(interval_s=0), "transport": httpx.MockTransport(answer)}
    registry = ToolRegistry()
    registry.add(WebSearch(embeddings, OwnEngine(), **web))
    registry.add(Http(**web))
    registry.add(DataTools(workspace))
    registry.add(Files(workspace))
    registry.add(Remember(store, embeddings))
    registry.add(Knowledge(store, embeddings))
    registry.add(Schedule(store, timezone="Europe/Paris"))
    return registry, store


SCRIPT = """
table = call_tool("data_parse", content=call_tool("http_fetch", url="https://pumps.example/sales.csv")["body"])
totals = call_tool("data_aggregate", records=table["records"], group_by=["year"],
                   metrics=[{"column": "sold", "op": "sum"}])["groups"]
report = "\\n".join(f"{row['year']}: {row['sum_sold']} sold" for row in totals)
call_tool("file_write", path="report.txt", content=report)
call_tool("remember", content="Heat pumps sold, " + report.replace("\\n", ", ") + " (pumps.example)")
set_result(report)
"""

TURNS = [
    calls(("web_search", {"query": "heat pump price"})),
    calls(("execute_code", {"code": SCRIPT})),
    calls(
        ("knowledge_search", {"query": "heat pumps sold"}),
        (
            "schedule_create",
            {
                "description": "Read the prices again",
                "time": "07:30",
                "recurrence": "weekly",
                "day": "monday",
                "tools": [{"tool": "http_fetch", "params": {"url": "https://pumps.example/prices"}}],
            },
        ),
    ),
    "A heat pump costs 14,000 euros; 430 were sold in 2025 and 470 in 2026. I look again every Monday.",
]


async def main() -> None:
    with tempfile.TemporaryDirectory() as workspace:
        registry, store = make_registry(workspace)
        async with Runtime(registry) as runtime:
            agent = Agent(ScriptedModel(TURNS), tools=registry, code_execution=runtime)
            run = await agent.run("What do heat pumps cost, and how many are sold?")
            for message in run.messages:
                if message["role"] == "tool":
                    print("the model read:", message["content"].splitlines()[0])
            print("answer:", run.content)

            (action,) = await store.list_scheduled_actions()
            next_monday = Scheduler(runtime, store, clock=lambda: action.next_run)
            for made in await next_monday.run_due():
                print("on Monday:", made.status, made.detail[:60] + "...")


anyio.run(main)
