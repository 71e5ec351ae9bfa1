"""Files of a notebook's folder, tools, approvals, the audit log, and a notebook that attacks its host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from egress.guest.http_server import serving
from egress.package_index import index, two_packages
from toolcell.config import Limits
from toolcell.kernel import folder as folder_module
from toolcell.kernel.folder import NotebookFolder
from toolcell.kernel.kernel import KernelApp
from toolcell.results import OutputFile
from toolcell.support import files

from .conftest import PATIENCE_S, Notebook

Start = Callable[..., Notebook]
TOOLS = str(Path(__file__).with_name("tools.py"))


def written(name: str, data: bytes) -> OutputFile:
    """A file that a cell has written."""
    return OutputFile(name, "application/octet-stream", len(data), data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.csv").write_text("x\n1\n")
    (folder / "b.txt").write_text("b")
    (folder / ".env").write_text("SECRET=1")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("c")
    (tmp_path / "outside.txt").write_text("outside")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    os.mkfifo(folder / "pipe")
    return folder


class TestFolder:
    def test_regular_files_that_are_not_hidden_are_copied(self, folder: Path) -> None:
        assert sorted(NotebookFolder(folder).copied(Limits()).files) == ["b.txt", "data/a.csv"]

    def test_environments_and_caches_are_not_copied(self, folder: Path) -> None:
        for name in ("env/pyvenv.cfg", "conda/conda-meta/history", "target/CACHEDIR.TAG", "web/node_modules/a/b.js"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text("x")
        (folder / "env" / "lib").mkdir()
        (folder / "env" / "lib" / "m.py").write_text("x")
        (folder / "web" / "page.html").write_text("x")

        assert sorted(NotebookFolder(folder).copied(Limits()).files) == ["b.txt", "data/a.csv", "web/page.html"]
        own = NotebookFolder(folder / "env").copied(Limits())  # a notebook that is in one
        assert sorted(own.files) == ["lib/m.py", "pyvenv.cfg"]

    def test_what_has_no_room_is_left_out_and_named(self, folder: Path) -> None:
        (folder / "large.bin").write_bytes(bytes(1 << 20))
        copied = NotebookFolder(folder).copied(Limits(disk_bytes=1 << 20))

        assert sorted(copied.files) == ["b.txt", "data/a.csv"]
        assert "large.bin" in copied.problems[0] and "--disk-bytes" in copied.problems[0]

    def test_what_changes_while_it_is_copied_is_copied_as_it_is_read_or_left_out(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever happens to a file happens when its folder has been listed."""
        for name in ("grows", "shrinks", "vanishes", "becomes-a-link", "becomes-a-pipe", "becomes-a-folder"):
            (folder / name).write_text("12345678")
        for name in ("becomes", "goes"):
            (folder / name).mkdir()
            (folder / name / "a.csv").write_text("x")
        listed = folder_module._entries

        def change_after(root: int, at: tuple[str, ...]) -> list[tuple[str, bool]]:
            found = listed(root, at)
            if at:
                return found
            (folder / "grows").write_text("1" * 40_000)
            (folder / "shrinks").write_text("1")
            for name in ("vanishes", "becomes-a-link", "becomes-a-pipe", "becomes-a-folder"):
                (folder / name).unlink()
            (folder / "becomes-a-link").symlink_to(tmp_path / "outside.txt")
            os.mkfifo(folder / "becomes-a-pipe")
            (folder / "becomes-a-folder").mkdir()
            shutil.rmtree(folder / "becomes")
            (folder / "becomes").symlink_to(tmp_path)
            shutil.rmtree(folder / "goes")
            return found

        monkeypatch.setattr(folder_module, "_entries", change_after)
        before = len(os.listdir("/proc/self/fd"))
        copied = NotebookFolder(folder).copied(Limits(disk_bytes=1 << 16))

        assert sorted(copied.files) == ["b.txt", "data/a.csv", "shrinks"] and copied.files["shrinks"] == b"1"
        assert copied.left_out == ("grows",)
        assert len(os.listdir("/proc/self/fd")) == before

    def test_names_that_a_workspace_cannot_have_are_said(self, folder: Path) -> None:
        (folder / "a\\b").write_text("1")
        (folder / os.fsdecode(b"\xff.txt")).write_text("1")
        copied = NotebookFolder(folder).copied(Limits())

        assert sorted(copied.files) == ["b.txt", "data/a.csv"] and len(copied.unfit) == 2
        assert copied.problems[0].encode() and "UTF-8" in copied.problems[0]

    def test_folders_may_nest_deeply(self, folder: Path) -> None:
        at = os.open(folder, os.O_DIRECTORY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=at)
            deeper = os.open("d", os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = deeper
        os.close(os.open("f", os.O_CREAT, dir_fd=at))
        os.close(at)
        try:
            assert "d/" * 1500 + "f" in NotebookFolder(folder).copied(Limits()).files
        finally:
            subprocess.run(["rm", "-r", str(folder / "d")], check=True)  # pytest removes folders by recursion

    def test_another_folder_hides_what_has_its_name(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "b.csv").write_text("b")
        (tmp_path / "b.txt").mkdir()
        (tmp_path / "b.txt" / "c").write_text("c")
        both = NotebookFolder(folder, (tmp_path / "data", tmp_path / "b.txt"))
        assert sorted(both.copied(Limits()).files) == ["b.txt/c", "data/b.csv"]

    def test_a_home_is_not_copied(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder / "data"))
        assert NotebookFolder(folder).copied(Limits()).files == {}

    def test_other_folders_are_copied_under_their_names_and_never_written(self, folder: Path, tmp_path: Path) -> None:
        other = tmp_path / "inputs"
        other.mkdir()
        (other / "c.txt").write_text("c")
        both = NotebookFolder(folder, (other,), is_saved=True)

        assert both.copied(Limits()).files["inputs/c.txt"] == b"c"
        assert "read only" in both.save([written("inputs/d.txt", b"d")], Limits())[0]

    @pytest.mark.parametrize(
        "name",
        [
            "../up.txt",
            "/tmp/absolute.txt",
            ".bashrc",
            ".git/hooks/post-commit",
            "a\\b",
            "data/../../up.txt",
            "",
            "link/x",
        ],
    )
    def test_no_name_leads_out_of_the_folder(self, folder: Path, tmp_path: Path, name: str) -> None:
        (folder / "link").symlink_to(tmp_path)
        before = sorted(tmp_path.rglob("*"))

        assert len(NotebookFolder(folder, is_saved=True).save([written(name, b"x")], Limits())) == 1
        assert sorted(tmp_path.rglob("*")) == before

    def test_only_files_of_kernels_are_replaced(self, folder: Path) -> None:
        saved = NotebookFolder(folder, is_saved=True)
        long = "n" * 251 + ".txt"

        assert saved.save([written("new/c.txt", b"1"), written(long, b"3"), written("é" * 127, b"4")], Limits()) == []
        assert (folder / long).read_text() == "3"
        assert saved.save([written("new/c.txt", b"2")], Limits()) == []
        assert (folder / "new" / "c.txt").read_bytes() == b"2"
        assert "is there" in saved.save([written("b.txt", b"2")], Limits())[0]
        assert (folder / "b.txt").read_text() == "b"
        assert "is there" in saved.save([written("link.txt", b"2")], Limits())[0]

    def test_a_kernel_that_is_restarted_replaces_what_was_saved_before(self, folder: Path) -> None:
        try:
            os.setxattr(folder / "b.txt", "user.tried", b"")
        except OSError as exc:
            pytest.skip(f"files keep no attributes here: {exc}")
        before = NotebookFolder(folder, is_saved=True)
        before.save([written("c.txt", b"1"), written("d.txt", b"1"), written("e.txt", b"1")], Limits())
        (folder / "d.txt").write_text("p")
        (folder / "f.txt").write_text("1")
        (folder / "f.txt").replace(folder / "e.txt")

        restarted = NotebookFolder(folder, is_saved=True)
        assert restarted.save([written("c.txt", b"2")], Limits()) == []
        assert before.save([written("c.txt", b"3")], Limits()) == []
        assert (folder / "c.txt").read_text() == "3"
        for name in ("b.txt", "d.txt", "e.txt"):
            assert "somebody has changed it" in restarted.save([written(name, b"2")], Limits())[0]
        assert [(folder / name).read_text() for name in ("b.txt", "d.txt", "e.txt")] == ["b", "p", "1"]

    def test_what_somebody_has_changed_or_made_anew_is_not_replaced(self, folder: Path) -> None:
        saved = NotebookFolder(folder, is_saved=True)
        saved.save([written("c.txt", b"1"), written("d.txt", b"1")], Limits())
        (folder / "c.txt").write_text("p")
        (folder / "d.txt").unlink()

        assert "somebody has changed it" in saved.save([written("c.txt", b"2")], Limits())[0]
        assert (folder / "c.txt").read_text() == "p"
        assert saved.save([written("d.txt", b"2")], Limits()) == []
        assert (folder / "d.txt").read_text() == "2"

    def test_what_somebody_changes_while_a_file_is_written_stays(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = NotebookFolder(folder, is_saved=True)
        saved.save([written("c.txt", b"1")], Limits())
        opened = files._open_draft

        def edit(draft: Path, mode: int) -> tuple[int, bool]:
            (folder / "c.txt").write_text("of somebody else")
            return opened(draft, mode)

        monkeypatch.setattr(files, "_open_draft", edit)
        assert "somebody has changed it" in saved.save([written("c.txt", b"2")], Limits())[0]
        assert (folder / "c.txt").read_text() == "of somebody else"

    @pytest.mark.parametrize("is_there", [False, True])
    def test_a_kernel_that_is_killed_while_it_writes_leaves_nothing_half_written(
        self, folder: Path, is_there: bool
    ) -> None:
        killed = (
            "import io, os, pathlib, signal, sys\n"
            "from toolcell.config import Limits\nfrom toolcell.kernel.folder import NotebookFolder\n"
            "from toolcell.results import OutputFile\nfrom toolcell.support import files\n"
            "saved = NotebookFolder(pathlib.Path(sys.argv[1]), is_saved=True)\n"
            "def save(data): saved.save([OutputFile('new/c.bin', 'a/b', len(data), data)], Limits())\n"
            "if sys.argv[2] == 'True': save(b'before')\n"
            "class Killed(io.FileIO):\n"
            "    def write(self, data):\n"
            "        super().write(data[:1000])\n        os.kill(os.getpid(), signal.SIGKILL)\n"
            "files.open = lambda descriptor, mode: Killed(descriptor, mode)\n"
            "save(bytes(5000))"
        )
        done = subprocess.run([sys.executable, "-c", killed, str(folder), str(is_there)])

        assert done.returncode == -signal.SIGKILL
        assert [(each.name, each.read_text()) for each in (folder / "new").iterdir()] == [
            ("c.bin", "before")
        ] * is_there

    def test_cells_cannot_fill_the_disk_of_the_host(self, folder: Path) -> None:
        saved, limits = NotebookFolder(folder, is_saved=True), Limits(disk_bytes=1 << 16, inodes=16)

        assert saved.save([written("1", bytes(60_000)), written("2", bytes(5536))], limits) == []
        assert saved.save([written("2", bytes(5535))], limits) == []
        assert "--disk-bytes" in saved.save([written("3", bytes(2))], limits)[0]
        assert saved.save([written("1", b""), *(written(f"{at}", b"x") for at in range(3, 17))], limits) == []
        assert "--inodes" in saved.save([written("17", b"x")], limits)[0]
        assert saved.save([written("4", b"again")], limits) == []

    def test_what_is_wrong_with_many_files_is_said_in_few_lines(self, folder: Path) -> None:
        said = NotebookFolder(folder, is_saved=True).save([written(f".{at}", b"") for at in range(1000)], Limits())
        assert len(said) == 11 and said[-1] == "990 more files were not saved"


@pytest.mark.isolation
class TestWorkspace:
    def test_a_notebook_reads_its_folder_and_without_save_the_first_file_written_is_said_to_stay_in_the_sandbox(
        self, notebooks: Start, folder: Path
    ) -> None:
        notebook = notebooks(folder=folder)
        listed = "import os\nsorted(os.path.join(at, each) for at, _, names in os.walk('.') for each in names)"
        assert notebook.run(listed).data == {"text/plain": "['./b.txt', './data/a.csv']"}
        cells = ("open('b.txt').read()", "open('b.txt', 'w').write('x')\n1 / 0", "open('c.txt', 'w').write('y');")
        told = [notebook.run(cell).text("stderr") for cell in cells]

        assert told[0] == told[2] == "" and "'b.txt'" in told[1] and "--save" in told[1]
        assert not (folder / "c.txt").exists() and (folder / "b.txt").read_text() == "b"

    def test_with_save_new_files_are_there_after_a_cell_also_if_its_thread_ends_with_its_sandbox(
        self, notebooks: Start, folder: Path
    ) -> None:
        notebook = notebooks("--save", folder=folder)
        notebook.run("open('first.txt', 'w').write('1');")
        shown = notebook.run(
            "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
            "open('first.txt', 'w').write('2')\nopen('second.txt', 'w').write('3');"
        )

        assert "not saved" not in shown.text("stderr")
        assert [(folder / name).read_text() for name in ("first.txt", "second.txt", "b.txt")] == ["2", "3", "b"]
        assert notebook.run("open('first.txt').read() + open('data/a.csv').read()[0]").data == {"text/plain": "'2x'"}
        shown = notebook.run("open('out.txt', 'w').write('o')\nopen('b.txt', 'w').write('changed')\nlast = 1")

        assert (folder / "out.txt").read_text() == "o"
        assert (folder / "b.txt").read_text() == "b" and "b.txt was not saved" in shown.text("stderr")
        assert notebook.run("open('out.txt', 'w').write('again')").text("stderr") == ""
        assert (folder / "out.txt").read_text() == "again"
        assert notebook.run("1 / 0").reply["ename"] == "ZeroDivisionError"


@pytest.mark.isolation
class TestRequests:
    def test_cells_reach_the_hosts_that_the_kernel_was_installed_with(
        self, notebooks: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SOME_TOKEN", "token-of-the-host")
        with serving() as server:
            host = f"http://127.0.0.1:{server.server_port}"
            secret = f"{host}=Authorization: Bearer {{SOME_TOKEN}}"
            notebook = notebooks("--allow", host, "--allow-secret", secret)
            sent = notebook.run(
                "import json, os, urllib.request\n"
                f"told = json.load(urllib.request.urlopen('{host}/echo'))\n"
                "told['path'], told['headers']['Authorization'], 'token-of-the-host' in str(os.environ)"
            )
            refused = notebook.run(f"urllib.request.urlopen('{host.replace('127.0.0.1', 'localhost')}/echo')")

        assert sent.data == {"text/plain": "('/echo', 'Bearer {SOME_TOKEN}', False)"}
        assert refused.reply["ename"] == "URLError"

    def test_a_cell_installs_what_the_kernel_was_installed_with(
        self, notebooks: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(index(*two_packages(tmp_path))) as site,
        ):
            url = site.url("/simple/", "127.0.0.1")
            (tmp_path / "sitecustomize.py").write_text(
                f"from toolcell.egress import PackageIndex\nPackageIndex.__init__.__kwdefaults__['url'] = {url!r}"
            )
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
            notebook = notebooks("--allow-package", "humanize")
            told = notebook.run("%pip install humanize").text()
            again = notebook.run("install_package('humanize')\n!pip install 'humanize>=4'").text()
            refused = notebook.run("install_package('tiny')").of("error")[0]["evalue"]
            notebook.run("import humanize")
            shown = notebook.run("humanize.twice()").data

        assert "Successfully installed humanize" in told and "already satisfied: humanize" in again
        assert "tiny is not allowed" in refused
        assert shown == {"text/plain": "14"}


@pytest.mark.isolation
class TestTools:
    def test_tools_are_names_and_approvals_are_asked_for(self, notebooks: Start, tmp_path: Path) -> None:
        notebook = notebooks("--tools", TOOLS, "--record", str(tmp_path / "audit"))

        assert notebook.run("temperature('Rome'), tools.temperature(city='Rome')").data == {
            "text/plain": "(31.0, 31.0)"
        }
        shown = notebook.run("send_mail('ann@example.com', 'hello')", answers=["y"])
        assert shown.data == {"text/plain": "'sent to ann@example.com'"}
        assert "send_mail(to='ann@example.com', text='hello')" in notebook.asked[0]["prompt"].replace('"', "'")
        assert "refused" in notebook.run("send_mail('a', 'b')", answers=["n"]).of("error")[0]["evalue"]
        assert "nobody answers" in notebook.run("send_mail('a', 'b')").of("error")[0]["evalue"]
        assert notebook.run("temperature = 5\ntemperature").data == {"text/plain": "5"}
        assert notebook.run("[each['name'] for each in list_tools()]").data == {
            "text/plain": "['temperature', 'send_mail']"
        }
        notebook.run("import getpass\n(getpass.getpass(), input())", answers=["typed-unseen", "typed-seen"])
        notebook.close()
        recorded = b"".join(path.read_bytes() for path in tmp_path.glob("audit*"))
        assert b"temperature('Rome'), tools" in recorded and b"typed-seen" in recorded
        assert b"typed-unseen" not in recorded

    def test_an_answer_to_one_question_does_not_approve_what_another_asks(self, with_tools: Notebook) -> None:
        client = with_tools.client
        ident = client.execute(
            "import threading\n"
            "asking = threading.Thread(target=lambda: print('typed', input('continue? [y/n] ')))\nasking.start()\n"
            "try: send_mail('mallory@example.com', 'secret')\nexcept Exception as exc: print(exc)\nasking.join()",
            allow_stdin=True,
        )

        def answer(value: object, **about: Any) -> None:
            client.stdin_channel.send(client.session.msg("input_reply", {"value": value}, **about))

        first = client.get_stdin_msg(timeout=PATIENCE_S)
        assert not client.stdin_channel.socket.poll(300), "there is one question at a time"
        answer("n", parent=first)
        second = client.get_stdin_msg(timeout=PATIENCE_S)
        answer("y", parent=first)
        client.stdin_channel.socket.send_multipart([b"<IDS|MSG>", b"forged", b"{}", b"{}", b"{}", b"{}"])
        client.stdin_channel.socket.send_multipart([b"nothing"])
        client.stdin_channel.send(client.session.msg("comm_msg", {"value": "y"}))
        client.stdin_channel.send(client.session.msg("input_reply", b'["y"]', parent=second))
        answer("n", parent=second)
        shown = with_tools.outcome_of(ident)

        prompts = sorted(each["content"]["prompt"][:20] for each in (first, second))
        assert prompts == ["[toolcell] Make the ", "continue? [y/n] "]
        assert "typed n" in shown.text() and "refused" in shown.text(), shown

    def test_what_is_shown_in_part_or_was_answered_before_it_was_asked_is_not_approved(
        self, with_tools: Notebook
    ) -> None:
        notebook, client = with_tools, with_tools.client

        shown = notebook.run("send_mail('ann@example.com', 'x' * 5000)", answers=["y"])
        assert "too long to be shown" in shown.of("error")[0]["evalue"] and notebook.asked == []

        ident = client.execute("input()", allow_stdin=True)
        client.get_stdin_msg(timeout=PATIENCE_S)
        notebook.manager.interrupt_kernel()
        notebook.outcome_of(ident)
        client.stdin_channel.send(client.session.msg("input_reply", {"value": "y"}))  # some do not name the question
        notebook.run("1")
        shown = notebook.run("send_mail('ann@example.com', 'hello')", answers=["n"])
        assert "refused" in shown.of("error")[0]["evalue"] and len(notebook.asked) == 1


@pytest.mark.isolation
def test_modules_and_settings_in_the_folder_are_not_loaded_on_the_host(notebooks: Start, tmp_path: Path) -> None:
    folder, told = tmp_path / "work", tmp_path / "told"
    (folder / "profile_default" / "startup").mkdir(parents=True)
    modules = ("toolcell", "anyio", "zmq", "ipykernel", "json", "debugpy", "sitecustomize", "profile_default/startup/a")
    for name in (*modules, "ipython_config", "ipython_kernel_config", "jupyter_config"):
        (folder / f"{name}.py").write_text(f"open({str(told)!r}, 'a').write(__name__)")
    notebook = notebooks(folder=folder)

    assert notebook.run("1").data == {"text/plain": "1"}
    notebook.ask("complete_request", code="pri", cursor_pos=3)
    notebook.ask("history_request", hist_access_type="tail", output=False, raw=True, n=1)
    assert not told.exists(), told.read_text()


def test_a_kernel_that_is_started_in_another_way_does_not_look_for_modules_in_the_folder_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", before := [each for each in sys.path if each])
    KernelApp().init_path()
    assert "" not in sys.path and sys.path is before


HOSTILE = """
import glob, os, socket
found = []
for path in {paths!r}:
    for attempt in (lambda: open(path).read(), lambda: os.listdir(path), lambda: os.stat(path)):
        try:
            found.append((path, str(attempt())[:50]))
        except OSError:
            pass
for port in {ports!r}:
    try:
        socket.create_connection(('127.0.0.1', port), 1)
        found.append(port)
    except OSError:
        pass
for pid in range(1, 4000):
    if os.path.exists(f'/proc/{{pid}}/cmdline') and b'kernel' in open(f'/proc/{{pid}}/cmdline', 'rb').read():
        found.append(pid)
for pid in {pids!r}:
    try:
        os.kill(pid, 9)
        found.append(pid)
    except OSError:
        pass
found += [name for name in os.environ if 'JUPYTER' in name or 'JPY' in name or name == {secret!r}]
found
"""


@pytest.mark.isolation
def test_a_hostile_notebook_gets_nothing_of_its_host_and_of_other_kernels(
    notebooks: Start, plain: Notebook, jupyter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "value")
    (tmp_path / "secret.txt").write_text("value")
    notebook = notebooks()
    ports = [
        getattr(each.manager, f"{channel}_port")
        for each in (plain, notebook)
        for channel in ("shell", "iopub", "stdin", "control", "hb")
    ]
    paths = [
        plain.manager.connection_file,
        notebook.manager.connection_file,
        str(jupyter),
        str(tmp_path / "secret.txt"),
        "/etc/shadow",
        str(Path.home()),
    ]
    pids = [plain.manager.provisioner.pid, notebook.manager.provisioner.pid]
    shown = notebook.run(HOSTILE.format(paths=paths, ports=ports, pids=pids, secret="HOST_SECRET"))

    assert shown.data == {"text/plain": "[]"}, shown.messages
    assert all(os.path.exists(path) for path in paths), "else nothing was there to be found"
    for each in (plain, notebook):
        assert each.run("'alive'").data == {"text/plain": "'alive'"}
