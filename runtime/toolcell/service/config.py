"""Settings of the service and of its tenants. Loadable from TOML: `toolcell serve --config service.toml`."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import platformdirs
from pydantic import AfterValidator, BeforeValidator

from toolcell.audit import RecordConfig
from toolcell.config import KIB, MIB, Limits, Policy, PoolConfig
from toolcell.errors import UsageError
from toolcell.quotas import Quota
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


def _place(given: Any) -> Any:
    """Return a file as a path, so that a URL is told from it."""
    return Path(given) if isinstance(given, str) and "://" not in given else given


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


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern for names of tenants. It is a folder's name, too."""


class TenantConfig(SettingsModel):
    """What one tenant's scripts may use, and where their runs are recorded."""

    backend: Literal["process", "docker"] = "process"
    """Where sandboxes are started."""

    limits: Limits = setting(default=Limits())
    """Limits of each run. A request may ask for less, never for more."""

    policy: Policy = setting(default=Policy())
    """Which isolation is required, and what scripts find in their environment."""

    pool: PoolConfig = setting(default=PoolConfig())
    """How many sandboxes are kept."""

    python: str | None = None
    """The interpreter of the scripts. None: the service's own."""

    packages: tuple[str, ...] = ()
    """What scripts may import besides the standard library."""

    preload: tuple[str, ...] = ()
    """Modules that are imported before a script starts."""

    tools: tuple[str, ...] = ()
    """Files or modules whose tools scripts may call, as `toolcell run --tools` takes them."""

    mcp: dict[str, dict[str, Any]] = setting(default_factory=lambda _: {})
    """MCP servers by name: `command` or `url`, and the other options of `add_mcp_server`."""

    allow: tuple[str, ...] = ()
    """Where scripts may send HTTP requests, as `toolcell run --allow` takes it: `[METHOD,... ]HOST[/PATH]`."""

    allow_secrets: tuple[str, ...] = ()
    """Headers of these requests: `HOST=HEADER: {NAME}`. NAME is a variable of the service's environment, and no script
    sees its value."""

    allow_packages: tuple[str, ...] = ()
    """What scripts may install with `install_package(NAME)`, such as `humanize>=4`."""

    quota: Quota | None = None
    """What may be used in a time."""

    quota_by: Literal["subject", "tenant"] = "subject"
    """Whether each subject may use that much, or all of them together."""

    concurrent_runs: int = setting(default=64, gt=0)
    """Runs at once. Further ones wait in the queue."""

    queued_runs: int = setting(default=256, ge=0)
    """Runs that wait. One more is refused, with the status 503."""

    queue_s: float = setting(default=30.0, gt=0, le=3600)
    """Seconds that a run, or a read past the allowance of large data, waits at most."""

    receiving_bytes: int = setting(default=256 * MIB, ge=KIB)
    """Bytes of requests at once that are on their way or wait for a place. One more is refused, with the status 503."""

    sessions: int = setting(default=64, gt=0)
    """Sessions that are open at once."""

    record: Annotated[Path | str, BeforeValidator(_place)] = Path()
    """The file, or PostgreSQL database (postgresql://...), that records what its scripts did; in `defaults`, a folder
    in which each tenant has one, NAME.db, or a database in which each tenant has a schema of its own. Without it:
    `tenants/<name>/runs.db` in the state folder."""

    record_config: RecordConfig = setting(default=RecordConfig())
    """What the record keeps, redacts and removes. Without `key`: where callers have tokens or JWTs, a key of the tenant
    alone, which is made in the state folder: `tenants/<name>/audit.key`; otherwise the user's own key."""


