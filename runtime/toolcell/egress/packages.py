"""`PackageIndex`: which packages scripts may install, and the tool that finds their wheels.

pip looks for them in a sandbox of its own, which can send requests to the index and to nothing else. The host takes the
wheels as bytes: it neither unpacks nor imports them. A script reads them part by part.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self
from urllib.parse import unquote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from toolcell.config import MIB, Limits, Policy, PoolConfig, names_of
from toolcell.egress import resolver_guest
from toolcell.egress.failures import LIMIT, PROTOCOL, refused
from toolcell.egress.rules import Allow
from toolcell.egress.urls import parse_url
from toolcell.errors import PackageError, ToolError, UsageError
from toolcell.results import OutputFile
from toolcell.support.checks import check_kind
from toolcell.support.log import logger_of

logger = logger_of("toolcell.egress")

PYPI: Final = "https://pypi.org/simple/"
PYPI_RULES: Final = (Allow("pypi.org", paths=["/simple/*"]), Allow("files.pythonhosted.org"))

PIP: Final = "pip>=23.1"
"""The first with `install --report` and a digest of each file."""

MAX_WHEELS: Final = 32
"""Wheels of one call, dependencies included."""

MAX_BYTES: Final = 64 * MIB
"""Size of the wheels of one call together."""

MAX_NAME: Final = 200
"""Characters of a requirement."""

_PYTHON: Final = re.compile(r"3\.\d{1,2}\.\d{1,3}")
_MACHINE: Final = re.compile(r"[A-Za-z0-9_]{1,40}")

MAX_INSTALLED: Final = 2000
"""Distributions of which a guest may say that it has them."""
MAX_INSTALLED_NAME: Final = 100
"""Characters of the name of one, and of its version."""

RESOLVER_LIMITS: Final = Limits(
    wall_s=120, cpu_s=60, memory_bytes=768 * MIB, disk_bytes=3 * MAX_BYTES, files=MAX_WHEELS, files_bytes=MAX_BYTES
)

NOT_FOUND: Final = "No matching distribution"
"""In what pip says when an index has no wheel that fits."""

ONLY_PURE: Final = (
    "Only wheels of pure Python can be installed while a script runs; others are for Runtime(packages=[...])"
)

USE: Final = """
find_wheels(requirement, constraints, installed, url, python, machine)
wheels = sorted(map(str, Path("wheels").glob("*.whl")))
set_result(len(wheels), files=wheels)
"""


@dataclass(frozen=True, slots=True)
class PackageIndex:
    """Which packages scripts may install, and from where."""

    requirements: Sequence[str]
    """Names with versions, such as `"humanize>=4"`. What they depend on is installed, too; where it is listed here, in
    these versions."""
    _: KW_ONLY
    url: str = PYPI
    """Address of the simple API."""
    rules: Sequence[Allow] = ()
    """Where index and wheels are. Empty: PyPI's hosts, or the host of `url`."""
    approval: bool = False
    """Somebody has to approve each call."""

    @classmethod
    def parse(cls, requirements: Sequence[str], text: str) -> tuple[Self, dict[str, str]]:
        """Read `URL[ @ADDRESS]`, such as `https://pypi.example.com/simple/ @10.0.0.0/8`: an index, and its secrets.

        A user name and a password in the URL are sent to the index, and no sandbox sees them.

        Raises:
            UsageError: it is not of this form.
        """
        url, *private = text.split() or [""]
        own, login = without_login(url)
        if wrong := [each for each in private if not each.startswith("@")]:
            raise UsageError(f"an index is written 'URL @ADDRESS', such as '{PYPI} @10.0.0.0/8'; not {wrong[0]!r:.100}")
        name, header = "PACKAGE_INDEX", {"Authorization": "Basic {PACKAGE_INDEX}"}
        rule = replace(_rule_of(own), private=[each[1:] for each in private], secrets=header if login else {})
        encoded = base64.b64encode(login.encode()).decode()
        return cls(requirements, url=own, rules=[rule]), {name: encoded} if login else {}

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "requirements", tuple(names_of(self.requirements, "Egress(packages)")))
        self._allowed()
        for rule in self.rules:
            check_kind("PackageIndex(rules): each", rule, Allow, cure='write Allow("pypi.example.com")')
        if not self.rules:
            put(self, "rules", PYPI_RULES if self.url == PYPI else (_rule_of(self.url),))

    def requirement_for(self, asked: object) -> str:
        """Return what pip is asked for when a script asks for a package.

        Raises:
            ToolError: it is not allowed, or not a name with versions.
        """
        wanted = _parsed(asked, ToolError)
        own = next((each for each in self._allowed() if each.name == wanted.name), None)
        if own is None:
            known = f"; allowed: {', '.join(self.requirements)}" if self.requirements else ""
            name = wanted.name
            raise refused(f"the package {name} is not allowed; {_allowed_by(name)}{known}")
        if more := sorted(wanted.extras - own.extras):
            raise refused(f"{wanted} is not allowed; {_allowed_by(f'{wanted.name}[{more[0]}]')}")
        wanted.specifier &= own.specifier
        return str(wanted)

    def _allowed(self) -> list[Requirement]:
        return [_parsed(each, UsageError) for each in self.requirements]

    @property
    def constraints(self) -> list[str]:
        """The versions of what is listed, for what is installed with something else."""
        return [f"{each.name}{each.specifier}" for each in self._allowed() if each.specifier]


