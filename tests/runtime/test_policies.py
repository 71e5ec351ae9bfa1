"""What a policy changes in every run: determinism, environment, lint, packages."""

from __future__ import annotations

import pytest

from sandbox.forty_packages import USUAL
from toolcell import Outcome, Policy, PoolConfig, SandboxUnavailable, SyncRuntime, UsageError
from toolcell.config import Limits

from .conftest import Run

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


@pytest.mark.conforms("Q-b27")
def test_a_seed_and_a_clock_make_runs_repeatable() -> None:
    script = """
import datetime, random, time
set_result([random.random(), time.time(), datetime.datetime.now(datetime.timezone.utc).isoformat(),
            datetime.date.today().isoformat(), hash("text"), list({"a", "b", "c", "d"}), time.monotonic() > 0])"""
    values = []
    for _ in range(2):
        policy = Policy(seed=7, clock=1_700_000_000.5, hash_seed=1)
        with SyncRuntime(policy=policy, pool=PoolConfig(warm=0)) as runtime:
            values.append(runtime.execute_code(script).value)

    assert values[0] == values[1]
    assert values[0][1:4] == [1_700_000_000.5, "2023-11-14T22:13:20.500000+00:00", "2023-11-14"]


@pytest.mark.conforms("Q-b23", "Q22")
def test_variables_are_passed_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANTED", "yes")
    monkeypatch.setenv("UNWANTED", "no")
    policy = Policy(env={"MODE": "test"}, env_passthrough=("WANTED", "NOT_SET"))
    with SyncRuntime(policy=policy) as runtime:
        value = runtime.execute_code("import os\nset_result(dict(os.environ))").value

    assert {"MODE": "test", "WANTED": "yes"}.items() <= value.items()
    assert "UNWANTED" not in value and "NOT_SET" not in value


@pytest.mark.conforms("Q26", "Q-b4", "EX-43")
def test_a_lint_profile_refuses_before_anything_runs(run: Run) -> None:
    result = run("print('never')\nimport os\nos.system('rm -rf /')", lint="standard")

    assert result.outcome is Outcome.DENIED
    assert result.error is not None
    assert "blocked" in result.error.message
    assert result.error.line == 3
    assert result.error.findings[0]["rule"]
    assert result.logs.text == ""
    assert result.isolation.lint == "standard"


@pytest.mark.conforms("Q26", "EX-43", "V-16")
@pytest.mark.parametrize(
    "script",
    [
        "import os; os.system('rm -rf /')",
        "import os; os.popen('id').read()",
        "import subprocess; subprocess.run(['id'])",
        "import subprocess; subprocess.check_output('id', shell=True)",
    ],
)
def test_starting_a_program_is_blocked_by_the_kernel_and_says_what_to_do(run: Run, script: str) -> None:
    error = run(script).error

    assert error is not None
    assert error.type == "PermissionError"
    assert "blocked: use call_tool() instead" in error.message


def test_a_script_without_packages_has_no_epoll_and_waits_without_it(run: Run) -> None:
    assert run("import asyncio, select\nawait asyncio.sleep(0)\nhasattr(select, 'epoll')").value is False


@pytest.mark.conforms("Q18", "Q-b22")
def test_packages_are_the_hosts_choice_and_a_script_is_told_so(run: Run) -> None:
    error = run("install_package('requests')").error

    assert error is not None
    assert error.type == "RuntimeError"
    assert error.message.startswith("pip install requests failed: ")
    doors = (
        "Runtime(packages=['requests'])",
        "--packages requests",
        "settings of a service",
        "--allow-package requests",
    )
    assert all(door in error.message for door in doors), error.message


@pytest.mark.slow
@pytest.mark.conforms("Q18", "Q19")
def test_the_usual_packages_work_and_are_read_only() -> None:
    script = """
install_package("numpy")
import matplotlib, numpy as np, pandas as pd, requests, scipy.stats
matplotlib.use("Agg")
import matplotlib.pyplot as plt, seaborn
from PIL import Image
frame = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]})
seaborn.lineplot(frame, x="a", y="b")
plt.savefig("chart.png", dpi=50)
try: open(np.__file__, "a")
except OSError as error: problem = type(error).__name__
set_result({
    "rows": frame,
    "dot": np.arange(4) @ np.arange(4),
    "slope": round(scipy.stats.linregress(frame.a, frame.b).slope, 6),
    "picture": Image.open("chart.png").size,
    "url": requests.Request("GET", "http://a.example/", params={"q": 1}).prepare().url,
    "problem": problem,
    "where": np.__file__,
}, files=["chart.png"])"""
    with SyncRuntime(packages=USUAL, preload=["numpy", "pandas"], limits=Limits(wall_s=60)) as runtime:
        result = runtime.execute_code(script)

    assert result.outcome is Outcome.OK, result.error
    value, [chart] = result.value, result.files
    assert value["rows"].rows()[0] == {"a": 1, "b": 0.5}
    assert (value["dot"], value["slope"], value["picture"]) == (14, 1.0, [320, 240])
    assert value["url"] == "http://a.example/?q=1"
    assert value["problem"] in ("OSError", "PermissionError")
    assert value["where"].startswith("/packages/")
    assert (chart.media_type, (chart.data or b"")[:4]) == ("image/png", b"\x89PNG")


def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match="no_such_module"), SyncRuntime(preload=["no_such_module"]):
        pass


def test_limits_load_from_toml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "limits.toml").write_text("wall_s = 2.5\nmemory_bytes = 67108864\n")

    assert Limits.from_toml(tmp_path / "limits.toml") == Limits(wall_s=2.5, memory_bytes=64 << 20)
    (tmp_path / "bad.toml").write_text("wall_seconds = 2\n")
    with pytest.raises(UsageError, match="wall_seconds"):
        Limits.from_toml(tmp_path / "bad.toml")


@pytest.mark.conforms("Q21")
def test_scripts_run_on_the_interpreter_that_was_asked_for() -> None:
    import os
    import shutil
    import sys

    other = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    with SyncRuntime(python=other, pool=PoolConfig(warm=0)) as runtime:
        value = runtime.execute_code("import sys\nset_result([sys.prefix, list(sys.version_info[:2])])").value

    import subprocess

    asked = subprocess.run([other, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, check=True)
    assert value == ["/usr", [int(part) for part in asked.stdout.split()]]
    assert os.path.exists(other)


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true"])
def test_what_is_no_python_is_refused_by_name(python: str) -> None:
    with pytest.raises(SandboxUnavailable, match=python), SyncRuntime(python=python):
        pass


def test_the_default_policy_as_text_is_the_one_in_the_code() -> None:
    from pathlib import Path

    folder = Path(__file__).parents[2] / "sandbox_images"

    limits, policy = Limits.from_toml(folder / "limits.toml"), Policy.from_toml(folder / "policy.toml")

    assert (limits, policy) == (Limits(), Policy())
    assert limits.model_fields_set == {name for name, value in limits if value is not None}
