"""A client for the conformance suite: adds the server at a URL and calls all of its tools.

The suite starts a client for each scenario. That is `SENDER`, which has this process do the work: to import the client of
MCP takes a process longer than a scenario.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2

from toolcell.mcp.oauth import Auth, ClientCredentials, IdentityAssertion, OAuth, signed_assertion
from toolcell.tools import ToolRegistry

ARGS = {"c.add_numbers": {"a": 1, "b": 2}}
CLIENT_METADATA_URL = "https://conformance-test.local/client-metadata.json"
SENDER = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as work:
    work.connect(sys.argv[1])
    work.sendall(json.dumps([sys.argv[-1], *map(os.environ.get, ("MCP_CONFORMANCE_SCENARIO", "MCP_CONFORMANCE_CONTEXT"))]).encode())
    work.shutdown(socket.SHUT_WR)
    sys.exit(work.makefile().read() or None)
"""
"""Exits with 0 if the answer is empty, and else prints it and exits with 1."""


def accept(message: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Accept with nothing filled in: the form's defaults hold."""
    return {}


async def browse(url: str) -> str:
    """Do what a person's browser does: the suite's login page sends it back at once."""
    async with httpx2.AsyncClient() as browser:
        return str((await browser.get(url)).headers["location"])


def auth_for(scenario: str, context: Mapping[str, str], folder: Path, url: str) -> Auth | None:
    """Return the login that a scenario is about."""
    known: dict[str, Any] = {name: context[name] for name in ("client_id", "client_secret") if name in context}
    if not scenario.startswith("auth/"):
        return None
    if "client-credentials" in scenario:
        if "private_key_pem" not in context:
            return ClientCredentials(**known)
        signing = signed_assertion(context["client_id"], context["private_key_pem"], context["signing_algorithm"])
        return ClientCredentials(**known, assertion=signing)
    if "cross-app-access" in scenario:
        assertion = partial(id_jag, context)
        return IdentityAssertion(**known, issuer=issuer_of(url), assertion=assertion, method="client_secret_basic")
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


async def id_jag(context: Mapping[str, str], audience: str, resource: str) -> str:
    """Exchange the user's id token at the company's identity provider, as its own program does."""
    data = {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "subject_token": context["idp_id_token"],
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
        "client_id": context["idp_client_id"],
        "audience": audience,
        "resource": resource,
    }
    async with httpx2.AsyncClient() as provider:
        return str((await provider.post(context["idp_token_endpoint"], data=data)).json()["access_token"])


async def use(url: str, auth: Auth | None) -> None:
    """Add the server, and call each of its tools."""
    registry = ToolRegistry()
    await registry.add_mcp_server("c", url=url, auth=auth, elicitation=accept, approve="none", timeout_s=60)
    for name in registry.list():
        result = await registry.dispatch(name, ARGS.get(name, {}))
        assert not result.is_error, result.text
    await registry.close()


@contextmanager
def serving_senders(folder: Path) -> Iterator[str]:
    """Yield the command of a sender, whose work is done here."""
    sender, address = folder / "sender.py", folder / "work"
    sender.write_text(SENDER)

    def work() -> None:
        with suppress(OSError):  # the listener has been shut down
            while True:
                asked, _ = listener.accept()
                with asked, asked.makefile("rw") as asked_file:
                    url, scenario, context = json.loads(asked_file.read())
                    try:
                        auth = auth_for(scenario or "", json.loads(context or "{}"), folder, url)
                        anyio.run(use, url, auth)
                    except BaseException:
                        asked_file.write(traceback.format_exc())

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            yield f"{sys.executable} -I -S {sender} {address}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            worker.join(10)