def _allowed_by(package: str) -> str:
    """Say what lets scripts install a package, in a program, on the command line and in a service."""
    return f'Egress(packages=["{package}"]), --allow-package {package} or `allow_packages` of a service would allow it'


def _parsed(text: object, error: type[ToolError | UsageError]) -> Requirement:
    """Read a name with versions and extras; nothing else is one."""
    try:
        if not isinstance(text, str) or len(text) > MAX_NAME:
            raise InvalidRequirement(f"it must be a text of at most {MAX_NAME} characters")
        found = Requirement(text)
    except InvalidRequirement as exc:
        raise error(f"{text!r:.100} is not the name of a package: {str(exc).partition(chr(10))[0]}") from None
    if found.url or found.marker or any(each.operator == "===" for each in found.specifier):
        raise error(f"{text!r:.100}: a package is given by its name and versions, such as 'humanize>=4'")
    found.name = canonicalize_name(found.name)
    found.extras = {canonicalize_name(each) for each in found.extras}
    return found


def without_login(url: str) -> tuple[str, str]:
    """Return a URL without the user name and the password in it, and these with a colon between them."""
    scheme, mark, rest = url.partition("://")
    login, at, _ = rest.partition("/")[0].rpartition("@")
    return (f"{scheme}{mark}{rest[len(login) + 1 :]}", unquote(login)) if at else (url, "")


def _rule_of(url: str) -> Allow:
    try:
        target = parse_url(url)
    except ToolError as exc:
        raise UsageError(f"PackageIndex(url) is the URL of an index, not {url!r:.100}: {exc}") from None
    name = target.origin.partition("://")[2].removesuffix(f":{target.port}").strip("[]")
    return Allow(f"{target.scheme}://{name}", ports=[target.port])


@dataclass(frozen=True, slots=True)
class ScriptPython:
    """The Python of a script, as its sandbox says."""

    version: str
    machine: str
    """Such as `x86_64`."""
    installed: Mapping[str, str]
    """Versions of what the script can import."""

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Self:
        """Read the arguments of a call.

        Raises:
            ToolError: they do not say which Python it is.
        """
        version, machine = args.get("python"), args.get("machine")
        if not (isinstance(version, str) and _PYTHON.fullmatch(version)):
            raise ToolError(f"python is a version such as 3.12.1, not {version!r:.40}", code="invalid_arguments")
        if not (isinstance(machine, str) and _MACHINE.fullmatch(machine)):
            raise ToolError(f"machine is a name such as x86_64, not {machine!r:.40}", code="invalid_arguments")
        return cls(version, machine, _versions_of(args.get("installed")))


