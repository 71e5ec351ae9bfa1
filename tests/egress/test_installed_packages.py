"""`install_package` in scripts: what is allowed, how wheels arrive, and what hostile names and wheels meet."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from builtin.webkit import page
from egress.doors import code_of, door
from egress.package_index import index, opened
from egress.replays import replayed
from rows import each_row
from toolcell import Limits, Policy, Runtime, ToolRegistry, UsageError
from toolcell.audit import AuditLog, RecordConfig
from toolcell.control import Draft
from toolcell.egress import Allow, Egress, PackageIndex
from toolcell.egress.packages import PIP, ScriptPython
from toolcell.egress.run_requests import RunRequests
from toolcell.errors import PackageError, ToolError
from toolcell.sandbox import prepare_packages
from toolcell.sandbox.process import packages
from toolcell.testing import FakeBackend
from toolcell.tools import Approve, Rewrite
from toolcell_bridge.guest.egress.packages import unpack_wheel
from wheels import make_wheel

# What may be asked for


@each_row(
    ("asked", "wanted"),
    [
        ("humanize", "humanize>=4"),
        ("Humanize<5", "humanize<5,>=4"),
        ("tiny.pkg", "tiny-pkg"),
        ("tiny_pkg[more]==1", "tiny-pkg[more]==1"),
    ],
)
def test_the_versions_of_the_list_and_of_the_script_hold(asked: str, wanted: str) -> None:
    assert PackageIndex(["humanize>=4", "tiny-pkg[more]"]).requirement_for(asked) == wanted


@each_row(
    ("asked", "said"),
    [
        ("numpy", r'Egress\(packages=\["numpy"\]\), --allow-package numpy or .* would allow it; allowed: humanize>=4'),
        ("humanize[all]", r'Egress\(packages=\["humanize\[all\]"\]\), --allow-package humanize\[all\] or'),
        ("humanize @ https://evil.test/h-1-py3-none-any.whl", "by its name and versions"),
        ("humanize @ file:///etc", "by its name and versions"),
        ("https://evil.test/humanize-9-py3-none-any.whl", "not the name"),
        ("./humanize", "not the name"),
        ("/tmp/humanize.whl", "not the name"),
        ("--index-url=https://evil.test", "not the name"),
        ("-r/etc/passwd", "not the name"),
        ("-e .", "not the name"),
        ("humanize --index-url https://evil.test", "not the name"),
        ("humanize\n--pre", "not the name"),
        ("humanize; python_version > '2'", "by its name and versions"),
        ("humanize===9;x", "not the name"),
        ("humanize===9", "by its name and versions"),
        ("$(id)", "not the name"),
        ("", "not the name"),
        ("h" * 201, "at most 200 characters"),
        (["humanize"], "at most 200 characters"),
        (None, "at most 200 characters"),
    ],
)
def test_what_is_not_the_name_of_an_allowed_package_is_refused(asked: object, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        PackageIndex(["humanize>=4"]).requirement_for(asked)


@each_row("packages", ["humanize", ["-r x"], ["humanize @ https://a.test/b.whl"], [3], ["a==="]])
def test_a_list_of_what_are_no_packages_is_an_error(packages: Any) -> None:
    with pytest.raises(UsageError):
        Egress(packages=packages)


def test_an_index_is_reached_by_rules_of_its_own() -> None:
    egress = Egress(Allow("a.test"), packages=PackageIndex(["x"], url="https://pypi.test:8443/simple/"))

    assert [(rule.host, rule.ports) for rule in egress.for_index().rules] == [("pypi.test", (8443,))]
    assert [rule.host for rule in egress.rules] == ["a.test"]
    assert {rule.host for rule in Egress(packages=["x"]).for_index().rules} == {"pypi.org", "files.pythonhosted.org"}


def test_versions_that_cannot_be_read_are_left_out() -> None:
    given = {"a": "1" * 5000, "b": "1.0", "../c": "1", "d": 3, "e": "1/../2"}
    python = ScriptPython.of({"python": "3.12.1", "machine": "x86_64", "installed": given})

    assert python.installed == {"b": "1.0"}


@pytest.mark.anyio
async def test_without_a_list_nothing_is_installed() -> None:
    async with door(Allow("a.test")) as opened:
        answer = await opened.call("install_package", {"package": "humanize"})

    assert code_of(answer) == "EgressRefused"
    assert answer.error is not None
    doors = ('Egress(packages=["humanize"])', "--allow-package humanize", "`allow_packages` of a service")
    assert all(door in answer.error.message for door in doors), answer.error.message


# Wheels


def wheel_of(path: Path, files: Mapping[str, str]) -> bytes:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path.read_bytes()


@each_row("name", ["../evil.py", "a/../../evil.py", "/tmp/evil.py", "x-1.data/purelib/../../evil.py"])
def test_a_wheel_has_no_file_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()

    with pytest.raises(ValueError, match="outside of its folder"):
        unpack_wheel(wheel_of(tmp_path / "x.whl", {name: "evil"}), str(folder))

    assert not any(path.name == "evil.py" for path in tmp_path.rglob("*"))


def test_a_link_in_a_wheel_is_a_file_and_its_scripts_are_left_out(tmp_path: Path) -> None:
    folder, path = tmp_path / "site", tmp_path / "x.whl"
    folder.mkdir()
    with zipfile.ZipFile(path, "w") as wheel:
        link = zipfile.ZipInfo("pkg/link")
        link.external_attr = 0o120777 << 16
        wheel.writestr(link, "/etc/passwd")
        wheel.writestr("x-1.data/scripts/run", "#!python")
        wheel.writestr("x-1.data/headers/x.h", "")
        wheel.writestr("x-1.data/purelib/pkg/pure.py", "")
    unpack_wheel(path.read_bytes(), str(folder))

    assert not (folder / "pkg/link").is_symlink()
    assert (folder / "pkg/link").read_text() == "/etc/passwd"
    assert {str(each.relative_to(folder)) for each in folder.rglob("*")} == {"pkg", "pkg/link", "pkg/pure.py"}


# Scripts


INSTALL = """
install_package("humanize>=4")
import humanize, importlib.metadata, json, os, sys
folder = os.path.dirname(humanize.__file__)
problems = []
for path in (humanize.__file__, folder + "/new.py", os.path.dirname(folder) + "/new.py"):
    try: open(path, "a")
    except OSError as error: problems.append(type(error).__name__)
