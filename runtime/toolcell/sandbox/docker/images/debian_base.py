"""A base image out of Debian packages, for machines that reach a Debian mirror and no container registry.

apt decides which packages an interpreter needs, on paper: in directories of its own, as any user, and without
installing anything here. Their files are merged into one archive; no maintainer script runs.
The archive depends on the packages alone: same packages, same bytes. Knows no engine.
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

SUITE = "bookworm"
MIRROR = "http://deb.debian.org"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

WANTED = ("python3", "base-files", "libc-bin", "libgomp1", "libstdc++6", "media-types", "netbase", "tzdata")
"""libc-bin holds the C.UTF-8 locale; libgomp and libstdc++ are what compiled packages link and nothing here needs."""

NOT_UNPACKED = frozenset({"debconf", "dpkg", "lock", "mawk", "readline-common", "tar"})
"""Programs that the others' maintainer scripts would have used."""

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
"""Links into usr/ on a present Debian, directories in some packages' archives."""

PROGRAMS = re.compile(r"usr/(local/)?s?bin/(?!python3($|\.\d+$))|usr/games/|usr/libexec/")
PAPERS = re.compile(
    r"usr/share/(man|info|lintian|locale|bug|menu|pixmaps|applications|bash-completion|debconf|perl5|gcc)(/|$)"
    r"|usr/share/doc/[^/]+/(?!copyright$)|usr/lib/[^/]+/(gconv|audit)/|etc/(init\.d|cron|default|profile|update-motd)"
)

APT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DebianPackages:
    """What a base image is made of."""

    suite: str
    files: tuple[Path, ...]
    """Package files, in the order of their names."""

    @property
    def names(self) -> list[str]:
        """Name and version of each."""
        return [path.name.rpartition("_")[0].replace("_", "=").replace("%3a", ":") for path in self.files]

    @property
    def digest(self) -> str:
        """Stands for the resulting archive: same digest, same bytes."""
        whole = hashlib.sha256()
        for path in self.files:
            whole.update(hashlib.sha256(path.read_bytes()).digest())
        return whole.hexdigest()


@contextmanager
def fetched(
    suite: str = SUITE, mirror: str = MIRROR, say: Callable[[str], None] = lambda text: None
) -> Iterator[DebianPackages]:
    """Download what an interpreter needs, security updates included, signatures checked; gone again afterwards.

    Raises:
        SandboxUnavailable: this machine has no apt or no Debian keys, or the mirror does not answer.
    """
    _require_tools()
    with tempfile.TemporaryDirectory(prefix="toolcell-debian-") as directory:
        place = Path(directory)
        options = _apt_options(place, suite, mirror)
        say(f"asking {mirror} for the packages of {suite}")
        _apt([*options, "update"])
        say(f"downloading {suite}'s Python")
        _apt([*options, "--yes", "--no-install-recommends", "--download-only", "install", *WANTED])
        found = sorted((place / "cache/archives").glob("*.deb"))
        yield DebianPackages(suite, tuple(path for path in found if path.name.partition("_")[0] not in NOT_UNPACKED))


def _require_tools() -> None:
    if missing := [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]:
        raise SandboxUnavailable(
            f"a base image from Debian packages is built with {' and '.join(missing)}, not here: run this on Debian or "
            "Ubuntu, or give --base an image that your engine has or can pull"
        )
    if not Path(KEYRING).exists():
        raise SandboxUnavailable(f"{KEYRING} is not there to check Debian's signatures with: apt install "
                                 "debian-archive-keyring")  # fmt: skip
    if platform.machine() not in ARCHITECTURES:
        raise SandboxUnavailable(
            f"no base image is built for {platform.machine()}, only for {', '.join(ARCHITECTURES)}"
        )


def _apt_options(place: Path, suite: str, mirror: str) -> list[str]:
    """apt with a machine of its own on which nothing is installed; proxies of the real one's configuration hold."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (place / name).mkdir(parents=True)
    place.chmod(0o755)  # apt downloads as a user of its own when called by root
    (place / "status").touch()
    archives = (f"debian {suite}", f"debian {suite}-updates", f"debian-security {suite}-security")
    (place / "sources").write_text("".join(f"deb [signed-by={KEYRING}] {mirror}/{name} main\n" for name in archives))
    settings = {
        "Dir::State": place / "state",
        "Dir::State::status": place / "status",
        "Dir::Cache": place / "cache",
        "Dir::Etc::sourcelist": place / "sources",
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
        told = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise SandboxUnavailable(f"apt-get could not fetch Debian's packages (exit status {done.returncode}):\n{told}")


def write_archive(packages: DebianPackages, target: IO[bytes]) -> None:
    """Merge the packages' files into one root file system archive."""
    seen: set[str] = set()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("usr", *(f"usr/{name}" for name in ("bin", "lib", "lib64"))):
            _add_entry(archive, name, tarfile.DIRTYPE, seen)
        for name in MERGED:
            _add_entry(archive, name, tarfile.SYMTYPE, seen, linkname=f"usr/{name}")
        for path in packages.files:
            _merge(path, archive, seen)
        listing = "\n".join(packages.names).encode() + b"\n"
        _add_entry(archive, "usr/share/doc/debian-packages.txt", tarfile.REGTYPE, seen, content=listing)


def _merge(package: Path, archive: tarfile.TarFile, seen: set[str]) -> None:
    with tarfile.open(fileobj=io.BytesIO(_contents(package)), mode="r:") as files:
        for member in files:
            name = kept_as(member.name)
            if name is None or name in seen:
                continue
            seen.add(name)
            content = files.extractfile(member) if member.isreg() else None
            member.name = name
            if member.islnk():
                member.linkname = kept_as(member.linkname) or member.linkname
            member.mode &= 0o755
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            archive.addfile(member, content)


def _contents(package: Path) -> bytes:
    """The archive of files inside a package file, which dpkg-deb checks and decompresses."""
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=False)
    if done.returncode:
        raise SandboxUnavailable(f"{package.name} cannot be unpacked: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def kept_as(name: str) -> str | None:
    """Where a package's file goes; None for programs, papers and what the merged layout has already."""
    path = posixpath.normpath(name).lstrip("/")
    if path.partition("/")[0] in MERGED:
        path = f"usr/{path}"
    if path in (".", "usr", *(f"usr/{merged}" for merged in MERGED)):
        return None
    return None if PROGRAMS.match(path) or PAPERS.match(path) else path


def _add_entry(
    archive: tarfile.TarFile, name: str, kind: bytes, seen: set[str], *, linkname: str = "", content: bytes = b""
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, linkname, len(content)
    entry.mode = 0o644 if kind == tarfile.REGTYPE else 0o755
    entry.uname = entry.gname = "root"
    seen.add(name)
    archive.addfile(entry, io.BytesIO(content))
