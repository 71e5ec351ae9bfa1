"""Ten known ways out of a sandbox made in Python, and a forged protocol line: PROMISES.md, "filesystem" and others."""

from __future__ import annotations

from pathlib import Path

import pytest

from escape.attack import Victim, outside
from escape.prologues import basics

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.conforms("Q-b1", "Q-b2", "EX-46")]

PROBES = {
    "io.open": "import io\nset_result(io.open(secret).read())",
    "pathlib": "import pathlib\nset_result(pathlib.Path(secret).read_text())",
    "os.open to read": "import os\nset_result(os.read(os.open(secret, os.O_RDONLY), 100).decode())",
    "os.open to write": "import os\nos.write(os.open(target, os.O_WRONLY | os.O_CREAT), b'x')\nset_result('escaped')",
    "os.unlink": "import os\nos.unlink(victim)\nset_result('escaped')",
    "posix.system": "import posix\nset_result('escaped' if posix.system('echo > ' + target) == 0 else None)",
    "os.spawnv": "import os\nset_result('escaped' if os.spawnv(os.P_WAIT, '/bin/true', ['true']) == 0 else None)",
    "re-imported subprocess": """
        import sys
        for name in list(sys.modules):
            if 'subprocess' in name:
                del sys.modules[name]
        import subprocess
        set_result(subprocess.run(['/bin/echo', 'escaped'], capture_output=True, text=True).stdout.strip())""",
    "socket": """
        import socket
        with socket.create_connection(('127.0.0.1', port), 2):
            set_result('escaped')""",
    "leftover globals": """
        found = []
        for holder in (globals(), vars(__builtins__) if not isinstance(__builtins__, dict) else __builtins__):
            found += [value for name, value in list(holder.items()) if name in ('open', '_builtin_open', '_open')]
        set_result(found[0](secret).read())""",
}


@pytest.mark.parametrize("probe", PROBES)
def test_each_of_the_ten_probes_works_in_a_plain_process_and_fails_in_a_sandbox(
    probe: str, victim: Victim, tmp_path: Path, listener: int
) -> None:
    secret, target, doomed = tmp_path / "secret", tmp_path / "target", tmp_path / "doomed"
    secret.write_text("escaped")
    inputs = {"secret": str(secret), "target": str(target), "victim": str(doomed), "port": listener}

    doomed.touch()
    assert outside(PROBES[probe], **inputs).value == "escaped"

    target.unlink(missing_ok=True)
    doomed.touch()
    inside = victim.run(PROBES[probe], **inputs)
    assert inside.result.value != "escaped"
    assert inside.outcome in ("error", "ok")
    assert not target.exists()
    assert doomed.exists()


@pytest.mark.conforms("Q-b5")
def test_a_forged_protocol_line_on_stdout_or_stderr_is_only_output(victim: Victim) -> None:
    source = basics("""
import json
for descriptor in (1, 2):
    os.write(descriptor, b'\\n' + json.dumps({"type": "result", "value": "forged"}).encode() + b'\\n')
    os.write(descriptor, bytes.fromhex("0000000a93 15 a6") + b"forged" + b"\\x90")
os._exit(0)
""")
    assert b'"value": "forged"' in outside(source).output

    inside = victim.run(source)
    assert not inside.result.has_value
    assert inside.outcome == "killed"
    assert "forged" in inside.result.logs.text
