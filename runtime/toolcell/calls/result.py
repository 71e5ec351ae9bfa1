"""What a tool call comes back with: text for the model, data for code, notes for people, and a status of its own.

Whether a call failed is its `status`, never something read out of its text. A result never changes; to
change one, make a new one. Knows no provider; `compat` shows it in four other forms.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, NoReturn, Self

from toolcell.calls.values import described_bytes, plain_or_text, readable_leaf, values_in, with_leaves
from toolcell.errors import UsageError
from toolcell.support.checks import brief, check_kind, check_one_of, text_of
from toolcell.support.text import cut_text
from toolcell_bridge.guest.pictures import picture_type
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import Array, Table

TEXT_CURE = "use ToolResult.of(data) for data, or str(x)"


@frozen
class Text:
    """Text the model reads."""

    text: str

    def __post_init__(self) -> None:
        if type(self.text) is not str or not self.text.isascii():
            check_kind("Text(text)", self.text, str, cure=TEXT_CURE)
            object.__setattr__(self, "text", text_of(self.text))


@frozen
class Image:
    """A picture for models that can see: PNG, JPEG, GIF or WebP, whatever `media_type` it is given."""

    data: bytes
    media_type: str = "image/png"

    def __post_init__(self) -> None:
        _check_data("Image", self)
        object.__setattr__(self, "media_type", picture_type(self.data) or self.media_type)


@frozen
class File:
    """A file a call produced. One that is a picture has the media type of that picture."""

    name: str
    data: bytes
    media_type: str = "application/octet-stream"

    def __post_init__(self) -> None:
        check_kind("File(name)", self.name, str)
        _check_data("File", self)
        object.__setattr__(self, "media_type", picture_type(self.data) or self.media_type)


def _check_data(kind: str, part: Image | File) -> None:
    check_kind(
        f"{kind}(data)", part.data, bytes, bytearray, memoryview, cure='text becomes bytes with .encode("utf-8")'
    )
    check_kind(f"{kind}(media_type)", part.media_type, str)
    object.__setattr__(part, "data", bytes(part.data))


Part = Text | Image | File

MAX_IMAGES: Final = 10
MAX_IMAGE_BYTES: Final = 3_750_000
"""Most bytes of one image. Base64 makes it a third larger, and Anthropic takes 5 MB."""


def described_part(part: Part) -> str | None:
    """Return what a model reads of a part. None of a picture: it is shown."""
    match part:
        case Text(text):
            return text
        case Image(data) if picture_type(data):
            return None
        case Image(data, media_type):
            return f"({media_type}, {len(data)} bytes: not a PNG, JPEG, GIF or WebP picture)"
        case File(name, data):
            return f"({name}, {len(data)} bytes)"


def part_data(part: Part) -> str | bytes:
    """Return what a script gets of a part: text, or the bytes of a picture or file."""
    return part.text if isinstance(part, Text) else part.data


def plain_part(part: Part) -> dict[str, Any]:
    """Return a part as plain data, without its bytes."""
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image(data, media_type):
            return {"type": "image", "media_type": media_type, "bytes": len(data)}
        case File(name, data, media_type):
            return {"type": "file", "name": name, "media_type": media_type, "bytes": len(data)}


class Status(enum.StrEnum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"
    """The tool ran and failed, or could not be run as asked."""
    BLOCKED = "blocked"
    """Policy or a hook refused it; the tool did not run."""
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PENDING = "pending"
    """Started; the final result arrives later under `job_id`."""

    __hash__ = str.__hash__  # Enum's own is Python code, and every result is asked whether it failed


class ErrorCode(enum.StrEnum):
    """Stable codes a program can branch on. Tools may use their own besides these."""

    TOOL_ERROR = "tool_error"
    """An expected failure the tool reported itself."""
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    PREPARE_FAILED = "prepare_failed"
    BLOCKED = "blocked"
    NOT_PERMITTED = "not_permitted"
    HOOK_ERROR = "hook_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    EXCEPTION = "exception"
    NO_RESULT = "no_result"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"
    """What the tool needs is not there now: no tools, no budget, no record, no sandbox."""


RETRYABLE_CODES = frozenset({ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE})


MAX_MODEL_CHARS = 100_000
"""Characters of one result that a model reads."""


@frozen
class ToolFailure:
    """Why a call failed, for a program (`code`) and for a model (`message`)."""

    code: str
    message: str
    retryable: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts behind the message: `fields` of invalid arguments, `available` tools, `exit_code`, ..."""

    def __post_init__(self) -> None:
        # What an author hands on here is often an exception or a number of HTTP: it ends up as text.
        check_kind("details", self.details, Mapping)
        said: object = self.message
        object.__setattr__(self, "message", "" if said is None else text_of(said))
        object.__setattr__(self, "code", text_of(self.code))
        object.__setattr__(self, "retryable", bool(self.retryable))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "code": str(self.code),
            "message": self.message,
            "retryable": self.retryable,
            "details": plain_or_text(dict(self.details)),
        }


