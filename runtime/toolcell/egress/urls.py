"""Read a URL in one strict way. What is checked is what is sent: nobody parses the text a second time."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote, unquote

from toolcell.egress.addresses import IPAddress
from toolcell.errors import ToolError

MAX_URL_CHARS = 4096
MAX_HOST_CHARS = 253
DEFAULT_PORTS = {"http": 80, "https": 443}

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//([^/?#]*))?([^?#]*)(\?[^#]*)?(#.*)?", re.DOTALL)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PERCENT = re.compile(r"%([0-9A-Fa-f]{2})")
_PATH_SAFE = "/:@!$&'()*+,;=-._~%[]|"
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


@dataclass(frozen=True, slots=True)
class Target:
    """One checked URL, in normal form. Source: RFC 3986, section 6."""

    scheme: str
    host: str
    """ASCII, lower case, without brackets and without a trailing dot."""
    port: int
    path: str
    """Percent-encoded, without `.` and `..`; begins with `/`."""
    query: str
    """With its `?`, or empty."""
    address: IPAddress | None
    """The host, if it is an address."""

    @property
    def origin(self) -> str:
        """Scheme, host and port, as in a URL."""
        host = f"[{self.host}]" if isinstance(self.address, IPv6Address) else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}")

    def __str__(self) -> str:
        return f"{self.origin}{self.path}{self.query}"


def parse_url(text: str, base: Target | None = None) -> Target:
    """Return the checked form of a URL; `base` is the page that a relative one stands on.

    Raises:
        ToolError: it is not an http or https URL, or it is written in a way that programs read differently.
    """
    text = text.strip(" \t\r\n")
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    if not text:
        raise ToolError("url is required")
    if len(text) > MAX_URL_CHARS:
        raise ToolError(f"the URL has {len(text)} characters, and may have {MAX_URL_CHARS}: {shown}")
    if "\\" in text or any(ord(char) < 32 or ord(char) == 127 or 0xD800 <= ord(char) < 0xE000 for char in text):
        raise ToolError(f"the URL has a backslash or a control character: {shown!r}")
    if base is not None:
        text = _absolute(text, base)
    match = _URL.fullmatch(text)
    if match is None or (scheme := match[1].lower()) not in DEFAULT_PORTS:
        raise ToolError(f"only http:// and https:// URLs can be fetched, not {shown!r}", code="not_permitted")
    if not match[3]:
        raise ToolError(f"the URL names no host: {shown!r}")
    host, port = _authority(match[3], DEFAULT_PORTS[scheme], shown)
    name, address = _host(host, shown)
    return Target(
        scheme,
        name,
        port=port,
        path=_path(match[4]),
        query=quote(match[5] or "", safe="?" + _PATH_SAFE),
        address=address,
    )


def _absolute(text: str, base: Target) -> str:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text):
        return text
    if text.startswith("//"):
        return f"{base.scheme}:{text}"
    if text.startswith("/"):
        return f"{base.origin}{text}"
    if text.startswith(("?", "#")):
        return f"{base.origin}{base.path}{text if text[0] == '?' else base.query}"
    return f"{base.origin}{base.path.rpartition('/')[0]}/{text}"


def _authority(text: str, default: int, shown: str) -> tuple[str, int]:
    if "@" in text:
        raise ToolError(
            "a URL with a user name or password is refused; credentials are attached by the program",
            code="not_permitted",
        )
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        return text, default
    if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ToolError(f"the URL's port is not a number from 1 to 65535: {shown!r}")
    return host, int(port) if port else default


def _host(text: str, shown: str) -> tuple[str, IPAddress | None]:
    if text.startswith("["):
        try:
            address = IPv6Address(text[1:-1] if text.endswith("]") and "%" not in text else "")
        except AddressValueError:
            raise ToolError(f"the URL's host is not an IPv6 address: {shown!r}") from None
        return str(address), address
    name = _ascii(text, shown)
    name = name[:-1] if name.endswith(".") else name
    labels = name.split(".")
    if len(name) > MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels)):
        raise ToolError(f"the URL's host is not a host name: {shown!r}")
    if not _NUMBER.fullmatch(labels[-1]):
        return name, None
    try:  # a name that ends in a number is an address, and libraries disagree about every form of it but this one
        return name, IPv4Address(name)
    except AddressValueError:
        cure = "write an address as four decimal numbers without leading zeros"
        raise ToolError(f"the URL's host is a number in an unusual form; {cure}: {shown!r}") from None


def _ascii(text: str, shown: str) -> str:
    if len(text) > MAX_HOST_CHARS + 1:  # the mapping below costs more than linear time
        raise ToolError(f"the URL's host has {len(text)} characters, and may have {MAX_HOST_CHARS}: {shown!r}")
    if text.isascii():
        return text.lower()
    import idna  # comes with httpx

    try:
        return idna.encode(text, uts46=True).decode("ascii").lower()
    except (idna.IDNAError, UnicodeError):
        raise ToolError(f"the URL's host is not a valid international name: {shown!r}") from None


def _path(text: str) -> str:
    path = _PERCENT.sub(_unreserved, quote(text, safe=_PATH_SAFE))
    kept: list[str] = []
    segments = path.split("/")[1:]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments and segments[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


def _unreserved(match: re.Match[str]) -> str:
    char = chr(int(match[1], 16))
    return char if char in _UNRESERVED else match[0].upper()


def decoded_path(path: str) -> str:
    """Return the path as a server that decodes it and tidies it up would see it: a rule must hold for that one too."""
    tidy = posixpath.normpath(unquote(path).replace("\\", "/"))
    tidy = "/" + tidy.lstrip("/")
    return f"{tidy}/" if path.endswith("/") and tidy != "/" else tidy
