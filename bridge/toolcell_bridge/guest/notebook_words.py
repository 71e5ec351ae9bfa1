"""What the kernel of a notebook and the shell in its sandbox call what they exchange."""

from __future__ import annotations

from typing import Final

NOTEBOOK_SHELL: Final = "toolcell_bridge.guest.notebook"
"""The module that has the shell. It needs IPython."""

CELL: Final = "_toolcell_cell"
"""Name of the input that says what the kernel asks for."""

SHOWN: Final = "toolcell_notebook"
"""Key of a dict that is reported as progress, with the kind of what the kernel is to pass on."""

NOTEBOOK_INPUT: Final = "notebook_input"
"""The tool that asks the person at the notebook."""