set_result({
    "twice": humanize.twice(),
    "data": open(folder + "/data.txt").read(),
    "version": importlib.metadata.version("humanize"),
    "problems": problems,
    "evil": "evil" in sys.modules,
})
"""
VALUE = {"twice": 14, "data": "words", "version": "4.1", "problems": ["PermissionError"] * 3, "evil": False}


@pytest.mark.isolation
@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"backend": "process"}, id="process"),
        pytest.param({"policy": Policy(profile="container")}, id="contained", marks=pytest.mark.contained),
        pytest.param({"backend": "docker"}, id="docker", marks=pytest.mark.docker),
    ],
)
async def test_a_script_installs_what_is_allowed_and_what_that_needs(
    options: dict[str, Any], wheels: list[Path]
) -> None:
    async with opened(wheels, "humanize", **options) as (_, runtime):
        result = await runtime.execute_code(INSTALL)
        fresh = await runtime.execute_code("import humanize")

    is_contained = "policy" in options  # there modes of files have no effect
    assert result.error is None, result.error
    assert result.value == (VALUE | {"problems": []} if is_contained else VALUE)
    assert fresh.error is not None
    assert fresh.error.type == "ModuleNotFoundError"


@pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning")  # trio's, of a body that is dropped
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.isolation
@pytest.mark.anyio
async def test_the_log_has_each_wheel_and_a_replay_needs_no_index(wheels: list[Path], tmp_path: Path) -> None:
    folder, files = tmp_path / "log", {"tiny_pkg/__init__.py": "VALUE = 7\n", "tiny_pkg/long": "x" * 600_000}
    wheels[0] = make_wheel(tmp_path, "tiny_pkg", "1.5", files)
    log = AuditLog(folder / "runs.db", config=RecordConfig(value_bytes=300_000))
    async with opened(wheels, "humanize", record=log) as (_, runtime):
        result = await runtime.execute_code(INSTALL)
    recorded, report = await replayed(folder, INSTALL)
    (call,) = [each for each in recorded.calls if each.tool == "install_package"]

    assert result.value == VALUE
    assert report.ok, report.divergence
    digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in wheels}
    found = {each["file"]: (each["name"], each["version"], each["sha256"]) for each in call.value["wheels"]}
    assert found == {
        "humanize-4.1-py3-none-any.whl": ("humanize", "4.1", digests["humanize-4.1-py3-none-any.whl"]),
        "tiny_pkg-1.5-py3-none-any.whl": ("tiny-pkg", "1.5", digests["tiny_pkg-1.5-py3-none-any.whl"]),
    }


@pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning")  # trio's, of a body that is dropped
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_draft_installs_and_its_commit_installs_only_to_recheck_that(
    wheels: list[Path], tmp_path: Path
) -> None:
    registry, sent = ToolRegistry(), list[int]()

    @registry.tool
    def send(value: int) -> None:
        """Send a value to the office."""
        sent.append(value)

    script = "install_package('humanize')\nimport humanize\ntools.send(humanize.twice())\nset_result(humanize.VERSION)"
    other = tmp_path / "other"
    other.mkdir()
    long = make_wheel(other, "tiny_pkg", "1.5", {"tiny_pkg/__init__.py": "VALUE = 8", "tiny_pkg/long": "x" * 600_000})
    async with opened([wheels[2], long], "humanize", "tiny-pkg", registry=registry) as (site, runtime):
        first, second, third = Draft(), Draft(), Draft()
        results = [await runtime.execute_code(script, dry_run=each) for each in (first, second, third)]
        await runtime.execute_code("install_package('tiny-pkg')", dry_run=second)
        before = len(site.requests)
        await runtime.commit(first)
        after = len(site.requests)
        await runtime.commit(second, recheck=True)
        site.pages["/simple/tiny-pkg/"] = page("")
        with pytest.raises(UsageError, match="install_package has another result now"):
            await runtime.commit(third, recheck=True)

    assert [each.value for each in results] == [4, 4, 4]
    assert sent == [16, 16]
    assert after == before


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_repair_takes_over_what_was_installed_and_mixes_it_with_nothing_new(wheels: list[Path]) -> None:
    async with opened(wheels, "humanize", "tiny-pkg") as (site, runtime):
        failed = await runtime.execute_code("install_package('tiny-pkg')\nimport tiny_pkg\n1 / 0")
        before = len(site.requests)
        same = await runtime.execute_code(
            "install_package('tiny-pkg')\nimport tiny_pkg\nset_result(tiny_pkg.VALUE)", repairs=failed
        )
        after = len(site.requests)
        other = await runtime.execute_code(
            "install_package('humanize<4')\nimport humanize\ninstall_package('tiny-pkg')\nimport tiny_pkg\n"
            "set_result([humanize.VERSION, tiny_pkg.VALUE])",
            repairs=failed,
        )

    assert same.value == 7, same.error
    assert after == before
    assert other.value == [3, 7], other.error


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_session_keeps_what_it_installed(wheels: list[Path]) -> None:
    async with opened(wheels, "humanize") as (_, runtime), runtime.session() as session:
        await session.execute_code("install_package('humanize')")
        first = await session.execute_code("import humanize; set_result(humanize.twice())")
        again = await session.execute_code("install_package('humanize'); set_result(humanize.VERSION)")

        await session.put_down()
        brought = await session.execute_code(
            "install_package('humanize'); set_result([humanize.twice(), humanize.VERSION])"
        )
        async with await session.fork() as copy:
            forked = await copy.execute_code("import tiny_pkg; set_result([humanize.twice(), tiny_pkg.VALUE])")

    assert (first.value, again.value) == (14, 4)
    assert again.calls == ()
    assert (brought.value, forked.value) == ([14, 4], [14, 7]), (brought.error, forked.error)
    assert brought.session is not None and brought.session.began in ("value", "journal")
    assert brought.calls == forked.calls == ()


@pytest.mark.isolation
@pytest.mark.anyio
async def test_another_process_goes_on_with_what_a_session_installed(wheels: list[Path], tmp_path: Path) -> None:
    async with opened(wheels, "humanize", record=tmp_path / "runs.db") as (site, runtime):
        async with runtime.session("installs") as session:
            assert (await session.execute_code("install_package('humanize')\nimport humanize")).ok
        sent = len(site.requests)
        async with Runtime(record=tmp_path / "runs.db") as other, other.session("installs", restore=True) as session:
            result = await session.execute_code("set_result(humanize.twice())")

    assert result.value == 14, result.error
    assert len(site.requests) == sent


@pytest.mark.isolation
@pytest.mark.anyio
async def test_somebody_approves_an_installation_and_the_run_is_carried_on_without_an_index(
    wheels: list[Path], tmp_path: Path
) -> None:
    registry = ToolRegistry()

    @registry.tool(requires_approval=True)
    def pay() -> str:
        """Pay the bill of today."""
        return "paid"

    script = "install_package('humanize')\nimport humanize\nset_result([tools.pay(), humanize.twice()])"
    options = {"registry": registry, "record": tmp_path / "journal" / "runs.db"}
    async with opened(wheels, "humanize", approval=True, **options) as (site, runtime):
        first = await runtime.execute_code(script, on_approval="suspend")
        before = len(site.requests)
        assert first.suspension is not None
        (install,) = first.suspension.calls
        second = await runtime.resume(first.suspension.to_json(), {install.id: Approve()})
        between = len(site.requests)
        assert second.suspension is not None
        (pay_call,) = second.suspension.calls
        third = await runtime.resume(second.suspension.to_json(), {pay_call.id: Approve()})
        after = len(site.requests)

    assert install.tool == "install_package"
    assert before == 0
    assert pay_call.tool == "pay"
    assert third.value == ["paid", 14], third.error
    assert between == after > 0


HOST = """
import os, signal, sys
import anyio
from toolcell import Egress, Limits, Runtime, ToolRegistry
from toolcell.egress import PackageIndex

