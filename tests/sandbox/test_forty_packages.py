"""The packages that scripts use most: installed together in one environment, imported and used in one sandbox."""

import os
import textwrap
from pathlib import Path

import pytest

from toolcell import Limits, PackageError, Policy, PoolConfig, SyncRuntime
from toolcell.sandbox.interpreter import AHEAD, imported_ahead
from toolcell.sandbox.process import root_filesystem

from .forty_packages import USES, USUAL

WITH_THE_TESTS = ("numpy", "pandas", "matplotlib", "scipy", "seaborn", "pillow", "jinja2", "markdown", "pydantic")
"""Those that the test tools bring with them."""

TRIED = USES if os.environ.get("CI") == "true" else {name: USES[name] for name in WITH_THE_TESTS}
"""Forty packages are a gigabyte, and take a minute to compile; CI tries all of them."""

PACKAGES = [
    *TRIED,
    *(("filelock", "h5netcdf", "h5py", "lmdb", "opencv-python-headless", "tables", "xarray") if TRIED is USES else ()),
]

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
        with SyncRuntime(packages=PACKAGES, limits=LIMITS, pool=PoolConfig(warm=1)) as runtime:
            result = runtime.execute_code(SCRIPT)
    except PackageError as exc:
        if "No matching distribution" not in str(exc) and "not installed" not in str(exc).partition("\n")[0]:
            raise
        pytest.skip(f"an index has not all of them: {exc}")

    assert result.ok, result.error
    assert result.value == dict.fromkeys(TRIED, True)


QUICK_STARTS = {
    "numpy": (
        "import numpy as np\n"
        "a = np.arange(15).reshape(3, 5)\n"
        "b = np.linalg.svd(np.random.default_rng(1).normal(size=(200, 200)))[1]\n"
        "a.T @ a"
    ),
    "pandas": (
        "import pandas as pd\n"
        "df = pd.DataFrame({'A': [1., 2.], 'B': pd.date_range('20130102', periods=2), 'C': pd.Categorical(['test', 'train'])})\n"
        "piv = pd.DataFrame({'k': list('abab'), 'v': range(4)}).pivot_table(index='k', values='v')\n"
        "piv.loc['a', 'v']"
    ),
    "pyarrow": (
        "import pyarrow as pa, pyarrow.parquet as pq, pyarrow.compute as pc\n"
        "t = pa.table({'n': range(100000), 's': ['x'] * 100000})\n"
        "pq.write_table(t, 't.parquet')\n"
        "pc.sum(pq.read_table('t.parquet')['n']).as_py()"
    ),
    "polars": (
        "import polars as pl\n"
        "pf = pl.DataFrame({'a': range(100000), 'g': ['x', 'y'] * 50000})\n"
        "pf.lazy().group_by('g').agg(pl.col('a').sum()).collect().height"
    ),
    "duckdb": (
        "import duckdb\n"
        "con = duckdb.connect('x.duckdb')\n"
        'con.execute("create table t as select range as i from range(100000)")\n'
        "con.execute('select sum(i) from t').fetchone()[0]"
    ),
    "scikit-learn": (
        "from sklearn.datasets import load_iris\n"
        "from sklearn.ensemble import RandomForestClassifier\n"
        "from sklearn.model_selection import cross_val_score\n"
        "X, y = load_iris(return_X_y=True)\n"
        "clf = RandomForestClassifier(n_jobs=-1, random_state=0).fit(X, y)\n"
        "cross_val_score(clf, X, y, n_jobs=2).mean()"
    ),
    "scipy": (
        "from scipy import optimize, stats\n"
        "res = optimize.minimize(lambda x: (x[0] - 1) ** 2, [0.])\n"
        "float(stats.norm.cdf(0))"
    ),
    "matplotlib": (
        "import matplotlib.pyplot as plt\n"
        "fig, ax = plt.subplots()\n"
        "ax.plot([1, 2, 3], [1, 4, 9])\n"
        "fig.savefig('p.png')\n"
        "plt.show()"
    ),
    "seaborn": (
        "import seaborn as sns, pandas as pd\n"
        "g = sns.relplot(data=pd.DataFrame({'x': [1, 2], 'y': [3, 4]}), x='x', y='y')\n"
        "g.savefig('s.png')"
    ),
    "pillow": (
        "from PIL import Image, ImageFilter\n"
        "im = Image.new('RGB', (640, 480), 'red').filter(ImageFilter.BLUR)\n"
        "im.thumbnail((128, 128))\n"
        "im.save('t.jpg')\n"
        "im.show()\n"
        "im.size"
    ),
    "opencv-python-headless": (
        "import cv2, numpy as np\n"
        "img = np.zeros((480, 640, 3), np.uint8)\n"
        "cv2.circle(img, (320, 240), 100, (255, 0, 0), -1)\n"
        "edges = cv2.Canny(cv2.GaussianBlur(img, (5, 5), 0), 50, 150)\n"
        "cv2.imwrite('o.png', edges)"
    ),
    "openpyxl": (
        "from openpyxl import Workbook, load_workbook\n"
        "wb = Workbook()\n"
        "wb.active.append([1, 2, 3])\n"
        "wb.save('s.xlsx')\n"
        "load_workbook('s.xlsx').active['A1'].value"
    ),
    "plotly": ("import plotly.express as px\npfig = px.bar(x=['a', 'b'], y=[1, 3])\npfig.show()"),
    "sympy": ("import sympy as sp\nx = sp.Symbol('x')\nsol = sp.integrate(sp.sin(x) ** 2, x)\nstr(sol)"),
    "networkx": ("import networkx as nx\nG = nx.path_graph(8)\nG.add_edge(0, 7)\nnx.shortest_path_length(G, 0, 4)"),
    "lxml": ("from lxml import etree\nroot = etree.fromstring('<a><b x=\"1\"/></a>')\nroot.xpath('//b/@x')"),
    "h5py": (
        "import h5py, numpy as np\n"
        "with h5py.File('a.h5', 'w') as f: f.create_dataset('d', data=np.arange(100))\n"
        "h5py.File('a.h5')['d'][5]"
    ),
    "xarray": (
        "import xarray as xr, numpy as np\n"
        "da = xr.DataArray(np.random.rand(2, 3), dims=('x', 'y'), coords={'x': [10, 20]})\n"
        "da.to_netcdf('d.nc')\n"
        "xr.open_dataset('d.nc').sizes['x']"
    ),
    "lmdb": (
        "import lmdb\n"
        "env = lmdb.open('db.lmdb', map_size=16 << 20)\n"
        "with env.begin(write=True) as txn: txn.put(b'k', b'v')\n"
        "env.begin().get(b'k')"
    ),
    "joblib": (
        "from joblib import Parallel, delayed\n"
        "for backend in (None, 'loky', 'threading', 'multiprocessing'):\n"
        "    assert Parallel(n_jobs=2, backend=backend)(delayed(pow)(i, 2) for i in range(3)) == [0, 1, 4]"
    ),
    "sqlite3": "import sqlite3\nsqlite3.connect(':memory:').execute('select 1').fetchone()[0]",
}
"""What the packages that map far more memory than they use, lock files or start workers begin their own pages with."""

