"""Run cells of a notebook as IPython does: its shell is here, in the sandbox.

The host's kernel only passes things on. What is shown goes to the host as progress. What is asked of the person at the
notebook is a call of a tool.
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import contextlib
import getpass
import html
import json
import os
import re
import shlex
import sys
import types
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

from IPython.core import page
from IPython.core.async_helpers import get_asyncio_loop
from IPython.core.compilerop import CachingCompiler
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.text import LSString, SList
from IPython.utils.tokenutil import token_at_cursor
from traitlets import Type
from traitlets.config import Config

from toolcell_bridge.guest import event_loop, files, interrupts, surroundings, tracebacks, workspace_commands
from toolcell_bridge.guest.errors import blocked, cure_of, installed, sendable
from toolcell_bridge.guest.notebook_words import NOTEBOOK_INPUT, SHOWN
from toolcell_bridge.guest.script_end import write_out_files
from toolcell_bridge.guest.scripts import SCRIPTS
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge

PLACES: Final = {
    "IPYTHONDIR": "/tmp/.ipython",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "MPLCONFIGDIR": "/tmp/.matplotlib",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
"""So that the workspace holds nothing but the notebook's files, and figures are shown in their cell."""

MOST_COMPLETIONS: Final = 500

INSTALLERS: Final = ("pip", "pip3", "conda", "mamba", "micromamba", "uv")
OF_INSTALLERS: Final = frozenset({"pip", "setuptools", "wheel", "uv"})
"""What notebooks upgrade before they install something."""

WITH_VALUES: Final = re.compile(
    r"-[cefinprt]|--(channel|constraint|editable|extra-index-url|file|find-links|index-url|name|prefix|requirement|target)"
)
"""Options of installers that take the next word."""

END_OF_INPUT: Final = "\x04"

MARKDOWN: Final = "text/markdown"
"""Shown as HTML, of which the host knows what is harmless."""

STAYS_HERE: Final = (
    "was written to the sandbox's workspace. What cells write stays there, unless the kernel is installed with --save: "
    "then it is copied to the notebook's folder"
)

WRITE_FILES: Final = frozenset({"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"})
"""Backends of matplotlib that need no window."""

NO_COMMS: Final = (
    "widgets need a comm, which is code in the browser that this kernel does not talk to; print(), display() with "
    "display_id=True, and tqdm work"
)


def begin(chosen_by: str, is_back: bool, tells_files: bool) -> None:
    """Make the shell of this sandbox.

    `chosen_by`: the command with which packages are chosen. `is_back`: the notebook's state is that of another sandbox.
    `tells_files`: what cells write stays here, and the first one that writes something says so.
    """
    os.environ.update(PLACES)
    for name, change in CHANGES.items():
        surroundings.CHANGES[name] = change
        if name in sys.modules:
            change(sys.modules[name])
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules are found in the current folder, also after %cd
    SCRIPTS.chosen_by = chosen_by
    SCRIPTS.run_cell = ShellRequests(is_back and not tells_files, tells_files).run


