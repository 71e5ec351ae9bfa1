"""What cannot be sent: where it is, and what to send in its place.

The latter is found by its class, by the names of its bases, or by its methods. No package is imported for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import Final

from toolcell_bridge.wire.plain import type_name

PATH_STEPS: Final = 16

REPLACED: Final = 'x.encode(errors="replace").decode()'
"""What to send in place of a text with half characters."""


class Refusal(Exception):
    """Travels up from the refused value and collects the steps of its path on the way."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[int | str] = []

    def path(self, root: str) -> str:
        steps = [f"[{step}]" if isinstance(step, int) else f"[{step[:40]!r}]" for step in reversed(self.steps)]
        return root + "".join(steps[:PATH_STEPS]) + ("..." if len(steps) > PATH_STEPS else "")


class TooDeep(Refusal):
    """Refused for what it is inside of."""


_BY_CLASS: Final[dict[type, str]] = {
    complex: "complex numbers have no form on the wire: send [x.real, x.imag] or str(x)",
    CoroutineType: "a coroutine: await it first",
    GeneratorType: "a generator may never end: send list(x)",
    Iterator: "an iterator may never end: send list(x)",
    BaseException: "an exception: send str(x)",
    type: "a class is not data",
}

_IN_A_FILE: Final = ", then return it as a file: set_result(data, files=[{name!r}])"

_PICTURES: Final[dict[tuple[str, str], str]] = {
    ("matplotlib", "Figure"): 'a figure: fig.savefig("chart.png")' + _IN_A_FILE.format(name="chart.png"),
    ("matplotlib", "Artist"): 'part of a figure: plt.savefig("chart.png")' + _IN_A_FILE.format(name="chart.png"),
    ("PIL", "Image"): 'an image: x.save("image.png")' + _IN_A_FILE.format(name="image.png"),
}
"""Not said of a value that was shown."""

_BY_NAME: Final[dict[tuple[str, str], str]] = _PICTURES | {
    ("polars", "LazyFrame"): "a query that was not run: send x.collect()",
    ("polars", "LazyGroupBy"): "groups without an aggregation: send x.agg(...).collect()",
    ("polars", "GroupBy"): "groups without an aggregation: send x.agg(...)",
    ("polars", "Expr"): "an expression: send what df.select(x) returns",
    ("pandas", "BaseGroupBy"): "groups without an aggregation: send x.sum().reset_index(), or another one",
    ("pandas", "BaseWindow"): "windows without an aggregation: send x.sum(), or another one",
    ("pandas", "StylerRenderer"): "a styled frame: send x.data",
    ("pyarrow", "RecordBatchReader"): "a table that was not read: send x.read_all()",
    ("pyarrow", "Dataset"): "a table that was not read: send x.to_table()",
    ("pyarrow", "TableGroupBy"): "groups without an aggregation: send x.aggregate(...)",
    ("_duckdb", "DuckDBPyConnection"): "a connection: send x.fetchall(), or another way to get its rows",
    ("h5py", "Dataset"): "an array in a file: send x[()]",
    ("types", "SimpleNamespace"): "SimpleNamespace is not data: send vars(x)",
    ("argparse", "Namespace"): "a namespace: send vars(x)",
    ("tools", "tool"): "a tool: call it, and send what it returns",
    ("re", "Match"): "a match: send x.group() or x.groups()",
    ("_io", "BytesIO"): "a file in memory: send x.getvalue()",
    ("_io", "StringIO"): "a file in memory: send x.getvalue()",
    ("_io", "_IOBase"): "a file: send x.read()",
}

_BY_METHOD: Final = ("to_dicts", "to_dict", "to_pylist", "to_list", "tolist", "toarray", "asdict", "_asdict")


def has_cure(kind: type) -> bool:
    """Return whether it is known of this class what to send in place of its values. Not of a picture: it was shown."""
    return _cure(kind) not in (None, *_PICTURES.values())


def _cure(kind: type) -> str | None:
    names = ((base.__module__.partition(".")[0], base.__qualname__) for base in kind.__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def advice(kind: type) -> str:
    """Return why a value of this class cannot be sent, with what to send where that is known."""
    if (known := _cure(kind)) is not None:
        return known
    for refused, text in _BY_CLASS.items():
        if issubclass(kind, refused):
            return text
    for name in _BY_METHOD:
        if callable(getattr(kind, name, None)):
            return f"{type_name(kind)} is not data: send x.{name}()"
    if issubclass(kind, (FunctionType, BuiltinFunctionType, MethodType)):
        return f"{type_name(kind)} is not data: call it, and send what it returns"
    has_names = kind.__dictoffset__ != 0
    return f"{type_name(kind)} is not data: send what is in it{', such as vars(x)' * has_names}, or str(x)"
