"""The documentation as a site: built strictly, with every page in its menu, and recipes that run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agents.api_server import completion, message, ok, serving, text, tool_use

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CODE = "set_result(call_tool('population', country='Italy') - call_tool('population', country='Norway'))"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_documents_the_public_names(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'toolcell[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr  # not with --quiet: strict does not see warnings then

    shown = {
        "runtime": ["Runtime.execute_code", "Runtime.execute_plan", "SyncRuntime.open"],
        "settings": ["Limits.wall_s", "Limits.host_work", "PoolConfig.warm", "Policy.profile"],
        "plans": ["Step"],
        "agents": ["Agent.run", "OpenAIProvider", "AnthropicProvider", "RetryPolicy"],
    }
    for page, names in shown.items():
        html = (tmp_path / "site" / "reference" / page / "index.html").read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf'id="toolcell\.[\w.]*{re.escape(name)}"', html), name
    recipes = (tmp_path / "site" / "recipes" / "index.html").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", re.sub("<[^>]*>", "", recipes)))
    for example in included():
        assert words >= set(re.findall(r"\w+", example.read_text(encoding="utf-8"))), example.name


def test_every_recipe_is_an_example() -> None:
    text = (ROOT / "docs" / "recipes" / "index.md").read_text(encoding="utf-8")

    assert len(included()) == text.count("```python") > 5


def included() -> list[Path]:
    """Return the examples that are on the page of recipes."""
    text = (ROOT / "docs" / "recipes" / "index.md").read_text(encoding="utf-8")
    return [ROOT / name for name in re.findall(r"^\[`(examples/\w+\.py)`\]\(.+\):$", text, re.MULTILINE)]


@pytest.mark.isolation
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_the_recipe_of_an_sdk_runs_against_a_server_that_speaks_its_api(kind: str) -> None:
    if kind == "openai":
        replies = [completion(None, ("c1", "execute_code", f'{{"code": "{CODE}"}}')), completion("53.3 million more.")]
    else:
        replies = [
            message(tool_use("c1", "execute_code", code=CODE), stop="tool_use"),
            message(text("53.3 million more.")),
        ]
    with serving(*map(ok, replies)) as server:
        url = f"{server.url}/v1" if kind == "openai" else server.url
        keys = {f"{kind.upper()}_API_KEY": "k", f"{kind.upper()}_BASE_URL": url}
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{kind}_agent.py")],
            capture_output=True,
            text=True,
            env={**os.environ, **keys},
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("53.3 million more.\n")
    assert "53300000" in done.stdout


@pytest.mark.isolation
def test_the_notebook_recipe_runs_in_an_event_loop_that_is_already_running() -> None:
    cells = (EXAMPLES / "notebook.py").read_text(encoding="utf-8").split("# %%")

    async def kernel() -> dict[str, object]:
        namespace: dict[str, object] = {"__name__": "notebook"}
        for cell in cells:
            exec(compile(cell.removeprefix(" [markdown]"), "<cell>", "exec"), namespace)
        return namespace

    namespace = asyncio.run(kernel())
    assert getattr(namespace["result"], "value", None) == {"Rome": 31.0, "Oslo": 17.5}
