"""Make a base image from Debian packages, for machines that reach a Debian mirror but no container registry.

apt resolves which packages an interpreter needs. It works in directories of its own, as any user, and installs nothing
on this machine. The files are merged into one archive; no maintainer script runs. The archive depends on the packages
alone: the same packages give the same bytes. This module knows no engine.
"""

from __future__ import annotations

import hashlib
import io
import platform
import posixpath
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from toolcell.errors import SandboxUnavailable

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

WANTED = ("python3", "base-files", "libc-bin", "libgomp1", "libstdc++6", "media-types", "netbase", "tzdata")
"""libc-bin contains the C.UTF-8 locale. Compiled packages link to libgomp and libstdc++; nothing else here does."""

SHELL_WANTED = (
    "bash", "bzip2", "coreutils", "dash", "diffutils", "findutils", "grep", "gzip", "jq", "mawk", "patch", "sed", "tar",
    "xz-utils",
)  # fmt: skip
"""The packages of the programs of a shell."""

NOT_UNPACKED = frozenset({"debconf", "dpkg", "lock", "mawk", "readline-common", "tar"})
"""Programs that only maintainer scripts use."""

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
"""Links into usr/ on a current Debian, but directories in the archives of some packages."""

PROGRAMS = re.compile(r"usr/(local/)?s?bin/(?!python3($|\.\d+$))|usr/games/|usr/libexec/")
DOCUMENTATION = re.compile(
    r"usr/share/(man|info|lintian|locale|bug|menu|pixmaps|applications|bash-completion|debconf|perl5|gcc)(/|$)"
    r"|usr/share/doc/[^/]+/(?!copyright$)|usr/lib/[^/]+/(gconv|audit)/|etc/(init\.d|cron|default|profile|update-motd)"
)

APT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DebianPackages:
    """The packages of a base image."""

    suite: str
    files: tuple[Path, ...]
    """Package files, in the order of their names."""
    has_programs: bool = False
    """Programs are unpacked too."""

    @property
    def names(self) -> list[str]:
        """Name and version of each."""
        return [path.name.rpartition("_")[0].replace("_", "=").replace("%3a", ":") for path in self.files]

    @property
    def digest(self) -> str:
        """Identifies the resulting archive: the same digest means the same bytes."""
        whole = hashlib.sha256(b"programs" if self.has_programs else b"")
        for path in self.files:
            whole.update(hashlib.sha256(path.read_bytes()).digest())
        return whole.hexdigest()


@contextmanager
def download(
    suite: str, mirror: str, report: Callable[[str], None] = lambda text: None, *, shell: bool = False
) -> Iterator[DebianPackages]:
    """Download the packages of an interpreter, with security updates and checked signatures; delete them afterwards.

    `shell`: with those of the programs of a shell.

    Raises:
        SandboxUnavailable: this machine has no apt or no Debian keys, or the mirror does not answer.
    """
    _require_tools()
    with tempfile.TemporaryDirectory(prefix="toolcell-debian-") as directory:
        folder = Path(directory)
        options = _apt_options(folder, suite, mirror)
        report(f"reading the package lists of {suite} from {mirror}")
        _apt([*options, "update"])
        report(f"downloading {suite}'s Python")
        _apt([*options, "--yes", "--no-install-recommends", "--download-only", "install", *WANTED,
              *(SHELL_WANTED if shell else ())])  # fmt: skip
        found = sorted((folder / "cache/archives").glob("*.deb"))
        unwanted = NOT_UNPACKED - {*SHELL_WANTED} if shell else NOT_UNPACKED
        wanted = tuple(path for path in found if path.name.partition("_")[0] not in unwanted)
        yield DebianPackages(suite, wanted, has_programs=shell)


def _require_tools() -> None:
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise SandboxUnavailable(
            f"a base image from Debian packages is built with {' and '.join(missing)}, not here: run this on Debian or "
            "Ubuntu, or give --base an image that your engine has or can pull"
        )
    if not Path(KEYRING).exists():
        raise SandboxUnavailable(
            f"{KEYRING} is not there to check Debian's signatures with: apt install debian-archive-keyring"
        )
    if platform.machine() not in ARCHITECTURES:
        raise SandboxUnavailable(
            f"no base image is built for {platform.machine()}, only for {', '.join(ARCHITECTURES)}"
        )


def _apt_options(folder: Path, suite: str, mirror: str) -> list[str]:
    """Return apt options for an empty system of its own. The proxy settings of the real system still apply."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # when root calls apt, it downloads as another user
    (folder / "status").touch()
    archives = (f"debian {suite}", f"debian {suite}-updates", f"debian-security {suite}-security")
    (folder / "sources").write_text("".join(f"deb [signed-by={KEYRING}] {mirror}/{name} main\n" for name in archives))
    settings = {
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources",
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferencesparts": "-",
        "APT::Architecture": ARCHITECTURES[platform.machine()],
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Debug::NoLocking": "true",
    }
    return ["-q", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]


def _apt(arguments: list[str]) -> None:
    try:
        done = subprocess.run(
            ["apt-get", *arguments], capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SandboxUnavailable(f"apt-get could not fetch Debian's packages: {exc}") from exc
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise SandboxUnavailable(
            f"apt-get could not fetch Debian's packages (exit status {done.returncode}):\n{output}"
        )


def write_archive(packages: DebianPackages, target: IO[bytes]) -> None:
    """Merge the packages' files into one root file system archive."""
    seen: set[str] = set()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("usr", *(f"usr/{name}" for name in ("bin", "lib", "lib64"))):
            _add_entry(archive, name, tarfile.DIRTYPE, seen)
        for name in MERGED:
            _add_entry(archive, name, tarfile.SYMTYPE, seen, linkname=f"usr/{name}")
        for path in packages.files:
            _merge(path, archive, seen, packages.has_programs)
        listing = "\n".join(packages.names).encode() + b"\n"
        _add_entry(archive, "usr/share/doc/debian-packages.txt", tarfile.REGTYPE, seen, content=listing)


def _merge(package: Path, archive: tarfile.TarFile, seen: set[str], has_programs: bool) -> None:
    with tarfile.open(fileobj=io.BytesIO(_contents(package)), mode="r:") as files:
        for member in files:
            name = target_path(member.name, has_programs)
            if name is None or name in seen:
                continue
            seen.add(name)
            content = files.extractfile(member) if member.isreg() else None
            member.name = name
            if member.islnk():
                member.linkname = target_path(member.linkname, has_programs) or member.linkname
            member.mode &= 0o755
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            archive.addfile(member, content)


def _contents(package: Path) -> bytes:
    """Return the tar archive inside a package file. dpkg-deb checks and decompresses it."""
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=False)
    if done.returncode:
        raise SandboxUnavailable(f"{package.name} cannot be unpacked: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def target_path(name: str, has_programs: bool = False) -> str | None:
    """Return where a package's file goes; None for programs, documentation and what the merged layout already has."""
    path = posixpath.normpath(name).lstrip("/")
    if path.partition("/")[0] in MERGED:
        path = f"usr/{path}"
    if path in (".", "usr", *(f"usr/{merged}" for merged in MERGED)):
        return None
    return None if (PROGRAMS.match(path) and not has_programs) or DOCUMENTATION.match(path) else path


def _add_entry(
    archive: tarfile.TarFile, name: str, kind: bytes, seen: set[str], *, linkname: str = "", content: bytes = b""
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, linkname, len(content)
    entry.mode = 0o644 if kind == tarfile.REGTYPE else 0o755
    entry.uname = entry.gname = "root"
    seen.add(name)
    archive.addfile(entry, io.BytesIO(content))