PLACES = ["process", pytest.param("container", marks=pytest.mark.contained)]


def runtime_in(place: str, limits: Limits) -> SyncRuntime:
    if place == "docker":
        return SyncRuntime(backend="docker", packages=OF_LOCKS, limits=limits, pool=PoolConfig(warm=1))
    policy = Policy(profile="container") if place == "container" else Policy()
    return SyncRuntime(policy=policy, packages=PACKAGES, limits=limits, pool=PoolConfig(warm=1))


FONT_CACHE = "Matplotlib is building the font cache; this may take a moment.\n"
"""What matplotlib says on stderr when fonts take it longer than five seconds, which is the machine's doing."""

NO_VALUE = ["con", "env", "f", "root", "txn"]
"""Names of these scripts that cannot be kept by value."""


@pytest.mark.isolation
@pytest.mark.slow
@pytest.mark.skipif(TRIED is not USES, reason="CI alone has these packages")
@pytest.mark.parametrize("place", PLACES)
def test_the_quick_starts_of_data_packages_run_in_one_session_that_may_use_little(place: str) -> None:
    limits = LIMITS.model_copy(update={"memory_bytes": 512 << 20, "processes": Limits().processes})
    with (
        runtime_in(place, limits) as runtime,
        runtime.session(cpu_s=900) as session,
    ):
        for name, script in QUICK_STARTS.items():
            result = session.execute_code(script)
            assert result.ok, (name, result.error)
            assert result.logs.stderr in ("", FONT_CACHE), name
            assert not result.warnings, (name, result.warnings)
        absurd = session.execute_code("try: bytearray(10**12)\nexcept MemoryError: set_result('refused')")
        assert absurd.value == "refused", absurd.error
        session.execute_code(
            "import time\nwhile True: time.sleep(0.01)", limits=limits.model_copy(update={"wall_s": 0.5})
        )
        session.put_down()
        back = session.execute_code(
            "[int(df.A.sum()), a.shape, im.size, len(G), pf.height, da.sizes['x'], str(sol)[:3]]"
        )

    assert back.value == [3, [3, 5], [128, 96], 8, 100000, 2, "x/2"], back.error
    assert back.session is not None
    assert sorted(each.partition(":")[0] for each in back.session.forgotten if ":" in each) == NO_VALUE


