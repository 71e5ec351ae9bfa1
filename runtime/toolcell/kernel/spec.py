"""The kernelspec: what Jupyter knows of an installed kernel, and the command that starts it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from toolcell.errors import MissingPackage, UsageError

NAME: Final = "toolcell"
DISPLAY_NAME: Final = "Python (toolcell)"

INSTALLED_BY: Final = "--installed-by"
"""Flag with the command that has installed the kernel, so that cells can say how it is installed with more packages."""

_PASSWORD: Final = re.compile(r"(://[^/@\s:]*:)[^/@\s]*@")
"""In an address. The command is shown in notebooks."""

try:
    from jupyter_client.kernelspec import KernelSpecManager
except ModuleNotFoundError as exc:
    raise MissingPackage(f"a kernel needs {exc.name}, which is not installed: pip install 'toolcell[jupyter]'") from exc


def kernel_spec(arguments: Sequence[str], display_name: str = DISPLAY_NAME) -> dict[str, Any]:
    """Return the kernelspec of a kernel that is started with `arguments`.

    `-P`: Jupyter starts kernels in the folder of the notebook, whose modules must not be imported on the host.
    """
    return {
        "argv": [sys.executable, "-P", "-m", "toolcell", "kernel", "start", "-f", "{connection_file}", *arguments],
        "display_name": display_name,
        "language": "python",
        "interrupt_mode": "message",
        "metadata": {"debugger": False},
    }


def install(name: str, arguments: Sequence[str], *, display_name: str = DISPLAY_NAME, for_user: bool = False) -> Path:
    """Write the kernelspec where Jupyter finds it: for the user, or in this environment. Return its folder.

    Raises:
        UsageError: Jupyter knows no such names, or the folder cannot be written.
    """
    of_spec = ["--user"] * for_user + ["--name", name] * (name != NAME)
    of_spec += ["--display-name", display_name] * (display_name != DISPLAY_NAME)
    command = _PASSWORD.sub(r"\1...@", shlex.join(["toolcell", "kernel", "install", *arguments, *of_spec]))
    with tempfile.TemporaryDirectory() as folder:
        spec = kernel_spec([*arguments, INSTALLED_BY, command], display_name)
        (Path(folder) / "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        try:
            place = KernelSpecManager().install_kernel_spec(
                folder, name, user=for_user, prefix=None if for_user else sys.prefix
            )
        except (ValueError, OSError) as exc:
            raise UsageError(f"the kernel {name!r} cannot be installed: {exc}") from exc
    return Path(place)
