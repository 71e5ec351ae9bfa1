"""Package environments: what may be requested, what is built, and that it is built once and completely."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rows import each_row
from toolcell.errors import PackageError, UsageError
from toolcell.sandbox.process import package_sources, packages, root_filesystem
from toolcell.sandbox.process.cache import default_cache_dir, private_directory
from toolcell.sandbox.process.packages import PackageEnvironment, resolve
from wheels import is_as_built, lay_out, make_wheel


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages directory of our own, which the running interpreter looks into first."""
    path = tmp_path / "site-packages"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


def install(site: Path, name: str, version: str = "1.0", requires: tuple[str, ...] = (), code: str = "") -> Path:
    """Lay a distribution into `site` as an installer would."""
    required = "".join(f"Requires-Dist: {each}\n" for each in requires)
    lay_out(site, name, version, {f"{name}.py": code or f"VERSION = {version!r}\n"}, required)
    return site / f"{name}.py"


def tiny_wheel(directory: Path, name: str = "tinywheel", version: str = "2.0") -> Path:
    files = {
        f"{name}/__init__.py": "def answer():\n    return 42\n",
        f"{name}/tests/test_it.py": "def test(): pass\n",
        f"{name}-{version}.dist-info/entry_points.txt": f"[console_scripts]\n{name} = {name}:answer\n",
    }
    return make_wheel(directory, name, version, files)


def only_a_lock_is_left(cache: Path) -> bool:
    return [path.suffix for path in cache.glob("*/*")] == [".lock"]


def run_with(environment: PackageEnvironment, code: str) -> str:
    """What a guest would see: the standard library and the environment, nothing else."""
    program = f"import sys; sys.path.append({str(environment.path)!r})\n{code}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@each_row(
    "text",
    [
        "--index-url=https://evil.example",
        "-r requirements.txt",
        "-e .",
        ".",
        "../numpy",
        "/etc",
        "git+https://example.org/x.git",
        "https://example.org/x.tar.gz",
        "x @ https://example.org/x-1-py3-none-any.whl",
        "x @ file:///tmp/x.whl",
        "numpy\n--pre",
        "numpy pandas",
        "",
        "numpy;",
        "no-such-file.whl",
    ],
)
def test_only_requirements_and_wheel_files_are_taken(text: str, cache: Path) -> None:
    with pytest.raises(UsageError):
        resolve([text], cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_one_text_instead_of_a_list_is_a_usage_error(cache: Path) -> None:
    with pytest.raises(UsageError, match="must be a list"):
        resolve("numpy", cache_dir=cache)
    with pytest.raises(UsageError, match="named by text"):
        resolve([1], cache_dir=cache)  # type: ignore[list-item]


def test_an_installed_package_is_copied_with_its_dependencies_and_extras(site: Path, cache: Path) -> None:
    install(site, "tinyapp", requires=("tinylib>=1,<2", 'tinyold; python_version < "3"', 'tinyfast; extra == "speed"'))
    install(site, "tinylib", "1.5", code="import tinydeep\n", requires=("tinydeep", "tinyapp"))
    install(site, "tinydeep")
    install(site, "tinyfast", "3.1")

    plain = resolve(["TinyApp>=1"], cache_dir=cache)
    fast = resolve(["tinyapp[speed]"], cache_dir=cache)

    assert plain.packages == {"tinyapp": "1.0", "tinylib": "1.5", "tinydeep": "1.0"}
    assert fast.packages == {**plain.packages, "tinyfast": "3.1"}
    assert plain.source == "installed"
    assert run_with(plain, "import tinyapp, tinylib; print(tinyapp.VERSION)") == "1.0"


def test_nothing_in_an_environment_names_a_place_on_this_machine(site: Path, cache: Path) -> None:
    info = install(site, "tinyapp", code="def f():\n    return 1\n").parent / "tinyapp-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{site}", "archive_info": {}}))
    (info / "RECORD").write_text((info / "RECORD").read_text() + f"{info.name}/direct_url.json,,\n")

    environment = resolve(["tinyapp"], cache_dir=cache)

    files = [path for path in environment.path.rglob("*") if path.is_file()]
    assert {"tinyapp.py", "METADATA"} <= {path.name for path in files}
    assert not [path for path in files if str(site.parent).encode() in path.read_bytes()]


