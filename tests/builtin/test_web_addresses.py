"""Every way to write an address that is not public is refused, and honest addresses are not."""

from __future__ import annotations

from ipaddress import ip_address

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builtin.webkit import Names, call, local, page, redirect, serve
from rows import each_row
from toolcell.builtin import Http, WebPolicy
from toolcell.builtin.web.fetch import Fetcher
from toolcell.egress.addresses import REFUSED_V4, refusal
from toolcell.egress.urls import parse_url
from toolcell.errors import ToolError

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

WRITTEN = [
    "http://127.0.0.1/", "http://127.0.0.2/", "http://127.1/", "http://127.0.1/", "http://2130706433/",
    "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0X7F.1/", "http://0177.0.0.1/", "http://017700000001/",
    "http://0177.0x0.0.1/", "http://127.0.0.01/", "http://127.000.000.001/", "http://0/", "http://0.0.0.0/",
    "http://127.0.0.1./", "http://localhost/", "http://localhost./", "http://LOCALHOST/", "http://a.localhost/",
    "http://printer.local/", "http://vault.internal/", "http://router.home.arpa/", "http://metadata.google.internal/",
    "http://169.254.169.254/latest/meta-data/", "http://2852039166/", "http://0xA9FEA9FE/", "http://169.254.43518/",
    "http://100.100.100.200/", "http://168.63.129.16/", "http://192.0.0.192/", "http://10.0.0.1/", "http://172.16.0.1/",
    "http://172.31.255.255/", "http://192.168.1.1/", "http://100.64.0.1/", "http://198.18.0.1/", "http://224.0.0.1/",
    "http://255.255.255.255/", "http://192.0.2.1/", "http://240.0.0.1/", "http://256.256.256.256/", "http://1.2.3/",
    "http://[::1]/", "http://[::]/", "http://[0:0:0:0:0:0:0:1]/", "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/", "http://[::127.0.0.1]/", "http://[::ffff:0:127.0.0.1]/", "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::169.254.169.254]/", "http://[64:ff9b:1::1]/", "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::1]/", "http://[fe80::1]/", "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/",
    "http://[fc00::1]/", "http://[fd00:ec2::254]/", "http://[fec0::1]/", "http://[ff02::1]/", "http://[2001:db8::1]/",
    "http://[2606:4700::5efe:10.0.0.1]/", "http://[::1", "http://[127.0.0.1]/", "http://①②⑦.⓪.⓪.①/",
    "http://127。0。0。1/", "http://１２７.0.0.1/", "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/", "http://%31%32%37.0.0.1/", "http://127.0.0.1%00.example.com/",
    "http://user@example.com/", "http://user:pass@example.com/", "http://example.com@127.0.0.1/",
    "http://127.0.0.1@example.com/", "http://@example.com/", "http://example.com\\@127.0.0.1/",
    "http:\\\\127.0.0.1\\", "http://example.com/a\\..\\b", "http://example.com\t.evil/", "http://exa\nmple.com/", "http://example.com:22/",
    "http://example.com:0/", "http://example.com:99999/", "http://example.com:8O/", "http://example.com:80:80/",
    "http:///etc/passwd", "http:/127.0.0.1/", "http:127.0.0.1", "//127.0.0.1/", "file:///etc/passwd",
    "ftp://example.com/", "gopher://127.0.0.1:6379/_x", "dict://127.0.0.1:11211/", "jar:http://example.com/!/",
    "data:text/html,hi", "javascript:alert(1)", "ldap://127.0.0.1/", "example.com", "", "http://", "https://?x",
    "http://.example.com/", "http://example..com/", "http://-example.com/", "http://exa mple.com/",
    "http://" + "a" * 64 + ".com/", "http://" + "a." * 130 + "com/", "http://example.com/" + "a" * 5000,
]  # fmt: skip
"""Refused as they are written: no name is looked up."""

RESOLVED = {
    "loopback": ["127.0.0.1"], "second": ["93.184.215.14", "127.0.0.1"], "six": ["::1"],
    "both": ["2606:2800:21f:cb07:6820:80da:af6b:8b2c", "fe80::1"], "mapped": ["::ffff:10.0.0.1"],
    "nat64": ["64:ff9b::a00:1"], "metadata": ["169.254.169.254"], "zone": ["fe80::1%2"], "none": [], "odd": ["x"],
    "private": ["10.1.2.3"], "teredo": ["2001:0:7f00:1::1"], "unspecified": ["0.0.0.0"], "isatap": ["2606:4700::5efe:7f00:1"],
}  # fmt: skip
"""Names that lead there."""


class Never(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"a request was sent to {request.url}")


@pytest.mark.conforms("S-b5")
async def test_addresses_that_are_written_in_any_way_are_refused_before_anything_is_sent() -> None:
    assert len(WRITTEN) + len(RESOLVED) >= 60
    fetcher = Fetcher(WebPolicy(robots=False, interval_s=0), transport=Never())
    for url in WRITTEN:
        with pytest.raises(ToolError) as failed:
            await fetcher.fetch(url)
        assert "a request was sent" not in str(failed.value), url


@pytest.mark.conforms("S-b5")
async def test_names_that_lead_to_an_address_that_is_not_public_are_refused() -> None:
    async with serve({"/": page("secret")}) as site:
        names = Names(**{f"{name}_test": [answer] for name, answer in RESOLVED.items()})
        fetcher = Fetcher(WebPolicy(robots=False, interval_s=0, ports=None), resolver=names)
        for name in RESOLVED:
            with pytest.raises(ToolError, match=r"is refused|no address"):
                await fetcher.fetch(site.url(host=f"{name}.test"))
        assert site.requests == []


