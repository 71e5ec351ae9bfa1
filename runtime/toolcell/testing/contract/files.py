"""Files: put into the workspace before a run, and returned with its result."""

from __future__ import annotations

import hashlib
import random

from toolcell.results import Outcome
from toolcell.testing.contract.case import Promises
from toolcell.testing.harness import LIMITS, BackendHarness, expect, expect_equal, expect_outcome

promises = Promises("files")


@promises
async def going_in(stand: BackendHarness) -> None:
    """Files are in the workspace before the script starts: empty ones, large ones, and in folders."""
    large = random.Random(1).randbytes(3_000_000)
    source = """
import hashlib
names = ["empty", "small.txt", "folder/deep/large"]
set_result([[len(data), hashlib.sha256(data).hexdigest()] for data in (open(name, "rb").read() for name in names)])
"""
    given = [("empty", b""), ("small.txt", "text é"), ("folder/deep/large", large)]
    contents = [b"", "text é".encode(), large]
    wanted = [[len(data), hashlib.sha256(data).hexdigest()] for data in contents]
    expect_equal(await stand.value(source, files=given), wanted, "sizes and digests")


@promises
async def going_out(stand: BackendHarness) -> None:
    """Returned files come whole, with their media types; folders and patterns stand for what is in them."""
    source = """
import os
os.makedirs("plots")
for i in range(2): open(f"plots/{i}.png", "wb").write(b"\\x89PNG\\r\\n\\x1a\\n" + bytes(i))
open("large.bin", "wb").write(bytes(range(256)) * 8000)
open("empty.txt", "w").close()
set_result("done", files=["plots", "large.bin", "*.txt"])
"""
    result = await stand.run(source)
    expect_outcome(result, Outcome.OK)
    files = {file.name: file for file in result.files}
    expect_equal(sorted(files), ["empty.txt", "large.bin", "plots/0.png", "plots/1.png"], "the names")
    expect_equal(files["large.bin"].data, bytes(range(256)) * 8000, "large.bin")
    expect_equal(files["empty.txt"].data, b"", "empty.txt")
    expect_equal(files["plots/1.png"].media_type, "image/png", "the media type")
    expect_equal(files["large.bin"].sha256, hashlib.sha256(bytes(range(256)) * 8000).hexdigest(), "the digest")


@promises
async def problems(stand: BackendHarness) -> None:
    """What cannot be returned is named with its problem: missing, outside, a link, no regular file."""
    source = """
import os
os.symlink("/etc/passwd", "link")
os.mkfifo("pipe")
set_result(1, files=["missing.txt", "../outside", "/etc/passwd", "link", "pipe"])
"""
    result = await stand.run(source)
    expect_outcome(result, Outcome.OK)
    expect_equal(len(result.files), 5, "files reported")
    for file in result.files:
        expect(file.data is None and file.problem, f"{file.name} was returned")


@promises
async def limits(stand: BackendHarness) -> None:
    """No more files, and no more bytes, than the run may return."""
    limits = LIMITS.model_copy(update={"files": 2, "files_bytes": 1000})
    source = "for i in range(4): open(f'{i}', 'wb').write(bytes(%d))\nset_result(1, files=list('0123'))"
    many, large = await stand.run(source % 10, limits=limits), await stand.run(source % 600, limits=limits)
    expect_equal([file.data is not None for file in many.files], [True, True, False, False], "files of ten bytes")
    expect_equal([file.data is not None for file in large.files], [True, False, False, False], "files of 600 bytes")


@promises
async def workspace(stand: BackendHarness) -> None:
    """A script starts in an empty workspace it may write to, and so it may to the temporary folder."""
    source = """
import os, tempfile
before = os.listdir(".")
os.makedirs("a/b")
open("a/b/c", "w").write("x" * 1000)
os.rename("a/b/c", "a/d")
os.remove("a/d")
with tempfile.TemporaryFile() as file: file.write(b"x" * 1000)
set_result([before, os.path.samefile(OUTPUT_DIR, ".")])
"""
    expect_equal(await stand.value(source), [[], True], "an empty folder, and where it is")
