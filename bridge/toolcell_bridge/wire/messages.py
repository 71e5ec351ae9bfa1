"""Every message on the wire, as frozen data, and the table of their tags."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import Array, Table

PROTOCOL_VERSION: Final = 1
"""Sent in `Hello`. Goes up when a message changes its fields or meaning; the ends do not negotiate."""

MAX_ELEMENTS: Final = 2**20
"""Lists, dicts, and the items, keys and values in them, in one message. One wire byte can become 88 in memory (an
empty list and its place in another), so the length of a frame alone does not bound what its decoding holds."""

MAX_GUEST_ELEMENTS: Final = 2**18
"""The same for a message of the guest, unless its run says otherwise. Decoding it takes the host at most some 100 ms,
in steps of a few."""

Plain: TypeAlias = bool | int | float | str | bytes | list[Any] | dict[str, Any] | Array | Table | None
"""The values of the wire, at every depth: these exact types, ints within 64 bit, text that is UTF-8."""


# Host to guest.


@frozen
class RunScript:
    """Host: run this script."""

    run: int
    """Number of the run in this sandbox; for messages and logs."""
    source: str
    inputs: dict[str, Plain]
    """Names the script finds defined."""
    tools: str
    """Names the script may call, with a space between two; the host decides again at each call. One text is read as
    quickly as one name, and most scripts look at none."""
    lint: str
    """Name of the lint profile."""
    result_bytes: int
    files: int
    files_bytes: int
    seed: int | None
    """Seed of the `random` module, so that a replay repeats it."""
    clock: float | None
    """Time at which the script's clock starts, in seconds since the epoch, so that a replay repeats it."""
    message_elements: int = MAX_GUEST_ELEMENTS
    """Elements of one message of the script, from now on."""
    answer_elements: int = MAX_ELEMENTS
    """Elements of one answer to the script, from now on."""
    egress: bool = False
    """Libraries of the script may send HTTP requests with the calls named below."""


@frozen
class PutFile:
    """Host: the next piece of a file for the workspace. Pieces of one file are never mixed with another's."""

    path: str
    data: bytes
    last: bool


STATE_FILE, CLOUDPICKLE_FILE = "/state", "/cloudpickle"
"""Paths of no file of the workspace, whose paths are relative: what is put there is the state of a session, and the
source of the module that pickles code."""


@frozen
class Stay:
    """Host: this sandbox serves a session, so more than one script. The guest ends what a script leaves running."""

    end_ms: int
    """Time that threads which a script left running have to end."""


@frozen
class ToolReturn:
    """Host: the tool called by `CallTool` of this id returned."""

    id: int
    value: Plain


@frozen
class ToolFail:
    """Host: the call of this id was refused or failed. Holds nothing of the host but what the tool chose to say."""

    id: int
    code: str
    message: str
    retryable: bool
    details: Plain


# Guest to host. The host trusts nothing in them but the types.


@frozen
class Hello:
    """Guest: ready for a run. The first message, once."""

    version: int
    guest: str
    """Version of the guest package."""
    python: str
    layers: dict[str, str]
    """Isolation layer to detail, as raised by the guest around itself."""


@frozen
class CallTool:
    """Guest: call a tool. Ids start at 1 and strictly increase for as long as the connection lives."""

    id: int
    name: str
    args: dict[str, Plain]
    line: int | None
    """Line of the script that called."""


@frozen
class CancelCall:
    """Guest: the answer is no longer wanted. The host still gives exactly one, which the guest's end drops."""

    id: int


@frozen
class Log:
    """Guest: the script printed this."""

    stream: int
    """1 is stdout, 2 is stderr."""
    text: str


@frozen
class ReadPipes:
    """Guest: read the pipes of the descriptors 1 and 2. What is in them was written before what is sent next."""

    stream: int
    """One that has something."""


@frozen
class Progress:
    """Guest: the script reports its progress."""

    value: Plain


@frozen
class Result:
    """Guest: the script set its result. May be repeated: the last one counts, and voids the files of those before."""

    value: Plain
    files: list[str]
    """Workspace paths that belong to it; their bytes follow as `FilePart` before `Done`."""


@frozen
class FilePart:
    """Guest: the next piece of a returned file. Pieces of one file are never mixed with another's."""

    name: str
    media_type: str
    data: bytes
    last: bool


@frozen
class FileProblem:
    """Guest: this file cannot be returned, or what was sent of it so far is void."""

    name: str
    size: int
    problem: str


@frozen
class Leftover:
    """Guest: this still ran after the script.

    In a sandbox that stays it was ended, before `Done`. In any other the guest waits for it, and `Done` comes when all
    of it has ended.
    """

    ended: list[str]
    """Threads and processes that were ended."""
    stuck: list[str]
    """Threads that did not end: no further script can run beside them. Or what the guest waits for."""
    hooks: bool
    """Exit hooks or destructors wait for the end of the session."""


@frozen
class Done:
    """Guest: the script has ended. The last message of a run.

    Both ends forget the calls still unanswered; a file whose last piece has not come is void.
    """

    ok: bool
    error: dict[str, Plain] | None
    """What stopped the script, as plain data with the keys of the host's `ErrorInfo`. With `ok`: why the value of its
    last expression, which was too large, is not the result."""


HostMessage: TypeAlias = RunScript | PutFile | Stay | ToolReturn | ToolFail
GuestMessage: TypeAlias = (
    Hello | CallTool | CancelCall | Log | ReadPipes | Progress | Result | FilePart | FileProblem | Done | Leftover
)  # fmt: skip
Message: TypeAlias = HostMessage | GuestMessage

TAGS: Final[dict[int, type[Message]]] = {
    1: RunScript,
    2: PutFile,
    3: ToolReturn,
    4: ToolFail,
    6: Stay,
    16: Hello,
    17: CallTool,
    18: CancelCall,
    19: Log,
    20: Progress,
    21: Result,
    22: FilePart,
    23: FileProblem,
    24: Done,
    25: Leftover,
    29: ReadPipes,
}
"""First element of each message on the wire. A tag is never reused: 7, 8 and 26 to 28 had a meaning before.
Tag 5 is reserved: it interrupts a run."""

FIRST_GUEST_TAG: Final = 16
"""Tags from here on are messages of the guest."""

SAID: Final[dict[tuple[type[Any], str], str]] = {
    (CallTool, "args"): "arguments",
    (Progress, "value"): "progress",
    (Result, "value"): "result",
    (RunScript, "inputs"): "inputs",
    (ToolReturn, "value"): "result",
}
"""What errors call the fields that hold somebody's value."""


# The calls with which libraries of a script send HTTP requests, where `RunScript.egress` says that they may.

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
