"""`Placeholder`: what a script gets in a dry run in place of the result of a call that was collected and not made.

It may be stored, passed on, returned, compared with None, printed and formatted, as `(result of effect-1)`. Whatever
needs what it stands for ends the dry run there, and so does a call with an argument that has such text in it.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from toolcell_bridge.wire.messages import ToolFail, ToolReturn

RESULT_OF: Final = "$result_of"
"""The one key of the dict that stands for a placeholder on the wire. Its value is the effect's id, a dot and the key of
the dry run, which nobody outside knows: data of a tool cannot pass for a placeholder."""

DRY_RUN: Final = "<dry_run>"
"""The input that holds the key of the dry run. No source can contain this name."""

ENDS_DRAFT: Final = "dry_run"
"""Code of the answer to a call that a dry run cannot make."""


class DraftEnded(BaseException):
    """The script needs a result that a dry run does not have. Not an `Exception`: the script must not go on."""


class GuestDryRun:
    """The guest's side of one dry run."""

    def __init__(self, key: str) -> None:
        self._end = f".{key}"
        self._ended = ""
        self._shown: dict[str, bytes] = {}
        """Texts that stand for results, each with its bytes."""

    def shown(self, effect: str) -> str:
        """Return the text that stands for a result."""
        text = f"(result of {effect})"
        self._shown[text] = text.encode()
        return text

    def check_arguments(self, packed: bytes) -> None:
        """Check that no text in the arguments of a call stands for a result: it would be sent as it is.

        Raises:
            DraftEnded: one does.
        """
        for text, data in self._shown.items():
            if data in packed:
                self.end(
                    f"an argument has the text {text!r} in it, in place of a result that is not known in a dry run: a "
                    "script may pass the result itself on, but not text made of it"
                )

    def check(self) -> None:
        """Check that the dry run goes on.

        Raises:
            DraftEnded: it has ended.
        """
        if self._ended:
            raise DraftEnded(self._ended)

    def end(self, why: str) -> NoReturn:
        """End it: the script makes no further call.

        Raises:
            DraftEnded: always.
        """
        self._ended = self._ended or why
        raise DraftEnded(why)

    def answer(self, tool: str, answer: ToolReturn | ToolFail) -> Any:
        """Return the answer with placeholders in it.

        Raises:
            DraftEnded: the host cannot make the call in a dry run.
        """
        if isinstance(answer, ToolReturn):
            return ToolReturn(answer.id, self._restored(tool, answer.value))
        if answer.code == ENDS_DRAFT:
            self.end(answer.message)
        return answer

    def _restored(self, tool: str, value: Any) -> Any:
        if type(value) is dict:
            reference = value.get(RESULT_OF) if len(value) == 1 else None
            if type(reference) is str and reference.endswith(self._end):
                return Placeholder(self, tool, reference)
            return {key: self._restored(tool, item) for key, item in value.items()}
        return [self._restored(tool, item) for item in value] if type(value) is list else value


class Placeholder:
    """Stands for a result that is not known yet. What needs to know it raises `DraftEnded`."""

    __slots__ = ("_dry_run", "_reference", "_tool")
    _dry_run: GuestDryRun
    _tool: str
    _reference: str

    def __init__(self, dry_run: GuestDryRun, tool: str, reference: str) -> None:
        for name, value in (("_dry_run", dry_run), ("_tool", tool), ("_reference", reference)):
            object.__setattr__(self, name, value)

    def __copy__(self) -> Placeholder:
        return self

    def __deepcopy__(self, memo: object) -> Placeholder:
        return self

    def _look(self, *_values: object, **_more: object) -> NoReturn:
        effect = self._reference.partition(".")[0]
        self._dry_run.end(
            f"the result of {self._tool} ({effect}) is not known in a dry run: a script may store it, pass it on to "
            "calls that write, print and return it, but not look into it. The draft ends here, and has the writes "
            "until here, which may not be all"
        )

    def __str__(self) -> str:
        return self._dry_run.shown(self._reference.partition(".")[0])

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        try:
            return format(str(self), spec)
        except ValueError:  # of a number
            self._look()

    def __eq__(self, other: object) -> bool:
        return False if other is None else self._look()

    def __ne__(self, other: object) -> bool:
        return True if other is None else self._look()

    __class__ = property(_look)  # isinstance() looks too


def reference_of(value: Placeholder) -> dict[str, Any]:
    """Return what is sent in place of a placeholder."""
    return {RESULT_OF: value._reference}


_LOOKS: Final = """
    abs add aenter aexit aiter and anext await bool bytes call ceil complex contains delattr delitem dir divmod enter
    exit float floor floordiv fspath ge getattr getitem gt hash iadd iand ifloordiv ilshift imatmul imod imul
    index int invert ior ipow irshift isub iter itruediv ixor le len length_hint lshift lt matmul missing mod mul neg
    next or pos pow radd rand rdivmod reduce reduce_ex reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow
    rrshift rshift rsub rtruediv rxor setattr setitem sub truediv trunc xor
"""
"""Special methods, without their underscores. Python looks for them on the class."""
for _name in _LOOKS.split():
    setattr(Placeholder, f"__{_name}__", Placeholder._look)
