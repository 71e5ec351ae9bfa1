"""`ArgumentText`: one text argument of a tool call, decoded while its JSON is streamed.

Providers stream the arguments of a tool call as pieces of one JSON text: Anthropic as `input_json_delta.partial_json`,
OpenAI as `tool_calls[].function.arguments`. A piece may end in the middle of an escape.
"""

from __future__ import annotations

from typing import Final

ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HEX_DIGITS: Final = 4


class ArgumentText:
    """Decodes one text argument of a tool call from the pieces of JSON that a provider streams."""

    def __init__(self, name: str = "code") -> None:
        """`name`: of the argument; execute_code takes its script as `code`."""
        self._name = name
        self._depth = 0
        self._is_key = False
        """The next string of the outermost object is a key."""
        self._key: list[str] = []
        self._string = ""
        """What the string is in which the text is: key, text or other; empty outside of strings."""
        self._escape = ""
        self._high = ""
        """The first half of a surrogate pair."""
        self.is_whole = False
        """The argument has come to its end."""

    def feed(self, piece: str) -> str:
        """Take the next piece; return the part of the argument that it brings, which may be empty."""
        return "".join([self._in_string(sign) if self._string else self._outside(sign) for sign in piece])

    def _outside(self, sign: str) -> str:
        if sign == '"':
            is_value = self._depth == 1 and not self._is_key
            is_wanted = is_value and "".join(self._key) == self._name and not self.is_whole
            self._string = "text" if is_wanted else "other" if is_value or self._depth != 1 else "key"
            if self._string == "key":
                self._key = []
        elif sign in "{[":
            self._depth += 1
            self._is_key = sign == "{" and self._depth == 1
        elif sign in "}]":
            self._depth -= 1
        elif sign in ",:" and self._depth == 1:
            self._is_key = sign == ","
        return ""

    def _in_string(self, sign: str) -> str:
        is_end = not self._escape and sign == '"'
        if is_end:
            said, self._high = self._high, ""
        else:
            said = self._joined(self._decoded(sign))
        if self._string == "key":
            self._key.append(said)
        text = said if self._string == "text" else ""
        if is_end:
            self.is_whole = self.is_whole or self._string == "text"
            self._string = ""
        return text

    def _decoded(self, sign: str) -> str:
        """Return the character that a sign stands for or completes; empty in the middle of an escape."""
        if not self._escape and sign != "\\":
            return sign
        self._escape += sign
        if len(self._escape) == 1 or (self._escape[1] == "u" and len(self._escape) < 2 + HEX_DIGITS):
            return ""
        escape, self._escape = self._escape, ""
        if escape[1] != "u":
            return ESCAPES.get(escape[1], escape[1])
        try:
            return chr(int(escape[2:], 16))
        except ValueError:
            return escape  # no JSON: the script shows what came

    def _joined(self, sign: str) -> str:
        """Join the halves of a surrogate pair."""
        if not sign:
            return ""
        high, self._high = self._high, ""
        if high and "\udc00" <= sign <= "\udfff":
            return (high + sign).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        if "\ud800" <= sign <= "\udbff":
            self._high = sign
            return high
        return high + sign
