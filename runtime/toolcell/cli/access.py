"""Flags of `toolcell serve` for who is let in, TLS, and the proxies before the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from toolcell.errors import UsageError


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Flags for the settings of access."""

    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", metavar="FILE", envvar="TOOLCELL_TOKENS", help="Token store of `toolcell tokens`."),
    ] = None
    oidc: Annotated[
        str | None, typer.Option("--oidc", metavar="ISSUER", help="Accept JWTs from this issuer (https://...).")
    ] = None
    audience: Annotated[
        str | None, typer.Option("--audience", metavar="NAME", help="Audience that JWTs must have (claim aud).")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate with its chain, PEM.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxies",
            metavar="ADDRESS",
            help="A proxy, or network, whose X-Forwarded-For is trusted.",
        ),
    ] = None

    def settings(self, base: Any) -> dict[str, Any]:
        """Return the settings that were given. `base` has those of the configuration file.

        Raises:
            UsageError: flags that belong together are not.
        """
        given: dict[str, Any] = {
            "tokens": self.tokens,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "trusted_proxies": tuple(self.trusted_proxies) if self.trusted_proxies else None,
        }
        if (self.oidc is None) != (self.audience is None):
            raise UsageError("--oidc ISSUER and --audience NAME belong together: JWTs for other services are not taken")
        if self.oidc is not None:
            own = base.oidc.model_dump() if base.oidc is not None else {}
            given["oidc"] = own | {"issuer": self.oidc, "audience": self.audience}
        return {name: value for name, value in given.items() if value is not None}
