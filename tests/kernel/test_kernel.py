"""Cells of a notebook run in a sandbox, and front ends see what they would see of ipykernel."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from rows import each_row
from toolcell.kernel import spec
from toolcell.kernel.cells import Cell, Cells
from toolcell.kernel.kernel import SandboxKernel

from .conftest import PATIENCE_S, Notebook

pytestmark = pytest.mark.isolation

Start = Callable[..., Notebook]


class TestCells:
    def test_values_streams_and_displays_come_in_their_order(self, plain: Notebook) -> None:
        shown = plain.run("import sys\nprint('a')\nprint('b', file=sys.stderr)\ndisplay('c')\nprint('d')\n'e'")

        assert shown.kinds == ["stream", "stream", "display_data", "stream", "execute_result"]
        assert (shown.text(), shown.text("stderr")) == ("a\nd\n", "b\n")
        assert shown.of("execute_result")[0]["data"] == {"text/plain": "'e'"}
        assert shown.of("execute_result")[0]["execution_count"] == shown.reply["execution_count"]

    def test_a_print_is_one_message(self, plain: Notebook) -> None:
        ident = plain.client.execute("print('one', [2])\nprint('two')")
        texts = []
        while (message := plain.client.get_iopub_msg(timeout=60))["content"].get("execution_state") != "idle":
            if message["parent_header"].get("msg_id") == ident and message["msg_type"] == "stream":
                texts.append(message["content"]["text"])
        assert "".join(texts) == "one [2]\ntwo\n" and all(text.endswith("\n") for text in texts)

    def test_many_prints_are_few_messages_in_their_order(self, plain: Notebook) -> None:
        texts: list[tuple[str, str]] = []

        def take(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts.append((message["content"]["name"], message["content"]["text"]))

        source = "import sys\nfor at in range(5000): print(at)\nprint('e', file=sys.stderr)\nprint('o')"
        plain.client.execute_interactive(source, output_hook=take, timeout=PATIENCE_S)

        assert "".join(text for _, text in texts) == "".join(f"{at}\n" for at in range(5000)) + "e\no\n"
        assert [name for name, _ in texts[-3:]] == ["stdout", "stderr", "stdout"]
        assert len(texts) < 500

    def test_what_was_printed_is_there_before_a_question(self) -> None:
        seen: list[object] = []

        async def ask(prompt: str, is_hidden: bool) -> str:
            seen.append(prompt)
            return "a"

        async def run() -> None:
            cells = Cells({})
            source = "print('before')\nx = input('question')\nprint('after')"
            await cells.execute(
                Cell(source=source, count=1, may_ask=True), lambda _kind, content: seen.append(content.get("text")), ask
            )
            await cells.close()

        asyncio.run(run())
        assert seen == ["before\n", "question", "after\n"]

    def test_names_stay_and_the_last_values_have_their_names(self, plain: Notebook) -> None:
        plain.run("stays = 40")
        assert plain.run("stays + 2").data == {"text/plain": "42"}
        assert plain.run("_").data == {"text/plain": "42"}

    def test_an_error_is_shown_with_colours_and_its_line_and_is_in_the_reply(self, plain: Notebook) -> None:
        shown = plain.run("a = 1\na / 0")

        (error,) = shown.of("error")
        assert (error["ename"], error["evalue"]) == ("ZeroDivisionError", "division by zero")
        assert "line 2" in shown.traceback and "\x1b[" in "".join(error["traceback"])
        assert shown.reply["status"] == "error" and shown.reply["traceback"] == error["traceback"]

    @pytest.mark.parametrize("code", ["raise SystemExit", "import sys\nsys.exit(3)"])
    def test_a_cell_that_exits_has_failed(self, plain: Notebook, code: str) -> None:
        shown = plain.run(code)
        assert shown.reply["status"] == "error" and shown.of("error")[0]["ename"] == "SystemExit"

    def test_a_syntax_error_is_one(self, plain: Notebook) -> None:
        assert plain.run("def").of("error")[0]["ename"] == "SyntaxError"

    def test_a_cell_may_await(self, plain: Notebook) -> None:
        assert plain.run("import asyncio\nawait asyncio.sleep(0, 'slept')").data == {"text/plain": "'slept'"}

    def test_a_display_is_updated_and_outputs_are_cleared(self, plain: Notebook) -> None:
        shown = plain.run(
            "from IPython.display import clear_output\nshown = display(1, display_id=True)\nshown.update(2)\n"
            "clear_output(wait=True)"
        )

        first, second, third = (content for _, content in shown.messages)
        assert shown.kinds == ["display_data", "update_display_data", "clear_output"]
        assert first["transient"] == second["transient"] != {}
        assert (second["data"], third) == ({"text/plain": "2"}, {"wait": True})

    def test_a_silent_cell_shows_no_value_and_has_no_number(self, plain: Notebook) -> None:
        before = plain.run("1").reply["execution_count"]
        shown = plain.run("2", silent=True)

        assert shown.messages == []
        assert plain.run("3").reply["execution_count"] == before + 1

    def test_expressions_are_evaluated_after_a_cell(self, plain: Notebook) -> None:
        shown = plain.run("expressed = 6", user_expressions={"twice": "expressed * 2", "wrong": "nothing_like_it"})

        found = shown.reply["user_expressions"]
        assert found["twice"]["data"] == {"text/plain": "12"}
        assert (found["wrong"]["status"], found["wrong"]["ename"]) == ("error", "NameError")


class TestMagics:
    def test_time_and_capture_work(self, plain: Notebook) -> None:
        assert "Wall time" in plain.run("%time 1 + 1").text()
        captured = plain.run("%%capture taken\nprint('unseen')\ndisplay('unseen')")
        assert captured.messages == []
        assert plain.run("taken.stdout").data == {"text/plain": "'unseen\\n'"}

    def test_the_command_that_installs_may_be_pasted_into_a_shell(self, plain: Notebook) -> None:
        said = plain.run("%pip install -q 'pandas>=2' \"a[b]\"").reply["evalue"]
        assert "kernel install" in said and "--packages 'pandas>=2,a[b]'" in said

    def test_only_names_of_the_notebook_are_listed(self, with_tools: Notebook) -> None:
        listed = with_tools.run("listed = 1\n%who_ls").data["text/plain"]
        assert {*ast.literal_eval(listed)} - {"asking", "os", "threading"} == {"listed"}  # without those of other tests

    def test_libraries_know_that_this_is_a_notebook(self, plain: Notebook) -> None:
        shown = plain.run("shell = get_ipython()\ntype(shell).__name__, hasattr(shell, 'kernel')")
        assert shown.data == {"text/plain": "('ZMQInteractiveShell', True)"}

    @each_row("line", ["%pip install pandas", "!pip install pandas", "!python -m pip install pandas"])
    def test_an_installation_says_what_to_do(self, plain: Notebook, line: str) -> None:
        shown = plain.run(line)

        assert shown.reply["status"] == "error" and shown.of("error")[0]["evalue"] == shown.reply["evalue"]
        assert "toolcell kernel install" in shown.traceback and "--packages pandas" in shown.traceback

    def test_an_installation_of_what_is_there_is_no_error(self, plain: Notebook) -> None:
        plain.run("open('requirements.txt', 'w').write('# ours\\nipython>=8  # the shell\\n')")
        for line in (
            "%pip install -q --upgrade pip ipython",
            "!pip install ipython 'traitlets>=5,<99'",
            "import sys\n!{sys.executable} -m pip install ipython~=9.0",
            "%conda install -y -c conda-forge ipython",
            "%pip install ipython!=1.0",
            "!pip install -q -r requirements.txt",
        ):
            shown = plain.run(line)
            assert shown.reply["status"] == "ok" and "Requirement already satisfied: ipython" in shown.text(), line
            assert shown.kinds == ["stream"], line
        older = plain.run("%pip install 'ipython>=99'")
        assert "ipython 9" in older.traceback and "--packages 'ipython>=99'" in older.traceback

    def test_the_packages_that_are_there_are_listed(self, plain: Notebook) -> None:
        for line in ("%pip list", "!pip list", "!python -m pip list"):
            shown = plain.run(line)
            assert shown.reply["status"] == "ok" and "ipython " in shown.text(), line
        assert plain.run("%conda list").reply["status"] == "error"
        assert plain.run("!python --version").text().startswith("Python 3.")

    def test_an_installation_keeps_the_packages_that_the_kernel_has(self, notebooks: Start) -> None:
        notebook = notebooks("--packages", "tqdm")
        name = notebook.manager.kernel_name
        command = f"toolcell kernel install --packages tqdm --user --name {name} --packages nothing-like-it"

        assert command in notebook.run("%pip install nothing-like-it").traceback
        assert command.replace("-like-", "_like_") in notebook.run("import nothing_like_it").traceback
        told = notebook.run("install_package('nothing-like-it')").traceback
        assert command in told and "with --allow-package nothing-like-it, a cell may install it" in told

    def test_a_cell_that_looks_for_a_network_is_told_that_there_is_none(self, plain: Notebook) -> None:
        shown = plain.run("import socket\nsocket.create_connection(('127.0.0.1', 9))")

        assert "a sandbox has no network" in shown.traceback

    def test_a_program_is_refused_with_an_error_output(self, plain: Notebook) -> None:
        cells = (
            "!nvidia-smi",
            "files = !find .",
            "!ls; rm x",
            "!ls > x",
            "!ls $(pwd)",
            "%%bash\nls",
            "%sx git status",
            "!!git status",
            "%%perl\nls",
            "%%python\n1",
            "%edit",
            "%pip download x",
            "!apt-get install -y graphviz",
            "import os\nos.system('git status')",
        )
        for cell in cells:
            shown = plain.run(cell)
            (error,) = shown.of("error")
            assert shown.reply["status"] == "error" and shown.kinds == ["error"], cell
            assert error.items() <= shown.reply.items() and error["ename"] and error["traceback"], cell
            said = error["evalue"]
            assert "use Python's own modules" in said and "nothing can be executed in the sandbox" in said, cell

    @each_row("cell", ["%nothing_like_it", "raise ValueError('\\ud800')", "raise ExceptionGroup('several', [ValueError(1)])", "raise SystemExit(2)", "1 +"])  # fmt: skip
    def test_every_cell_that_fails_has_one_error_output(self, plain: Notebook, cell: str) -> None:
        shown = plain.run(cell)
        (error,) = shown.of("error")
        assert error.items() <= shown.reply.items() and error["ename"] and any(error["traceback"])

    def test_commands_that_look_at_files_work_on_the_workspace(self, notebooks: Start, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("x\n1\n2\n")
        notebook = notebooks(folder=tmp_path)

        assert notebook.run("name = 'a.csv'\n!ls\n!cat $name | wc -l\n!head -n 1 {name}").text() == "a.csv\n3\nx\n"
        assert notebook.run("lines = !tail -n 2 a.csv\nlines, lines.n").data == {"text/plain": "(['1', '2'], '1\\n2')"}
        assert notebook.run("%sx ls").data == {"text/plain": "['a.csv']"}
        assert notebook.run("ls *.csv").text() == "a.csv\n"  # an alias
        assert notebook.run("!cat nothing\n_exit_code").data == {"text/plain": "1"}
        assert notebook.run("import os\n!mkdir -p out/deep\n!pwd\nos.path.isdir('out/deep')").reply["status"] == "ok"

    def test_tools_are_named_in_place_of_a_program_where_there_are_any(self, with_tools: Notebook) -> None:
        assert "use call_tool() instead" in with_tools.run("!git").traceback
        assert "use call_tool() instead" in with_tools.run("import os\nos.system('ls')").traceback

    def test_a_question_mark_opens_the_pager(self, plain: Notebook) -> None:
        (page,) = plain.run("print?").reply["payload"]
        assert page["source"] == "page" and "Prints the values" in page["data"]["text/plain"]


class TestRequests:
    def test_names_of_the_notebook_are_completed_and_inspected(self, plain: Notebook) -> None:
        plain.run("completed_name = {'a': 1}")

        found = plain.ask("complete_request", code="x = completed_na", cursor_pos=16)
        assert (found["matches"], found["cursor_start"], found["cursor_end"]) == (["completed_name"], 4, 16)
        about = plain.ask("inspect_request", code="completed_name", cursor_pos=5, detail_level=0)
        assert about["found"] and "dict" in about["data"]["text/plain"]
        assert not plain.ask("inspect_request", code="nothing_like_it", cursor_pos=5, detail_level=0)["found"]

    @each_row(
        ("code", "status"),
        [("1 + 1", "complete"), ("for i in range(3):", "incomplete"), ("x = )", "invalid"), ("%time 1", "complete")],
    )
    def test_a_cell_is_whole_or_not(self, plain: Notebook, code: str, status: str) -> None:
        assert plain.ask("is_complete_request", code=code)["status"] == status

    def test_history_has_the_cells_of_this_kernel(self, plain: Notebook) -> None:
        count = plain.run("'remembered'").reply["execution_count"]
        plain.run("'not remembered'", store_history=False)

        wanted = {"output": False, "raw": True}
        assert plain.ask("history_request", hist_access_type="tail", n=1, **wanted)["history"] == [
            [1, count, "'remembered'"]
        ]
        found = plain.ask("history_request", hist_access_type="search", pattern="'remem*", unique=True, **wanted)
        assert found["history"] == [[1, count, "'remembered'"]]
        ranged = {"hist_access_type": "range", "session": 0, "start": count, "stop": count + 1, **wanted}
        assert plain.ask("history_request", **ranged)["history"] == [[1, count, "'remembered'"]]

    def test_the_kernel_says_what_it_is_and_offers_no_debugger(self, plain: Notebook) -> None:
        about = plain.ask("kernel_info_request")

        assert (about["implementation"], about["language_info"]["name"]) == ("toolcell", "python")
        assert about["supported_features"] == []

    def test_comms_are_closed_at_once(self, plain: Notebook) -> None:
        message = plain.client.session.msg("comm_open", {"comm_id": "c1", "target_name": "t", "data": {}})
        plain.client.shell_channel.send(message)

        while (answer := plain.client.get_iopub_msg(timeout=60))["msg_type"] != "comm_close":
            pass
        assert answer["content"]["comm_id"] == "c1"
        assert plain.ask("comm_info_request")["comms"] == {}

    @pytest.mark.slow
    def test_widgets_say_why_they_cannot_be_and_bars_are_text(self, notebooks: Start) -> None:
        notebook = notebooks("--packages", "ipywidgets,tqdm")
        for code in (
            "import ipywidgets\nipywidgets.IntSlider()",
            "ipywidgets.interact(lambda number: number, number=3)",
            "import tqdm.notebook\nfor _ in tqdm.notebook.tqdm(range(3)): pass",
        ):
            assert "widgets need a comm" in notebook.run(code).of("error")[0]["evalue"], code

        shown = notebook.run("import tqdm.auto\nfor _ in tqdm.auto.tqdm(range(3)): pass\nipywidgets.__name__")
        assert "3/3" in shown.text("stderr") and shown.data == {"text/plain": "'ipywidgets'"}


class TestInput:
    def test_a_line_and_a_password_are_asked_for(self, plain: Notebook) -> None:
        shown = plain.run("import getpass\n(input('name? '), getpass.getpass('word? '))", answers=["Bo", "secret"])

        assert shown.data == {"text/plain": "('Bo', 'secret')"}
        assert plain.asked == [{"prompt": "name? ", "password": False}, {"prompt": "word? ", "password": True}]

    @each_row("named", ["question", "cell", "nothing"])
    def test_an_answer_names_its_question_or_the_cell_or_nothing(self, plain: Notebook, named: str) -> None:
        session = plain.client.session
        request = session.msg("execute_request", {"code": "input()", "allow_stdin": True, "user_expressions": {}})
        plain.client.shell_channel.send(request)
        question = plain.client.get_stdin_msg(timeout=PATIENCE_S)
        about = {"question": question, "cell": request, "nothing": None}[named]
        plain.client.stdin_channel.send(session.msg("input_reply", {"value": "typed"}, parent=about))

        assert plain.outcome_of(request["header"]["msg_id"]).data == {"text/plain": "'typed'"}

    def test_where_nobody_answers_it_is_an_error_at_once(self, plain: Notebook) -> None:
        assert plain.run("input()").of("error")[0]["ename"] == "StdinNotImplementedError"

    def test_a_cell_that_asks_can_be_interrupted(self, plain: Notebook) -> None:
        ident = plain.client.execute("asked = 1\ninput('?')", allow_stdin=True)
        plain.client.get_stdin_msg(timeout=60)
        plain.manager.interrupt_kernel()

        assert plain.outcome_of(ident).reply["ename"] == "KeyboardInterrupt"
        assert plain.run("asked").data == {"text/plain": "1"}


class TestEnds:
    LOOP = "import time\nbegun = True\nprint('go')\nwhile True: time.sleep(0.01)"

    @pytest.mark.parametrize("mode", ["message", "signal"])
    def test_an_interrupt_ends_the_cell_and_keeps_the_names(self, plain: Notebook, mode: str) -> None:
        ident = plain.begin(self.LOOP)
        if mode == "message":
            plain.manager.interrupt_kernel()
        else:
            os.kill(plain.manager.provisioner.pid, signal.SIGINT)

        shown = plain.outcome_of(ident)
        assert shown.reply["ename"] == "KeyboardInterrupt"
        assert "time.sleep(0.01)" in shown.traceback and "interrupts.py" not in shown.traceback
        assert plain.run("begun").data == {"text/plain": "True"}

    MAIL = (
        "import asyncio\ngate, log = asyncio.Event(), []\n"
        "async def send():\n"
        "    try:\n"
        "        print('go')\n"
        "        await gate.wait()\n"
        "        log.append('sent')\n"
        "    finally:\n"
        "        await asyncio.sleep(0)\n"
        "        log.append('cleaned up')\n"
    )

    @each_row("how", ["await send()", "await asyncio.gather(send(), send())", "async with asyncio.TaskGroup() as group: group.create_task(send())"])  # fmt: skip
    def test_a_cell_that_is_interrupted_while_it_awaits_is_cancelled_and_cleans_up(
        self, plain: Notebook, how: str
    ) -> None:
        ident = plain.begin(self.MAIL + how)
        plain.manager.interrupt_kernel()

        shown = plain.outcome_of(ident)
        assert shown.reply["ename"] == "KeyboardInterrupt" and "Cell In[" in shown.traceback
        assert plain.run("gate.set()\nfor turn in range(9): await asyncio.sleep(0)\nset(log)").data == {
            "text/plain": "{'cleaned up'}"
        }

    def test_a_cell_that_refuses_to_be_cancelled_does_not_go_on_in_the_next_one(self, plain: Notebook) -> None:
        refusing = "while not gate:\n    try: print('go'); await asyncio.sleep(60)\n    except asyncio.CancelledError: pass\nlog.append('sent')"
        ident = plain.begin(f"import asyncio\ngate, log = [], []\n{refusing}")
        plain.manager.interrupt_kernel()

        assert plain.outcome_of(ident).reply["ename"] == "KeyboardInterrupt"
        assert plain.run("gate.append(1)\nfor turn in range(9): await asyncio.sleep(0)\nlog").data == {
            "text/plain": "[]"
        }

    def test_a_cell_that_handles_an_interrupt_goes_on_and_ends_well(self, plain: Notebook) -> None:
        again = "seen = []\nwhile len(seen) < 2:\n    try: print('go'); time.sleep(60)\n    except KeyboardInterrupt: seen.append(1)\n"
        ident = plain.begin("import time\n" + again + "time.sleep(0.3)  # longer than a signal is repeated after\nseen")
        plain.manager.interrupt_kernel()
        while plain.client.get_iopub_msg(timeout=PATIENCE_S)["msg_type"] != "stream":
            pass
        plain.manager.interrupt_kernel()

        shown = plain.outcome_of(ident)
        assert shown.reply["status"] == "ok" and shown.data == {"text/plain": "[1, 1]"}

    def test_an_interrupt_counts_for_the_cell_that_was_sent_before_it(self, plain: Notebook) -> None:
        for _ in range(20):
            plain.client.control_channel.send(plain.client.session.msg("interrupt_request", {}))
            assert plain.run("'left alone'").reply["status"] == "ok"

    def test_an_interrupt_of_a_cell_that_has_just_ended_leaves_the_next_one_alone(self) -> None:
        class TwoCells:
            def __init__(self) -> None:
                self.under_way, self.interrupted = "first", list[str]()

            async def interrupt(self, cell: str) -> None:
                self.interrupted.append(cell)

        async def interrupted(is_over: bool) -> list[str]:
            kernel: Any = SandboxKernel()
            kernel.cells = cells = TwoCells()
            kernel._loop = asyncio.get_running_loop()
            sent = {"session": "front end", "date": datetime.now(UTC)}  # so were both cells
            kernel._header = sent
            kernel.set_parent([], {"header": sent}, channel="control")
            kernel._send_interrupt_children()
            if is_over:
                cells.under_way = "second"
            for _ in range(3):
                await asyncio.sleep(0)
            return cells.interrupted

        assert asyncio.run(interrupted(is_over=True)) == []
        assert asyncio.run(interrupted(is_over=False)) == ["first"]

    def test_an_interrupt_while_the_kernel_opens_is_kept(self, jupyter: Path, tmp_path: Path) -> None:
        spec.install("toolcell-opening", [], for_user=True)
        manager = KernelManager(kernel_name="toolcell-opening")
        manager.start_kernel(cwd=str(tmp_path))
        client = manager.client()
        client.start_channels()
        try:
            ident = client.execute("ran = 1")
            client.control_channel.send(client.session.msg("interrupt_request", {}))
            reply = client.get_shell_msg(timeout=PATIENCE_S)
            assert reply["parent_header"]["msg_id"] == ident and reply["content"]["ename"] == "KeyboardInterrupt"
            after = client.execute_interactive("ran", timeout=PATIENCE_S, output_hook=id)
            assert after["content"]["ename"] == "NameError"
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)

    def test_tasks_that_a_cell_without_await_makes_run_while_another_awaits(self, plain: Notebook) -> None:
        plain.run("import asyncio\nlog = []\nasync def note(): log.append(1)\nasyncio.ensure_future(note())")
        plain.run("task = asyncio.get_event_loop().create_task(note())")
        plain.run("asyncio.run(note())")
        plain.run("later = asyncio.ensure_future(note())")
        plain.run("also = asyncio.create_task(note(), name='also')")
        assert plain.run("await task; await later; await also\nlog").data == {"text/plain": "[1, 1, 1, 1, 1]"}

    def test_a_signal_while_nothing_runs_interrupts_no_cell_that_follows(self, plain: Notebook) -> None:
        for _ in range(20):  # the kernel's process has each before it reads the cell: it takes a system call to read
            os.kill(plain.manager.provisioner.pid, signal.SIGINT)
            assert plain.run("'alive'").reply["status"] == "ok"

    def test_cells_after_one_that_failed_are_not_executed(self, plain: Notebook) -> None:
        first = plain.begin_held("1 / 0")
        second = plain.client.execute("print('executed')")
        plain.client.input("")

        replies = {}
        while len(replies) < 2:
            reply = plain.client.get_shell_msg(timeout=60)
            replies[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
        assert replies == {first: "error", second: "aborted"}

    def test_a_time_limit_keeps_the_names_and_says_so(self, notebooks: Start) -> None:
        notebook = notebooks("--wall-s", "1")
        shown = notebook.run("kept = 1\nwhile True: pass")

        assert shown.reply["ename"] == "timeout" and "after 1 s" in shown.of("error")[-1]["evalue"]
        assert notebook.run("kept").data == {"text/plain": "1"}

    def test_a_memory_limit_ends_the_sandbox_and_says_so(self, notebooks: Start) -> None:
        notebook = notebooks("--memory-bytes", "256MiB")
        notebook.run("gone = 1")
        shown = notebook.run("big = b'x' * (1 << 30)\nfork = [bytearray(1 << 28) for _ in range(9)]")
        if shown.reply["ename"] == "MemoryError":  # where the rlimit is met first
            return

        assert shown.reply["ename"] == "memory_limit"
        assert "run its cells again from the first" in shown.of("error")[-1]["evalue"]
        assert notebook.run("gone").reply["ename"] == "NameError"

    def test_a_sandbox_that_ends_by_itself_says_so_and_the_next_cell_runs(self, plain: Notebook) -> None:
        assert plain.run("import os\nos._exit(3)").reply["ename"] == "killed"
        again = plain.run("'again'")
        count = again.reply["execution_count"]
        assert again.data == {"text/plain": "'again'"}
        assert plain.run(f"In[{count}], Out[{count}]").data == {"text/plain": """("'again'", 'again')"""}

    def test_a_restart_forgets_names_and_a_shutdown_leaves_no_process(self, notebooks: Start) -> None:
        notebook = notebooks()
        notebook.run("forgotten = 1")
        notebook.manager.restart_kernel()
        notebook.client.wait_for_ready(timeout=60)

        assert notebook.run("forgotten").reply["ename"] == "NameError"
        notebook.manager.shutdown_kernel()
        assert not notebook.manager.is_alive()

    @pytest.mark.parametrize("victim", ["kernel", "server"])
    def test_nothing_is_left_of_a_kernel_when_it_or_its_server_is_killed(
        self, jupyter: Path, tmp_path: Path, victim: str
    ) -> None:
        spec.install("toolcell-killed", ["--save"], for_user=True)
        with subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            kernel = int(server.stdout.readline().removeprefix("kernel "))
            sandboxes = cgroups_of(kernel)
            inside = {
                pid for group in sandboxes for each in group.rglob("cgroup.procs") for pid in each.read_text().split()
            }
            assert inside or not sandboxes
            try:
                os.kill(kernel if victim == "kernel" else server.pid, signal.SIGKILL)
                until = time.monotonic() + PATIENCE_S
                while cgroups_of(kernel) or any(os.path.exists(f"/proc/{pid}/exe") for pid in (kernel, *inside)):
                    assert time.monotonic() < until, (cgroups_of(kernel), inside)
                    time.sleep(0.05)
            finally:
                server.kill()

        assert sorted(each.name for each in tmp_path.iterdir()) == ["written.txt"]


SERVER = """
import sys, time
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="toolcell-killed", cwd=sys.argv[1])
client.execute_interactive("open('written.txt', 'w').write('w');", timeout=90)
client.execute("print('go')\\nwhile True: pass")
while client.get_iopub_msg(timeout=90)["msg_type"] != "stream": pass
print("kernel", manager.provisioner.pid, flush=True)
time.sleep(1000)
"""


def cgroups_of(kernel: int) -> list[Path]:
    """Return the cgroups of sandboxes that a kernel has started."""
    return [
        Path(at, each) for at, names, _ in os.walk("/sys/fs/cgroup") for each in names if f"toolcell-{kernel}-" in each
    ]


def test_what_a_cell_shows_is_harmless_on_every_way_to_a_front_end(plain: Notebook) -> None:
    shown = plain.run(
        "loud = '<b onclick=alert(1)>x</b>'\n"
        "class Loud:\n    def _repr_html_(self): return loud\n"
        "for order in ({'source': 'page', 'data': {'text/html': loud}}, {'source': 'open', 'url': 'x'}):\n"
        "    get_ipython().payload_manager.write_payload(order)\n"
        "handle = display(Loud(), display_id=True)\nhandle.update(Loud())\n"
        "from IPython.display import Markdown, SVG\n"
        "display(Markdown('# T\\n\\n![a](https://evil.example/) $a_1 \\\\, b*c*d$ <b onclick=x>b</b>'), SVG('<svg onload=\"x\"/>'))\n"
        "Loud()",
        user_expressions={"loud": "Loud()", "raises": "1 / loud"},
    )
    (page,) = shown.reply["payload"]
    first, updated, markdown, drawing, value = shown.of("display_data", "update_display_data", "execute_result")

    for data in (page, first, updated, value, shown.reply["user_expressions"]["loud"]):
        assert data["data"]["text/html"] == "<b>x</b>"
    assert markdown["data"]["text/html"].split("\n") == [
        "<h1>T</h1>",
        '<p><img alt="a"> <span>$a_1 \\, b*c*d$</span> <b>b</b></p>',
    ]
    assert drawing["data"]["text/html"].startswith('<img alt="" src="data:image/svg+xml;base64,')
    assert set(markdown["data"]) | set(drawing["data"]) == {"text/plain", "text/html"}


def test_an_error_is_text_on_every_way_to_a_front_end(plain: Notebook) -> None:
    hostile = "<a href=''><img onerror=x></a>"
    shown = plain.run(f'raise ValueError("{hostile}")')
    told = plain.run("1", user_expressions={"x": f'int("{hostile}")'}).reply["user_expressions"]["x"]

    for error in (shown.of("error")[0], shown.reply, told):
        assert hostile not in str(error)
        assert "<\u2060img" in error["evalue"] and "<\u2060img" in "".join(error["traceback"])


class TestAnswersOfAGuest:
    """What the kernel is sent as its own shell's words comes from code that may be anything."""

    @each_row(
        "report",
        [
            "progress({'toolcell_notebook': 'display_data', 'data': 7, 'metadata': 8, 'transient': 9})",
            "progress({'toolcell_notebook': 'execute_result', 'data': {'text/plain': b'x', 'application/json': [b'']}})",
            "progress({'toolcell_notebook': 'error', 'ename': [], 'evalue': {}, 'traceback': 5})",
            "progress({'toolcell_notebook': 'reply', 'content': [1]})",
            "progress({'toolcell_notebook': 'reply', 'content': {'payload': 5, 'user_expressions': 6}})",
            "progress({'toolcell_notebook': ['no kind']})",
            "progress(float('nan'))\ndisplay({'application/json': float('nan')}, raw=True)",
        ],
    )
    def test_nothing_that_is_reported_ends_the_kernel(self, plain: Notebook, report: str) -> None:
        assert plain.run(report).reply["status"] == "ok"
        assert plain.run("'alive'").data == {"text/plain": "'alive'"}

    def test_answers_of_a_forged_shell_have_the_shape_of_the_protocol(self, notebooks: Start) -> None:
        notebook = notebooks()
        notebook.run(
            "shell = type(get_ipython())\n"
            "answer = {'status': 'error', 'matches': [5, 'a' * 5000] * 1000, 'cursor_start': 'x', 'found': True,\n"
            "    'data': {'text/html': '<script>1</script>'}, 'metadata': [1], 'indent': 7, 'payload': 8}\n"
            "shell.send = lambda self, kind, **content: self.report({'toolcell_notebook': kind, 'content': answer})"
        )

        found = notebook.ask("complete_request", code="ab", cursor_pos=1)
        assert (found["status"], found["cursor_start"], found["cursor_end"]) == ("ok", 1, 1)
        assert len(found["matches"]) == 500 and set(map(type, found["matches"])) == {str}
        assert max(map(len, found["matches"])) == 1000
        about = notebook.ask("inspect_request", code="ab", cursor_pos=1)
        assert about["status"] == "ok" and "<script" not in str(about["data"])
        assert notebook.ask("is_complete_request", code="ab") == {"status": "unknown"}

    def test_an_output_that_is_too_large_is_shown_as_text(self, plain: Notebook) -> None:
        shown = plain.run("display({'text/plain': 'small', 'text/html': 'x' * (65 << 20)}, raw=True)")

        assert shown.of("display_data")[0]["data"] == {"text/plain": "small"}
        assert "only its text is shown" in shown.text("stderr")


def test_the_workspace_has_nothing_of_ours(plain: Notebook, tmp_path: Path) -> None:
    assert plain.run("import os\n[each for each in os.listdir() if not each.endswith('.txt')]").data == {
        "text/plain": "[]"
    }