@pytest.mark.conforms("S-b5")
async def test_a_name_that_leads_elsewhere_a_moment_later_is_connected_where_it_was_checked() -> None:
    """DNS rebinding: the second answer is never asked for, so there is nothing to swap."""
    async with serve({"/": page("reached", "text/plain")}) as site:
        names = Names(site_test=[["127.0.0.1"], ["169.254.169.254"]], evil_test=[["93.184.215.14"], ["127.0.0.1"]])
        reached = await Fetcher(local(), resolver=names).fetch(site.url())
        assert (reached.content, names.asked) == (b"reached", ["site.test"])
        assert "Host: site.test" in site.requests[0]
        with pytest.raises(ToolError, match=r"site.test \(169.254.169.254\) is refused: link-local"):
            await Fetcher(local(), resolver=names).fetch(site.url())


@pytest.mark.conforms("S-b5")
@each_row(
    "to",
    ["http://169.254.169.254/", "file:///etc/passwd", "http://2130706433/", "//127.0.0.1/", "http://evil.test/",
     "gopher://evil.test/", "http://user@good.test/", "http://[::1]/", "http://good.test:22/"],
)  # fmt: skip
async def test_every_redirect_is_checked_like_the_first_request(to: str) -> None:
    async with serve({"/": redirect(to), "/secret": page("secret")}) as site:
        names = Names(good_test=[["127.0.0.2"]], evil_test=[["10.0.0.1"]], site_test=[["127.0.0.1"]])
        policy = local(private=["site.test"], ports=frozenset({80, site.port}))
        with pytest.raises(ToolError, match=r"refused|not allowed|only http|unusual") as failed:
            await Fetcher(policy, resolver=names).fetch(site.url())
        assert failed.value.code in ("not_permitted", "tool_error")
        assert len(site.requests) == 1


@pytest.mark.conforms("S-b5")
async def test_redirects_end() -> None:
    async with serve({"/": redirect("/a"), "/a": redirect("/")}) as site:
        policy = local(private=["another.test", "127.0.0.1"])  # names and addresses, in any order
        result = await call(Http(policy, resolver=Names(site_test=[["127.0.0.1"]])), "http_fetch", url=site.url())
        assert result.message.startswith("more than 5 redirects")
        assert len(site.requests) == 6


@each_row(
    ("text", "normal"),
    [
        ("https://Example.COM", "https://example.com/"),
        ("http://example.com:80/a/../b/./c", "http://example.com/b/c"),
        ("https://example.com:443/%61%2f%7e", "https://example.com/a%2F~"),
        ("https://bücher.example/ä?q=ö x#top", "https://xn--bcher-kva.example/%C3%A4?q=%C3%B6%20x"),
        ("https://example.com./", "https://example.com/"),
        ("https://8.8.8.8/dns-query", "https://8.8.8.8/dns-query"),
        ("https://[2606:4700:4700::1111]/", "https://[2606:4700:4700::1111]/"),
        ("https://例え.テスト/", "https://xn--r8jz45g.xn--zckzah/"),
        ("https://my_host.example.com/", "https://my_host.example.com/"),
        ("  https://example.com/x  ", "https://example.com/x"),
        ("https://example.com/../../etc", "https://example.com/etc"),
        ("https://example.com?x=1", "https://example.com/?x=1"),
        ("https://1password.com/", "https://1password.com/"),
        ("https://example.com/a@b:c", "https://example.com/a@b:c"),
    ],
)
def test_honest_urls_pass_in_their_normal_form(text: str, normal: str) -> None:
    target = parse_url(text)
    WebPolicy().check("GET", target)
    assert str(target) == normal
    assert str(parse_url(normal)) == normal


@given(st.text(max_size=60), st.sampled_from(["", "http://", "https://a.test/", "http://[", "http://127."]))
def test_any_text_is_a_checked_url_or_refused(text: str, start: str) -> None:
    try:
        target = parse_url(start + text)
    except ToolError:
        return
    assert str(target).isascii()
    assert str(parse_url(str(target))) == str(target)
    assert httpx.URL(str(target)).raw_host.decode().strip("[]") == target.host
    assert httpx.URL(str(target)).raw_path.decode() == target.path + target.query


@given(st.ip_addresses())
def test_only_addresses_of_the_public_internet_pass(address: object) -> None:
    """`is_global` of Python is a second opinion; ours refuses more."""
    found = ip_address(str(address))
    if refusal(found) is None and found.version == 4:
        assert found.is_global
    if refusal(found) is None and found.version == 6:
        assert found.is_global or str(found).startswith("64:ff9b::")


def test_the_ends_of_every_refused_network_are_refused_and_their_neighbours_may_pass() -> None:
    for network in REFUSED_V4:
        assert refusal(network[0]) and refusal(network[-1])
    for public in ("1.1.1.1", "9.255.255.255", "11.0.0.0", "126.255.255.255", "128.0.0.1", "172.15.255.255",
                   "172.32.0.0", "192.167.255.255", "192.169.0.0", "223.255.255.255", "::ffff:8.8.8.8",
                   "64:ff9b::808:808", "2606:4700::1", "2a00::1", "2001:4860:4860::8888"):  # fmt: skip
        assert refusal(ip_address(public)) is None, public
