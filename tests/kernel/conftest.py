"""A kernel as a front end has it: installed, started, and talked to over its channels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from toolcell.kernel import spec

PATIENCE_S = 60.0
INSTALLING_S = 240.0
"""How long the first cell of a kernel with packages may take, on a machine that installs them first."""
PACKAGES = (
    "--packages",
    "pandas,matplotlib,seaborn,scikit-learn,plotly,sympy,networkx,polars,duckdb,pillow,jinja2",
    "--memory-bytes",
    "4GiB",
)
"""For every kernel with large packages: they are installed once."""


@dataclass
class Shown:
    """What a cell showed, and its reply."""

    reply: dict[str, Any]
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Kind and content, in order; texts of one stream that came in a row are one."""

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [content for kind, content in self.messages if kind in kinds]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.messages]

    def text(self, stream: str = "stdout") -> str:
        return "".join(each["text"] for each in self.of("stream") if each["name"] == stream)

    @property
    def traceback(self) -> str:
        """Traceback of the last error, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.of("error")[-1]["traceback"]))

    @property
    def data(self) -> dict[str, Any]:
        (only,) = self.of("execute_result", "display_data")
        data: dict[str, Any] = only["data"]
        return data


class Notebook:
    """A front end with one kernel."""

    def __init__(self, name: str, folder: Path) -> None:
        self.manager = KernelManager(kernel_name=name)
        self.manager.start_kernel(cwd=str(folder))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=PATIENCE_S)
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel()

    def run(self, code: str, answers: Sequence[str] | None = None, **options: Any) -> Shown:
        """Execute a cell; `answers` are typed where it asks for something."""
        left = list(answers or ())
        self.asked: list[dict[str, Any]] = []

        def answer(message: dict[str, Any]) -> None:
            self.asked.append(message["content"])
            self.client.input(left.pop(0))

        ident = self.client.execute(code, allow_stdin=answers is not None, **options)
        return self.outcome_of(ident, answer)

    def outcome_of(self, ident: str, answer: Callable[[Any], None] | None = None) -> Shown:
        """Read what a cell shows, to its end."""
        shown = Shown({})
        while True:
            if answer is not None and self.client.stdin_channel.msg_ready():
                answer(self.client.get_stdin_msg(timeout=PATIENCE_S))
            if not self.client.iopub_channel.msg_ready():
                self.client.iopub_channel.socket.poll(20)
                continue
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") != ident:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind not in ("status", "execute_input"):
                _add(shown.messages, kind, content)
        shown.reply = self.reply_to(ident)
        return shown

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Send a request to the kernel, and return the content of its reply."""
        message = self.client.session.msg(kind, content)
        self.client.shell_channel.send(message)
        return self.reply_to(message["header"]["msg_id"])

    def ask_control(self, kind: str, **content: Any) -> dict[str, Any]:
        """Do the same on the control channel."""
        message = self.client.session.msg(kind, content)
        self.client.control_channel.send(message)
        return self._reply(self.client.get_control_msg, message["header"]["msg_id"])

    def reply_to(self, ident: str) -> dict[str, Any]:
        """Return the content of the reply to a request that was sent on the shell channel."""
        return self._reply(self.client.get_shell_msg, ident)

    @staticmethod
    def _reply(receive: Callable[..., dict[str, Any]], ident: str) -> dict[str, Any]:
        while True:
            reply = receive(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == ident:
                content: dict[str, Any] = reply["content"]
                return content

    def begin(self, code: str) -> str:
        """Execute a cell that prints `go`, and return its id when it has."""
        ident: str = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["msg_type"] == "stream" and "go" in message["content"]["text"]:
                return ident

    def begin_held(self, code: str, **options: Any) -> str:
        """Execute a cell that asks for an answer before this code. Return its id when it asks: what is sent then comes
        while it runs, and `client.input` lets it go on."""
        ident: str = self.client.execute(f"input()\n{code}", allow_stdin=True, **options)
        self.client.get_stdin_msg(timeout=PATIENCE_S)
        return ident


def _add(messages: list[tuple[str, dict[str, Any]]], kind: str, content: dict[str, Any]) -> None:
    if kind == "stream" and messages and messages[-1][0] == kind and messages[-1][1]["name"] == content["name"]:
        content = {**content, "text": messages[-1][1]["text"] + content["text"]}
        messages.pop()
    messages.append((kind, content))


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of Jupyter and IPython that only these tests use."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home / name.lower()))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        yield home


@pytest.fixture(scope="session")
def notebooks(jupyter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Notebook]]:
    """Start kernels that were installed with some arguments."""
    opened: list[Notebook] = []

    def start(*arguments: str, folder: Path | None = None) -> Notebook:
        name = f"toolcell-{len(opened)}"
        spec.install(name, arguments, for_user=True)
        opened.append(Notebook(name, folder or tmp_path_factory.mktemp("notebook")))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture(scope="session")
def with_tools(notebooks: Callable[..., Notebook]) -> Notebook:
    """A kernel with the tools of `tools.py`. Its tests leave each other's names alone."""
    return notebooks("--tools", str(Path(__file__).with_name("tools.py")))


@pytest.fixture(scope="session")
def plain(notebooks: Callable[..., Notebook]) -> Notebook:
    """A kernel without arguments. Its tests leave each other's names alone."""
    return notebooks()