LOCKS_AND_WORKERS = {
    "duckdb, read only": (
        "import duckdb\nwith duckdb.connect('given.duckdb', read_only=True) as con: n = con.execute('select * from t').fetchone()[0]\n"
        "n == 7"
    ),
    "filelock": "from filelock import FileLock\nwith FileLock('a.lock', timeout=5): is_there = True\nis_there",
    "to_hdf": (
        "import pandas as pd\npd.DataFrame({'a': [1, 2]}).to_hdf('a.h5', key='k')\nbool(pd.read_hdf('a.h5', 'k').a.sum() == 3)"
    ),
    "mailbox": (
        "import mailbox\nbox = mailbox.mbox('box')\nbox.lock()\nbox.add('From: a\\n\\nb')\nbox.flush()\nbox.unlock()\nlen(box) == 1"
    ),
    "GridSearchCV": (
        "from sklearn.datasets import load_iris\nfrom sklearn.model_selection import GridSearchCV, cross_val_score\n"
        "from sklearn.svm import SVC\nX, y = load_iris(return_X_y=True)\n"
        "search = GridSearchCV(SVC(), {'C': [1, 10]}, n_jobs=-1).fit(X, y)\n"
        "bool(search.best_score_ > .9 and cross_val_score(SVC(), X, y, n_jobs=-1).mean() > .9)"
    ),
    "joblib, multiprocessing": (
        "import joblib\njoblib.Parallel(n_jobs=2, backend='multiprocessing')(joblib.delayed(pow)(i, 2) for i in range(3)) == [0, 1, 4]"
    ),
    "joblib, as it chooses": "import joblib\njoblib.Parallel(n_jobs=-1)(joblib.delayed(pow)(i, 2) for i in range(3)) == [0, 1, 4]",
}
"""What locks files or starts workers."""
OF_LOCKS = ("duckdb", "filelock", "joblib")
"""For a container, whose image is built with them: "to_hdf" locks as "filelock" does, and "GridSearchCV" is joblib's."""


@pytest.mark.isolation
@pytest.mark.slow
@pytest.mark.skipif(TRIED is not USES, reason="CI alone has these packages")
@pytest.mark.parametrize("place", [*PLACES, pytest.param("docker", marks=pytest.mark.docker)])
def test_files_are_locked_and_workers_work_in_runs_and_sessions(place: str) -> None:
    make = "import duckdb\nwith duckdb.connect('given.duckdb') as con: con.execute('create table t as select 7')\nset_result(1, files=['given.duckdb'])"
    limits = Limits(wall_s=120, disk_bytes=LIMITS.disk_bytes, inodes=LIMITS.inodes)
    with runtime_in(place, limits) as runtime:
        (made,) = runtime.execute_code(make).files
        given = {"given.duckdb": made.data or b""}
        with runtime.session() as session:
            for name, script in LOCKS_AND_WORKERS.items():
                if place == "docker" and name in ("to_hdf", "GridSearchCV"):
                    continue
                for result in (runtime.execute_code(script, files=given), session.execute_code(script, files=given)):
                    assert result.value is True, (name, result.error)
                    assert result.logs.stderr in ("", FONT_CACHE), name


def test_a_file_is_a_library_by_the_end_of_its_name(tmp_path: Path) -> None:
    libraries = ["a.so", "liba.so.6", "liba-1f2.so.1.2.3", "b.cpython-311-x86_64-linux-gnu.so"]
    for name in (*libraries, "x.some-named-index.parquet", "a.so.txt", "a.source", "a.sofa"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in root_filesystem.shared_objects(tmp_path)] == sorted(libraries)


def test_only_modules_of_the_environment_are_imported_ahead(tmp_path: Path) -> None:
    for name in ("numpy", "matplotlib", "other"):
        (tmp_path / name).mkdir()
    assert imported_ahead(tmp_path) == (*AHEAD["numpy"], *AHEAD["matplotlib"])
    assert imported_ahead(None) == ()


@pytest.mark.slow
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
