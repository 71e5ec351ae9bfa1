"""`python -m benchmarks.standard_library`: CPython's own tests of its standard library, in a sandbox and outside.

Prints each test that passes in a plain process and not in a sandbox, grouped by its error. docs/plain-python.md lists
the reasons. Names of test modules may be given as arguments, and `--backend docker`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolcell import Limits, SyncRuntime, ToolRegistry

TESTS = Path(sysconfig.get_path("stdlib")) / "test"

MODULES = """
    abc argparse array ast base64 binascii bisect bool builtin bytes bz2 calendar codecs collections compile
    configparser contextlib contextvars copy csv dataclasses datetime decimal deque dict difflib dis email enum
    enumerate exceptions file fileinput fileio float fnmatch format fractions functools gc generators getopt
    getpass glob graphlib grp gzip hashlib heapq hmac html htmlparser inspect int io ipaddress itertools json
    keyword linecache list locale logging lzma math memoryview mimetypes mmap netrc numeric_tower operator
    optparse os ordered_dict pathlib pickle pkgutil plistlib poll posix posixpath pprint pwd queue random range
    re reprlib resource runpy sched select selectors set shelve shlex shutil signal sqlite3 stat statistics
    string stringprep struct sys tarfile tempfile textwrap thread threading time timeit tokenize tomllib
    traceback tuple typing types unicodedata urlparse userdict uuid weakref xml_etree zipfile zlib zoneinfo
    asyncio.test_streams asyncio.test_tasks asyncio.test_queues asyncio.test_locks asyncio.test_timeouts
    asyncio.test_taskgroups asyncio.test_selector_events asyncio.test_runners asyncio.test_base_events
    asyncio.test_unix_events
"""

RUN = """
import sys, unittest
class Recorded(unittest.TestResult):
    def startTest(self, test):
        super().startTest(test)
        told[test.id()] = "ok"
    def addError(self, test, error):
        told[test.id()] = f"{error[0].__name__}: {error[1]}"[:200]
    addFailure = addError
    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addError(test, error)
    def addSkip(self, test, reason):
        told[test.id()] = "skipped"
    def addExpectedFailure(self, test, error):
        pass
told = {}
sys.argv = ["tests"]
try:
    unittest.defaultTestLoader.loadTestsFromName(f"test.{module}").run(Recorded())
except unittest.SkipTest:
    told["skipped"] = "skipped"
set_result(told)
"""

OUTSIDE = """
import json, sys
sys.path.insert(0, ".")
module = sys.argv[1]
def set_result(value, to=open(sys.argv[2], "w")):
    json.dump(value, to)
    to.close()
"""

LIMITS = Limits(
    wall_s=60,
    cpu_s=60,
    memory_bytes=1 << 30,
    disk_bytes=256 << 20,
    inodes=20_000,
    open_files=1024,
    frame_bytes=64 << 20,
)


def files_of(module: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of what a test module needs of the test package."""
    wanted = [each for each in TESTS.iterdir() if not each.name.startswith("test_")]
    own = module.partition(".")[0]
    wanted += [TESTS / f"{own}.py", TESTS / own]
    for path in wanted:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and file.suffix != ".pyc" and file.stat().st_size < 1 << 20:
                yield f"test/{file.relative_to(TESTS)}", file.read_bytes()


def outside(module: str) -> dict[str, str]:
    """Run a test module in a plain process."""
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r") as told:
        for name, content in files_of(module):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        command = [sys.executable, "-P", "-S", "-c", OUTSIDE + RUN, module, told.name]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMITS.wall_s)
        except subprocess.TimeoutExpired:
            return {}
        return read(told.read())


def read(text: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(text) if text else {}
    return found


def inside(runtime: SyncRuntime, module: str) -> tuple[str, dict[str, Any]]:
    """Run a test module in a sandbox; returns how the run ended and what each test did."""
    result = runtime.execute_code(RUN, inputs={"module": module}, files=list(files_of(module)))
    return str(result.outcome), result.value if result.has_value else {}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=[f"test_{name}" for name in MODULES.split()])
    parser.add_argument("--backend", default="process")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    different: dict[str, list[str]] = defaultdict(list)
    try:
        with SyncRuntime(ToolRegistry(), backend=options.backend, limits=LIMITS) as runtime:
            for module in options.modules:
                compare(runtime, module, counts, different)
    finally:  # also of a comparison that is broken off
        for error, tests in sorted(different.items(), key=lambda row: -len(row[1])):
            print(f"\n{len(tests)} x {error}\n    " + "\n    ".join(tests[:6]))
        print(f"\n{dict(counts)}")


def compare(runtime: SyncRuntime, module: str, counts: Counter[str], different: dict[str, list[str]]) -> None:
    """Run one module in both places. Collect the tests that pass outside only, by what they say inside."""
    plain, (outcome, told) = outside(module), inside(runtime, module)
    passed = [test for test, how in plain.items() if how == "ok"]
    lost = [test for test in passed if told.get(test) != "ok"]
    counts.update(modules=1, tests=len(plain), passed=len(passed), different=len(lost))
    print(f"{module}: {len(passed)} pass outside, {len(passed) - len(lost)} of them inside ({outcome})", flush=True)
    unloaded = next((how for test, how in told.items() if "_FailedTest" in test), f"not run: {outcome}")
    for test in lost:
        different[told.get(test, unloaded)].append(test)


if __name__ == "__main__":
    main()
