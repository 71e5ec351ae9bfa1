"""Decide whether an IP address is on the public internet. Tables and pure functions; no DNS, no sockets.

Own tables, because `ipaddress.is_global` answers differently from one Python release to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

REFUSED_V4 = {
    ip_network(network): reason
    for network, reason in {
        "0.0.0.0/8": "this network",
        "10.0.0.0/8": "private",
        "100.64.0.0/10": "shared by a provider",
        "127.0.0.0/8": "loopback",
        "168.63.129.16/32": "cloud metadata",
        "169.254.0.0/16": "link-local, cloud metadata",
        "172.16.0.0/12": "private",
        "192.0.0.0/24": "reserved",
        "192.0.2.0/24": "documentation",
        "192.88.99.0/24": "6to4 relay",
        "192.168.0.0/16": "private",
        "198.18.0.0/15": "benchmarks",
        "198.51.100.0/24": "documentation",
        "203.0.113.0/24": "documentation",
        "224.0.0.0/4": "multicast",
        "240.0.0.0/4": "reserved",
    }.items()
}
"""Source: IANA IPv4 Special-Purpose Address Registry; 168.63.129.16 is Azure's host agent."""

REFUSED_V6 = {
    ip_network(network): reason
    for network, reason in {
        "2001::/23": "reserved, Teredo",
        "2001:db8::/32": "documentation",
        "2002::/16": "6to4",
        "2620:4f:8000::/48": "AS112",
        "3fff::/20": "documentation",
    }.items()
}
"""Inside 2000::/3. Source: IANA IPv6 Special-Purpose Address Registry."""

GLOBAL_V6 = IPv6Network("2000::/3")
"""The only range that is assigned to hosts of the public internet."""

NAT64 = IPv6Network("64:ff9b::/96")
"""An IPv4 address is in its last 32 bits, RFC 6052: how a network without IPv4 reaches the rest."""

_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


def refusal(address: IPAddress, private: Iterable[IPNetwork] = ()) -> str | None:
    """Return why `address` must not be connected to; None when it may.

    `private`: networks that are allowed although they are not public.
    """
    real = embedded_v4(address) or address
    for network in private:
        if any(each.version == network.version and each in network for each in (address, real)):
            return None
    if isinstance(real, IPv4Address):
        return next((reason for network, reason in REFUSED_V4.items() if real in network), None)
    if real.scope_id is not None:
        return "link-local, with a zone"
    if real not in GLOBAL_V6:
        return "not a public IPv6 address"
    if int.from_bytes(real.packed[8:12], "big") in _ISATAP:
        inner = IPv4Address(real.packed[12:])
        return next((f"ISATAP of {inner}: {why}" for network, why in REFUSED_V4.items() if inner in network), None)
    return next((reason for network, reason in REFUSED_V6.items() if real in network), None)


def embedded_v4(address: IPAddress) -> IPv4Address | None:
    """Return the IPv4 address that packets to `address` end up at: IPv4-mapped and NAT64 addresses have one."""
    if isinstance(address, IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(address.packed[12:]) if address in NAT64 else None


def networks_of(names: Sequence[str]) -> tuple[IPNetwork, ...]:
    """Return those of `names` that are addresses or networks; the others are names of hosts."""
    found: list[IPNetwork] = []
    for name in names:
        try:
            found.append(ip_network(name, strict=False))
        except ValueError:
            continue
    return tuple(found)


def address_of(host: str) -> IPAddress | None:
    """Return the address that `host` is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None