class ResultMeta(NamedTuple):
    """Which call a result belongs to, filled in by the pipeline."""

    call_id: str = ""
    tool: str = ""
    duration_ms: float = 0.0
    truncated: bool = False


@frozen
class TokenUsage:
    """Tokens models used, summed upwards through plans and sub-agents."""

    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def total(self) -> int:
        """Both directions."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens)


NO_USAGE = TokenUsage()
NO_META = ResultMeta()
NOT_FAILED = frozenset({Status.OK, Status.PENDING})


@dataclass(frozen=True)
class ToolResult:
    """The outcome of one tool call."""

    # No slots: most fields of most results keep their default, and then it stands on the class alone.

    __unsendable__ = "a ToolResult inside other data: return one ToolResult, or its data"
    """What it has for logs and user interfaces would be data for models and scripts."""

    parts: tuple[Part, ...] = ()
    """What the model reads. Empty with a `value`: the model reads the value as JSON."""
    status: Status = Status.OK
    error: ToolFailure | None = None
    value: Any = None
    """Structured data for plans, sandboxed code and programs. Of bytes in it a model reads kind and size."""
    has_value: bool = False
    """Tells a value of None from no value."""
    details: Any = None
    """For logs and user interfaces; never sent to a model."""
    for_user: str | None = None
    """Shown to the user as it is, unless `silent`."""
    silent: bool = False
    terminate: bool = False
    """A hint to stop the run; it counts only when every result of the batch gives it."""
    files: tuple[File, ...] = ()
    job_id: str | None = None
    """Id of a pending result."""
    usage: TokenUsage = NO_USAGE
    meta: ResultMeta = NO_META
    exc: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception behind a failure, traceback and all; never serialised."""

    def __post_init__(self) -> None:
        for name in _SEQUENCES:
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        for name, kinds in _FIELD_KINDS.items():
            if not isinstance(given := getattr(self, name), kinds):
                cure = f"write ToolResult.fail({given!r:.60})" if name == "error" else ""
                check_kind(f"ToolResult({name})", given, *kinds, cure=cure)
        for name, kinds in _SEQUENCES.items():
            for each in getattr(self, name):
                check_kind(f"ToolResult({name}): each", each, *kinds)
        if type(self.status) is not Status:
            check_one_of("ToolResult(status)", str(self.status), map(str, Status))
            object.__setattr__(self, "status", Status(self.status))
        if self.error is not None and not self.is_error:
            raise UsageError(f"ToolResult({self.status}) must have no error, not {brief(self.error)}")

    @classmethod
    def ok(cls, text: str | None = None, *, value: Any = None, **fields: Any) -> Self:
        """Success: `text` for the model, `value` for code. A value without text is its own text."""
        parts = () if text is None or (text == "" and value is not None) else (Text(text),)
        return cls(parts=parts, value=value, has_value=value is not None, **fields)

    @classmethod
    def of(cls, value: Any, **fields: Any) -> Self:
        """Success with structured data; the model reads it as JSON."""
        return cls(value=value, has_value=True, **fields)

    @classmethod
    def fail(
        cls,
        message: str,
        *,
        code: str = ErrorCode.TOOL_ERROR,
        retryable: bool | None = None,
        output: str = "",
        status: Status = Status.ERROR,
        facts: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Self:
        """Failure: `message` says what to do about it; `output` is what was captured until then. `facts` are for the
        code that called: the `details` of its `ToolError`."""
        again = code in RETRYABLE_CODES if retryable is None else retryable
        failure = ToolFailure(code, message, again, facts or {})
        fields.setdefault("parts", (Text(output),) if output or not isinstance(output, str) else ())
        return cls(status=status, error=failure, **fields)

    @classmethod
    def silenced(cls, text: str, **fields: Any) -> Self:
        """For the model only: nothing is shown to the user."""
        return cls(parts=(Text(text),), silent=True, **fields)

    @classmethod
    def user(cls, text: str, **fields: Any) -> Self:
        """Success, with the same text for the model and the user."""
        return cls(parts=(Text(text),), for_user=text, **fields)

    @classmethod
    def async_(cls, text: str, **fields: Any) -> Self:
        """Started in the background; the final result follows."""
        return cls(parts=(Text(text),), status=Status.PENDING, **fields)

    def with_error(self, exc: BaseException) -> Self:
        """Return the same result with `exc` attached for logs."""
        return replace(self, exc=exc)

    def stamped(self, call_id: str, tool: str, duration_ms: float, truncated: bool) -> ToolResult:
        """Return the same result with its call's ids on it."""
        twin = _new(ToolResult)
        fields = twin.__dict__
        fields.update(self.__dict__)
        fields["meta"] = ResultMeta(call_id, tool, duration_ms, truncated)
        return twin

    @property
    def is_error(self) -> bool:
        """True unless the call succeeded or is pending."""
        return self.status not in NOT_FAILED

    @property
    def output(self) -> str:
        """Text of the parts, or the value as JSON; without the error and the pictures."""
        if self.parts:
            return "\n".join(text for part in self.parts if (text := described_part(part)) is not None)
        return to_json(self.value) if self.has_value else ""

    @property
    def text(self) -> str:
        """What the model reads: the error first, then the output. Long text is cut, with a mark."""
        return cut_text(self.whole_text, MAX_MODEL_CHARS)[0]

    @property
    def whole_text(self) -> str:
        """The same text, uncut."""
        if self.error is None:
            if not self.parts and not self.has_value and self.exc is not None:
                return text_of(self.exc)
            return self.output
        message = self.error.message or text_of(self.exc or "") or str(self.error.code)
        output = self.output
        return f"{message}\n{output}" if output else message

    @property
    def images(self) -> tuple[Image, ...]:
        """Return the pictures for a model that can see: those among the parts and files, and in the value.

        The bytes decide what a picture is. A file or a value that is a part, too, is not shown again.
        """
        parts = [part.data for part in self.parts if not isinstance(part, Text)]
        others = [file.data for file in self.files] + [*(values_in(self.value, bytes) if self.has_value else ())]
        found = [*parts, *(data for data in dict.fromkeys(others) if data not in parts)]
        return tuple(Image(data) for data in found if picture_type(data))

    @property
    def message(self) -> str:
        """The bare error message, empty on success."""
        return self.error.message if self.error else ""

    @property
    def user_text(self) -> str | None:
        """What to show the user, or None."""
        return None if self.silent or not self.for_user else self.for_user

    def guest_value(self) -> Any:
        """Return what sandboxed code receives: structured data if there is any, else a file's bytes, else the text.

        A picture among the parts is its bytes; several parts with one are a list.
        """
        if self.has_value:
            return self.value
        if self.status is Status.OK and len(self.files) == 1:
            return self.files[0].data
        if self.status is Status.OK and not self.parts:
            return None
        if self.status is Status.PENDING and self.job_id is not None:
            return {"job_id": self.job_id, "status": "pending", "text": self.output}
        if self.status is Status.OK and not all(isinstance(part, Text) for part in self.parts):
            data = [*map(part_data, self.parts)]
            return data if len(data) > 1 else data[0]
        return self.output

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; bytes become sizes, `exc` is left out."""
        plain: dict[str, Any] = {"status": str(self.status), "parts": [plain_part(part) for part in self.parts]}
        plain |= {"error": self.error.to_dict()} if self.error is not None else {}
        plain |= {"value": self.value} if self.has_value else {}
        optional = {"details": plain_or_text(self.details), "for_user": self.for_user, "job_id": self.job_id}
        plain |= {key: value for key, value in optional.items() if value is not None}
        plain |= {key: True for key, flag in {"silent": self.silent, "terminate": self.terminate}.items() if flag}
        plain |= {"files": [plain_part(file) for file in self.files]} if self.files else {}
        meta = self.meta
        own = {"call_id": meta.call_id, "tool": meta.tool, "duration_ms": meta.duration_ms}
        return plain | {"meta": own | ({"truncated": True} if meta.truncated else {})}


class _Default:
    """The default of a field for results that do not set it. Called on the class it says what was meant."""

    def __init__(self, value: object, cure: str) -> None:
        self._value, self._cure = value, cure

    def __get__(self, instance: object, owner: type) -> Any:
        return self._refuse if instance is None else self._value

    def _refuse(self, *_args: object, **_fields: object) -> NoReturn:
        raise UsageError(self._cure)


setattr(ToolResult, "error", _Default(None, "ToolResult.error is a field; write ToolResult.fail(text)"))  # noqa: B010
setattr(ToolResult, "silent", _Default(False, "ToolResult.silent is a field; write ToolResult.silenced(text)"))  # noqa: B010


_FIELD_KINDS: Mapping[str, tuple[type, ...]] = {
    "parts": (tuple,), "status": (str,), "error": (ToolFailure, type(None)), "has_value": (bool,),
    "for_user": (str, type(None)), "silent": (bool,), "terminate": (bool,), "files": (tuple,),
    "job_id": (str, type(None)), "usage": (TokenUsage,), "meta": (ResultMeta,), "exc": (BaseException, type(None)),
}  # fmt: skip
_SEQUENCES: Mapping[str, tuple[type, ...]] = {"parts": (Text, Image, File), "files": (File,)}

_new = object.__new__


def of_plain(value: Any) -> ToolResult:
    """Do what `ToolResult.of` does, for plain data and in a fraction of the time: every call makes one of these."""
    result = _new(ToolResult)
    fields = result.__dict__
    fields["value"] = value
    fields["has_value"] = True
    return result


def of_text(text: str) -> ToolResult:
    """Do what `ToolResult.ok` does with a text, in a fraction of the time."""
    result = _new(ToolResult)
    result.__dict__["parts"] = (Text(text),)
    return result


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=readable_leaf)


def to_json(value: Any) -> str:
    """JSON text of a value for a model: compact enough, not escaped, never failing on odd leaves, without bytes.

    An array or a table is a text to read, here and inside of other data.
    """
    return str(value) if isinstance(value, Array | Table) else _ENCODER.encode(value)


def without_bytes(value: Any) -> Any:
    """Return data with what a model reads in place of bytes, such as `(image/png, 69 bytes)`, and of tables."""
    return with_leaves(value, _readable) if next(values_in(value, bytes | Array | Table), None) is not None else value


def _readable(leaf: Any) -> Any:
    if isinstance(leaf, bytes):
        return described_bytes(leaf)
    return str(leaf) if isinstance(leaf, Array | Table) else leaf


def total_usage(results: Iterable[ToolResult]) -> TokenUsage:
    """Tokens of several results together."""
    return sum((result.usage for result in results if result.usage is not NO_USAGE), NO_USAGE)
