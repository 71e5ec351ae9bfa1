"""The libraries of an interpreter and of packages, with real files of this machine and with files made to mislead."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.sandbox.process.libraries import libraries_of, loader_of, needed_by

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="ELF interpreters are Linux's")


def write_elf(path: Path, needed: Sequence[str], interp: str = "/lib/ld.so") -> Path:
    """Write the smallest program with a dynamic section."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (interp, *needed))
    places = [strings.index(name.encode() + b"\0") for name in needed]
    dynamic_at = 64 + 3 * 56
    strings_at = dynamic_at + 16 * (len(needed) + 2)
    tags = [*((1, place) for place in places), (5, strings_at), (0, 0)]
    size = strings_at + len(strings)
    raw = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    raw += struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    raw += struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, 0, 16 * len(tags), 16 * len(tags), 8)
    raw += struct.pack("<IIQQQQQQ", 3, 4, strings_at + 1, 0, 0, len(interp) + 1, len(interp) + 1, 1)
    raw += b"".join(struct.pack("<qQ", tag, value) for tag, value in tags) + strings
    path.write_bytes(raw)
    return path


@linux_only
def test_everything_the_interpreter_really_maps_is_found() -> None:
    modules = sorted(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    names = [path.name.partition(".")[0] for path in modules]
    script = f"""
import importlib, sys
for name in {names!r}:
    try: importlib.import_module(name)
    except ImportError: pass
print(*sorted({{line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}}), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    mapped = {os.path.realpath(line) for line in done.stdout.splitlines()}

    found = libraries_of(Path(os.path.realpath(sys.executable)), modules, ["libgcc_s.so.1", "libno-such.so.1"])
    known = {os.path.realpath(path) for path in (*found.values(), *modules)}
    assert mapped - known == set()
    assert next(iter(found.values())) == loader_of(Path(sys.executable))
    assert "libgcc_s.so.1" in found and "libno-such.so.1" not in found


@linux_only
def test_more_modules_than_one_question_to_the_loader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcell.sandbox.process.libraries._AT_ONCE", 1)
    found = libraries_of(Path(sys.executable), names=["libgcc_s.so.1", "libz.so.1"])
    assert {"libgcc_s.so.1", "libz.so.1"} <= set(found)


@linux_only
def test_no_file_that_a_package_names_by_a_path_is_given_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a package says that it needs a file of this machine, or one beside it."""
    given: list[str] = []
    run = subprocess.run

    def watched(*args: Any, env: dict[str, str], **named: Any) -> Any:
        given.append(env["LD_PRELOAD"])
        return run(*args, env=env, **named)

    monkeypatch.setattr(subprocess, "run", watched)
    path = write_elf(tmp_path / "module.so", ["/libevil.so", "./libevil.so", "a:./evil.so", "$ORIGIN", "libz.so.1"])
    libraries_of(Path(sys.executable), names=needed_by([path]))
    assert given == ["libz.so.1"]


def test_the_loader_and_the_needs_of_a_file_are_read(tmp_path: Path) -> None:
    path = write_elf(tmp_path / "main", ["liba.so", "libb.so.1"])
    assert loader_of(path) == Path("/lib/ld.so")
    assert needed_by([path]) == {"liba.so", "libb.so.1"}


@each_row(
    "raw",
    [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x02" + bytes(100), bytes(5000)],
)
def test_what_is_no_64_bit_elf_file_needs_nothing(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "odd").write_bytes(raw)
    assert (loader_of(tmp_path / "odd"), needed_by([tmp_path / "odd"])) == (None, set())
    assert libraries_of(tmp_path / "odd") == {}


@given(edits=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=12), cut=st.integers(0, 700))
def test_no_edit_of_a_file_makes_reading_it_crash(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    path = write_elf(tmp_path_factory.getbasetemp() / "edited", ["liba.so", "libb.so"])
    raw = bytearray(path.read_bytes())
    for at, value in edits:
        raw[at % len(raw)] = value
    path.write_bytes(raw[: cut or None])
    loader_of(path)
    needed_by([path])