url, journal, *end = sys.argv[1:]
registry, parts = ToolRegistry(), []

@registry.before_call
def end_at_the_second_part(call):
    parts.append(call.name)
    if end and parts.count("http_read") == 2:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    egress = Egress(packages=PackageIndex(["long"], url=url))
    async with Runtime(registry, egress=egress, record=journal + "/runs.db", limits=Limits(wall_s=120)) as runtime:
        for run in runtime.interrupted_runs():
            print((await runtime.resume(run)).value)
        if end:
            await runtime.execute_code("install_package('long'); import long; long.VALUE")

anyio.run(main)
"""


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_run_whose_host_died_while_wheels_arrived_is_carried_on(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "long", "1.0", {"long/__init__.py": "VALUE = 7", "long/data": "x" * 600_000})
    async with index(wheel) as site:
        command = [sys.executable, "-c", HOST, site.url("/simple/", "127.0.0.1"), str(tmp_path / "journal")]
        killed = await anyio.run_process([*command, "end"], check=False)
        carried_on = await anyio.run_process(command, check=False, stderr=None)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert carried_on.stdout == b"7\n"


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_plan_has_no_packages_to_install(wheels: list[Path]) -> None:
    async with opened(wheels, "humanize") as (site, runtime):
        plan = [{"tool": "install_package", "args": {"package": "humanize"}}]
        result = await runtime.execute_plan(plan)

    assert result[0]["status"] == "error"
    assert site.requests == []


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_hook_cannot_have_another_package_installed(wheels: list[Path]) -> None:
    registry = ToolRegistry()

    @registry.before_call
    def change(call: Any) -> Rewrite:
        return Rewrite({**call.args, "package": "tiny-pkg"})

    async with opened(wheels, "humanize", registry=registry) as (site, runtime):
        result = await runtime.execute_code("install_package('humanize')")

    assert result.error is not None
    assert "tiny-pkg is not allowed" in result.error.message
    assert site.requests == []


@pytest.mark.isolation
@pytest.mark.anyio
async def test_what_a_script_can_import_stays_as_it_is(wheels: list[Path], tmp_path: Path) -> None:
    own = make_wheel(tmp_path, "tiny_pkg", "1.2", {"tiny_pkg/__init__.py": "VALUE = 100\n"})
    async with opened(wheels, "humanize", packages=[str(own)]) as (site, runtime):
        result = await runtime.execute_code(INSTALL + "\nset_result(humanize.twice())")

    assert result.value == 200, result.error
    assert not [path for path in site.paths if "tiny" in path]


@pytest.mark.filterwarnings("ignore:Async generator 'httpcore:ResourceWarning")  # trio's, of a body that is dropped
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_package_that_does_not_fit_is_named(wheels: list[Path], tmp_path: Path) -> None:
    many = make_wheel(tmp_path, "many", "1.0", {f"many/m{number}.py": "" for number in range(700)})
    large = make_wheel(tmp_path, "large", "1.0", {"large/data.txt": "x" * (3 << 20)})
    script = """
