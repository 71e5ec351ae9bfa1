"""`jupyter_kernel_test`, which is Jupyter's own suite for kernels, against an installed kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jupyter_kernel_test
import pytest

from toolcell.kernel import spec

from .conftest import PATIENCE_S

pytestmark = [pytest.mark.isolation, pytest.mark.slow]


@pytest.fixture(scope="session", autouse=True)
def _installed(jupyter: Path) -> None:
    spec.install("toolcell", [], for_user=True)


class TestSuite(jupyter_kernel_test.KernelTests):
    """Every case of it applies.

    It gives a reply 15 seconds, of which the first one needs some for a sandbox, and each message a tenth of one, and takes
    what came in that time for all that the last test left. Here it waits for messages, and for the end of what was asked.
    """

    kernel_name = "toolcell"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = ({"text": "zi", "matches": {"zip"}},)
    complete_code_samples = ("1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n")
    incomplete_code_samples = ("print('''hello", "def f(x):\n  x*2")
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = (
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    )
    code_display_data = (
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('\\\\frac{1}{2}'))", "mime": "text/latex"},
    )
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    def flush_channels(self) -> None:
        """Read to the answer of a request of its own, which comes after all others."""
        ident = self.kc.kernel_info()
        self._read_to(self.kc.get_shell_msg, ident, "kernel_info_reply")
        self._read_to(self.kc.get_iopub_msg, ident, "status", execution_state="idle")

    def get_non_kernel_info_reply(self, timeout: float | None = None) -> Any:
        return super().get_non_kernel_info_reply(timeout=2 * PATIENCE_S)

    def execute_helper(self, *args: Any, **kwargs: Any) -> Any:
        channel = self.kc.iopub_channel
        read = channel.get_msg
        with patch.object(channel, "get_msg", lambda timeout: read(timeout=PATIENCE_S)):
            return super().execute_helper(*args, **kwargs)

    @staticmethod
    def _read_to(read: Callable[..., dict[str, Any]], ident: str, kind: str, **content: str) -> None:
        while True:
            message = read(timeout=PATIENCE_S)
            is_its = message["parent_header"].get("msg_id") == ident and message["msg_type"] == kind
            if is_its and content.items() <= message["content"].items():
                return
