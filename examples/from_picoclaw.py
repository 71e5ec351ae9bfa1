"""Shows picoclaw's own examples here: tools, results for model and user, contextual and async tools, the loop."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import anyio

from toolcell import ToolContext, ToolRegistry, ToolResult
from toolcell.agents import ToolLoopConfig, run_tool_loop, user
from toolcell.compat import execute_with_context, get_summaries, register_or_replace, to_for_llm
from toolcell.testing import ScriptedModel, calls

PATH = {"path": {"type": "string", "description": "Path to the file to read"}}
TEXT = {"text": {"type": "string", "description": "What to say"}}
FILES = {"/tmp/foo": "Hello from /tmp/foo\n"}


class ReadFile:
    name = "read_file"
    description = "Read the contents of a file at the given path."
    parameters: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": PATH, "required": ["path"]}

    async def execute(self, ctx: ToolContext, args: dict[str, str]) -> ToolResult:
        if args["path"] not in FILES:
            return ToolResult.fail("no such file").with_error(FileNotFoundError(args["path"]))
        return ToolResult.ok(FILES[args["path"]])


class Message:
    """A ContextualTool: it is told the conversation of each call."""

    name = "message"
    description = "Send a message to the user's chat."
    parameters: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": TEXT, "required": ["text"]}

    def set_context(self, channel: str, chat_id: str) -> None:
        self.chat = f"{channel}:{chat_id}"

    async def execute(self, ctx: ToolContext, args: dict[str, str]) -> ToolResult:
        print(f"  sent to {self.chat}: {args['text']}")
        return ToolResult.silenced("message sent")


class Report:
    """An AsyncTool: it returns at once, and calls back."""

    name = "report"
    description = "Write a report in the background."
    parameters: ClassVar[Mapping[str, Any]] = {"type": "object", "properties": {}}

    def set_callback(self, callback: Callable[[ToolResult], None]) -> None:
        self.callback = callback

    async def execute(self, ctx: ToolContext, args: dict[str, str]) -> ToolResult:
        self.callback(ToolResult.user("The report is ready."))
        return ToolResult.async_("Report started, will report back")


async def main() -> None:
    registry = ToolRegistry()
    for tool in (ReadFile(), Message(), Report()):
        register_or_replace(registry, tool)
    print(registry.count(), registry.list(), get_summaries(registry)[0])
    print(to_for_llm(await registry.execute("read_file", {"path": "/none"})))

    done = anyio.Event()

    def on_done(context: Any, result: ToolResult) -> None:
        print("  called back:", result.text)
        done.set()

    acknowledged = await execute_with_context(registry, "report", {}, "telegram", "42", on_done)
    print(to_for_llm(acknowledged))
    await done.wait()

    model = ScriptedModel(
        [calls(("read_file", {"path": "/tmp/foo"}), ("message", {"text": "reading"})), "It says hello."]
    )
    config = ToolLoopConfig(provider=model, model="gpt-4o", tools=registry, max_iterations=5)
    result = await run_tool_loop(config, [user("What is in /tmp/foo?")], "telegram", "42")
    print(result.messages[-3])
    print(result.content, f"({result.iterations} rounds)")


anyio.run(main)