problems = {}
for name in ("many", "large", "humanize"):
    try: install_package(name)
    except RuntimeError as error: problems[name] = str(error)
import os
set_result([problems, os.listdir("/tmp")])
"""
    small = Limits(wall_s=120, inodes=600, disk_bytes=2 << 20)
    async with opened([*wheels, many, large], "many", "large", "humanize") as (_, runtime):
        result = await runtime.execute_code(script, limits=small)

    problems, left = result.value
    assert "the run's limit inodes is used up" in problems["many"]
    assert "the run's limit disk_bytes is used up" in problems["large"]
    assert sorted(problems) == ["large", "many"]
    assert len(left) == 1


@pytest.mark.isolation
@pytest.mark.anyio
@pytest.mark.parametrize("pip", ["pip==23.1", "pip==26.3"])  # each has words of its own for it
async def test_an_index_that_is_not_there_is_named(pip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        await prepare_packages([pip])
    except PackageError as exc:
        pytest.skip(f"no package index: {exc}"[:200])
    monkeypatch.setattr("toolcell.egress.packages.PIP", pip)
    gone = Egress(packages=PackageIndex(["humanize"], url="http://127.0.0.1:9/simple/"))
    async with Runtime(egress=gone, limits=Limits(wall_s=120)) as runtime:
        result = await runtime.execute_code("install_package('humanize')")

    assert result.error is not None
    assert "the index cannot be reached: GET http://127.0.0.1:9/simple/humanize/: ConnectError" in result.error.message


@pytest.mark.isolation
@pytest.mark.anyio
async def test_the_python_and_the_machine_of_the_script_decide_what_is_installed(
    wheels: list[Path], tmp_path: Path
) -> None:
    needs = (
        "Requires-Python: >=3.9",
        'Requires-Dist: tiny-pkg; python_version < "3.10"',
        'Requires-Dist: humanize; python_version >= "3.99" or platform_machine == "riscv64"',
        'Requires-Dist: elsewhere; sys_platform != "linux"',
    )
    new = make_wheel(tmp_path, "newer", "2.0", {"newer.py": ""}, "".join(f"{each}\n" for each in needs))
    asks = """
