"""The settings of the compatible front, from the SANDBOX_* variables."""

from __future__ import annotations

import re

import pytest

from toolcell import Limits, UsageError
from toolcell.service.compat import CompatSettings
from toolcell.service.compat.scripts import limits_of
from toolcell.service.compat.settings import DRAIN_S, duration_s

TOKEN = "0123456789abcdef"


@pytest.mark.conforms("Q40")
def test_without_variables_the_documented_values_hold() -> None:
    settings = CompatSettings.from_environment({"SANDBOX_ADDR": "", "PATH": "/bin"})

    assert settings == CompatSettings(addr=":9000", workspace="/var/sandbox", max_concurrent=4, session_ttl_s=3600.0)
    assert (settings.max_output_bytes, settings.max_file_bytes, DRAIN_S) == (524288, 10 * 2**20, 30.0)


@pytest.mark.conforms("Q40")
def test_each_variable_has_its_setting() -> None:
    settings = CompatSettings.from_environment(
        {
            "SANDBOX_ADDR": "127.0.0.1:9001",
            "SANDBOX_WORKSPACE": "/srv/w",
            "SANDBOX_PYTHON_BIN": "/usr/bin/python3",
            "SANDBOX_NODE_BIN": "node",
            "SANDBOX_MAX_CONCURRENT": "9",
            "SANDBOX_SESSION_TTL": "1h30m",
            "SANDBOX_MAX_OUTPUT": "1000",
            "SANDBOX_MAX_FILE_SIZE": "2000",
            "SANDBOX_TOKEN": TOKEN,
            "SANDBOX_CALLBACK_HOSTS": "agents.internal, 10.0.0.5:8080",
        }
    )

    assert settings == CompatSettings(
        addr="127.0.0.1:9001",
        workspace="/srv/w",
        python_bin="/usr/bin/python3",
        node_bin="node",
        max_concurrent=9,
        session_ttl_s=5400.0,
        max_output_bytes=1000,
        max_file_bytes=2000,
        token=TOKEN,
        callback_hosts=("agents.internal", "10.0.0.5:8080"),
    )
    assert TOKEN not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SANDBOX_MAX_CONCURRENT", "many"),
        ("SANDBOX_MAX_CONCURRENT", "0"),
        ("SANDBOX_SESSION_TTL", "an hour"),
        ("SANDBOX_SESSION_TTL", "-1"),
        ("SANDBOX_MAX_OUTPUT", "64k"),
    ],
)
def test_a_wrong_value_is_refused_with_the_variable_and_the_value(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{name}={value!r}")):
        CompatSettings.from_environment({name: value})


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("90m", 5400), ("1h30m", 5400), ("500ms", 0.5), ("45", 45), ("1.5s", 1.5)]
)
def test_durations_are_read_as_go_writes_them(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.conforms("Q40")
@pytest.mark.parametrize(
    ("addr", "token", "where"),
    [
        (":9000", "", ("127.0.0.1", 9000)),
        (":9000", TOKEN, ("0.0.0.0", 9000)),
        ("127.0.0.2:1", "", ("127.0.0.2", 1)),
        ("[::1]:9000", "", ("::1", 9000)),
        ("0.0.0.0:9000", TOKEN, ("0.0.0.0", 9000)),
    ],
)
def test_without_a_token_only_this_machine_reaches_it(addr: str, token: str, where: tuple[str, int]) -> None:
    assert CompatSettings(addr=addr, token=token).listens_at() == where


@pytest.mark.parametrize(
    ("addr", "token", "says"),
    [
        ("0.0.0.0:9000", "", "without a token"),
        ("[::]:9000", "", "without a token"),
        ("sandbox.internal:9000", "", "without a token"),
        (":9000", "short", "5 characters"),
        ("9000", "", "no address"),
        ("::1:9000", "", "no address"),
        (":70000", "", "no address"),
    ],
)
def test_an_address_that_is_none_or_open_to_everybody_is_refused(addr: str, token: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CompatSettings(addr=addr, token=token).listens_at()


@pytest.mark.parametrize(
    ("host", "port", "may"),
    [
        ("agents", 80, True),
        ("AGENTS", 9, True),
        ("10.0.0.5", 8080, True),
        ("10.0.0.5", 80, False),
        ("other", 80, False),
    ],
)
def test_tool_calls_go_to_the_named_hosts_only(host: str, port: int, may: bool) -> None:
    assert CompatSettings(callback_hosts=("agents", "10.0.0.5:8080")).may_call(host, port) is may
    assert CompatSettings().may_call(host, port)


@pytest.mark.conforms("Q39")
def test_the_time_of_a_run_is_that_of_the_request_unless_the_operator_allows_less() -> None:
    settings = CompatSettings()

    assert limits_of(Limits(), 300.0, settings).wall_s == 300.0
    assert limits_of(Limits(), 300.0, settings).cpu_s >= 300.0
    assert limits_of(Limits(wall_s=5, cpu_s=2), 300.0, settings).wall_s == 5.0
    assert limits_of(Limits(wall_s=5, cpu_s=2), 300.0, settings).cpu_s == 2.0
    assert limits_of(Limits(), 0.5, settings).wall_s == 0.5
    assert limits_of(Limits(), 1.0, settings).output_bytes == 524288