def test_an_editable_install_is_not_an_installed_copy(site: Path, cache: Path) -> None:
    info = install(site, "tinyapp").parent / "tinyapp-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    wanted = package_sources.parse_wanted(["tinyapp"])
    interpreter = package_sources.probe_interpreter(Path(sys.executable))
    assert "source tree" in str(package_sources.find_installed(wanted, interpreter))


def test_an_upgrade_of_the_installed_copy_makes_a_new_environment(site: Path, cache: Path) -> None:
    module = install(site, "tinyapp")
    old = resolve(["tinyapp"], cache_dir=cache)
    module.unlink()
    for file in (site / "tinyapp-1.0.dist-info").iterdir():
        file.unlink()
    (site / "tinyapp-1.0.dist-info").rmdir()
    install(site, "tinyapp", "1.1")
    new = resolve(["tinyapp"], cache_dir=cache)

    assert (old.packages, new.packages) == ({"tinyapp": "1.0"}, {"tinyapp": "1.1"})
    assert old.key != new.key


def test_the_order_and_spelling_of_requirements_do_not_matter(site: Path, cache: Path) -> None:
    install(site, "tinyapp")
    install(site, "tinylib")
    first = resolve(["tinyapp", "tinylib >= 1.0"], cache_dir=cache)
    assert resolve(["TinyLib>=1.0", "tinyapp", "tinyapp"], cache_dir=cache) == first


def test_an_environment_can_be_read_by_everybody_and_written_by_nobody(site: Path, cache: Path) -> None:
    install(site, "tinyapp")
    environment = resolve(["tinyapp"], cache_dir=cache)

    for path in [environment.path, *environment.path.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o555 if path.is_dir() else 0o444)


def test_bytecode_is_ready_and_does_not_depend_on_times_or_places(site: Path, cache: Path, tmp_path: Path) -> None:
    install(site, "tinyapp", code="KINDS = {'a', 'b', 'c'}\ndef f(x):\n    return x in {'p', 'q', 'r', 's'}\n")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    first, second = resolve(["tinyapp"], cache_dir=cache), resolve(["tinyapp"], cache_dir=other)

    (compiled,) = (first.path / "__pycache__").iterdir()
    assert compiled.read_bytes()[4:8] == b"\1\0\0\0"  # PEP 552: hash-based, unchecked
    assert first.digest == second.digest
    assert is_as_built(first)


@each_row("damage", ["changed", "missing", "added", "manifest", "truncated manifest", "no site"])
def test_a_damaged_entry_is_noticed_and_built_again(
    damage: str, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "tinyapp")
    environment = resolve(["tinyapp"], cache_dir=cache)
    entry, module = environment.path.parent, environment.path / "tinyapp.py"
    for path in [entry, environment.path, *environment.path.rglob("*"), entry / "manifest.json"]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    match damage:
        case "changed":
            module.write_text("VERSION = 'evil'\n")
        case "missing":
            module.unlink()
        case "added":
            (environment.path / "json.py").write_text("evil = 1\n")
        case "manifest":
            (entry / "manifest.json").write_text('{"key": 1}')
        case "truncated manifest":
            (entry / "manifest.json").write_text((entry / "manifest.json").read_text()[:40])
        case "no site":
            environment.path.rename(entry / "elsewhere")

    builds: list[Path] = []
    new_directory = packages.new_directory

    def counted(target: Path, prefix: str) -> AbstractContextManager[Path]:
        builds.append(target)
        return new_directory(target, prefix)

    monkeypatch.setattr(packages, "new_directory", counted)
    rebuilt = resolve(["tinyapp"], cache_dir=cache)
    assert len(builds) == 1
    assert rebuilt == environment
    assert run_with(rebuilt, "import tinyapp; print(tinyapp.VERSION)") == "1.0"


def test_a_whole_entry_is_not_built_again(site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "tinyapp")
    first = resolve(["tinyapp"], cache_dir=cache)
    monkeypatch.setattr(packages, "new_directory", lambda *_: pytest.fail("built twice"))
    assert resolve(["tinyapp"], cache_dir=cache) == first


