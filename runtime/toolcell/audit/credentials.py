"""Well-known credentials as data: the published formats of tokens and keys, each with a literal that it contains.

The table was written from the documentation of the services that issue them. What has no mark of its own, such as 32
hexadecimal digits, is not here: it is found by the name under which it stands, or when it is registered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from toolcell.support.secrets import hidden


@dataclass(frozen=True, slots=True)
class RedactionRule:
    """How to replace something in a text, and lower-case literals of which the text must contain one for it."""

    anchors: tuple[str, ...]
    replace: Callable[[str], tuple[str, int]]
    occurs: Callable[[bytes], object] | None = None
    """Where there is no such literal: a quick search of the encoded data."""


def hide_pattern(anchors: str, pattern: str, occurs: bytes | None = None) -> RedactionRule:
    """Make a rule of a regular expression. If it has groups, only the last group that matched is hidden."""
    compiled = re.compile(pattern)
    return RedactionRule(
        tuple(anchors.split(" ")) if anchors else (),
        lambda text: compiled.subn(_hide, text),
        re.compile(occurs).search if occurs else None,
    )


def _hide(match: re.Match[str]) -> str:
    """Replace the last group that matched, or the whole match; keep the number of lines."""
    whole = match[0]
    if match.re.groups and match.lastindex:
        start, end = match.start(match.lastindex) - match.start(), match.end(match.lastindex) - match.start()
    else:
        start, end = 0, len(whole)
    return f"{whole[:start]}{hidden(whole[start:end])}{whole[end:]}"


# Texts come from guests, so no pattern here may take quadratic time. Each pattern starts at a literal that its own
# repetition cannot contain, or cannot fail once it has begun to repeat. It begins with the literal, and looks behind
# after it: the search for a literal is fast.

_WORD, _NAME = "[A-Za-z0-9]", "[A-Za-z0-9_-]"

PREFIXED: Final[tuple[tuple[str, str, str, str], ...]] = (
    # service, literals, how the credential begins, the rest of it
    ("OpenAI, Anthropic, DeepSeek, OpenRouter", "sk-", "sk-", f"{_NAME}{{16,}}"),
    ("Stripe", "_live_ _test_", "[rsp]k_(?:live|test)_", f"{_WORD}{{10,}}"),
    ("Stripe, webhooks", "whsec_", "whsec_", f"{_WORD}{{16,}}"),
    ("GitHub", "ghp_ gho_ ghu_ ghs_ ghr_", "gh[pousr]_", f"{_WORD}{{30,}}"),
    ("GitHub, fine-grained", "github_pat_", "github_pat_", "[A-Za-z0-9_]{30,}"),
    ("GitLab", "glpat- glrt- glptt- glsoat- glagent-", "gl(?:pat|rt|ptt|soat|agent)-", f"{_NAME}{{16,}}"),
    ("GitLab, tokens of jobs and deployments", "gldt- glcbt- glft- glimt- gloas-", "gl[a-z]{2,3}-", f"{_NAME}{{16,}}"),
    ("Hugging Face", "hf_ api_org_", "(?:hf|api_org)_", f"{_WORD}{{30,}}"),
    ("Groq", "gsk_", "gsk_", f"{_WORD}{{30,}}"),
    ("xAI", "xai-", "xai-", f"{_NAME}{{30,}}"),
    ("Replicate", "r8_", "r8_", f"{_WORD}{{30,}}"),
    ("Perplexity", "pplx-", "pplx-", f"{_WORD}{{30,}}"),
    ("Google, API keys", "aiza", "AIza", f"{_NAME}{{35}}"),
    ("Google, OAuth", "gocspx- ya29.", r"(?:GOCSPX-|ya29\.)", f"{_NAME}{{20,}}"),
    ("DigitalOcean", "_v1_", "do[opr]_v1_", f"{_WORD}{{30,}}"),
    ("Slack", "xox xapp-", "x(?:ox[a-z]|app)-", "[A-Za-z0-9%+/=-]{10,}"),
    ("AWS", "akia asia abia acca", "A(?:KIA|SIA|BIA|CCA)", "[A-Z0-9]{16}"),
    ("npm", "npm_", "npm_", f"{_WORD}{{30,}}"),
    ("PyPI", "pypi-", "pypi-", f"{_NAME}{{30,}}"),
    ("Docker Hub", "dckr_", "dckr_[po]at_", f"{_NAME}{{20,}}"),
    ("SendGrid", "sg.", r"SG\.", r"[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{16,64}"),
    ("Shopify", "shpat_ shpca_ shppa_ shpss_", "shp(?:at|ca|pa|ss)_", f"{_WORD}{{20,}}"),
    ("Databricks", "dapi", "dapi", "[a-f0-9]{32}"),
    ("Notion", "ntn_", "ntn_", f"{_WORD}{{30,}}"),
    ("Linear", "lin_api_", "lin_api_", f"{_WORD}{{30,}}"),
    ("HashiCorp Vault", "hvs. hvb.", r"hv[sb]\.", f"{_NAME}{{20,}}"),
    ("Grafana", "glsa_ glc_", "gl(?:sa|c)_", "[A-Za-z0-9_+/=]{20,}"),
    ("New Relic", "nrak-", "NRAK-", "[A-Z0-9]{20,}"),
    ("Sentry", "sntrys_ sntryu_", "sntry[su]_", "[A-Za-z0-9_+/=]{20,}"),
    ("Atlassian", "atatt3x", "ATATT3x", "[A-Za-z0-9_=-]{20,}"),
    ("Tavily", "tvly-", "tvly-", f"{_NAME}{{20,}}"),
    ("LangSmith", "lsv2_", "lsv2_", "[A-Za-z0-9_]{30,}"),
    ("Supabase", "sbp_ sb_secret_", "sb(?:p|_secret)_", f"{_NAME}{{20,}}"),
    ("NVIDIA", "nvapi-", "nvapi-", f"{_NAME}{{20,}}"),
    ("toolcell, tokens of a service", "tcs_", "tcs_", "[0-9a-f]{16}_[A-Za-z0-9_-]{20,}"),
    ("JSON Web Tokens", "eyj", "eyJ", r"(?:(?![_-]eyJ)[A-Za-z0-9_-]){8,}+\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*"),
)


def _prefixed() -> tuple[RedactionRule, ...]:
    """A credential does not begin within a word: the character before it is looked at first, and most often last."""
    return tuple(
        hide_pattern(
            anchors,
            f"{begins[0]}(?<![A-Za-z0-9]{begins[0]}){begins[1:]}{rest}"
            if begins[0].isalpha()
            else f"(?<![A-Za-z0-9]){begins}{rest}",
        )
        for _, anchors, begins, rest in PREFIXED
    )


OTHERS: Final = (
    hide_pattern("-----begin", r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----([\s\S]*?)(?:-----END|\Z)"),
    hide_pattern("://", r"://[^/\s:@'\"]*+:([^@/\s'\"]++)@"),  # a password in a URL
    hide_pattern("bearer", r"[Bb](?<![A-Za-z][Bb])[Ee][Aa][Rr][Ee][Rr] {1,8}([A-Za-z0-9._~+/=-]{12,})"),
    hide_pattern("basic", r"[Bb](?<![A-Za-z][Bb])[Aa][Ss][Ii][Cc] {1,8}([A-Za-z0-9+/]{12,}=*)"),
    hide_pattern("q~", r"(?<![A-Za-z0-9_~.-])[A-Za-z0-9_~.-]{3}[0-9]Q~([A-Za-z0-9_~.-]{31,34})"),  # Azure, Entra ID
    hide_pattern("accountkey=", r"[Aa]ccount[Kk]ey=([A-Za-z0-9+/]{40,}=*)"),  # Azure, storage
    hide_pattern("accesskey=", r"[Aa]ccess[Kk]ey=([A-Za-z0-9+/]{30,}=*)"),  # Azure, service bus and Event Hubs
    hide_pattern("sig=", r"[?&;]sig=([A-Za-z0-9%+/]{30,}=*)"),  # Azure, shared access signatures
    hide_pattern("hooks.slack.com/", r"hooks\.slack\.com/(?:services|workflows|triggers)/([A-Za-z0-9/_-]{20,})"),
    hide_pattern("/api/webhooks/", r"/api/webhooks/\d{1,24}/([A-Za-z0-9_-]{50,})"),  # Discord
    hide_pattern(  # Discord, a bot's token
        "",
        r"(?<![A-Za-z0-9_.-])[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.([A-Za-z0-9_-]{27,40})(?![A-Za-z0-9_-])",
        rb"\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27}",
    ),
    hide_pattern(":aa", r"(?<!\d)\d{8,10}:(AA[A-Za-z0-9_-]{32,34})"),  # Telegram
)

CREDENTIALS: Final[tuple[RedactionRule, ...]] = (*_prefixed(), *OTHERS)
