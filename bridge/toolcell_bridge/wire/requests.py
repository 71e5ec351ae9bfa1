"""The calls with which libraries of a script send HTTP requests, where `RunScript.egress` says that they may."""

from __future__ import annotations

from typing import Final

HTTP: Final = "http"
"""Sends a request: method, url, headers, body, upload, timeout_s. Returns status, reason, version, headers, the first
part of the body, and as `rest` the name under which `HTTP_READ` has more of it."""

HTTP_UPLOAD: Final = "http_upload"
"""Appends a part to a body that the host keeps for a request: upload, data. Returns the name of the upload."""

HTTP_READ: Final = "http_read"
"""Returns the next part of the rest of a body: rest, size. b"" at its end; size 0 drops it. Of a wheel it returns the
part from `start`, and drops the wheel with its last part."""

INSTALL_PACKAGE: Final = "install_package"
"""Finds the wheels of a package and its dependencies: package, installed, python, machine. Returns `wheels`, each with
name, version, file, sha256 and size, and as `rest` the name under which `HTTP_READ` has its content."""

PART_BYTES: Final = 256 * 1024
"""Most bytes of a body, in one call or one answer."""
