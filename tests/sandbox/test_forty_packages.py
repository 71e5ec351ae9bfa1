"""The packages that scripts use most: installed together in one environment, imported and used in one sandbox."""

import os
import textwrap
from pathlib import Path

import pytest

from toolcell import Limits, PackageError, PoolConfig, SyncRuntime
from toolcell.sandbox.interpreter import AHEAD, imported_ahead
from toolcell.sandbox.process import interpreter_copy

from .forty_packages import USES, USUAL

WITH_THE_TESTS = ("numpy", "pandas", "matplotlib", "scipy", "seaborn", "pillow", "jinja2", "markdown", "pydantic")
"""Those that the test tools bring with them."""

TRIED = USES if os.environ.get("CI") == "true" else {name: USES[name] for name in WITH_THE_TESTS}
"""Forty packages are a gigabyte, and take a minute to compile; CI tries all of them."""

LIMITS = Limits(
    wall_s=300, cpu_s=200, memory_bytes=4 << 30, processes=256, open_files=1024, disk_bytes=256 << 20, inodes=20_000
)

SCRIPT = (
    "import traceback, json\ndone = {}\n"
    + "".join(
        f"def use():\n{textwrap.indent(use.replace('; ', chr(10)), '    ')}\n"
        f"try: done[{name!r}] = bool(use())\n"
        f"except BaseException as exc: done[{name!r}] = ''.join(traceback.format_exception(exc))[-300:]\n"
        for name, use in TRIED.items()
    )
    + "done\n"
)


@pytest.mark.isolation
@pytest.mark.slow
def test_forty_packages_install_together_and_work_in_one_sandbox() -> None:
    assert len(USES) == 40
    try:
        with SyncRuntime(packages=list(TRIED), limits=LIMITS, pool=PoolConfig(warm=1)) as runtime:
            result = runtime.execute_code(SCRIPT)
    except PackageError as exc:
        if "No matching distribution" not in str(exc) and "not installed" not in str(exc).partition("\n")[0]:
            raise
        pytest.skip(f"an index has not all of them: {exc}")

    assert result.ok, result.error
    assert result.value == dict.fromkeys(TRIED, True)


DATA_WORK = {
    "a database in a file": "import duckdb\nduckdb.connect('x.db').close()\nduckdb.connect('x.db', read_only=True).close()",
    "frames of four libraries": (
        "import polars, pyarrow.parquet, pandas\npandas.DataFrame({'a': range(1000)}).to_parquet('a.parquet')\n"
        "assert polars.read_parquet('a.parquet').height == pyarrow.parquet.read_table('a.parquet').num_rows == 1000"
    ),
    "validation in parallel": (
        "from sklearn.model_selection import cross_val_score\nfrom sklearn.tree import DecisionTreeClassifier\n"
        "from sklearn.datasets import load_iris\nX, y = load_iris(return_X_y=True)\n"
        "assert cross_val_score(DecisionTreeClassifier(), X, y, n_jobs=-1).mean() > 0.8"
    ),
    "joblib": (
        "from joblib import Parallel, delayed\nfor backend in (None, 'loky', 'threading', 'multiprocessing'):\n"
        "    assert Parallel(n_jobs=2, backend=backend)(delayed(pow)(i, 2) for i in range(3)) == [0, 1, 4]"
    ),
    "a standard library that still works": "import sqlite3\nsqlite3.connect(':memory:').execute('select 1').close()",
}
"""What maps far more memory than it uses, locks files, or starts workers."""


@pytest.mark.isolation
@pytest.mark.slow
@pytest.mark.skipif(TRIED is not USES, reason="CI alone has these packages")
def test_data_work_of_many_libraries_fits_into_one_session_that_uses_little() -> None:
    limits = LIMITS.model_copy(update={"memory_bytes": 512 << 20})
    with (
        SyncRuntime(packages=list(TRIED), limits=limits, pool=PoolConfig(warm=1)) as runtime,
        runtime.session() as session,
    ):
        for name, script in DATA_WORK.items():
            result = session.execute_code(script)
            assert result.ok and not result.logs.stderr, (name, result.error, result.logs.stderr)
        absurd = session.execute_code("try: bytearray(10**12)\nexcept MemoryError: set_result('refused')")
        assert absurd.value == "refused", absurd.error


def test_a_file_is_a_library_by_the_end_of_its_name(tmp_path: Path) -> None:
    libraries = ["a.so", "liba.so.6", "liba-1f2.so.1.2.3", "b.cpython-311-x86_64-linux-gnu.so"]
    for name in (*libraries, "x.some-named-index.parquet", "a.so.txt", "a.source", "a.sofa"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in interpreter_copy.shared_objects(tmp_path)] == sorted(libraries)


def test_only_modules_of_the_environment_are_imported_ahead(tmp_path: Path) -> None:
    for name in ("numpy", "matplotlib", "other"):
        (tmp_path / name).mkdir()
    assert imported_ahead(tmp_path) == (*AHEAD["numpy"], *AHEAD["matplotlib"])
    assert imported_ahead(None) == ()


@pytest.mark.isolation
def test_matplotlib_can_be_preloaded_and_its_fonts_are_not_looked_for_again() -> None:
    script = (
        "import sys\nwas_there = 'matplotlib.font_manager' in sys.modules\nimport matplotlib.pyplot as plt\n"
        "from matplotlib import font_manager\nassert font_manager.fontManager.ttflist\n"
        "plt.plot([1, 2])\nplt.title('fonts')\nplt.savefig('chart.png')\n"
        "import os, tempfile\nopen(os.path.join(tempfile.gettempdir(), 'x'), 'w').close()\n"
        "set_result([was_there, os.listdir('/tmp'), os.path.expanduser('~')], files=['chart.png'])"
    )
    for preload in ((), ("matplotlib.pyplot",)):
        with SyncRuntime(packages=USUAL, preload=preload, pool=PoolConfig(warm=1)) as runtime:
            result = runtime.execute_code(script)
        assert result.ok, result.error
        assert result.value == [True, ["x"], "/sandbox/work"]
        assert result.files[0].data is not None


@pytest.mark.isolation
def test_what_cannot_be_imported_ahead_is_left_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AHEAD, "numpy", ("numpy.no_such_module", "numpy"))
    with SyncRuntime(packages=USUAL, pool=PoolConfig(warm=1)) as runtime:
        result = runtime.execute_code("import sys\n'numpy' in sys.modules")
    assert result.value is True
