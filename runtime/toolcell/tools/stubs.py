"""Tools as Python functions without bodies: what a model that writes code needs to call them rightly.

JSON Schemas become annotations: `list[str]`, `Literal[...]`, a TypedDict for a record.
"""

from __future__ import annotations

import json
import keyword
import math
import re
import textwrap
import threading
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from toolcell.calls.definition import ToolDefinition
from toolcell.calls.schema import dicts_in, pointed
from toolcell.errors import UsageError
from toolcell.support.checks import check_one_of
from toolcell.support.lru import Lru
from toolcell.support.text import one_line
from toolcell_bridge.guest.tool_names import python_name

TYPING = ("Any", "Literal", "NotRequired", "TypedDict")
BUILTINS = ("bool", "bytes", "dict", "float", "int", "list", "staticmethod", "str")
ABSTRACT = ("Mapping", "Sequence")
_SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_OF_VALUES = {"NoneType": "None", "list": "list[Any]", "dict": "dict[str, Any]"}
_ABOUT = frozenset({"description", "default", "examples"})
_MAX_LITERALS = 20
_MAX_DEPTH = 5
_NAME = re.compile(r"\w+")
_WORD = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\w+")


def is_identifier(name: str) -> bool:
    """True when Python takes it as a plain name of a parameter or a field, and does not change it."""
    is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")
    return is_name and unicodedata.is_normalized("NFKC", name)  # `normalize` takes quadratic time for rows of marks


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and {} for anything else."""
    return value if isinstance(value, Mapping) else {}


class StubTypes:
    """The types of one module of stubs."""

    def __init__(self, taken: Iterable[str] = (), lenient: bool = False, has_classes: bool = True) -> None:
        """`taken`: names that tools and fields have. A built-in type of such a name gets another one here.

        `lenient`: arguments have types that a checker does not refuse where a sandbox would take them.
        `has_classes`: a record is a class of its own; otherwise a dict.
        """
        self.lenient, self._has_classes = lenient, has_classes
        self.is_argument = False
        """What is described now is given to a tool, and not returned by it."""
        self._root: Any = None
        self._roots = 0
        """Schemas that were described until now."""
        self._known: dict[tuple[int, int, bool], str] = {}
        """Annotations of the parts of `_root`, by part and depth: a part may be named very often."""
        taken = frozenset(taken)
        self._used = {*taken, *TYPING, *BUILTINS, *ABSTRACT, *keyword.kwlist}
        self._aliases = {name: self._free(f"{name}_type") for name in (*TYPING, *BUILTINS, *ABSTRACT) if name in taken}
        self._named: dict[str, str] = {}
        """The class of each record, by its schema."""
        self._classes: dict[str, str] = {}

    def _free(self, base: str) -> str:
        name, number = base, 2
        while name in self._used:
            name, number = f"{base}{number}", number + 1
        self._used.add(name)
        return name

    def visible(self, annotation: str) -> str:
        """Return an annotation, or a decorator, with the names that its types have in this module."""
        if not self._aliases:
            return annotation
        return _WORD.sub(lambda found: self._aliases.get(found[0], found[0]), annotation)

    def new_classes(self) -> list[str]:
        """Return the records that came since the last time, those inside others first."""
        made, self._classes = [*self._classes.values()], {}
        return made

    def imports(self, text: str) -> str:
        """Return the imports that a module of this `text` needs to stand alone."""
        words = set(_NAME.findall(text))  # those of docstrings too: a quote there begins no literal
        lines = []
        for module, names in (("builtins", BUILTINS), ("collections.abc", ABSTRACT), ("typing", TYPING)):
            plain = [] if module == "builtins" else [each for each in names if each in words - self._aliases.keys()]
            renamed = [f"{each} as {self._aliases[each]}" for each in names if self._aliases.get(each) in words]
            if plain or renamed:
                lines.append(f"from {module} import {', '.join(plain + renamed)}")
        return "\n".join(lines)

    def annotation(self, schema: Any, prefix: str, hint: str, root: Any = None, depth: int = 0) -> str:
        """Return the Python annotation that fits a schema, or Any. References are looked up in `root`."""
        root = schema if root is None else root
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "Any"
        if root is not self._root:
            self._root, self._roots, self._known = root, self._roots + 1, {}
        key = id(schema), depth, self.is_argument
        if key not in self._known:
            self._known[key] = self._annotation(schema, prefix, hint, root, depth)
        return self._known[key]

    def _annotation(self, schema: Mapping[str, Any], prefix: str, hint: str, root: Any, depth: int) -> str:
        if isinstance(reference := schema.get("$ref"), str):
            target = pointed(root, reference) if reference.startswith("#") else None
            return self.annotation(target, prefix, hint, root, depth + 1)
        is_open = self.lenient and self.is_argument
        if "const" in schema:
            return _literal([schema["const"]], is_open)
        if isinstance(options := schema.get("enum"), list):
            return _literal(options, is_open)
        for either in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(either), list) and branches:
                return union(self.annotation(branch, prefix, hint, root, depth + 1) for branch in branches)
        kind = schema.get("type")
        if isinstance(kind, list):
            if depth == _MAX_DEPTH:
                return "Any"
            return union(self._annotation({**schema, "type": each}, prefix, hint, root, depth + 1) for each in kind)
        if kind == "array":
            items = schema.get("items") if "prefixItems" not in schema else None
            return f"{'Sequence' if is_open else 'list'}[{self.annotation(items, prefix, hint, root, depth + 1)}]"
        if kind == "object" and is_open:
            return "Mapping[str, Any]"  # a variable with a dict is not a TypedDict
        if kind == "object":
            return self._record(schema, prefix, hint, root, depth)
        if schema.get("contentEncoding") == "base64":
            if self.lenient and not self.is_argument:
                return "_Picture" if depth == 0 else "Any"  # those that are a picture can be saved
            return "bytes"  # a script sends and gets them as they are
        return _SIMPLE.get(kind, "Any") if isinstance(kind, str) else "Any"

    def _record(self, schema: Mapping[str, Any], prefix: str, hint: str, root: Any, depth: int) -> str:
        properties = mapping(schema.get("properties"))
        if not properties:
            return f"dict[str, {self.annotation(schema.get('additionalProperties'), prefix, hint, root, depth + 1)}]"
        if not self._has_classes or not all(map(is_identifier, properties)):
            return "dict[str, Any]"
        own = {key: value for key, value in schema.items() if key not in _ABOUT}
        shape = json.dumps(own, sort_keys=True, default=repr)
        if '"$ref"' in shape:
            shape += f" in {self._roots}"
        if shape in self._named:
            return self._named[shape]
        words = [part for part in re.split(r"[^A-Za-z0-9]+", hint) if part]
        name = self._free(python_name(prefix + "".join(word[0].upper() + word[1:] for word in words)))
        self._named[shape] = name
        self._classes[name] = ""  # its place: before the records inside it are known
        required = frozenset(each for each in schema.get("required") or () if isinstance(each, str))
        fields = []
        for field, part in properties.items():
            annotation = self.annotation(part, prefix, f"{hint}_{field}", root, depth + 1)
            fields.append(f"    {field}: {annotation if field in required else f'NotRequired[{annotation}]'}")
        del self._classes[name]  # records inside come first
        lines = [f"{left}:{self.visible(right)}" for left, _, right in (each.partition(":") for each in fields)]
        self._classes[name] = f"class {name}({self.visible('TypedDict')}):\n" + "\n".join(lines)
        return name


def _literal(options: list[Any], is_open: bool = False) -> str:
    plain = all(option is None or isinstance(option, str | bool | int) for option in options)
    if not options:
        return "Any"
    if is_open or not plain or len(options) > _MAX_LITERALS:
        return union(_OF_VALUES.get(name, name) for name in (type(option).__name__ for option in options))
    return f"Literal[{', '.join(dict.fromkeys(map(repr, options)))}]"


def union(annotations: Iterable[str]) -> str:
    """Return one annotation for any of several. None goes last, as people write it."""
    distinct = [*dict.fromkeys(annotations)]
    return "Any" if "Any" in distinct else " | ".join(sorted(distinct, key=lambda text: text == "None"))


def default_text(default: Any, annotation: str) -> str:
    """Return a default as it is written in a stub; `...` where it is not plain, or not of its type."""
    kinds, written = annotation.split(" | "), repr(default)
    if isinstance(default, float) and not math.isfinite(default):
        return "..."
    if "Any" in kinds and isinstance(default, str | int | float | bool | None):
        return written
    fits = {
        bool: "bool" in kinds,
        int: "int" in kinds or "float" in kinds,
        float: "float" in kinds,
        str: "str" in kinds,
        list: annotation.startswith("list[") and default == [],
        dict: annotation.startswith("dict[") and default == {},
        type(None): "None" in kinds,
    }.get(type(default), False)
    is_choice = isinstance(default, str | int) and re.search(rf"(\[|, ){re.escape(written)}[,\]]", annotation)
    return written if fits or is_choice else "..."


Described = tuple[ToolDefinition, Mapping[str, Any] | None]
"""A tool, and the schema of what it returns."""


def python_module(tools: Iterable[Described], asynchronous: bool = False) -> str:
    """Write the stubs of several tools as a module that a type checker takes as a `.pyi` file: with its imports.

    `asynchronous`: as `async def`, for scripts that use `await call_tool_async(...)`.
    """
    types, text = _write_stubs(tools, asynchronous=asynchronous)
    return "\n\n\n".join(filter(None, (types.imports(text), text)))


def checked_module(tools: Iterable[Described]) -> str:
    """Write the stubs that scripts are checked against: all tools in one class `tools`.

    They take what a sandbox takes: values in order, and any mapping or sequence of the right kind.
    """
    types, text = _write_stubs(tools, "tools", lenient=True)
    return "\n".join((types.imports(text), text))


def python_stubs(tools: Iterable[Described]) -> str:
    """Write the stubs of several tools as one text, without imports: for a model to read.

    The tools of a namespace stand together, in a class of its name.
    """
    return _write_stubs(tools)[1]


def python_signature(definition: ToolDefinition, returns: Mapping[str, Any] | None = None) -> str:
    """Write one tool on one line, by the name that it is called by; records are dicts."""
    types = StubTypes(has_classes=False)
    stub = _Stub(definition, None, types, False)
    returned = types.annotation(returns, "", "") if returns is not None else "Any"
    parameters = [each for each in stub.parameters if each != "*"]
    return f"{definition.name}({', '.join(parameters)}) -> {returned}"


def _write_stubs(
    tools: Iterable[Described], inside: str = "", *, lenient: bool = False, asynchronous: bool = False
) -> tuple[StubTypes, str]:
    """Return the types of a module of stubs, and its text without imports. `inside`: the class that holds them all."""
    given, taken = [*tools], set[str]()
    for definition, returns in given:
        taken.update(map(python_name, definition.name.split(".")))
        taken.update(key for part in dicts_in([definition.parameters, returns]) for key in part)
    types, blocks, spaces = StubTypes(taken, lenient), list[str](), dict[str, Any]()
    for definition, returns in given:
        stub = _Stub(definition, returns, types, asynchronous)
        *path, _ = [*([inside] if inside else []), *definition.name.split(".")]
        space, qualified = spaces, ""
        for part in path:
            qualified += f"{part}."
            if qualified not in space:
                space[qualified] = {}
                if space is spaces:
                    blocks.append(qualified)
            space = space[qualified]
        text = stub.text
        blocks += types.new_classes()
        if path:
            space[definition.name] = f"@{types.visible('staticmethod')}\n{text}"
        else:
            blocks.append(text)
    return types, "\n\n\n".join(_namespace(each, spaces[each]) if each in spaces else each for each in blocks)


def _namespace(qualified: str, members: Mapping[str, Any]) -> str:
    """Write a namespace as a class: `tools.github` of `tools.github.create_issue(...)`."""
    written = [_namespace(name, member) if isinstance(member, Mapping) else member for name, member in members.items()]
    name = python_name(qualified.removesuffix(".").rpartition(".")[2])
    return f"class {name}:\n" + textwrap.indent("\n\n".join(written), "    ")


class _Stub:
    def __init__(
        self, definition: ToolDefinition, returns: Mapping[str, Any] | None, types: StubTypes, asynchronous: bool
    ) -> None:
        self._definition = definition
        self._schema = definition.parameters
        self._types = types
        self._asynchronous = asynchronous
        self._prefix = "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", definition.name)) or "Tool"
        self.parameters = self._parameters()
        self._returns = returns

    @property
    def text(self) -> str:
        """The function with its docstring."""
        return f"{self._signature()}\n{_docstring(self._documentation())}"

    def _signature(self) -> str:
        name, returns, parameters = (
            python_name(self._definition.name.rpartition(".")[2]),
            self._returns,
            self.parameters,
        )
        returned = self._types.annotation(returns, self._prefix, "Result") if returns is not None else "Any"
        returned = self._types.visible(returned)
        start = f"{'async ' if self._asynchronous else ''}def {name}("
        line = f"{start}{', '.join(parameters)}) -> {returned}:"
        if len(line) <= 110:
            return line
        listed = "".join(f"    {parameter},\n" for parameter in parameters)
        return f"{start}\n{listed}) -> {returned}:"

    def _parameters(self) -> list[str]:
        schema = self._schema
        properties = mapping(schema.get("properties"))
        required = dict.fromkeys(name for name in schema.get("required") or () if name in properties)
        optional = [name for name in properties if name not in required]
        named = [name for name in dict.fromkeys((*required, *optional)) if is_identifier(name)]
        written = [self._parameter(name, properties[name], name in required) for name in named]
        rest = len(named) < len(properties) or schema.get("additionalProperties") not in (None, False)
        others = "others"
        while others in named:
            others += "_"
        any_type = self._types.visible("Any")
        if self._types.lenient and len(named) < len(properties):
            return [f"*values: {any_type}", f"**{others}: {any_type}"]
        if self._types.lenient:
            return written + ([f"**{others}: {any_type}"] if rest else [])
        return (["*", *written] if written else []) + ([f"**{others}: {any_type}"] if rest else [])

    def _parameter(self, name: str, schema: Any, is_required: bool) -> str:
        self._types.is_argument = True
        annotation = self._types.annotation(schema, self._prefix, name, self._schema)
        self._types.is_argument = False
        if is_required:
            return f"{name}: {self._types.visible(annotation)}"
        default = mapping(schema).get("default")
        if default is None and not annotation.endswith("None") and annotation != "Any":
            annotation += " | None"
        return f"{name}: {self._types.visible(annotation)} = {default_text(default, annotation)}"

    def _documentation(self) -> str:
        properties = mapping(self._schema.get("properties"))
        described = {name: mapping(part).get("description") for name, part in properties.items()}
        lines = [f"    {name}: {' '.join(str(text).split())}" for name, text in described.items() if text]
        heading = self._definition.description.strip()
        if self._asynchronous:
            heading += f"\n\nCall it as await call_tool_async({self._definition.name!r}, {{...}})."
        elif not all(map(is_identifier, self._definition.name.split("."))):
            heading += f"\n\nCall it as call_tool({self._definition.name!r}, {{...}})."
        return "\n".join([heading, "", "Args:", *lines]) if lines else heading


def _docstring(text: str) -> str:
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"').replace("\0", "")
    if safe.endswith('"'):
        safe += " "
    lines = safe.splitlines() or [""]
    indented = "\n".join(f"    {line}".rstrip() for line in lines[1:])
    closing = "\n    " if len(lines) > 1 else ""
    return f'    """{lines[0]}' + (f"\n{indented}" if len(lines) > 1 else "") + f'{closing}"""'


# Tools in three degrees of detail, and the most detailed text that a budget has room for


Made = TypeVar("Made")


class Recent(Generic[Made]):
    """Remembers what was made of the last few sequences of objects. Used from several threads at once."""

    def __init__(self, size: int) -> None:
        self._made: Lru[tuple[object, ...], tuple[tuple[object, ...], Made]] = Lru(size)
        """By the ids of the objects, with the objects: while they are held, no others get their ids."""
        self._lock = threading.Lock()

    def get(self, objects: Sequence[object], make: Callable[[], Made], *more: object) -> Made:
        """Return what was made of exactly these objects, or make it. `more`: plain values that it depends on too."""
        key = (*map(id, objects), *more)
        with self._lock:
            if (found := self._made.use(key)) is not None:
                return found[1]
        made = make()  # without the lock: making it twice does no harm
        with self._lock:
            self._made.put(key, (tuple(objects), made))
        return made


Detail = Literal["names", "signatures", "full"]
"""`names`; `signatures`, each on a line with the first line of its description; `full`, stubs with docstrings."""

DETAILS: Final = get_args(Detail)
MAX_SIGNATURE_CHARS: Final = 400
MAX_SUMMARY_CHARS: Final = 120
MAX_TEXT_CHARS: Final = 200_000
"""Most characters of tools that a script or a model asked for."""


def signature_line(tool: Described) -> str:
    """Return a tool on one line: what it takes, what it returns, and what it is for."""
    definition, returns = tool
    signature = one_line(python_signature(definition, returns), MAX_SIGNATURE_CHARS)
    purpose = one_line(definition.description.strip().partition("\n")[0].strip(), MAX_SUMMARY_CHARS)
    return f"{signature}  # {purpose}"


def tools_text(tools: Sequence[Described], detail: Detail) -> str:
    """Write tools in one degree of detail.

    Raises:
        UsageError: there is no such degree, or the text would be too long to be read.
    """
    check_one_of("detail", detail, DETAILS)
    objects = [part for tool in tools for part in tool]
    text = _texts.get(objects, lambda: _tools_text(tools, detail, MAX_TEXT_CHARS), detail)
    if text is None:
        weaker = "" if detail == "names" else f", or a detail before {detail!r} of {', '.join(DETAILS)}"
        raise UsageError(
            f"{len(tools)} tools as detail={detail!r} are more than {MAX_TEXT_CHARS} characters; ask for fewer{weaker}"
        )
    return text


def _tools_text(tools: Sequence[Described], detail: Detail, max_chars: int) -> str | None:
    """Return the text; None when it is longer than that. What would be far too long is not written."""
    parts, length = list[str](), 0
    if detail == "full" and sum(len(definition.description) for definition, _ in tools) > max_chars:
        return None
    for tool in tools:
        match detail:
            case "names":
                parts.append(tool[0].name)
            case "signatures":
                parts.append(signature_line(tool))
            case "full":
                parts.append(python_stubs([tool]))
        length += len(parts[-1])
        if length > max_chars:
            return None
    text = python_stubs(tools) if detail == "full" else ("\n" if detail == "signatures" else ", ").join(parts)
    return text if len(text) <= max_chars else None


_texts = Recent[str | None](8)
"""A script may ask for the same again and again."""
_shown = Recent[tuple[Detail | None, str]](16)


def shown_within(tools: Sequence[Described], shown_chars: int) -> tuple[Detail | None, str]:
    """Return the most detailed text of tools that has at most so many characters. (None, "") when none has."""

    def best() -> tuple[Detail | None, str]:
        for detail in reversed(DETAILS):
            if (text := _tools_text(tools, detail, shown_chars)) is not None:
                return detail, text
        return None, ""

    return _shown.get([part for tool in tools for part in tool], best, shown_chars)
