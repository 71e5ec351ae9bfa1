"""Tools of a kernel in tests."""

from toolcell import ToolRegistry

registry = ToolRegistry()


@registry.tool
def temperature(city: str) -> float:
    """Return the temperature of a city in degrees Celsius."""
    return {"Rome": 31.0}[city]


@registry.tool(requires_approval=True)
def send_mail(to: str, text: str) -> str:
    """Send a mail to somebody, after a person has approved it."""
    return f"sent to {to}"
