"""Settings of who is let in: an issuer of JWTs, and which proxies say truly where a request comes from."""

from __future__ import annotations

import ipaddress

from toolcell.service.principal import Scope
from toolcell.settings import SettingsModel, setting


class OidcConfig(SettingsModel):
    """An issuer whose JWTs are taken, and what their claims mean here."""

    issuer: str = setting(min_length=1, max_length=2000)
    """Its address, exactly as it stands in the claim `iss`."""

    audience: str = setting(min_length=1, max_length=2000)
    """What the claim `aud` must contain. JWTs for other services are refused."""

    jwks: str | None = None
    """Address of its keys. None: its discovery document says it."""

    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    """Signatures that are taken: with public keys only."""

    tenant_claim: str = "tenant"
    """The claim that names the tenant."""

    scope_claim: str = "scope"
    """The claim with the scopes: words with spaces between them, or a list."""

    scopes: dict[str, Scope] | None = None
    """What the words of that claim allow. None: `toolcell:execute`, `toolcell:read` and so on, without `operator`."""

    unlisted_tenants: bool = False
    """Let in tenants without a table of their own; they get the `defaults`."""


def check_networks(networks: tuple[str, ...]) -> tuple[str, ...]:
    """Check addresses of proxies, and return them.

    Raises:
        ValueError: one is neither an address nor a network.
    """
    for each in networks:
        try:
            ipaddress.ip_network(each)
        except ValueError as exc:
            raise ValueError(f"trusted_proxies: {each!r:.80} is not an address or network ({exc})") from exc
    return networks
