"""Shows one class that is several tools. Its state is passed to it, and one of its tools needs approval."""

from typing import ClassVar

import anyio

from toolcell.tools import (
    Approve,
    Call,
    Deny,
    ToolContext,
    ToolDefinition,
    ToolOptions,
    ToolRegistry,
    ToolResult,
    approval_hook,
)

NAME = {"type": "object", "properties": {"name": {"type": "string", "description": "Which"}}, "required": ["name"]}
NO_ARGUMENTS = {"type": "object", "properties": {}}


class Widgets:
    """A shelf of widgets. Each instance has its own shelf."""

    options: ClassVar = {
        "widget_list": ToolOptions(read_only=True),
        "widget_delete": ToolOptions(requires_approval=True),
    }

    def __init__(self, shelf: set[str]) -> None:
        self.shelf = shelf

    def definitions(self) -> list[ToolDefinition]:
        return [
            ToolDefinition("widget_create", "Create a widget by name.", NAME),
            ToolDefinition("widget_list", "List all widgets.", NO_ARGUMENTS),
            ToolDefinition("widget_delete", "Delete a widget by name.", NAME),
        ]

    async def execute(self, ctx: ToolContext, name: str, args: dict[str, str]) -> ToolResult:
        match name:
            case "widget_create":
                self.shelf.add(args["name"])
            case "widget_delete" if args["name"] not in self.shelf:
                return ToolResult.fail(f"no widget {args['name']!r}", code="no_such_widget")
            case "widget_delete":
                self.shelf.remove(args["name"])
        return ToolResult.of(sorted(self.shelf))


def ask_the_user(call: Call) -> Approve | Deny:
    print(f"  may {call.name} touch {call.args['name']}?")
    return Deny("the user wants to keep 'gear'") if call.args["name"] == "gear" else Approve()


async def main() -> None:
    registry = ToolRegistry([Widgets({"gear"})])
    registry.add_hook(approval_hook(ask_the_user))
    for name, args in [
        ("widget_create", {"name": "bolt"}),
        ("widget_delete", {"name": "gear"}),
        ("widget_delete", {"name": "bolt"}),
        ("widget_list", {}),
    ]:
        result = await registry.execute(name, args)
        print(f"{name:14} {result.status:8} {result.text}")


anyio.run(main)
