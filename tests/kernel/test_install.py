"""`toolcell kernel install` tells Jupyter how the kernel is started, wherever that happens."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.connect import write_connection_file
from jupyter_client.kernelspec import KernelSpecManager
from typer.testing import CliRunner

from rows import each_row
from toolcell.cli import build
from toolcell.kernel import spec

pytestmark = pytest.mark.isolation


def install(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolcell", "kernel", "install", "--user", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_flags_are_those_of_the_kernel_and_paths_are_absolute(jupyter: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(Path(__file__).with_name("tools.py").read_text())
    (tmp_path / "data").mkdir()
    flags = ["--tools", "tools.py", "--mount", "data", "--save", "--memory-bytes", "1GiB", "--wall-s", "5"]
    done = install(tmp_path, "--name", "mine", "--display-name", "Mine", *flags)

    assert done.returncode == 0, done.stderr
    found = json.loads((jupyter / "jupyter_data_dir" / "kernels" / "mine" / "kernel.json").read_text())
    assert found["display_name"] == "Mine" and found["language"] == "python"
    assert found["argv"][:8] == [sys.executable, "-P", "-m", "toolcell", "kernel", "start", "-f", "{connection_file}"]
    given = found["argv"][8:]
    for flag, value in {
        "--tools": str(tmp_path / "tools.py"),
        "--mount": str(tmp_path / "data"),
        "--memory-bytes": str(1 << 30),
        "--wall-s": "5.0",
    }.items():
        assert given[given.index(flag) + 1] == value
    assert "--save" in given and not {"--name", "--display-name", "--user"} & set(given)
    words = shlex.split(given[given.index(spec.INSTALLED_BY) + 1])
    assert words[:3] == ["toolcell", "kernel", "install"] and words[3:-5] == given[: given.index(spec.INSTALLED_BY)]
    assert words[-5:] == ["--user", "--name", "mine", "--display-name", "Mine"]
    assert "mine" in KernelSpecManager().find_kernel_specs()


@each_row(
    ("flags", "said"),
    [
        (["--mount", "nothing-like-it"], "there is no such folder"),
        (["--mount", "/usr/lib", "--mount", "/var/lib"], "'lib' is taken"),
        (["--tools", "nothing_like_it.py"], "nothing_like_it.py"),
        (["--name", "no name"], "cannot be installed"),
        (["--sys-prefix"], "--user and --sys-prefix"),
        (["--wall-s", "-1"], "--wall-s"),
        (["--check-types", "warn"], "--check-types"),
    ],
)
def test_what_cannot_work_is_said_at_the_installation(
    jupyter: Path, tmp_path: Path, flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = KernelSpecManager().find_kernel_specs()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(build(["kernel"]), ["kernel", "install", "--user", *flags])

    assert done.exit_code == 2 and said in done.stderr
    assert KernelSpecManager().find_kernel_specs() == before


def test_the_command_that_front_ends_use_is_not_offered_to_people() -> None:
    told = CliRunner().invoke(build(["kernel"]), ["kernel", "--help"]).output

    assert "│ install " in told and "│ start " not in told


@each_row("taken", ["shell", "iopub", "stdin", "control"])
def test_a_kernel_whose_port_is_taken_says_so_and_ends(tmp_path: Path, taken: str) -> None:
    file, _ = write_connection_file(str(tmp_path / "kernel.json"), ip="127.0.0.1")
    with socket.create_server(("127.0.0.1", json.loads(Path(file).read_text())[f"{taken}_port"])) as other:
        command = [sys.executable, "-m", "toolcell", "kernel", "start", "-f", file]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)

        assert done.returncode == 2, done.stderr
        assert "kernel.json" in done.stderr and f"127.0.0.1:{other.getsockname()[1]}" in done.stderr
        assert "Traceback" not in done.stderr
