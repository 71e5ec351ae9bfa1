"""The rules of the loader, with real files of this machine and with files made to mislead."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell.sandbox.process import elf

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="ELF interpreters are Linux's")
X86, ARM = 62, 183
"""e_machine in the files made here."""


def write_elf(
    path: Path,
    needed: Sequence[str] = (),
    *,
    rpath: str = "",
    runpath: str = "",
    interp: str = "",
    machine: int = X86,
) -> Path:
    """Write the smallest shared object with a dynamic section."""
    strings = b"\0"

    def place(text: str) -> int:
        nonlocal strings
        at = len(strings)
        strings += text.encode() + b"\0"
        return at

    entries = [(1, place(name)) for name in needed]
    entries += [(15, place(rpath))] if rpath else []
    entries += [(29, place(runpath))] if runpath else []
    interp_at = place(interp) if interp else 0
    headers = 3 if interp else 2
    dynamic_at = 64 + 56 * headers
    entries += [(5, dynamic_at + 16 * (len(entries) + 2)), (0, 0)]
    strings_at = dynamic_at + 16 * len(entries)
    size = strings_at + len(strings)
    raw = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 64, 0, 0, 64, 56, headers, 0, 0, 0)
    raw += struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    raw += struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, 0, 16 * len(entries), 16 * len(entries), 8)
    if interp:
        raw += struct.pack("<IIQQQQQQ", 3, 4, strings_at + interp_at, 0, 0, len(interp) + 1, len(interp) + 1, 1)
    raw += b"".join(struct.pack("<qQ", tag, value) for tag, value in entries) + strings
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def search(*directories: Path, **cache: Path) -> elf.Search:
    return elf.Search({name.replace("_", "."): path for name, path in cache.items()}, directories)


def libs(path: Path, where: elf.Search) -> dict[str, Path]:
    return dict(elf.closure([path], where, also=()).libs)


@linux_only
def test_everything_the_interpreter_really_maps_is_in_the_closure() -> None:
    modules = sorted(Path(sysconfig.get_path("platstdlib"), "lib-dynload").glob("*.so"))
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

    found = elf.closure([Path(sys.executable), *modules])
    assert found.interp is not None
    known = {os.path.realpath(path) for path in (*found.libs.values(), *modules)}
    assert mapped - known == set()
    assert "libgcc_s.so.1" in found.libs


@linux_only
def test_the_search_below_another_root_does_not_look_outside_it(tmp_path: Path) -> None:
    write_elf(tmp_path / "usr/lib64/libthere.so")
    path = write_elf(tmp_path / "main", ["libthere.so", "libc.so.6"])
    found = elf.closure([path], elf.system_search("EM_X86_64", tmp_path), also=())
    assert dict(found.libs) == {"libthere.so": tmp_path / "usr/lib64/libthere.so"}
    assert dict(found.missing) == {"libc.so.6": path}


def test_needs_are_followed_through_every_library(tmp_path: Path) -> None:
    write_elf(tmp_path / "lib/liba.so", ["libb.so"])
    write_elf(tmp_path / "lib/libb.so", ["libc.so", "liba.so"])
    write_elf(tmp_path / "lib/libc.so")
    path = write_elf(tmp_path / "main", ["liba.so"], interp="/lib/ld.so")
    assert libs(path, search(tmp_path / "lib")) == {
        "ld.so": Path("/lib/ld.so"),
        **{f"lib{each}.so": tmp_path / f"lib/lib{each}.so" for each in "abc"},
    }


def test_a_runpath_comes_before_the_cache_and_the_cache_before_directories(tmp_path: Path) -> None:
    for each in ("own", "cached", "usual"):
        write_elf(tmp_path / each / "libx.so")
    with_path = write_elf(tmp_path / "bin/with", ["libx.so"], runpath="$ORIGIN/../own:/nowhere")
    without = write_elf(tmp_path / "bin/without", ["libx.so"])
    where = search(tmp_path / "usual", libx_so=tmp_path / "cached/libx.so")
    assert libs(with_path, where) == {"libx.so": tmp_path / "own/libx.so"}
    assert libs(without, where) == {"libx.so": tmp_path / "cached/libx.so"}
    assert libs(without, search(tmp_path / "usual")) == {"libx.so": tmp_path / "usual/libx.so"}


@pytest.mark.parametrize(("kind", "inherited"), [("rpath", True), ("runpath", False)])
def test_an_rpath_serves_dependencies_too_and_a_runpath_does_not(tmp_path: Path, kind: str, inherited: bool) -> None:
    write_elf(tmp_path / "own/liba.so", ["libb.so"])
    write_elf(tmp_path / "own/libb.so")
    path = write_elf(tmp_path / "main", ["liba.so"], **{kind: "${ORIGIN}/own"})  # type: ignore[arg-type]
    assert ("libb.so" in libs(path, search())) == inherited


def test_a_runpath_of_its_own_makes_a_library_deaf_to_inherited_rpaths(tmp_path: Path) -> None:
    write_elf(tmp_path / "own/liba.so", ["libb.so"], runpath="/nowhere")
    write_elf(tmp_path / "own/libb.so")
    assert "libb.so" not in libs(write_elf(tmp_path / "main", ["liba.so"], rpath="$ORIGIN/own"), search())


def test_paths_relative_to_the_working_directory_are_never_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_elf(tmp_path / "libx.so")
    write_elf(tmp_path / "sub/liby.so")
    path = write_elf(tmp_path / "main", ["libx.so", "sub/liby.so"], runpath=".::lib:$LIB")
    assert libs(path, search()) == {}


def test_a_candidate_for_another_machine_or_of_another_kind_is_passed_over(tmp_path: Path) -> None:
    write_elf(tmp_path / "one/libx.so", machine=ARM)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/libx.so").write_text("INPUT(libx.so.1)")
    os.mkfifo(tmp_path / "two/liby.so")
    right = write_elf(tmp_path / "three/libx.so")
    path = write_elf(tmp_path / "main", ["libx.so", "liby.so"])
    places = [tmp_path / each for each in ("one", "two", "three")]
    assert libs(path, search(*places)) == {"libx.so": right}


def test_two_files_of_one_name_are_both_reported(tmp_path: Path) -> None:
    first, second = (write_elf(tmp_path / each / "libx.so") for each in ("one", "two"))
    modules = [write_elf(tmp_path / f"{at}.so", ["libx.so"], runpath=f"$ORIGIN/{at}") for at in ("one", "two")]
    found = elf.closure(modules, search(), also=())
    assert (dict(found.libs), found.others) == ({"libx.so": first}, (second,))


def test_a_program_for_another_machine_than_the_first_is_refused(tmp_path: Path) -> None:
    paths = [write_elf(tmp_path / "one"), write_elf(tmp_path / "two", machine=ARM)]
    with pytest.raises(ValueError, match="machine"):
        elf.closure(paths, search())


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x02" + bytes(100), bytes(5000)],
)
def test_what_is_no_64_bit_elf_file_is_a_value_error(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "odd").write_bytes(raw)
    with pytest.raises(ValueError, match="odd"):
        elf.read_shared_object(tmp_path / "odd")


@given(edits=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=12), cut=st.integers(0, 700))
def test_no_edit_of_a_file_makes_reading_it_crash(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    path = write_elf(
        tmp_path_factory.getbasetemp() / "edited", ["liba.so", "libb.so"], runpath="$ORIGIN/x", interp="/lib/ld.so"
    )
    raw = bytearray(path.read_bytes())
    for at, value in edits:
        raw[at % len(raw)] = value
    path.write_bytes(raw[: cut or None])
    try:
        elf.closure([path], search(path.parent), also=())
    except (ValueError, OSError):
        pass


@given(raw=st.binary(max_size=300))
def test_a_cache_of_any_bytes_is_a_value_error_or_a_table(raw: bytes) -> None:
    for each in (raw, b"glibc-ld.so.cache1.1" + raw):
        try:
            elf.parse_cache(each, 0x0303)
        except (ValueError, struct.error):
            pass


def test_the_cache_gives_plain_entries_of_the_right_kind() -> None:
    texts = b"libx.so\0/plain/libx.so\0/v3/libx.so\0/32/libx.so\0"
    rows = [(0x0303, "/v3/libx.so", 1 << 62), (3, "/32/libx.so", 0), (0x0303, "/plain/libx.so", 0)]
    base = 48 + 24 * len(rows)
    entries = b"".join(
        struct.pack("<iIIIQ", flags, base, base + texts.index(path.encode()), 0, hwcap) for flags, path, hwcap in rows
    )
    table = struct.pack("<20sII", b"glibc-ld.so.cache1.1", len(rows), len(texts)) + bytes(20) + entries + texts
    for raw in (table, b"ld.so-1.7.0\0" + bytes(20) + table):
        assert elf.parse_cache(raw, 0x0303) == {"libx.so": Path("/plain/libx.so")}


def test_without_a_cache_the_configured_directories_are_searched(tmp_path: Path) -> None:
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    (tmp_path / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n/opt/one # why\n")
    (tmp_path / "etc/ld.so.conf.d/a.conf").write_text("/opt/two\nrelative\ninclude /etc/ld.so.conf\n")
    where = elf.system_search("EM_X86_64", tmp_path)
    assert tmp_path / "opt/one" in where.directories
    assert tmp_path / "opt/two" in where.directories
    assert tmp_path / "lib/x86_64-linux-gnu" in where.directories
    assert all(each.is_relative_to(tmp_path) for each in where.directories)