def check_names(tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
    """Check the names of tenants, and return their settings.

    Raises:
        ValueError: one cannot be a tenant's name.
    """
    for name in tenants:
        if not NAME.fullmatch(name):
            raise ValueError(f"the tenant name {name!r:.80} must be 1 to 64 letters, digits, - and _")
    return tenants


class ServiceConfig(SettingsModel):
    """Settings of the service: address, access, bounds and tenants."""

    other_names: ClassVar = {"bind": "host", "address": "host", "tenant": "tenants", "default": "defaults"}

    host: str = "127.0.0.1"
    port: int = setting(default=8700, ge=0, le=65_535)

    state: Path = setting(
        default_factory=lambda _: platformdirs.user_state_path("toolcell", appauthor=False) / "service"
    )
    """Folder of what outlives the service: records and keys of the tenants."""

    defaults: TenantConfig = setting(default=TenantConfig())
    """What holds for each tenant where its own table says nothing."""

    tenants: Annotated[dict[str, TenantConfig], AfterValidator(check_names)] = setting(default_factory=lambda _: {})
    """Tenants with settings of their own, by name."""

    body_bytes: int = setting(default=64 * MIB, ge=KIB)
    """Bytes of a request's body. A larger one is refused before it is read."""

    receiving_bytes: int = setting(default=512 * MIB, ge=KIB)
    """Bytes of requests at once that are on their way or wait for a place, of all tenants together."""

    answer_bytes: int = setting(default=64 * MIB, ge=MIB)
    """Bytes of an answer. Of a larger one, contents of files, long texts and lists are left out, and it says so."""

    body_s: float = setting(default=30.0, gt=0, le=3600)
    """Seconds in which a body must arrive."""

    head_s: float = setting(default=10.0, gt=0, le=3600)
    """Seconds in which the line and the headers of a request must arrive, from when the connection is there."""

    write_s: float = setting(default=60.0, gt=0, le=3600)
    """Seconds after which the connection of a client that reads nothing of its answer is ended."""

    connections: int = setting(default=2048, gt=0)
    """Connections at once, and at most half of what the process may open. For a further one, the oldest that has no
    request under way makes room; if there is none, it is answered with the status 503 and closed."""

    heartbeat_s: float = setting(default=15.0, gt=0, le=3600)
    """Seconds without an event after which a stream of events sends a comment."""

    grace_s: float = setting(default=60.0, ge=0, le=3600)
    """Seconds for which runs and sessions of a `Client` go on while it has no connection."""

    socket_requests: int = setting(default=64, ge=8, le=4096)
    """Requests of one `Client` that are under way at once."""

    drain_s: float = setting(default=30.0, ge=0, le=86_400)
    """Seconds in which runs may finish after SIGTERM. Then they are cancelled."""

    package_index: str | None = None
    """Where packages come from instead of PyPI: those of sandboxes and those that scripts install. `URL`, or
    `URL @ADDRESS` for an index that is not public."""

    tokens: Path | None = None
    """The store of tokens: `toolcell tokens` makes it."""

    oidc: OidcConfig | None = None
    """An issuer whose JWTs are taken."""

    tls_cert: Path | None = None
    """Certificate, with its chain, as PEM. Without it, TLS is the business of a proxy before the service."""

    tls_key: Path | None = None
    """Key of the certificate, as PEM."""

    trusted_proxies: Annotated[tuple[str, ...], AfterValidator(check_networks)] = ()
    """Addresses and networks of the proxies before the service. Of nobody else, X-Forwarded-For is believed."""

    concurrent_runs: int = setting(default=256, gt=0)
    """Runs at once, of all tenants together."""

    queued_runs: int = setting(default=1024, ge=0)
    """Runs that wait, of all tenants together."""

    idempotency_s: float = setting(default=86_400.0, gt=0, le=366 * 86_400)
    """Seconds in which a request with an Idempotency-Key is answered again, and not carried out again."""

    idempotency_keys: int = setting(default=100_000, gt=0)
    """Keys of one tenant that are kept. One more is refused until the oldest is that old."""

    def check(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")
        least = min(self.receiving_bytes, *(each.receiving_bytes for each in (self.defaults, *self.tenants.values())))
        if least < self.body_bytes:
            raise ValueError(f"receiving_bytes = {least} has no room for one body of body_bytes = {self.body_bytes}")

    @property
    def folders(self) -> list[Path]:
        """The folders of the service, the longest first: no answer names them."""
        each = [self.defaults, *self.tenants.values()]
        paths = [self.state, *(one.record for one in each if isinstance(one.record, Path) and one.record != Path())]
        paths += [one.record_config.key for one in each if one.record_config.key is not None]
        return sorted({path.absolute() for path in paths}, key=lambda path: -len(str(path)))

    @property
    def knows_callers(self) -> bool:
        """True when callers say who they are, so that there may be several tenants."""
        return self.tokens is not None or self.oidc is not None

    def unlisted(self, names: Iterable[str]) -> str:
        """Say which tenants have no table, where others have one; empty if none."""
        unknown = sorted({*names} - {*self.tenants}) if self.tenants else []
        if not unknown:
            return ""
        known = ", ".join(self.tenants)
        return f"no table in the settings for {', '.join(unknown)}: `defaults` apply; tenants with one: {known}"[:1000]

    def tenant(self, name: str) -> TenantConfig:
        """Return the settings of one tenant.

        Raises:
            UsageError: this cannot be a tenant's name.
        """
        if not NAME.fullmatch(name):
            raise UsageError(f"the tenant name {name!r:.80} must be 1 to 64 letters, digits, - and _")
        own = self.tenants.get(name)
        given = {field: getattr(own, field) for field in own.model_fields_set} if own is not None else {}
        folder = self.state / "tenants" / name
        if "record" not in given:
            given["record"] = _record_of(name, self.defaults.record, folder)
        config = given.get("record_config", self.defaults.record_config)
        if self.knows_callers and config.key is None:
            config = config.model_copy(update={"key": folder / "audit.key"})
        given["record_config"] = config
        return self.defaults.model_copy(update=given)


def _record_of(name: str, default: Path | str, folder: Path) -> Path | str:
    """Return where a tenant's record is that has no place of its own."""
    if isinstance(default, Path):
        return folder / "runs.db" if default == Path() else default / f"{name}.db"
    is_short = re.fullmatch(r"[a-z0-9_]{1,48}", name) is not None
    schema = f"tenant_{name}" if is_short else f"other_tenant_{hashlib.sha256(name.encode()).hexdigest()[:40]}"
    return f"{default}{'&' if '?' in default else '?'}schema={schema}"