def described(wheel: OutputFile) -> dict[str, Any]:
    """Return what the log has of a wheel.

    Raises:
        ToolError: it is not a wheel of pure Python.
    """
    file = wheel.name.rpartition("/")[2]
    # Before its tags are parsed: of sets of them, each with each becomes a tag, and a name has room for 30,000.
    if file.endswith(".whl") and not file.endswith("-none-any.whl"):
        raise ToolError(f"{file!r:.100} is not a wheel of pure Python. {ONLY_PURE}", code=PROTOCOL)
    try:
        name, version, *_ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        raise ToolError(f"{file!r:.100} is not the name of a wheel", code=PROTOCOL) from None
    return {"name": name, "version": str(version), "file": file, "sha256": wheel.sha256, "size": wheel.size}


class IndexRules(Protocol):
    """Where requests to an index may go; an `Egress`."""

    def tools_for(self, limits: Limits) -> Any: ...


async def prepare_pip() -> None:
    """Fetch pip, where this machine has not done so yet."""
    from toolcell.sandbox import prepare_packages

    try:
        await prepare_packages([PIP])
    except PackageError as exc:  # only scripts that install something need it
        logger.warning("install_package() will not work: %s", exc)


async def find_wheels(
    index: PackageIndex,
    requirement: str,
    python: ScriptPython,
    *,
    egress: IndexRules,
    policy: Policy,
    most_bytes: int,
) -> Sequence[OutputFile]:
    """Have pip find and download wheels in a sandbox of its own.

    `egress`: where that sandbox may send requests. `policy`: how it is isolated.

    Raises:
        ToolError: they cannot be had; the text has pip's reasons.
        SandboxUnavailable: no sandbox could be started.
        PackageError: this machine has no pip, and it could not be fetched.
    """
    from toolcell.runtime import Runtime  # which imports this package where requests are allowed

    limits = RESOLVER_LIMITS.model_copy(update={"files_bytes": min(most_bytes, MAX_BYTES)})
    inputs = {
        "requirement": requirement,
        "constraints": index.constraints,
        "installed": dict(python.installed),
        "python": python.version,
        "machine": python.machine,
        "url": index.url,
    }
    own = Runtime(packages=[PIP], egress=egress, limits=limits, policy=policy, pool=PoolConfig(warm=0))
    script = Path(resolver_guest.__file__).read_text(encoding="utf-8") + USE
    async with own:
        result = await own.execute_code(script, inputs=inputs)
    if result.error is not None:
        if result.calls and (failed := result.calls[-1]).status == "error":  # pip asks the index, and nothing else
            raise ToolError(f"the index cannot be reached: {failed.message}"[:1000], code=PROTOCOL)
        lines = [line.removeprefix("ERROR: ") for line in result.logs.text.splitlines() if line.startswith("ERROR: ")]
        if lines[-1:] == ["Exception:"]:  # pip's own failure, and the end of its traceback
            lines[-1] = result.logs.text.rstrip().rpartition("\n")[2]
        reason = ("; ".join(lines) or f"{result.outcome}: {result.error.message}")[:1000]
        raise ToolError(f"{reason}. {ONLY_PURE}" if NOT_FOUND in reason else reason, code=PROTOCOL)
    if isinstance(count := result.value, int) and count > MAX_WHEELS:
        text = f"{requirement} and what it needs are {count} wheels, and one call installs at most {MAX_WHEELS}"
        raise ToolError(f"{text}: install some of its dependencies first", code=LIMIT)
    for wheel in result.files:
        if wheel.problem is not None:
            limit = "egress_bytes" if most_bytes < MAX_BYTES else f"one call installs at most {MAX_BYTES} bytes"
            raise ToolError(f"the wheel {wheel.name}: {wheel.problem} ({limit})", code=LIMIT)
    return result.files


def _versions_of(given: object) -> dict[str, str]:
    """Return what can be names and versions of packages."""
    found: dict[str, str] = {}
    for name, version in itertools.islice(given.items(), MAX_INSTALLED) if isinstance(given, Mapping) else ():
        if len(name) > MAX_INSTALLED_NAME or not isinstance(version, str) or len(version) > MAX_INSTALLED_NAME:
            continue
        try:
            found[canonicalize_name(name, validate=True)] = str(Version(version))
        except ValueError:
            continue
    return found
