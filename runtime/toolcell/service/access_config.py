"""Settings of who is let in: an issuer of JWTs, and which proxies say truly where a request comes from."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final

from pydantic import AfterValidator

from toolcell.service.principal import Scope
from toolcell.settings import SettingsModel, setting

SIGNATURES: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
"""With public keys. `none` signs nothing; with HS256 a public key would be the secret."""


def check_algorithms(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check names of signatures, and return them.

    Raises:
        ValueError: one is not of `SIGNATURES`, or there is none.
    """
    if not names or (wrong := sorted(set(names) - SIGNATURES)):
        given = f"the algorithm {wrong[0]!r:.80} proves nothing" if names else "no algorithm proves anything"
        raise ValueError(f"{given} with a public key; use one of {', '.join(sorted(SIGNATURES))}")
    return names


class OidcConfig(SettingsModel):
    """An issuer whose JWTs are taken, and what their claims mean here."""

    issuer: str = setting(min_length=1, max_length=2000)
    """Its address, exactly as it stands in the claim `iss`."""

    audience: str = setting(min_length=1, max_length=2000)
    """What the claim `aud` must contain. JWTs for other services are refused."""

    jwks: str | None = None
    """Address of its keys. None: its discovery document says it."""

    algorithms: Annotated[tuple[str, ...], AfterValidator(check_algorithms)] = ("RS256", "ES256", "EdDSA")
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