RACER = """
import sys
from pathlib import Path
from toolcell.sandbox.process import packages
new_directory = packages.new_directory
def counted(*args, **named):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    return new_directory(*args, **named)
packages.new_directory = counted
print("ready", flush=True)
sys.stdin.readline()
print(packages.resolve(["tinyapp"], cache_dir=Path(sys.argv[1])).key)
"""


def test_processes_that_want_the_same_at_once_build_it_once(site: Path, cache: Path, tmp_path: Path) -> None:
    install(site, "tinyapp")
    log = tmp_path / "log"
    command = [sys.executable, "-c", RACER, str(cache), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    keys = {racer.communicate("go\n", timeout=60)[0].strip() for racer in racers}

    assert len(keys) == 1
    assert log.read_text() == "built\n"
    assert [racer.returncode for racer in racers] == [0, 0, 0]


DOOMED = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from toolcell.sandbox.process import packages
    packages._compile_bytecode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    packages.resolve(["tinyapp"], cache_dir=Path(sys.argv[1]))
""")


def test_a_builder_killed_half_way_leaves_nothing_that_is_ever_used(site: Path, cache: Path) -> None:
    install(site, "tinyapp")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", DOOMED, str(cache)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(cache.glob("environments/.build-*"))

    built = resolve(["tinyapp"], cache_dir=cache)

    assert built.packages == {"tinyapp": "1.0"}
    assert sorted(path.name for path in (cache / "environments").iterdir()) == [built.key, f"{built.key}.lock"]


def test_a_build_that_fails_leaves_only_its_lock_file(site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "tinyapp")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packages, "_compile_bytecode", fail)
    with pytest.raises(PackageError, match=r"No space left.*what no process uses may be removed"):
        resolve(["tinyapp"], cache_dir=cache)
    assert only_a_lock_is_left(cache)


def test_a_cache_that_others_may_write_to_is_refused(site: Path, cache: Path) -> None:
    install(site, "tinyapp")
    cache.chmod(0o777)
    with pytest.raises(PackageError, match="others may write"):
        resolve(["tinyapp"], cache_dir=cache)


@pytest.mark.isolation
def test_what_a_sandbox_runs_on_is_refused_from_a_place_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toolcell").mkdir()
    (tmp_path / "toolcell").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with pytest.raises(PackageError, match="others may write"):
        root_filesystem.build()
    assert list((tmp_path / "toolcell").iterdir()) == []


def test_a_permissive_umask_leaves_the_cache_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = private_directory(tmp_path / "cache")
    finally:
        os.umask(before)

    assert made.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    with pytest.raises(PackageError, match="it is a link"):
        private_directory(tmp_path / "cache")


def test_the_cache_that_was_checked_is_the_one_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: a name leads to another directory when it is looked at again."""
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "theirs").mkdir(mode=0o700)
    above = tmp_path / "above"
    above.symlink_to(tmp_path / "ours")
    fstat = os.fstat

    def swapped(descriptor: int) -> os.stat_result:
        if above.resolve().name == "ours":
            above.unlink()
            above.symlink_to(tmp_path / "theirs")
            (tmp_path / "theirs" / "cache").mkdir(mode=0o700)
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", swapped)
    assert private_directory(above / "cache") == tmp_path / "ours" / "cache"


