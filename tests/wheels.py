"""Wheels that are published nowhere, and distributions as an installer lays them out."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from toolcell.sandbox.process.packages import PackageEnvironment, digest_of


def make_wheel(directory: Path, name: str, version: str, files: Mapping[str, str], metadata: str = "") -> Path:
    """Write a wheel of pure Python with these files, and return its path. `metadata`: more lines of it."""
    path, info = directory / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    all_files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in all_files.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*all_files, f"{info}/RECORD"]))
    return path


def lay_out(site: Path, name: str, version: str, files: Mapping[str, str], metadata: str = "") -> Path:
    """Put a distribution with these files into a site-packages directory, and return its .dist-info directory.

    Its RECORD has a row that leads out of the directory, as that of a package with a script has.
    """
    info = site / f"{name}-{version}.dist-info"
    all_files = {
        **files,
        f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info.name}/INSTALLER": "pip\n",
    }
    for file, text in all_files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    (info / "RECORD").write_text(
        "".join(f"{file},,\n" for file in [*all_files, "../../bin/tool", f"{info.name}/RECORD"])
    )
    return info


def is_as_built(environment: PackageEnvironment) -> bool:
    """Read every file of an environment and return whether the contents are those that were installed."""
    return digest_of(environment.path) == environment.digest