class ShellRequests:
    """Answers what the kernel asks: to execute a cell, to complete or explain a name, whether a cell is complete."""

    def __init__(self, is_back: bool, tells_files: bool) -> None:
        self._tells_files = tells_files
        self._shell: ZMQInteractiveShell | None = None
        self._given: dict[str, Any] = {}
        """Tools that are names in cells."""
        # Which files the last cell in the other sandbox has changed is not known: the host compares them all.
        self._versions = {} if is_back else files.find_versions(["."], SCRIPTS.workspace)

    def run(
        self,
        source: str,
        namespace: dict[str, Any],
        names: Mapping[str, Any],
        asked: dict[str, Any],
        own_interrupts: interrupts.Interrupts,
    ) -> None:
        """Answer one request. `names`: of the sandbox itself, as they are for this script.

        Raises:
            BaseException: what the cell raised, when it was shown.
        """
        shell = self._shell_in(namespace)
        shell.report, shell.call_tool, shell.interrupts = names["progress"], names["call_tool"], own_interrupts
        shell.install_package = names["install_package"]
        builtins.__dict__["display"] = shell.display
        shell.user_ns_hidden |= names
        answers: dict[str, Callable[..., object]] = {
            "complete": self._complete,
            "inspect": self._inspect,
            "is_complete": self._is_complete,
            "finish": self._finish,
        }
        if asked["kind"] != "execute":
            if asked["kind"] == "changed_files":
                if changed := self._changed_files():
                    names["set_result"](None, changed)
            else:
                shell.send("reply", content=answers[asked["kind"]](shell, source, asked))
            return
        if namespace.get("__file__") == names["__file__"]:
            del namespace["__file__"]  # by which programs know a notebook
        self._give_tools(shell, namespace, names["tools"])
        try:
            self._execute(shell, source, asked)
        finally:
            if self._tells_files and (changed := self._changed_files()):
                self._tells_files = False
                sys.stderr.write(f"[toolcell] {changed[0]!r:.100} {STAYS_HERE}\n")

    def _shell_in(self, namespace: dict[str, Any]) -> ZMQInteractiveShell:
        if self._shell is None:
            module: Any = sys.modules["__main__"]
            before = dict(namespace)
            self._shell = ZMQInteractiveShell.instance(user_module=module, user_ns=namespace, config=CONFIG)
            self._shell.go_on_from(before)
            if "matplotlib" in sys.modules:  # imported ahead, for another place to show figures in
                self._shell.enable_matplotlib("inline")
        return self._shell

    def _give_tools(self, shell: ZMQInteractiveShell, namespace: dict[str, Any], tools: Any) -> None:
        """Make the tools names of the notebook, but for those to which it has given a value."""
        for name in SCRIPTS.tools.split():
            first = name.partition(".")[0]
            if first == NOTEBOOK_INPUT or not first.isidentifier() or hasattr(builtins, first):
                continue
            if first not in namespace or namespace[first] is self._given.get(first):
                namespace[first] = self._given[first] = shell.user_ns_hidden[first] = getattr(tools, first)

    @staticmethod
    def _execute(shell: ZMQInteractiveShell, source: str, asked: dict[str, Any]) -> None:
        shell.execution_count, shell.may_ask, shell.cut_short = asked["count"], asked["may_ask"], None
        shell.value_error = shell.cancelled = None
        for cells in (shell.history_manager.input_hist_parsed, shell.history_manager.input_hist_raw):
            cells += [""] * (asked["count"] - len(cells))  # those of a sandbox that was lost
        shell.payload_manager.clear_payload()
        hook = sys.excepthook
        asyncio.set_event_loop(get_asyncio_loop())  # for tasks that a cell without `await` makes
        asyncio.create_task = asyncio.tasks.create_task = _create_task
        try:
            result = shell.run_cell(source, store_history=asked["is_kept"], silent=asked["is_silent"])
        finally:
            sys.excepthook = hook  # IPython leaves its own when an `await` is interrupted
        error = result.error_before_exec or result.error_in_exec or shell.value_error
        wanted = asked["expressions"] if error is None else {}
        payload = shell.payload_manager.read_payload()
        values = shell.user_expressions(wanted)
        shell.send("reply", content={"payload": payload, "user_expressions": values, "is_error": error is not None})
        if error is not None:
            raise error.with_traceback(_of_cell(error.__traceback__))

    def _changed_files(self) -> list[str]:
        write_out_files()
        before, self._versions = self._versions, files.find_versions(["."], SCRIPTS.workspace)
        return [name for name, version in self._versions.items() if before.get(name) != version]

    @staticmethod
    def _finish(shell: ZMQInteractiveShell, _source: str, _asked: dict[str, Any]) -> dict[str, Any]:
        """Show what the last cell had no time for when it was interrupted."""
        cut_short, shell.cut_short = shell.cut_short, None
        if cut_short is not None:
            shell.showtraceback(cut_short)
            shell.events.trigger("post_execute")
        return {}

    @staticmethod
    def _complete(shell: ZMQInteractiveShell, source: str, asked: dict[str, Any]) -> dict[str, Any]:
        at = asked["at"]
        with provisionalcompleter():
            found = list(rectify_completions(source, shell.Completer.completions(source, at)))[:MOST_COMPLETIONS]
        kinds = [{"start": each.start, "end": each.end, "text": each.text, "type": each.type} for each in found]
        start, end = (found[0].start, found[0].end) if found else (at, at)
        return {
            "matches": [each.text for each in found],
            "cursor_start": start,
            "cursor_end": end,
            "metadata": {"_jupyter_types_experimental": kinds},
        }

    @staticmethod
    def _inspect(shell: ZMQInteractiveShell, source: str, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            found = shell.object_inspect_mime(
                token_at_cursor(source, asked["at"]), detail_level=asked["detail"], omit_sections=asked["omit"]
            )
        except KeyError:
            return {"found": False, "data": {}, "metadata": {}}
        return {"found": True, "data": {"text/plain": found["text/plain"]}, "metadata": {}}

    @staticmethod
    def _is_complete(shell: ZMQInteractiveShell, source: str, _asked: dict[str, Any]) -> dict[str, Any]:
        status, blanks = shell.input_transformer_manager.check_complete(source)
        return {"status": status} | ({"indent": " " * blanks} if status == "incomplete" else {})


class AsyncioRunner:
    """Runs a cell that awaits."""

    def __call__(self, cell: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell to its end."""
        loop, shell = get_asyncio_loop(), ZMQInteractiveShell.instance()
        if loop.is_running():  # and a cell in a cell is refused
            return loop.run_until_complete(cell)
        result = event_loop.run(loop, cell, shell.interrupts, shell.note_interrupt)
        if shell.cancelled is not None and isinstance(result.error_in_exec, asyncio.CancelledError):
            result.error_in_exec = shell.cancelled
        return result

    def __str__(self) -> str:
        """Return what %autoawait calls it."""
        return "asyncio"


class CellCompiler(CachingCompiler):
    """Names the code of a cell as the sandbox names a script, so that both know its lines."""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the name of the code of the script that runs."""
        return SCRIPTS.current


class Publisher(DisplayPublisher):
    """Sends what `display` shows."""

    def publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        """Show something, or show it in place of what has the same display id."""
        kind = "update_display_data" if update else "display_data"
        self.shell.send_shown(kind, data, metadata or {}, transient=transient or {})

    def clear_output(self, wait: bool = False) -> None:
        """Remove what the cell has shown; with `wait`, when it shows something else."""
        self.shell.send("clear_output", wait=bool(wait))


class ResultHook(DisplayHook):
    """Sends the value of a cell's last expression."""

    _shown: tuple[Any, Any] = ({}, {})

    def __call__(self, result: Any = None) -> None:
        """Show a value. A cell whose value cannot be shown has failed."""
        self.shell.is_showing_value = True
        try:
            super().__call__(result)
        finally:
            self.shell.is_showing_value = False

    def start_displayhook(self) -> None:
        """Begin with nothing."""
        self._shown = {}, {}

    def write_output_prompt(self) -> None:
        """Write nothing: the number is the kernel's."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Take all forms of the value."""
        self._shown = format_dict, md_dict or {}

    def finish_displayhook(self) -> None:
        """Send them."""
        data, metadata = self._shown
        if data:
            self.shell.send_shown("execute_result", data, metadata)
        self._shown = {}, {}


class ZMQInteractiveShell(InteractiveShell):
    """IPython's shell, which shows and asks by way of the host.

    Libraries know a notebook by the name of this class, which is ipykernel's, and by `kernel`.
    """

    kernel = None
    loop_runner_map = InteractiveShell.loop_runner_map | {"asyncio": (AsyncioRunner(), True)}
    displayhook_class = Type(ResultHook)
    display_pub_class = Type(Publisher)
    compiler_class = Type(CellCompiler)
    report: Callable[..., None]
    call_tool: Callable[..., Any]
    install_package: Callable[[str], None]
    interrupts: interrupts.Interrupts
    may_ask = False
    cut_short: tuple[Any, Any, Any] | None = None
    """The KeyboardInterrupt that has ended the last cell, until it is shown."""
    cancelled: KeyboardInterrupt | None = None
    """The interrupt for which the cell was cancelled."""
    is_showing_value = False
    value_error: BaseException | None = None
    """What the value of the cell raised when it was to be shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loop_runner = "asyncio"
        self.display = builtins.__dict__["display"]
        builtins.input = self.ask
        getpass.getpass = lambda prompt="Password: ", stream=None, **_: self.ask(prompt, is_password=True)

    def go_on_from(self, before: Mapping[str, Any]) -> None:
        """Take the cells and values of a shell in another sandbox, of which `before` has the names."""
        cells, values = before.get("_ih"), before.get("_oh")
        if isinstance(cells, list) and isinstance(values, dict):
            history, hook = self.history_manager, self.displayhook
            history.input_hist_parsed[:] = history.input_hist_raw[:] = cells
            history.output_hist.update(values)
            for name in ("_", "__", "___"):
                self.user_ns[name] = hook.__dict__[name] = before.get(name, "")

    # To the host.

    def send(self, kind: str, **content: Any) -> None:
        """Send something to the kernel."""
        try:
            self.report({SHOWN: kind, **content})
        except UnsendableValue:
            self.report({SHOWN: kind, **sendable(content)})

    def send_shown(self, kind: str, data: Mapping[str, Any], metadata: Mapping[str, Any], **more: Any) -> None:
        """Send a value in all its forms; of what is too large, only its text."""
        forms = {mime: _plain(form) for mime, form in data.items()}
        if isinstance(text := forms.pop(MARKDOWN, None), str):
            forms.setdefault("text/html", rendered_markdown(text))
        try:
            self.send(kind, data=forms, metadata=_plain(metadata), **_plain(more))
        except (ValueTooLarge, UnsendableValue) as exc:
            sys.stderr.write(f"[toolcell] of an output, only its text is shown: {exc}\n")
            self.send(kind, data={"text/plain": str(forms.get("text/plain", ""))[:10_000]}, metadata={}, **_plain(more))

    def ask(self, prompt: object = "", *, is_password: bool = False) -> Any:
        """Ask the person at the notebook, as `input` does."""
        if not self.may_ask:
            raise StdinNotImplementedError("input() was called, and whoever runs this notebook answers no questions")
        sys.stdout.flush()
        given = self.call_tool(NOTEBOOK_INPUT, {"prompt": str(prompt), "is_hidden": is_password})
        answer = given["password" if is_password else "text"]
        if answer == END_OF_INPUT:
            raise EOFError
        return answer

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        """Show an exception. An interrupted script has to end at once to keep its names, so its own is shown later."""
        kind, error, _ = found = exc_tuple or sys.exc_info()
        if isinstance(error, asyncio.CancelledError) and self.cancelled is not None:
            kind, error, _ = found = KeyboardInterrupt, self.cancelled.with_traceback(found[2]), found[2]
        if self.is_showing_value:
            self.value_error = error
        if exc_tuple is None and kind is KeyboardInterrupt:
            self.interrupts.is_allowed, self.cut_short = False, found
            _cut_own_frames(found[2])
        else:
            if error is not None and (cure := cure_of(error, _text(error))):
                error.add_note(cure.removeprefix("; "))
            if error is not None and _has_group(error):  # of which IPython prints the text only
                text = tracebacks.format_exception(error, traceback=_of_cell(error.__traceback__))
                self._showtraceback(kind, error, text.splitlines())
            else:
                super().showtraceback(exc_tuple, *args, **options)

    def show_usage_error(self, exc: BaseException) -> None:
        """Show it as any error: what runs a notebook without a person knows of no other ones."""
        self._showtraceback(type(exc), exc, [f"UsageError: {exc}"])

    def note_interrupt(self, error: KeyboardInterrupt) -> None:
        """The cell is cancelled for this."""
        self.cancelled = error

    def _tee(self, channel: str) -> contextlib.AbstractContextManager[None]:
        """Keep nothing of what is printed: the front end does, and each print would become several messages."""
        return contextlib.nullcontext()

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """Keep no traceback with the history: it would be made for every error a second time."""
        return {"ename": type(exception).__name__, "evalue": _text(exception), "traceback": []}

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        self.send("error", ename=str(etype.__name__), evalue=_text(evalue), traceback=list(map(str, stb)))

    def set_next_input(self, text: str, replace: bool = False) -> None:
        """Offer a text as the next cell."""
        self.payload_manager.write_payload({"source": "set_next_input", "text": text, "replace": replace})

    def ask_exit(self) -> None:
        """Ask the front end to end the notebook's kernel."""
        self.payload_manager.write_payload({"source": "ask_exit", "keepkernel": False})

    def show_page(self, text: Any, start: int = 0, *_: Any, **__: Any) -> None:
        """Show a text in the front end's pager."""
        data = {"text/plain": text["text/plain"] if isinstance(text, dict) else text}
        self.payload_manager.write_payload({"source": "page", "data": data, "start": max(0, start)})

    # What there is not in a sandbox.

    def init_environment(self) -> None:
        """Change nothing: there are no programs to set variables for."""

    def init_virtualenv(self) -> None:
        """Look for none."""

    def init_events(self) -> None:
        """Leave what follows a cell, such as drawing its figures, for later when it was interrupted."""
        super().init_events()
        trigger = self.events.trigger

        def trigger_unless_cut_short(event: str, *args: Any) -> None:
            if self.cut_short is None or not event.startswith("post_"):
                trigger(event, *args)

        self.events.trigger = trigger_unless_cut_short

    def init_hooks(self) -> None:
        """Have texts paged by the front end."""
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(self.show_page), 99)

    def init_magics(self) -> None:
        """Replace the magics that would start a program."""
        super().init_magics()
        for name in INSTALLERS:
            self.register_magic_function(partial(self._do_without_program, "%", name), "line", name)
        for name in (*self.magics_manager.registry["ScriptMagics"].magics["cell"], "edit", "ed"):
            self.register_magic_function(partial(self._do_without_program, "%%", name), "line_cell", name)

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: figures are shown in their cell."""

    def enable_matplotlib(self, gui: Any = None) -> Any:
        """Show figures in their cell, whatever is asked for: there is no window, and no comm."""
        return super().enable_matplotlib("inline")

    def system(self, cmd: str) -> None:
        """Print what a command prints that needs no program; refuse every other one."""
        sys.stdout.write(self._printed(self.var_expand(cmd, depth=1)))

    system_raw = system_piped = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Return what such a command prints."""
        text = self._printed(self.var_expand(cmd, depth=depth + 1))
        return SList(text.splitlines()) if split else LSString(text)

    def _do_without_program(self, mark: str, name: str, line: str, cell: str = "") -> None:
        sys.stdout.write(self._printed(f"{name} {line}", mark))

    def _printed(self, line: str, mark: str = "!") -> str:
        """Return what a command prints. `mark`: what stands before it in the cell.

        Raises:
            UsageError: a program would have to be started.
        """
        if self._has_installed(line):
            return ""
        try:
            text, self.user_ns["_exit_code"] = workspace_commands.run(line)
        except workspace_commands.NotKnown:
            raise UsageError(
                f"{f'{mark}{line}'.strip()[:80]}: {blocked()}; of commands after !, the usual options of "
                f"{', '.join(workspace_commands.COMMANDS)} work"
            ) from None
        return text

    def _has_installed(self, line: str) -> bool:
        """Do what an installer would, if the line is for one."""
        words = line.split()
        at = words.index("install") if "install" in words[:5] else 0
        if not any(word.rpartition("/")[2] in INSTALLERS for word in words[:at]):
            return False
        self._install(_requirements(words[at + 1 :]))
        return True

    def _install(self, names: list[str]) -> None:
        """Do what pip would, as far as it is possible: say what is there, and have the host install what it allows."""
        missing = []
        for name in names:
            if name in OF_INSTALLERS:
                said = f"{name} is not needed here: the packages are chosen with the kernel"
            elif version := installed(name):
                said = f"Requirement already satisfied: {name} ({version})"
            elif SCRIPTS.may_send:
                self.install_package(name)
                said = f"Successfully installed {name}"
            else:
                missing.append(name)
                continue
            sys.stdout.write(f"{said}\n")
        if missing or not names:
            raise UsageError(
                "a sandbox has no network, so pip installs nothing from a cell. Its packages are chosen with the "
                f"kernel: {SCRIPTS.chosen_by} --packages {shlex.quote(','.join(missing or ['NAME']))}; with "
                f"--allow-package {(missing or ['NAME'])[0]}, a cell may install it"
            )


CONFIG: Final = Config(
    {
        "HistoryManager": {"enabled": False},
        "InteractiveShell": {"banner1": "", "autoindent": False},
    }
)


def _has_group(error: BaseException) -> bool:
    found: BaseException | None = error
    while found is not None and not isinstance(found, BaseExceptionGroup):
        found = found.__context__
    return found is not None


def _requirements(words: list[str]) -> list[str]:
    """Return what is to be installed, of the words after `install` and the files that they name."""
    names: list[str] = []
    left = iter(words)
    for word in left:
        if word.startswith("-"):
            value = next(left, "") if WITH_VALUES.fullmatch(word) else ""
            if word in ("-r", "--requirement"):
                with open(value, encoding="utf-8") as file:
                    names += [line for each in file if (line := each.partition("#")[0].strip()) and line[0] != "-"]
        elif name := word.strip("'\""):
            names.append(name)
    return names


def _of_cell(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the frames of the cell and what it called. Those of the shell tell a model nothing, and take long."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename != SCRIPTS.current:
        traceback = traceback.tb_next
    return traceback


def _cut_own_frames(traceback: types.TracebackType | None) -> None:
    """Take the frames of the harness, which has raised the KeyboardInterrupt, from its end."""
    while traceback is not None and (after := traceback.tb_next) is not None:
        if after.tb_frame.f_code.co_filename == interrupts.__file__:
            traceback.tb_next = None
        traceback = traceback.tb_next


def _plain(value: Any) -> Any:
    """Return a form of a value as the wire takes it: bytes as base64, everything else as JSON does."""
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, str):
        return sendable(value)
    return json.loads(json.dumps(value, default=str))


def rendered_markdown(markdown: str) -> str:
    """Return Markdown as HTML, with its formulas as they are."""
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    def formula(text: str, options: dict[str, Any]) -> str:
        sign = "$$" if options["display_mode"] else "$"
        return html.escape(f"{sign}{text}{sign}")

    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"]).use(dollarmath_plugin, renderer=formula)
    return str(parser.render(markdown))


def _text(value: object) -> str:
    try:
        return _plain(str(value))
    except BaseException as exc:
        return f"<no text: its __str__ raised {type(exc).__name__}>"


def _show_charts(renderers: types.ModuleType) -> None:
    """Charts are data that the front end draws."""
    renderers.renderers.default = "plotly_mimetype"
    if renderers.nbformat is None:  # it is only asked for its version
        renderers.__dict__["nbformat"] = types.SimpleNamespace(__version__="5.0.0")


def _refuse_comms(comm: types.ModuleType) -> None:
    def create_comm(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError(NO_COMMS)

    comm.__dict__["create_comm"] = create_comm


def _draw_without_thread(std: types.ModuleType) -> None:
    """A bar of tqdm starts a thread that redraws it. It does not end with the cell, and the sandbox would with it."""
    std.tqdm.monitor_interval = 0


def _show_columns(pandas: Any) -> None:
    """Imported ahead of the shell, pandas takes the notebook for a terminal of 80 characters."""
    pandas.set_option("display.max_columns", 20)


def _draw_in_cells(matplotlib: Any) -> None:
    """Figures for a window are shown in their cell."""
    choose = matplotlib.use

    def use(backend: str, *, force: bool = True) -> None:
        name = str(backend).lower()
        if name in WRITE_FILES or name.startswith("module://"):
            choose(backend, force=force)
        else:
            ZMQInteractiveShell.instance().enable_matplotlib()

    matplotlib.use = use


CHANGES: Final = {
    "matplotlib": _draw_in_cells,
    "plotly.io._renderers": _show_charts,
    "comm": _refuse_comms,
    "tqdm.std": _draw_without_thread,
    "pandas": _show_columns,
}
"""By module: what is changed in it when it is imported."""


def _create_task(coro: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task in a cell without `await` too. It runs outside of the loop, so that `asyncio.run` works in it."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = get_asyncio_loop()
    return loop.create_task(coro, **options)
