"""Tokens of suspended runs: signed JSON that says which run waits for which decisions, and until when."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from toolcell.errors import ResumeError
from toolcell.results import PendingCall
from toolcell.support.call_text import MAX_ASKED_CHARS, arguments_text

KIND: Final = "toolcell_suspension"
OF_AGENT: Final = "toolcell_turn"
"""Holds the token of a suspended agent, beside those of its scripts."""
VERSION: Final = 1


def make_token(
    key: bytes, *, token_id: str, run: str, source: str, tools: str, expires: float, calls: Sequence[PendingCall]
) -> str:
    """Return a signed token. `source`, `tools`: sha256 of the script and of the tools that it may call."""
    shown = ("id", "tool", "args", "line", "digest", "reason")
    payload = {
        "version": VERSION,
        "token": token_id,
        "run": run,
        "source": source,
        "tools": tools,
        "expires": expires,
        "calls": [
            {name: getattr(each, name) for name in shown}
            # No form shows these arguments whole, and a reader of the token has no other way to know.
            | ({} if arguments_text(each.args, max_chars=MAX_ASKED_CHARS).is_whole else {"is_cut": True})
            for each in calls
        ],
    }
    text = _text(payload)
    return f'{{"signature":"{_signature(key, text)}","{KIND}":{text}}}'


def run_of(given: str) -> str:
    """Return the run that a token, or an id, claims to be about. Nothing of it is checked."""
    if not given.lstrip().startswith("{"):
        return given
    try:
        return str(json.loads(given)[KIND]["run"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def read_token(token: str, key: bytes) -> dict[str, Any]:
    """Return what a token says.

    Raises:
        ResumeError: it is none, its signature is another key's, or it has expired.
    """
    try:
        given = json.loads(token)
        payload, signature = given[KIND], given["signature"]
        is_ours = hmac.compare_digest(str(signature), _signature(key, _text(payload)))
        run, expires = str(payload["run"]), float(payload["expires"])
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ResumeError(foreign_text(token)) from exc
    if not is_ours:
        raise ResumeError(
            f"the token of run {run[:80]!r} was changed, or was signed elsewhere; resume it with the record of the "
            "Runtime that suspended it, Runtime(record=FILE)"
        )
    if time.time() > expires:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(expires))
        raise ResumeError(f"the token of run {run} expired at {when} (RecordConfig.token_s); run the script again")
    result: dict[str, Any] = payload
    return result


def foreign_text(token: str, is_for_agent: bool = False) -> str:
    """Say what is wrong with what is not a token of a suspended run, or of an agent: it may be one of the other."""
    try:
        kinds = {KIND, OF_AGENT} & {*json.loads(token)}
    except (ValueError, TypeError, RecursionError):
        kinds = set()
    if is_for_agent and KIND in kinds:
        return "this is the token of a suspended run, not of an agent: pass it to Runtime.resume"
    if OF_AGENT in kinds and not is_for_agent:
        return "this is the token of a suspended agent, not of a run: pass it to the resume() of the agent"
    what, cure = ("agent", "suspension.to_json()") if is_for_agent else ("run", "result.suspension.to_json()")
    return f"{token!r:.60} is not a token of a suspended {what}; pass {cure}"


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_odd)


def _odd(value: object) -> Any:
    """Bytes have no form in JSON: a reader of the token sees them as base64, and the beginning of a table as text. The
    digest is over all of it."""
    if isinstance(value, bytes | bytearray):
        return {"base64": base64.b64encode(bytes(value)).decode("ascii")}
    return str(value)
