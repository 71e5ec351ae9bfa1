"""Shows an agent that repairs its own script: it reads the variables, and the calls that were made are not repeated."""

import anyio

from toolcell import Agent, Runtime, ToolRegistry
from toolcell.testing import ScriptedModel, calls

registry = ToolRegistry()
sent: list[str] = []


@registry.tool
async def send_mail(to: str) -> dict[str, str | int]:
    """Send a mail, and return its number."""
    sent.append(to)
    return {"to": to, "number": len(sent)}


BROKEN = "mails = [call_tool('send_mail', to=name) for name in ('ada', 'bob')]\nsum(mail['id'] for mail in mails)"
MENDED = BROKEN.replace("'id'", "'number'")
model = ScriptedModel(
    [  # in the place of a model: it reads what went wrong, and mends the script
        calls(("execute_code", {"code": BROKEN})),
        calls(("execute_code", {"code": MENDED})),
        "Both mails are sent.",
    ]
)


async def main() -> None:
    async with Runtime(registry) as runtime:
        agent = Agent(model, tools=registry, code_execution=runtime, repair=True)
        result = await agent.run("Send a mail to Ada and Bob.")
    for message in result.messages:
        if message["role"] == "tool":
            print(message["content"], end="\n\n")
    print(result.content, sent)
    assert sent == ["ada", "bob"]


anyio.run(main)
