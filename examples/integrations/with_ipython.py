"""Run cells of IPython in a sandbox, with a tool; a notebook's cells are the same.

Prints what the cells print and what they result in.
"""

from IPython.core.interactiveshell import InteractiveShell

from toolcell import SyncRuntime


def temperature(city: str) -> float:
    """Return the temperature of a city in degrees Celsius."""
    return {"Rome": 31.0, "Oslo": 17.5}[city]


shell = InteractiveShell.instance()
with SyncRuntime([temperature]) as runtime:
    shell.user_ns |= {"runtime": runtime, "cities": ["Rome", "Oslo"]}
    shell.run_line_magic("load_ext", "toolcell.integrations.ipython")
    shell.run_line_magic("toolcell", "runtime")
    shell.run_cell_magic("toolcell", "--inputs cities", "degrees = {city: tools.temperature(city) for city in cities}")
    shell.run_cell_magic("toolcell", "--to result", "print('warmest first')\nsorted(degrees, key=degrees.get)[::-1]")
    print(shell.user_ns["result"].value)
    shell.run_line_magic("unload_ext", "toolcell.integrations.ipython")
