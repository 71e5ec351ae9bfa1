"""A client for the conformance suite: adds the server at a URL and calls all of its tools."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx2

from toolcell.mcp.oauth import Auth, ClientCredentials, IdentityAssertion, OAuth, signed_assertion
from toolcell.tools import ToolRegistry

ARGS = {"c.add_numbers": {"a": 1, "b": 2}}
CLIENT_METADATA_URL = "https://conformance-test.local/client-metadata.json"
CONTEXT = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))


def accept(message: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Accept with nothing filled in: the form's defaults hold."""
    return {}


async def browse(url: str) -> str:
    """Do what a person's browser does: the suite's login page sends it back at once."""
    async with httpx2.AsyncClient() as browser:
        return str((await browser.get(url)).headers["location"])


def auth_for(scenario: str, folder: Path, url: str) -> Auth | None:
    """Return the login that a scenario is about."""
    known = {name: CONTEXT[name] for name in ("client_id", "client_secret") if name in CONTEXT}
    if not scenario.startswith("auth/"):
        return None
    if "client-credentials" in scenario:
        if "private_key_pem" not in CONTEXT:
            return ClientCredentials(**known)
        signing = signed_assertion(CONTEXT["client_id"], CONTEXT["private_key_pem"], CONTEXT["signing_algorithm"])
        return ClientCredentials(**known, assertion=signing)
    if "cross-app-access" in scenario:
        issuer = issuer_of(url)
        return IdentityAssertion(**known, issuer=issuer, assertion=id_jag, method="client_secret_basic")
    return OAuth(
        **known,
        client_metadata_url=CLIENT_METADATA_URL,
        redirect=browse,
        redirect_uri="http://127.0.0.1:8765/callback",
        store=folder / "tokens.json",
    )


def issuer_of(url: str) -> str:
    """Return the suite's authorization server, which a company configures."""
    place = httpx2.URL(url).copy_with(path="/.well-known/oauth-protected-resource/mcp")
    return str(httpx2.get(place).json()["authorization_servers"][0])


async def id_jag(audience: str, resource: str) -> str:
    """Exchange the user's id token at the company's identity provider, as its own program does."""
    data = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "subject_token": CONTEXT["idp_id_token"],
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
        "client_id": CONTEXT["idp_client_id"],
        "audience": audience,
        "resource": resource,
    }
    async with httpx2.AsyncClient() as provider:
        return str((await provider.post(CONTEXT["idp_token_endpoint"], data=data)).json()["access_token"])


async def main(url: str, folder: Path) -> None:
    registry = ToolRegistry()
    auth = auth_for(os.environ.get("MCP_CONFORMANCE_SCENARIO", ""), folder, url)
    await registry.add_mcp_server("c", url=url, auth=auth, elicitation=accept, approve="none", timeout_s=60)
    for name in registry.list():
        result = await registry.dispatch(name, ARGS.get(name, {}))
        assert not result.is_error, result.text
    await registry.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        anyio.run(main, sys.argv[-1], Path(place))
