"""Programs that behave as under plain Python, in containers too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rows import each_row
from runtime.beside_cpython import OF_EACH_KIND, ending_in_cpython, ending_of, registry, source_of
from runtime.plain_python import LIBRARIES, PROGRAMS, died_of
from runtime.plain_scripts import HELPER
from toolcell import Limits, Outcome, PoolConfig, SyncRuntime, ToolRegistry
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.container import DockerSandbox
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.testing.contract.termination import OWN_SIGNALS

from .docker_sandboxes import DATA_PACKAGES

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def runtime(docker_image: ImageRef) -> Iterator[SyncRuntime]:
    with SyncRuntime(ToolRegistry(), backend=DockerBackend(docker_image.id), limits=Limits(wall_s=60)) as each:
        yield each


@each_row("program", list(PROGRAMS))
def test_a_program_behaves_as_under_plain_python(runtime: SyncRuntime, program: str) -> None:
    result = runtime.execute_code(textwrap.dedent(PROGRAMS[program]))
    assert (result.outcome, result.value) == ("ok", True), (result.error, result.logs.text)


@each_row("script", list(OF_EACH_KIND))
def test_a_script_ends_as_in_cpython(runtime: SyncRuntime, script: str) -> None:
    result = runtime.execute_code(source_of(script), files=HELPER, tools=registry())

    ending, expected = ending_of(result), ending_in_cpython(script)
    if script == "a process that nobody joins" and result.logs.stderr:  # in a container of its own: see docs/docker.md
        ending = replace(ending, stdout=ending.stderr, stderr="")
    assert ending == expected


@each_row("source", list(OWN_SIGNALS))
def test_a_signal_to_itself_ends_a_script_and_is_named(runtime: SyncRuntime, source: str) -> None:
    result = runtime.execute_code(f"import os, signal, threading\n{source}")
    assert (result.outcome, result.error) == (Outcome.KILLED, died_of(OWN_SIGNALS[source]))


def test_libraries_keep_few_heaps_and_look_for_no_programs(docker_image: ImageRef) -> None:
    with SyncRuntime(
        backend=DockerBackend(docker_image.id, packages=DATA_PACKAGES), pool=PoolConfig(warm=0)
    ) as runtime:
        result = runtime.execute_code(LIBRARIES)
    assert result.value == 2, result.error
    assert "physical cores" not in result.logs.stderr


@pytest.mark.parametrize("wait", ["while True:\n    pass", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')"])
def test_a_timeout_names_the_line_it_was_at(runtime: SyncRuntime, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DockerSandbox, "answer_s", 60.0)  # the daemon passes the question on, and may be busy
    result = runtime.execute_code(f"print('said')\n{wait}", limits=Limits(wall_s=1))

    assert result.outcome == "timeout"

    assert result.error is not None
    assert result.error.line in (2, 3)
    assert result.logs.text.startswith("said\n")
