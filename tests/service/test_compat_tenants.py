"""The compatible front with a store of tokens: what one tenant cannot see or touch of another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.compat_server import compat_server
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = pytest.mark.isolation


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    folder = tmp_path_factory.mktemp("tenants")
    store = TokenDatabase(folder / "tokens.sqlite")
    wanted = {"a": ("a", Scope.EXECUTE), "b": ("b", Scope.EXECUTE), "reader": ("a", Scope.READ)}
    tokens = {name: store.create(tenant, [scope]).text for name, (tenant, scope) in wanted.items()}
    store.close()
    with compat_server(folder / "w", None, "--tokens", str(folder / "tokens.sqlite")) as (url, _):
        made = {
            name: httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {token}"})
            for name, token in tokens.items()
        }
        yield made
        for client in made.values():
            client.close()


def output(client: httpx.Client, code: str, **fields: Any) -> Any:
    response = client.post("/execute", json={"code": code, **fields})
    assert response.status_code == 200, response.text
    return json.loads(response.json()["output"] or "null")


@pytest.mark.conforms("Q34", "Q-b17")
def test_a_session_of_one_tenant_is_another_session_for_the_other(clients: dict[str, httpx.Client]) -> None:
    a, b = clients["a"], clients["b"]
    listed = "import os; set_result(os.listdir('.'))"
    output(a, "open('secret.txt', 'w').write('of a')", session_id="shared-name")

    assert output(b, listed, session_id="shared-name") == []
    assert b.delete("/workspace/shared-name").status_code == 204
    assert output(a, listed, session_id="shared-name") == ["secret.txt"]


@pytest.mark.conforms("Q-b18")
def test_an_execution_id_of_one_tenant_tells_the_other_nothing(clients: dict[str, httpx.Client]) -> None:
    assert output(clients["a"], "set_result('of a')", execution_id="same-id") == "of a"
    assert output(clients["b"], "set_result('of b')", execution_id="same-id") == "of b"
    assert output(clients["b"], "set_result('of b')", execution_id="same-id") == "of b"


def test_a_token_that_may_only_read_runs_and_deletes_nothing(clients: dict[str, httpx.Client]) -> None:
    refused = [clients["reader"].post("/execute", json={"code": "1"}), clients["reader"].delete("/workspace/x")]

    assert [each.status_code for each in refused] == [403, 403]
    assert all("scope execute" in each.json()["error"] for each in refused)


def test_too_many_wrong_tokens_from_an_address_have_to_wait(clients: dict[str, httpx.Client]) -> None:
    url = clients["a"].base_url
    with httpx.Client(base_url=url) as stranger:
        seen = [
            stranger.post("/execute", json={"code": "1"}, headers={"authorization": f"Bearer guess-{n}"}).status_code
            for n in range(30)
        ]

    assert seen[0] == 401
    assert seen[-1] == 429
    assert output(clients["a"], "set_result(1)") == 1
