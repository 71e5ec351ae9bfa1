"""Shows an own source of tools: each named query on a SQLite database becomes a tool with typed parameters."""

import re
import sqlite3
from collections.abc import Mapping
from typing import Any

import anyio

from toolcell import Runtime, ToolContext, ToolDefinition, ToolRegistry, ToolResult
from toolcell.tools import ToolOptions

QUERIES = {
    "cities_over": ("Return cities with more inhabitants than this.", "SELECT name FROM city WHERE people > :people"),
    "people_in": ("Return how many people live in a city.", "SELECT people FROM city WHERE name = :name"),
}
TYPES = {"people": "integer", "name": "string"}


class Queries:
    """A registry takes any object with `definitions` and `execute`; `options` may say more of each tool."""

    def __init__(self, database: sqlite3.Connection, queries: Mapping[str, tuple[str, str]]) -> None:
        self.database, self.queries = database, queries
        self.options = {name: ToolOptions(read_only=True) for name in queries}

    def definitions(self) -> list[ToolDefinition]:
        return [ToolDefinition(name, text, schema_of(sql)) for name, (text, sql) in self.queries.items()]

    def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> ToolResult:
        """Run a query. The arguments have been checked against the schema."""
        try:
            rows = self.database.execute(self.queries[name][1], args).fetchall()
        except sqlite3.Error as error:
            return ToolResult.fail(f"the database refused the query: {error}", code="database")
        return ToolResult.of([row[0] for row in rows])


def schema_of(sql: str) -> dict[str, Any]:
    names = re.findall(r":(\w+)", sql)
    return {"type": "object", "properties": {name: {"type": TYPES[name]} for name in names}, "required": names}


async def main() -> None:
    database = sqlite3.connect(":memory:", check_same_thread=False)  # synchronous tools run in worker threads
    database.execute("CREATE TABLE city (name TEXT, people INTEGER)")
    database.executemany("INSERT INTO city VALUES (?, ?)", [("Oslo", 717_000), ("Bergen", 291_000), ("Bodø", 53_000)])

    async with Runtime(ToolRegistry([Queries(database, QUERIES)])) as runtime:
        for script in ("tools.people_in(name=tools.cities_over(people=500_000)[0])", "tools.people_in(city='Oslo')"):
            result = await runtime.execute_code(script)
            print(result.value if result.ok else result.error.message)


if __name__ == "__main__":
    anyio.run(main)
