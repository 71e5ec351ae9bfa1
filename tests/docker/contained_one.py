"""The shortest script: for `toolcell run`."""

set_result(1)  # type: ignore[name-defined]  # noqa: F821