from toolcell_bridge.guest.egress import packages
from toolcell_bridge.wire.messages import INSTALL_PACKAGE
found = {}
def ask(python, machine="x86_64"):
    args = {"package": "newer", "installed": {}, "python": python, "machine": machine}
    try: return sorted(each["file"] for each in call_tool(INSTALL_PACKAGE, **args)["wheels"])
    except ToolError as error: return str(error)
for version in ("3.8.1", "3.9.2", "3.99.0", "3", "3.9.2; x", None):
    found[str(version)] = ask(version)
found["machine"] = ask("3.12.1", "riscv64")
found["no machine"] = ask("3.12.1", "riscv64; x")
set_result(found)
"""
    async with opened([*wheels, new], "newer") as (_, runtime):
        result = await runtime.execute_code(asks)

    assert result.error is None, result.error
    found = result.value
    assert found["3.9.2"] == ["newer-2.0-py3-none-any.whl", "tiny_pkg-1.5-py3-none-any.whl"]
    assert found["3.99.0"] == [f"{name}-py3-none-any.whl" for name in ("humanize-4.1", "newer-2.0", "tiny_pkg-1.5")]
    assert found["machine"] == found["3.99.0"]
    assert "requires a different Python: 3.8.1" in found["3.8.1"]
    assert "machine is a name such as x86_64" in found["no machine"]
    assert all("python" in found[each] for each in ("3", "3.9.2; x", "None"))


@pytest.mark.anyio
async def test_pip_is_there_before_the_first_script_asks_for_it(
    wheels: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = list[Sequence[str]]()
    monkeypatch.setattr(packages, "resolve", lambda names, **_: prepared.append(names))
    async with opened(wheels, "humanize", backend=FakeBackend(), allow_unisolated=True):
        assert prepared == [[PIP]]
    async with Runtime(egress=Egress(Allow("a.example")), backend=FakeBackend(), allow_unisolated=True):
        assert prepared == [[PIP]]


@pytest.mark.anyio
async def test_without_pip_a_runtime_opens_and_says_so(
    wheels: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(names: Sequence[str], **_: object) -> None:
        raise PackageError("pip could not be fetched: no network")

    monkeypatch.setattr(packages, "resolve", fail)
    async with opened(wheels, "humanize", backend=FakeBackend(), allow_unisolated=True):
        assert "install_package() will not work: pip could not be fetched: no network" in caplog.text


@pytest.mark.isolation
@pytest.mark.anyio
async def test_what_a_package_needs_has_the_versions_of_the_list_and_counts_for_the_bytes_of_the_run(
    wheels: list[Path], tmp_path: Path
) -> None:
    newer = make_wheel(tmp_path, "tiny_pkg", "2.0", {"tiny_pkg/__init__.py": "VALUE = 100\n"})
    other = make_wheel(tmp_path, "other", "1.0", {"other/__init__.py": ""})
    script = """