def test_a_cache_that_is_moved_while_it_is_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat, cache = os.fstat, tmp_path / "cache"

    def moved(descriptor: int) -> os.stat_result:
        status, readlink = fstat(descriptor), os.readlink

        def then_moved(path: str) -> str:
            place = readlink(path)
            cache.rename(tmp_path / "elsewhere")
            cache.mkdir(mode=0o700)
            return place

        monkeypatch.setattr(os, "fstat", fstat)
        monkeypatch.setattr(os, "readlink", then_moved)
        return status

    monkeypatch.setattr(os, "fstat", moved)
    with pytest.raises(PackageError, match="was moved"):
        private_directory(cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_cache_in_a_directory_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    with pytest.raises(PackageError, match=r"in the place of .*/public/cache"):
        private_directory(public / "cache")
    public.chmod(0o1777)
    assert private_directory(public / "cache") == public / "cache"
    (public / "theirs").mkdir()
    os.chown(public / "theirs", 4321, 4321)
    with pytest.raises(PackageError, match=r"in the place of .*/public/theirs"):
        private_directory(public / "theirs" / "cache")


def test_a_cache_that_cannot_be_made_is_a_package_error(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackageError, match="cannot use"):
        resolve([], cache_dir=tmp_path / "file" / "cache")


def test_the_cache_is_where_the_desktop_standard_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "toolcell"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "toolcell"


@pytest.mark.parametrize("home", ["/dev/null", "/proc"])
def test_a_user_without_a_home_has_the_cache_among_the_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_cache_dir() == tmp_path / f"toolcell-cache-{os.geteuid()}"


@pytest.mark.slow
def test_a_wheel_file_is_installed_without_scripts_or_traces_of_its_origin(cache: Path, tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path)
    environment = resolve([str(wheel)], cache_dir=cache)

    assert environment.packages == {"tinywheel": "2.0"}
    assert environment.source in {"pip", "uv"}
    assert not (environment.path / "bin").exists()
    assert not list(environment.path.glob("*.dist-info/direct_url.json"))
    assert run_with(environment, "import tinywheel; print(tinywheel.answer())") == "42"
    assert (environment.path / "tinywheel" / "__pycache__").is_dir()
    assert not (environment.path / "tinywheel" / "tests" / "__pycache__").exists()


def test_the_installers_last_words_are_in_the_error(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "broken-1.0-py3-none-any.whl"
    wheel.write_bytes(b"no zip file")
    with pytest.raises(PackageError) as caught:
        resolve([str(wheel)], cache_dir=cache)
    assert "could not install" in str(caught.value)
    assert "broken" in str(caught.value)
    assert only_a_lock_is_left(cache)


def test_without_an_installer_the_error_says_what_to_get(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PackageError, match="install uv"):
        resolve([str(tiny_wheel(tmp_path))], cache_dir=cache)


def test_the_interpreter_behind_a_virtual_environment_is_the_running_one() -> None:
    behind = Path(getattr(sys, "_base_executable", sys.executable))
    assert package_sources.probe_interpreter(behind).python == Path(sys.executable)


def test_another_interpreter_is_asked_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(sys.executable)
    ours = package_sources.probe_interpreter(here)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere"))
    other = package_sources.probe_interpreter(here)
    assert (other.python, other.version, other.tag) == (here, ours.version, ours.tag)

    with pytest.raises(PackageError, match="cannot ask"):
        package_sources.probe_interpreter(tmp_path / "nothing")


@pytest.mark.slow
def test_numpy_as_installed_here_works_in_an_environment_of_its_own(cache: Path) -> None:
    pytest.importorskip("numpy", reason="copies the numpy of this interpreter")
    environment = resolve(["numpy"], cache_dir=cache)

    assert set(environment.packages) == {"numpy"}
    assert environment.source == "installed"
    code = "import numpy; print(int(numpy.arange(4).sum()), numpy.__file__)"
    assert run_with(environment, code) == f"6 {environment.path}/numpy/__init__.py"


def test_an_installer_is_heard_line_by_line_and_its_last_lines_are_in_the_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    lines = "; ".join(f"print('step {n}', flush=True)" for n in range(20))
    uv = cache.parent / "uv"
    uv.write_text(f"#!{sys.executable}\nimport sys\n{lines}\nsys.exit(3)\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(cache.parent), prepend=os.pathsep)
    with (
        caplog.at_level("INFO", "toolcell.sandbox.process.package_sources"),
        pytest.raises(PackageError, match="exit status 3") as caught,
    ):
        resolve(["no-such-package-at-all", "PIL", "pyyaml"], cache_dir=cache)
    assert str(caught.value).endswith("\nthe module PIL is in the package pillow")
    assert [record.getMessage() for record in caplog.records][:2] == [
        "installing no-such-package-at-all, pil, pyyaml with uv",
        "step 0",
    ]
    assert "step 19" in str(caught.value) and "step 4\n" not in str(caught.value)


def test_two_installers_make_the_same_environment(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    wheel = make_wheel(
        tmp_path,
        "tinywheel",
        "2.0",
        {
            "tinywheel/__init__.py": "x = 1\n",
            "tinywheel-2.0.data/purelib/tinypure.py": "y = 1\n",
            "tinywheel-2.0.data/data/share/tiny.txt": "data",
            "tinywheel-2.0.data/scripts/tiny": "#!python\n",
            "tinywheel-2.0.data/headers/tiny.h": "",
        },
    )
    by_uv = resolve([str(wheel)], cache_dir=cache)
    monkeypatch.setenv("PATH", "")
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    by_pip = resolve([str(wheel)], cache_dir=other)

    assert (by_uv.source, by_pip.source) == ("uv", "pip")
    read = [
        {str(path.relative_to(each.path)): path.read_bytes() for path in each.path.rglob("*.*") if path.is_file()}
        for each in (by_uv, by_pip)
    ]
    assert read[0] == read[1]
    assert (by_pip.path / "share" / "tiny.txt").read_text() == "data"


def test_a_record_names_the_files_that_are_there(site: Path, cache: Path) -> None:
    """The RECORD that was installed names a script outside of the directory."""
    install(site, "tinyapp")
    environment = resolve(["tinyapp"], cache_dir=cache)

    (dist,) = package_sources.distributions_in(environment.path)
    rows = {str(row): row for row in dist.files or ()}

    assert set(rows) == {"tinyapp.py", "tinyapp-1.0.dist-info/METADATA", "tinyapp-1.0.dist-info/RECORD"}


LEADING_OUT = ("../evil.py", "/evil.py", "tiny/../../evil.py", "tiny-1.0.data/purelib/../../evil.py")


def test_a_file_of_a_wheel_that_leads_out_is_not_installed(tmp_path: Path, cache: Path) -> None:
    """pip refuses the wheel, and uv leaves the file out."""
    wheel = make_wheel(tmp_path, "tiny", "1.0", {**dict.fromkeys(LEADING_OUT, "evil"), "ok.py": ""})
    refusal = ""
    try:
        environment = resolve([str(wheel)], cache_dir=cache)
    except PackageError as exc:
        refusal = str(exc)
    else:
        assert (environment.path / "ok.py").exists()
    assert not refusal or ("could not install" in refusal and only_a_lock_is_left(cache))
    assert all(path.parent.name == "site" for path in tmp_path.rglob("evil.py")) and not Path("/evil.py").exists()


def test_packages_that_share_a_namespace_are_one_package(site: Path, cache: Path) -> None:
    lay_out(site, "tinyone", "1.0", {"tinyspace/__init__.py": "", "tinyspace/one.py": "x = 1\n"})
    lay_out(site, "tinytwo", "1.0", {"tinyspace/__init__.py": "", "tinyspace/two.py": "y = 2\n"})
    environment = resolve(["tinyone", "tinytwo"], cache_dir=cache)
    assert run_with(environment, "import tinyspace.one, tinyspace.two as t; print(tinyspace.one.x, t.y)") == "1 2"


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_build_says_on_a_terminal_what_it_does_unless_its_log_is_read(
    level: str, site: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    install(site, "tinyapp")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(level, package_sources.logger.name):
        resolve(["tinyapp"], cache_dir=cache)
    built = terminal.getvalue()
    resolve(["tinyapp"], cache_dir=cache)

    assert terminal.getvalue() == built, "a whole environment is found without a word"
    assert ("packages: copying tinyapp" in built) is (level == "WARNING")
    assert ("copying tinyapp" in caplog.text) is (level == "INFO")
    assert built.endswith("\r\x1b[K") or level == "INFO"


def test_no_terminal_no_progress_line(site: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "tinyapp")
    resolve(["tinyapp"], cache_dir=cache)
    assert capsys.readouterr() == ("", "")


def test_what_was_asked_for_is_told_with_its_version_however_it_is_spelled() -> None:
    environment = PackageEnvironment(Path(), "", {"PyYAML": "6.0", "typing_extensions": "4.1"}, "", "pip")
    assert environment.versions(["pyyaml>=5", "Typing.Extensions"]) == ("PyYAML 6.0", "typing_extensions 4.1")
