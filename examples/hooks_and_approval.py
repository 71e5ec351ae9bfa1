"""Shows rules that hold for a model, a plan and code alike: a hook, an approval and a blacklist."""

import anyio

from toolcell import Runtime
from toolcell.tools import Approve, Block, Call, Deny, Edit, ToolRegistry, approval_hook

registry = ToolRegistry()


@registry.tool(requires_approval=True)
async def send_money(to: str, euros: int) -> str:
    """Send money to somebody."""
    return f"{euros} euros sent to {to}"


@registry.tool
async def delete_file(path: str) -> str:
    """Delete a file for good."""
    return f"{path} is gone"


@registry.tool
async def shell_exec(command: str) -> str:
    """Run a command in a shell."""
    return f"ran {command}"


@registry.before_call
def block_deletion(call: Call) -> Block | None:
    return Block("file deletion is disabled in this session") if call.name == "delete_file" else None


def ask_the_user(call: Call) -> Approve | Deny | Edit:
    if call.args["to"] == "mallory":
        return Deny("not to mallory")
    return Edit({**call.args, "euros": 100}) if call.args["euros"] > 100 else Approve()


registry.add_hook(approval_hook(ask_the_user))
registry.blacklist("shell_*")

SCRIPT = """
for name, args in [('send_money', {'to': 'mallory', 'euros': 5}), ('delete_file', {'path': '/tmp/x'})]:
    try:
        print(call_tool(name, args))
    except ToolError as exc:
        print(name, 'refused:', exc)
"""


async def main() -> None:
    registry.enable_plan_execution()
    for args in ({"to": "ada", "euros": 5}, {"to": "ada", "euros": 5000}, {"to": "mallory", "euros": 1}):
        print("model:", (await registry.execute("send_money", args)).text)
    steps = [{"tool": "shell_exec", "args": {"command": "ls"}}, {"tool": "delete_file", "args": {"path": "/tmp/x"}}]
    for row in (await registry.execute("execute_plan", {"steps": steps})).value:
        print("plan: ", row["tool"], "refused:", row["error"])
    async with Runtime(registry) as runtime:
        print("code: ", (await runtime.execute_code(SCRIPT)).logs.text.strip().replace("\n", "\ncode:  "))


anyio.run(main)