install_package("humanize")
import humanize
try: install_package("other")
except RuntimeError as error: set_result([humanize.twice(), str(error)])
"""
    needed = sum(wheel.stat().st_size for wheel in wheels if "3.0" not in wheel.name)
    limits = Limits(wall_s=120, egress_bytes=needed + other.stat().st_size - 1)
    async with opened([*wheels, newer, other], "humanize", "tiny-pkg<2", "other") as (_, runtime):
        limited = await runtime.execute_code(script, limits=limits)
        exact = limits.model_copy(update={"egress_bytes": limits.egress_bytes + 1})
        enough = await runtime.execute_code(script + "\nset_result('installed')", limits=exact)

    twice, said = limited.value
    assert twice == 14
    assert "egress_bytes" in said
    assert enough.value == "installed", enough.error


@pytest.mark.isolation
@pytest.mark.anyio
async def test_compiled_and_damaged_wheels_are_refused(wheels: list[Path], tmp_path: Path) -> None:
    compiled = make_wheel(tmp_path, "fast", "1.0", {"fast/__init__.py": ""})
    compiled = compiled.rename(tmp_path / "fast-1.0-cp311-cp311-manylinux_2_17_x86_64.whl")
    changed = make_wheel(tmp_path, "broken", "1.0", {"broken/__init__.py": ""})
    climbing = make_wheel(tmp_path, "climbing", "1.0", {"../../tmp/up.py": "", "climbing/__init__.py": ""})
    script = """
problems = {}
for name in ("fast", "broken", "climbing"):
    try: install_package(name)
    except RuntimeError as error: problems[name] = str(error)
import glob, sys
set_result([problems, glob.glob("/tmp/*"), [path for path in sys.path if "packages-" in path]])
"""
    names = ["fast", "broken", "climbing", "humanize"]
    async with opened([*wheels, compiled, changed, climbing], *names) as (site, runtime):
        site.pages[f"/files/{changed.name}"] = page(changed.read_bytes() + b"x", "application/octet-stream")
        result = await runtime.execute_code(script)

    problems, left, path = result.value
    assert "Runtime(packages=[...])" in problems["fast"]
    assert "HASH" in problems["broken"].upper()
    assert problems["climbing"].startswith("pip install climbing failed: ")
    assert (left, path) == ([], [])


def test_wheels_that_nobody_has_read_are_in_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = RunRequests(Limits())
    names = [run.keep_wheel(b"abcde", "digest") for _ in range(2)]
    assert [run.part_of_wheel(name, start, 3) for name in names for start in (0, 3)] == [b"abc", b"de"] * 2
    assert run.wheels == {}

    before = len(os.listdir("/proc/self/fd"))
    names = [run.keep_wheel(b"%d" % number, "digest") for number in range(200)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert [run.part_of_wheel(name, 0, 9) for name in reversed(names)] == [b"%d" % n for n in reversed(range(200))]
    assert len(os.listdir("/proc/self/fd")) == before

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    with pytest.raises(ToolError, match="cannot keep a wheel: No such file"):
        run.keep_wheel(b"abcde", "digest")
