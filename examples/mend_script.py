"""Shows a repair: the mended script gets the answers of the calls that the broken one made, and makes none twice."""

import anyio

from toolcell import Runtime, ToolRegistry

registry = ToolRegistry()
sent: list[str] = []


@registry.tool
async def send_mail(to: str) -> int:
    """Send a mail, and return its number."""
    sent.append(to)
    return len(sent)


BROKEN = "ids = [call_tool('send_mail', to=name) for name in ('ada', 'bob')]\nids['ada']"
MENDED = "ids = {name: call_tool('send_mail', to=name) for name in ('ada', 'bob', 'eve')}\nids"


async def main() -> None:
    async with Runtime(registry) as runtime:
        broken = await runtime.execute_code(BROKEN)
        assert broken.error is not None
        print(broken.error.message, dict(broken.error.frames[-1].locals))
        fixed = await runtime.execute_code(MENDED, repairs=broken)
        assert fixed.repair is not None
        print(fixed.value, "reused:", len(fixed.repair.reused), "new:", len(fixed.repair.new))
        print("mails sent:", sent)


anyio.run(main)
