"""Messages of a front end, one by one: what ipykernel's own suite expects of a kernel, and messages that are malformed."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest

from rows import each_row

from .conftest import PATIENCE_S, Notebook

pytestmark = pytest.mark.isolation

Start = Callable[..., Notebook]
HISTORY = {"hist_access_type": "tail", "n": 1, "output": False, "raw": True}


class TestCells:
    @each_row(
        ("code", "status"),
        [
            ("1 / 0", "error"),
            ("class Wrong:\n    def __repr__(self): 1 / 0\nWrong()", "error"),
            ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    get_ipython().showtraceback()", "ok"),
        ],
    )
    def test_a_cell_fails_when_it_or_its_value_raises(self, plain: Notebook, code: str, status: str) -> None:
        shown = plain.run(code)

        assert shown.reply["status"] == status
        assert shown.of("error")[-1]["ename"] == "ZeroDivisionError"

    def test_a_lone_surrogate_in_a_cell_is_its_escape(self, plain: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
        browser = lambda sent: json.dumps(sent, default=str).encode()  # noqa: E731 - it escapes what is not ASCII
        monkeypatch.setattr(plain.client.session, "pack", browser)

        assert plain.run("len('a\ud800')").data == {"text/plain": "2"}
        failed = plain.run("x = 1\ny = \ud800", stop_on_error=False)
        assert failed.reply["ename"] == "SyntaxError" and r"y = \ud800" in failed.traceback

    def test_cells_that_arrive_at_once_are_answered_in_their_order(self, plain: Notebook) -> None:
        first = plain.run("ordered = 0").reply["execution_count"] + 1
        idents = [plain.client.execute("ordered += 1\nordered") for _ in range(30)]

        assert [plain.reply_to(ident)["execution_count"] for ident in idents] == list(range(first, first + 30))
        assert plain.run("ordered").data == {"text/plain": "30"}

    def test_cells_run_after_one_that_failed_when_that_is_asked_for(self, plain: Notebook) -> None:
        failing = plain.begin_held("import asyncio\nawait asyncio.sleep(0)\n1 / 0", stop_on_error=False)
        after = plain.client.execute("'runs'")
        plain.client.input("")

        assert plain.reply_to(failing)["status"] == "error"
        assert plain.reply_to(after)["status"] == "ok"

    def test_every_cell_that_waits_is_aborted_after_one_that_failed_and_later_ones_run(self, plain: Notebook) -> None:
        failing = plain.begin_held("1 / 0")
        waiting = [plain.client.execute("executed_after_a_failure = 1") for _ in range(5)]
        plain.client.input("")

        assert plain.reply_to(failing)["status"] == "error"
        assert [plain.reply_to(ident)["status"] for ident in waiting] == ["aborted"] * 5
        plain.client.kernel_info(reply=True, timeout=PATIENCE_S)
        assert plain.run("'executed_after_a_failure' in globals()").data == {"text/plain": "False"}

    def test_only_cells_are_aborted_after_one_that_failed(self, plain: Notebook) -> None:
        failing = plain.begin_held("1 / 0")
        others = [plain.client.kernel_info(), plain.client.comm_info(), plain.client.inspect("print")]
        plain.client.input("")

        assert plain.reply_to(failing)["status"] == "error"
        assert [plain.reply_to(ident)["status"] for ident in others] == ["ok"] * 3

    def test_a_next_cell_is_offered_once(self, plain: Notebook) -> None:
        shown = plain.run("for word in 'abc': get_ipython().set_next_input(word)")
        assert shown.reply["payload"] == [{"source": "set_next_input", "text": "c", "replace": False}]

    def test_context_variables_stay(self, plain: Notebook) -> None:
        plain.run("from contextvars import ContextVar\nvariable = ContextVar('variable', default='first')")
        assert plain.run("variable.set('second')\nvariable.get()").data == {"text/plain": "'second'"}
        assert plain.run("variable.get()").data == {"text/plain": "'second'"}

    def test_the_workspace_is_where_modules_are_found(self, plain: Notebook) -> None:
        plain.run("open('own_module.py', 'w').write('value = 6')")
        shown = plain.run("import os, own_module\nos.remove('own_module.py')\nown_module.value")
        assert shown.data == {"text/plain": "6"}

    def test_a_thread_prints_into_its_cell_and_ends_with_it(self, plain: Notebook) -> None:
        shown = plain.run(
            "import threading, time\nhas = threading.Event()\n"
            "def count():\n    print('from the thread')\n    has.set()\n    while True: time.sleep(0.001)\n"
            "threading.Thread(target=count, name='counter').start()\nhas.wait(30);"
        )
        assert shown.text() == "from the thread\n"
        assert "ended with the cell: thread 'counter'" in shown.text("stderr")
        assert plain.run("has.is_set()").data == {"text/plain": "True"}

    def test_a_thread_that_does_not_end_ends_with_its_sandbox_and_names_and_history_stay(self, plain: Notebook) -> None:
        count = plain.run("'before'").reply["execution_count"]
        shown = plain.run(
            "import threading\nn = 5\nthreading.Thread(target=threading.Event().wait, name='stuck').start()"
        )

        assert shown.reply["status"] == "ok"
        assert "ended with the cell: thread 'stuck'" in shown.text("stderr")
        assert plain.run("n, len(threading.enumerate()), _").data == {"text/plain": "(5, 1, 'before')"}
        assert plain.run(f"In[{count}], Out[{count}], __").data == {
            "text/plain": """("'before'", 'before', 'before')"""
        }

    def test_a_cell_says_what_is_gone_when_its_sandbox_was_replaced_or_lost_while_nothing_ran(
        self, notebooks: Start
    ) -> None:
        notebook = notebooks()
        notebook.run(
            "%precision 2\nimport threading\nkept = 1.0\nstuck = threading.Event()\n"
            "threading.Thread(target=stuck.wait).start()"
        )
        notebook.ask("complete_request", code="ke", cursor_pos=2)  # it has nowhere to say so
        shown = notebook.run("kept")

        assert shown.of("execute_result")[0]["data"] == {"text/plain": "1.0"}
        said = shown.text("stderr")
        assert "Settings are as at the start" in said and "gone with the last sandbox: stuck: " in said
        assert said.count("gone with the last sandbox") == 1, said
        assert notebook.run("kept").text("stderr") == ""

        notebook.run("class Odd:\n    def __dir__(self): import os; os._exit(3)\nodd = Odd()")
        notebook.ask("complete_request", code="odd.a", cursor_pos=5)
        notebook.ask("complete_request", code="pri", cursor_pos=3)

        assert notebook.run("1").text("stderr").count("run its cells again from the first") == 1
        assert notebook.run("2").text("stderr") == "", "it is said once"

    def test_threads_of_an_event_loop_end_with_their_cell_and_the_next_cell_has_others(self, plain: Notebook) -> None:
        for _ in range(2):
            shown = plain.run("import asyncio\nawait asyncio.to_thread(sum, [1, 2])")
            assert shown.data == {"text/plain": "3"} and shown.text("stderr") == ""
        assert "asyncio" in plain.run("%autoawait").text()

    def test_modules_are_found_in_the_current_folder(self, plain: Notebook) -> None:
        plain.run("import os\nos.mkdir('below')\n%cd below\nopen('in_below.py', 'w').write('value = 3')")
        shown = plain.run("import in_below, shutil\nos.chdir('..')\nshutil.rmtree('below')\nin_below.value")
        assert shown.data == {"text/plain": "3"}

    def test_a_notebook_has_no_file(self, plain: Notebook) -> None:
        assert plain.run("__file__").reply["ename"] == "NameError"

    def test_pdb_asks_in_the_notebook_and_is_interrupted(self, plain: Notebook) -> None:
        code = "import pdb\nlooked_at = 7\npdb.set_trace()\nlooked_at"
        shown = plain.run(code, answers=["p looked_at", "c"])

        assert "7" in shown.text() and shown.of("execute_result")[0]["data"] == {"text/plain": "7"}
        ident = plain.client.execute(code, allow_stdin=True)
        plain.client.get_stdin_msg(timeout=PATIENCE_S)
        plain.manager.interrupt_kernel()
        assert plain.outcome_of(ident).reply["status"] == "error"
        assert plain.run("3 + 4").data == {"text/plain": "7"}

    def test_an_event_loop_may_be_interrupted(self, plain: Notebook) -> None:
        ident = plain.begin("import asyncio\nprint('go')\nawait asyncio.sleep(1000)")
        plain.manager.interrupt_kernel()

        assert plain.outcome_of(ident).reply["status"] == "error"
        assert plain.run("'alive'").data == {"text/plain": "'alive'"}
        assert len(plain.run("1 / 0").of("error")) == 1

    def test_the_history_is_written_to_a_file_of_the_workspace(self, plain: Notebook) -> None:
        plain.run("written_down = 'þ'")
        shown = plain.run(
            "%hist -f cells.txt\nimport os\nhistory = open('cells.txt').read()\nos.remove('cells.txt')\nhistory"
        )

        # Of all cells so far, with their quotes.
        assert "written_down = 'þ'" in ast.literal_eval(shown.data["text/plain"])

    def test_the_handler_of_faults_is_enabled(self, plain: Notebook) -> None:
        shown = plain.run("import faulthandler, signal\nfaulthandler.enable()\nfaulthandler.register(signal.SIGTERM)")
        assert shown.reply["status"] == "ok" and shown.messages == []


class TestOtherRequests:
    def test_an_inspection_shows_the_source_when_asked(self, plain: Notebook) -> None:
        plain.run("def inspected(first):\n    return first + 1")
        about = plain.ask("inspect_request", code="inspected", cursor_pos=9, detail_level=1)["data"]["text/plain"]

        assert "Signature:" in about and "first" in about

    def test_attributes_are_completed(self, plain: Notebook) -> None:
        plain.run("number = 1")
        code = "import os\nnumber.bit_l"
        found = plain.ask("complete_request", code=code, cursor_pos=len(code))

        completed = [code[: found["cursor_start"]] + each for each in found["matches"]]
        assert found["cursor_end"] == len(code) and completed == ["import os\nnumber.bit_length"]

    @pytest.mark.parametrize(("code", "status"), [("a = [1,\n2,", "incomplete"), ("%%timeit\na\n\n", "complete")])
    def test_a_list_and_a_magic_of_a_cell_are_whole_or_not(self, plain: Notebook, code: str, status: str) -> None:
        assert plain.ask("is_complete_request", code=code)["status"] == status

    def test_the_ports_of_the_kernel_are_told(self, plain: Notebook) -> None:
        found = plain.ask("connect_request")

        for name in ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port"):
            assert found[name] == getattr(plain.manager, name)

    def test_the_control_channel_comes_before_cells_that_wait(self, plain: Notebook) -> None:
        first = plain.begin("import time\nprint('go')\nwhile True: time.sleep(0.01)")
        waiting = [plain.client.execute(f"waiting = {number}") for number in range(5)]

        for _ in waiting:
            assert plain.ask_control("kernel_info_request")["status"] == "ok"
        assert not plain.client.shell_channel.msg_ready()
        assert plain.ask_control("interrupt_request")["status"] == "ok"
        assert plain.reply_to(first)["ename"] == "KeyboardInterrupt"
        assert [plain.reply_to(each)["status"] for each in waiting] == ["aborted"] * 5

    def test_the_control_channel_answers_while_a_cell_runs(self, plain: Notebook) -> None:
        ident = plain.begin("import time\nprint('go')\ntime.sleep(1000)")

        assert plain.ask_control("kernel_info_request")["status"] == "ok"
        assert "pid" in plain.ask_control("usage_request")
        assert "shell channel" in plain.ask_control("execute_request", code="1")["evalue"]
        assert plain.ask_control("interrupt_request")["status"] == "ok"
        assert plain.outcome_of(ident).reply["ename"] == "KeyboardInterrupt"


def test_the_requests_of_vs_code(notebooks: Start) -> None:
    """It prepares the kernel by silent cells, asks for values by them, and stops it by messages of the control channel."""
    notebook = notebooks()
    assert notebook.ask("kernel_info_request")["language_info"]["name"] == "python"
    quiet = {"silent": True, "store_history": False, "stop_on_error": False}
    prepared = notebook.run(
        "import os as _VSCODE_os\ndef _VSCODE_size(value): return len(value)\n"
        "__vsc_ipynb_file__ = '/nothing/like/it.ipynb'",
        **quiet,
    )
    assert (prepared.reply["status"], prepared.messages) == ("ok", [])
    assert notebook.run("print('told', end='')", **quiet).messages == [("stream", {"name": "stdout", "text": "told"})]

    shown = notebook.run("frame = [1, 2]\nframe", user_expressions={"size": "_VSCODE_size(frame)"})
    assert (shown.reply["execution_count"], shown.data) == (1, {"text/plain": "[1, 2]"})
    assert shown.reply["user_expressions"]["size"]["data"] == {"text/plain": "2"}
    assert notebook.run("1 / 0", **quiet).reply["status"] == "error"

    code = "first = 1\nfra.x"
    found = notebook.ask("complete_request", code=code, cursor_pos=len("first = 1\nfra"))
    assert (found["matches"], found["cursor_start"], found["cursor_end"]) == (["frame"], 10, 13)
    assert "list" in notebook.ask("inspect_request", code="frame", cursor_pos=5, detail_level=0)["data"]["text/plain"]
    assert notebook.ask("history_request", hist_access_type="tail", n=9, output=False, raw=True)["history"] == [
        [1, 1, "frame = [1, 2]\nframe"]
    ]

    ident = notebook.begin("import time\nprint('go')\nwhile True: time.sleep(0.01)")
    assert notebook.ask_control("interrupt_request")["status"] == "ok"
    assert notebook.outcome_of(ident).reply["ename"] == "KeyboardInterrupt"
    assert notebook.ask_control("shutdown_request", restart=False) == {"status": "ok", "restart": False}
    notebook.manager.shutdown_kernel()
    assert not notebook.manager.is_alive()


class TestMalformed:
    """Messages without fields, or with fields of other types."""

    @each_row("content", [{}, {"code": None}, {"code": ["1"]}, {"code": "1", "user_expressions": [1]}])
    def test_a_cell_is_refused_and_has_no_number(self, plain: Notebook, content: dict[str, Any]) -> None:
        plain.client.kernel_info(reply=True, timeout=PATIENCE_S)  # cells right after one that failed are aborted
        count = plain.run("1").reply["execution_count"]

        refused = plain.ask("execute_request", stop_on_error=False, **content)
        assert (refused["status"], refused["ename"]) == ("error", "UsageError")
        assert plain.run("2").reply["execution_count"] == count + 1
        wanted = {"hist_access_type": "search", "pattern": "2", "n": 1, "output": False, "raw": True}
        assert plain.ask("history_request", **wanted)["history"] == [[1, count + 1, "2"]]

    @each_row("place", [None, -7, 10**30, "x", 1.5])
    def test_a_place_that_is_not_in_the_source_is_its_end(self, plain: Notebook, place: object) -> None:
        found = plain.ask("complete_request", code="prin", cursor_pos=place)
        assert (found["matches"], found["cursor_start"], found["cursor_end"]) == (["print"], 0, 4)
        about = plain.ask("inspect_request", code="print", cursor_pos=place, detail_level="x")
        assert about["found"]

    @each_row("kind", ["complete_request", "inspect_request", "is_complete_request"])
    def test_the_sandbox_is_asked_by_the_main_thread_alone(self, plain: Notebook, kind: str) -> None:
        content = {"code": "pri", "cursor_pos": 3}

        assert "shell channel" in plain.ask_control(kind, **content)["evalue"]
        assert plain.ask(kind, **content)["status"] in ("ok", "unknown", "complete")

    @each_row(
        ("kind", "content"),
        [
            ("complete_request", {}),
            ("complete_request", {"code": "pri"}),
            ("complete_request", {"code": None, "cursor_pos": 0}),
            ("inspect_request", {"code": "print"}),
            ("inspect_request", {"code": [], "cursor_pos": 0}),
            ("inspect_request", {"code": "print", "cursor_pos": 1, "omit_sections": 5}),
            ("is_complete_request", {}),
            ("is_complete_request", {"code": 7}),
            ("history_request", {}),
            ("history_request", HISTORY | {"hist_access_type": 5}),
            ("history_request", HISTORY | {"n": "x"}),
            ("history_request", HISTORY | {"hist_access_type": "range", "start": "a"}),
            ("history_request", HISTORY | {"hist_access_type": "search", "pattern": "*a" * 100_000}),
            ("history_request", HISTORY | {"nothing_like_it": 1}),
            ("shutdown_request", {}),
        ],
    )
    def test_what_cannot_be_answered_is_refused(self, plain: Notebook, kind: str, content: dict[str, Any]) -> None:
        """A front end would wait for the reply."""
        plain.run("1")
        for refused in (plain.ask(kind, **content), plain.ask_control(kind, **content)):
            assert refused["status"] == "error" and kind in refused["evalue"]
        assert plain.run("'alive'").data == {"text/plain": "'alive'"}

    @each_row("kind", ["debug_request", "create_subshell_request", "list_subshell_request"])
    def test_a_request_for_what_there_is_not_is_refused(self, plain: Notebook, kind: str) -> None:
        assert "no debugger and no subshells" in plain.ask_control(kind)["evalue"]

    def test_what_has_no_answer_does_not_end_the_kernel(self, plain: Notebook) -> None:
        for kind, content in (
            ("comm_open", {}),
            ("comm_msg", {"comm_id": []}),
            ("nothing_like_it", {}),
        ):
            for channel in (plain.client.shell_channel, plain.client.control_channel):
                channel.send(plain.client.session.msg(kind, content))
        assert plain.run("'alive'").data == {"text/plain": "'alive'"}
        assert plain.ask_control("kernel_info_request")["status"] == "ok"
