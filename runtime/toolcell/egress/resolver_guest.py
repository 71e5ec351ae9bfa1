"""Find and download the wheels of a requirement with pip, in a sandbox of its own that reaches the index only.

The host reads this file as text: nothing here is imported there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

COMMON = (
    "--only-binary :all: --no-cache-dir --disable-pip-version-check --isolated --no-input --progress-bar off "
    "--retries 1 --timeout 10"
)
"""An index that hangs is tried twice, and named within the time that a run has by default."""


def pip(*arguments: str) -> None:
    """Run pip in this process.

    Raises:
        SystemExit: it failed; it has printed why.
    """
    main: Any = import_module("pip._internal.cli.main").main
    if code := main([*arguments, *COMMON.split()]):
        sys.exit(code)


def read_nothing_of_the_machine() -> None:
    """Have pip send indexes no description of the machine: a sandbox may not read all that it would look at."""
    session: Any = import_module("pip._internal.network.session")
    session.user_agent = lambda: f"pip/{session.__version__}"


def stop_at_failures_of_the_index() -> None:
    """Have pip fail where an index answers with an error: it would go on as if there were no such package."""
    collector: Any = import_module("pip._internal.index.collector")
    error: Any = import_module("pip._internal.exceptions").CommandError

    def fail(link: object, reason: Any, *_: Any, **__: Any) -> None:
        response = getattr(reason, "response", None)
        if response is None or response.status_code != 404:
            raise error(f"the index {link} cannot be read: {reason}")

    collector._handle_get_simple_fail = fail


def accept_pure_wheels_only(python: str) -> None:
    """Have pip choose wheels that every machine can import: nothing can be executed in a sandbox's folders."""
    tags: Any = import_module("pip._vendor.packaging.tags")
    version = tuple(map(int, python.split(".")[:2]))
    pure = list(dict.fromkeys(tags.compatible_tags(version, platforms=["any"])))
    module: Any = import_module("pip._internal.models.target_python")
    module.get_supported = lambda **_options: pure


def decide_for(python: str, machine: str) -> None:
    """Have pip decide what is needed for this version of Python and this machine, which may be others than its own."""
    markers: Any = import_module("pip._vendor.packaging.markers")
    target: Any = import_module("pip._internal.models.target_python").TargetPython
    candidate: Any = import_module("pip._internal.resolution.resolvelib.candidates").RequiresPythonCandidate
    own, make_target, make_candidate = markers.default_environment, target.__init__, candidate.__init__
    named = {"python_version": python.rpartition(".")[0], "python_full_version": python, "platform_machine": machine}
    version = tuple(map(int, python.split(".")))
    markers.default_environment = lambda: {**own(), **named, "implementation_version": python}
    target.__init__ = lambda self, *_, **__: make_target(self, py_version_info=version)
    candidate.__init__ = lambda self, *_: make_candidate(self, version)


def show_as_installed(versions: Mapping[str, str], folder: Path) -> None:
    """Have pip see what the script can import already, so that it is neither replaced nor downloaded, and no more."""
    for name, version in versions.items():
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment: Any = import_module("pip._internal.metadata").select_backend().Environment
    environment.default = classmethod(lambda cls: cls([str(folder)]))


def find_wheels(
    requirement: str, constraints: Sequence[str], installed: Mapping[str, str], url: str, python: str, machine: str
) -> None:
    """Download the wheels of a requirement and of its dependencies into `wheels`.

    `python`, `machine`: that they are for, such as 3.12.1 and x86_64.
    """
    own = Path(tempfile.mkdtemp())
    read_nothing_of_the_machine()
    stop_at_failures_of_the_index()
    accept_pure_wheels_only(python)
    decide_for(python, machine)
    show_as_installed(installed, own / "installed")
    report, limits = own / "report.json", own / "constraints.txt"
    limits.write_text("".join(f"{each}\n" for each in constraints))
    # pip would leave an index of plain http out. What it reaches is decided by the rules of the host, which connects.
    index = ["--index-url", url, "--trusted-host", url.partition("://")[2].partition("/")[0]]
    pip("install", "--dry-run", "--report", str(report), "--constraint", str(limits), *index, requirement)
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    if pins := [f"{each['name']}=={each['version']}" for each in found]:
        pip("download", "--no-deps", "--dest", "wheels", *index, *pins)
