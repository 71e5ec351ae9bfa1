"""Cells of a notebook run in a sandbox, and results show themselves there without being HTML."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from traitlets.config import Config

from rows import each_row
from toolcell import ExecutionResult, Outcome, SyncRuntime, ToolRegistry
from toolcell.results import ErrorInfo, LogEntry, Logs, OutputFile, ToolCallRecord

from .conftest import run_example

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e\x1b[31m"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    shell.run_line_magic("load_ext", "toolcell.integrations.ipython")
    yield shell
    shell.run_line_magic("unload_ext", "toolcell.integrations.ipython")


def run(shell: InteractiveShell, line: str, cell: str) -> ExecutionResult:
    """Run a cell and return its result."""
    shell.run_cell_magic("toolcell", f"--to result --no-raise-error {line}", cell)
    return shell.user_ns["result"]


def failed(shell: InteractiveShell, cell: str) -> str:
    """Run a cell that fails as a front end runs it, and return what it raised."""
    outcome = shell.run_cell(cell, silent=True)
    return str(outcome.error_in_exec)


@pytest.mark.isolation
class TestCells:
    def test_state_stays_between_cells_and_reset_forgets_it(self, shell: InteractiveShell) -> None:
        run(shell, "", "x = 40")
        assert run(shell, "", "x + 2").value == 42
        assert run(shell, "--reset", "x").error.type == "NameError"

    def test_a_cell_reads_the_variables_that_it_is_given_and_no_others(self, shell: InteractiveShell) -> None:
        shell.user_ns |= {"rows": [{"n": 1}, {"n": 2}], "secret": "s"}
        assert run(shell, "--inputs rows", "sum(row['n'] for row in rows)").value == 3
        assert run(shell, "", "secret").error.type == "NameError"

    def test_a_cell_reads_the_files_that_it_is_given(self, shell: InteractiveShell, tmp_path: Path) -> None:
        for name in ("a.csv", "b c.csv"):
            (tmp_path / name).write_text(name)
        line = f"--file {tmp_path}/a.csv --file '{tmp_path}/b c.csv'"
        cell = "[open(name).read() for name in input_files]"
        assert run(shell, line, cell).value == ["a.csv", "b c.csv"]
        assert run(shell, "", "open('a.csv').read()").value == "a.csv", "the files of a session stay"

    def test_a_csv_of_40_megabytes_and_a_frame_go_into_a_cell_of_a_named_session(
        self, shell: InteractiveShell, tmp_path: Path
    ) -> None:
        pandas = pytest.importorskip("pandas", reason="copies the pandas of this interpreter")
        rows = 2_000_000
        with (tmp_path / "data.csv").open("w") as file:
            file.write("region,amount,note\n")
            file.writelines(f"r{number % 2},{number},text {number % 1000:04}\n" for number in range(rows))
        assert (tmp_path / "data.csv").stat().st_size > 40_000_000
        shell.user_ns["df"] = pandas.DataFrame({"rate": [1.0, 0.5]}, index=["r0", "r1"])
        shell.run_line_magic("toolcell", "--packages pandas")
        cell = "import pandas as pd\nsales = pd.read_csv('data.csv')\n"
        cell += "(sales.amount * sales.region.map(df.rate)).groupby(sales.region).sum()"
        result = run(shell, f"--file {tmp_path}/data.csv --inputs df --session sales", cell)
        assert result.value.to_pandas().to_dict() == {"r0": sum(range(0, rows, 2)), "r1": sum(range(1, rows, 2)) / 2}
        assert run(shell, "--session sales", "len(sales)").value == rows

    def test_names_come_back_as_variables_of_the_notebook(self, shell: InteractiveShell) -> None:
        shell.user_ns["low"] = 0
        run(shell, "--outputs low,high", "low, high = 1, {'top': [2, 3]}")
        assert (shell.user_ns["low"], shell.user_ns["high"]) == (1, {"top": [2, 3]})

    def test_names_that_do_not_exist_are_said_and_none_comes_back(self, shell: InteractiveShell) -> None:
        shell.user_ns["low"] = 0
        problem = failed(shell, "%%toolcell --outputs low,hihg\nlow = 1")
        assert "--outputs low,hihg: error: NameError: name 'hihg' is not defined" in problem
        assert shell.user_ns["low"] == 0

    def test_a_cell_that_fails_brings_nothing_back(self, shell: InteractiveShell) -> None:
        run(shell, "--outputs low", "low = 1\n1/0")
        assert "low" not in shell.user_ns

    def test_sessions_of_other_names_know_nothing_of_each_other(self, shell: InteractiveShell) -> None:
        run(shell, "", "x = 1")
        run(shell, "--session mine", "x = 2")
        assert run(shell, "--session mine", "x").value == 2
        assert run(shell, "", "x").value == 1
        assert run(shell, "--session mine --reset", "x").error.type == "NameError"
        assert run(shell, "", "x").value == 1

    def test_packages_can_be_had_without_leaving_the_notebook(self, shell: InteractiveShell) -> None:
        pytest.importorskip("numpy", reason="copies the numpy of this interpreter")
        shell.run_line_magic("toolcell", "--packages numpy")
        assert run(shell, "", "import numpy\nint(numpy.arange(4).sum())").value == 6

    def test_frames_go_into_a_cell_and_come_back_as_frames(self, shell: InteractiveShell) -> None:
        pandas = pytest.importorskip("pandas", reason="copies the pandas of this interpreter")
        frame = pandas.DataFrame({"region": ["a", "b", "a"], "amount": [1.5, 2.0, 3.0]})
        shell.user_ns["df"] = frame
        shell.run_line_magic("toolcell", "--packages pandas")
        cell = "totals = df.groupby('region').sum()\ntop = totals.amount.to_numpy()\ntotals"
        result = run(shell, "--inputs df --outputs totals,top", cell)
        expected = frame.groupby("region").sum()
        pandas.testing.assert_frame_equal(shell.user_ns["totals"], expected)
        assert shell.user_ns["top"].tolist() == [4.5, 2.0]
        assert "<td>4.5</td>" in result._repr_html_()

    def test_a_chosen_runtime_brings_its_tools(self, shell: InteractiveShell) -> None:
        registry = ToolRegistry()

        @registry.tool
        def double(number: int) -> int:
            """Return twice the number that is given."""
            return 2 * number

        with SyncRuntime(registry) as runtime:
            shell.user_ns["mine"] = runtime
            shell.run_line_magic("toolcell", "mine")
            assert run(shell, "", "tools.double(number=21)").value == 42

    def test_a_failure_stops_the_notebook_unless_told_otherwise(self, shell: InteractiveShell) -> None:
        assert "ended with error: ZeroDivisionError: division by zero" in failed(shell, "%%toolcell\n1/0")
        assert run(shell, "", "1/0").outcome is Outcome.ERROR

    def test_no_text_of_a_script_moves_the_cursor_or_hides_in_the_failure(self, shell: InteractiveShell) -> None:
        cell = '%%toolcell\nraise ValueError("\\x1b]52;c;aGk=\\x07a\\u202eb")'
        assert failed(shell, cell) == "the cell ended with error: ValueError: a\\u202eb"

    @each_row(
        ("cell", "says"),
        [
            ("%%toolcell --inputs nothing\n1", "no variable 'nothing'"),
            ("%%toolcell --to 1x\n1", "not '1x'"),
            ("%%toolcell --wrong\n1", "--wrong"),
            ("%%toolcell --to 'x\n1", "No closing quotation"),
            ("%%toolcell --inputs a.b\n1", "'a.b' is not the name of a variable"),
            ("%%toolcell --file /no/such.csv\n1", "/no/such.csv"),
            ("%%toolcell --session a/b\n1", "'a/b'"),
            ("%toolcell", "no variable was named. To begin, run a cell that starts with %%toolcell"),
            ("%toolcell session", "no variable 'session' in this notebook. To begin, run a cell that starts with"),
            ("%toolcell --packages https://a.example/x", "'https://a.example/x'"),
            ("%toolcell get_ipython", "needs the name of a variable that holds an open SyncRuntime"),
        ],
    )
    def test_a_mistake_is_named(self, shell: InteractiveShell, cell: str, says: str) -> None:
        assert says in failed(shell, cell)

    def test_a_runtime_that_is_not_open_is_not_taken(self, shell: InteractiveShell) -> None:
        with SyncRuntime() as runtime:
            shell.user_ns["mine"] = runtime
        assert "mine is not open" in failed(shell, "%toolcell mine")

    def test_an_interrupt_ends_the_cell_and_keeps_the_state(
        self, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(shell, "", "x = 7")

        def printed(text: str, **_: Any) -> None:
            if "waiting" in text:
                raise KeyboardInterrupt

        monkeypatch.setattr("toolcell.integrations.ipython.print", printed, raising=False)
        result = run(shell, "", "import time\nprint('waiting', flush=True)\ntime.sleep(600)")
        assert result.outcome is Outcome.CANCELLED
        assert run(shell, "", "x").value == 7

    def test_the_example_runs(self) -> None:
        assert run_example("with_ipython.py").endswith("\nvalue: ['Rome', 'Oslo']\n['Rome', 'Oslo']\n")

    def test_unloading_ends_the_sandbox(self) -> None:
        before = set(psutil.Process().children(recursive=True))
        shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
        shell.run_line_magic("load_ext", "toolcell.integrations.ipython")
        run(shell, "", "1")
        assert set(psutil.Process().children(recursive=True)) - before
        shell.run_line_magic("unload_ext", "toolcell.integrations.ipython")
        shell.history_manager.end_session()
        deadline = time.monotonic() + 60
        while left := set(psutil.Process().children(recursive=True)) - before:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert "toolcell" not in shell.magics_manager.magics["cell"]

    def test_a_real_kernel_shows_output_below_the_cell_and_the_result_as_html(self) -> None:
        cells = [
            "%load_ext toolcell.integrations.ipython",
            "%%toolcell\nprint('printed inside')\n[{'city': '<b>Rome</b>', 'n': 3}]",
            "%%toolcell\n1/0",
        ]
        notebook = new_notebook(cells=[new_code_cell(each) for each in cells])
        NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
        stream, shown = notebook.cells[1].outputs
        traceback = notebook.cells[2].outputs[-1].traceback
        assert traceback == ["CellFailed: the cell ended with error: ZeroDivisionError: division by zero"]
        assert stream.text == "printed inside\n"
        assert "<td>&lt;b&gt;Rome&lt;/b&gt;</td>" in shown.data["text/html"]
        assert "printed inside" not in shown.data["text/html"]
        assert "value: [{'city': '<b>Rome</b>', 'n': 3}]" in shown.data["text/plain"]


class TestHtml:
    def test_everything_from_a_script_is_text(self) -> None:
        result = ExecutionResult(
            HOSTILE,
            Outcome.ERROR,
            value=[{HOSTILE: HOSTILE}],
            has_value=True,
            logs=Logs((LogEntry("stdout", HOSTILE),)),
            files=(OutputFile(HOSTILE, HOSTILE, 3, b"<sv"),),
            error=ErrorInfo(HOSTILE, HOSTILE, traceback=HOSTILE),
            calls=(ToolCallRecord("call_1", HOSTILE, {HOSTILE: HOSTILE}, HOSTILE),),
        )
        html = result._repr_html_()
        assert html.count("&lt;img src=x onerror=alert(1)&gt;") == 12
        assert "<img" not in html
        assert "<script" not in html
        assert "\u202e" not in html
        assert "\x1b" not in html

    @each_row("value", ["text", 1.5, [], [1], [{}], {"a": 1}, None, float("nan"), [{"a": 1}, 2]])
    def test_what_is_no_list_of_records_is_json(self, value: Any) -> None:
        html = ExecutionResult("r", Outcome.OK, value=value, has_value=True)._repr_html_()
        assert "<table" not in html
        assert "<pre>" in html

    @each_row(
        ("data", "shown"),
        [
            (PIXEL, '<img alt="x" src="data:image/png;base64,'),
            (b"RIFF\x24\x00\x00\x00WAVEfmt ", '<audio controls src="data:audio/wav;base64,'),
            (b"\x00\x00\x00\x18ftypmp42", '<video controls src="data:video/mp4;base64,'),
            (b"\xef\xbb\xbf<svg xmlns='x'/>", '<img alt="x" src="data:image/svg+xml;base64,'),
            (b"a,b\n1,<i>2</i>\n", "<pre>a,b\n1,&lt;i&gt;2&lt;/i&gt;\n</pre>"),
            (b"<html><script>alert(1)</script>", "<pre>&lt;html&gt;&lt;script&gt;"),
            (b"PK\x03\x04\x00\xff", "<figure><figcaption>"),
        ],
    )
    def test_every_file_is_shown_as_what_it_is_and_can_be_saved(self, data: bytes, shown: str) -> None:
        file = OutputFile("x", "text/html", len(data), data)
        html = ExecutionResult("r", Outcome.OK, files=(file,))._repr_html_()
        assert shown in html
        saved = base64.b64encode(data).decode()
        link = f'<a download="x" href="data:application/octet-stream;base64,{saved}">x</a>'
        assert html.count(saved) == 1, "a notebook keeps it once"
        assert (link in html) is not any(kind in shown for kind in ("<img", "<audio", "<video"))
        assert "data:text" not in html

    def test_an_image_is_shown_by_its_content_and_up_to_a_size(self) -> None:
        def shown(*files: OutputFile) -> str:
            return ExecutionResult("r", Outcome.OK, files=files)._repr_html_()

        assert "data:image/png;base64," in shown(OutputFile("a.txt", "text/plain", len(PIXEL), PIXEL))
        large = PIXEL + bytes(5 << 20)
        assert "data:" not in shown(OutputFile("a.png", "image/png", 1, large))
        assert "missing" in shown(OutputFile("a.png", "image/png", 0, None, problem="missing"))

    def test_much_is_cut_and_said(self) -> None:
        rows = [{"n": number} for number in range(80)]
        html = ExecutionResult("r", Outcome.OK, value=rows, has_value=True)._repr_html_()
        assert "<td>49</td>" in html
        assert "<td>50</td>" not in html
        assert "and 30 more rows" in html
        assert len(ExecutionResult("r", Outcome.OK, value="x" * 10**6, has_value=True)._repr_html_()) < 30_000
