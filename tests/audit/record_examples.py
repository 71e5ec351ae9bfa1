"""One well-formed body of each kind of event."""

from __future__ import annotations

from typing import Any, Final

from toolcell.audit import records

EXAMPLES: Final[dict[str, tuple[Any, ...]]] = {
    records.OPENED: ("host", 1, "0.1", "3.11", "key", "hmac-sha256", ["chain", 1, b"hash"], {}),
    records.PRUNED: ("chain", 3, b"hash", 3, "age", {}),
    records.RUN_STARTED: (
        "id", "code", "x = 1", "00ff", {"name": 1}, None, [["name", 1, "00ff", None]], "digest", "digest", "off",
        7, 1.5, None,
        {"user": "ada"}, {},
    ),
    records.CALL_STARTED: (1, "call_1", None, "search", "code", 1, {"query": "x"}, {}),
    records.CALL_ENDED: (1, "ok", 5, [1], None, {}),
    records.RUN_ENDED: (
        "ok", 1, True, "00ff", [["stdout", "text"]], [4, 0, False], [["name", "text/plain", 1, "00ff", None]],
        {"type": "ValueError", "message": "no", "line": 1},
        {"wall_s": 1.0, "cpu_s": 1.0, "start_s": 0.1, "peak_memory_bytes": 1}, [1, 0], {},
    ),
    records.KEY_CHANGED: ("old", "new", "ed25519", "", {}),
}  # fmt: skip
