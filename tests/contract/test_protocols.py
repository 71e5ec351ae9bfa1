"""What the host asks of a backend and its sandboxes is what `Backend` and `Sandbox` declare, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

import toolcell
from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry, UsageError
from toolcell.sandbox.backend import Backend, Sandbox
from toolcell.sandbox.process.backend import ProcessBackend

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def declared(kind: type) -> set[str]:
    return {name for name in {*dir(kind), *kind.__annotations__} if name[0] != "_"}


class Watched:
    """Passes everything on, and takes note of what was asked for."""

    def __init__(self, given: Any, asked: set[str]) -> None:
        object.__setattr__(self, "_of", (given, asked))

    def __getattribute__(self, name: str) -> Any:
        given, asked = object.__getattribute__(self, "_of")
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        asked.add(name)
        return getattr(given, name)


class WatchedBackend:
    """A process backend that takes note of what its Runtime asks for, and gives it sandboxes that do so too."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.asked_of_sandboxes: set[str] = set()
        self.backend = ProcessBackend()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.asked.add(name)
        return getattr(self.backend, name)

    async def start(self, limits: Limits) -> Any:
        return Watched(await self.backend.start(limits), self.asked_of_sandboxes)


@pytest.mark.slow
@pytest.mark.isolation
async def test_a_runtime_asks_for_declared_members_only() -> None:
    backend = WatchedBackend()
    registry = ToolRegistry()

    @registry.tool(requires_approval=True)
    def pay() -> str:
        """Pay the bill of the month."""
        return "paid"

    Backend.register(WatchedBackend)
    Sandbox.register(Watched)
    watched: Any = backend
    async with Runtime(registry, backend=watched, pool=PoolConfig(warm=1)) as runtime:
        assert (await runtime.execute_code("print(1); 2")).value == 2
        late = await runtime.execute_code("while True: pass", limits=Limits(wall_s=0.2))
        assert late.outcome is Outcome.TIMEOUT
        busy = await runtime.execute_code("while True: pass", limits=Limits(cpu_s=0.2))
        assert busy.outcome is Outcome.CPU_LIMIT
        big = await runtime.execute_code("bytearray(1 << 40)", limits=Limits(memory_bytes=64 << 20))
        assert big.outcome is not Outcome.OK
        waiting = await runtime.execute_code("call_tool('pay')", on_approval="suspend")
        assert waiting.outcome is Outcome.SUSPENDED
        async with runtime.session() as session:
            await session.execute_code("x = 1")
            ended = await session.execute_code("while True: pass", limits=Limits(wall_s=0.2))
            assert ended.outcome is Outcome.TIMEOUT
            assert await session.pause()
            assert (await session.execute_code("x")).value == 1

    assert backend.asked - declared(Backend) == set()
    assert backend.asked_of_sandboxes - declared(Sandbox) == set()
    unasked = declared(Sandbox) - backend.asked_of_sandboxes
    assert unasked <= {"outside_layers", "kill_now"}, "nobody asks for it"


@pytest.mark.slow
def test_the_host_looks_nothing_up_by_name_in_a_sandbox_or_backend() -> None:
    """`getattr` with a default hides a member that nobody declares."""
    root = Path(toolcell.__file__).parent
    found = []
    for path in [*root.rglob("*.py")]:
        if path.relative_to(root).parts[0] in ("testing", "cli", "integrations"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[subject, *_]):
                    text = ast.unparse(subject)
                    if text.rpartition(".")[2].lstrip("_") in ("sandbox", "backend"):
                        found.append(f"{path.relative_to(root)}: {ast.unparse(node)}")
    assert found == ["sandbox/environment.py: getattr(backend, 'start', None)"], "the one says what `backend=` takes"


class FakeLike:
    """Has a method of a backend."""

    async def start(self, limits: Limits) -> Any: ...


class Nameless(Backend):
    async def open(self) -> None: ...

    async def start(self, limits: Limits) -> Any:
        return object()

    async def close(self) -> None: ...


class Plain(Nameless):
    name: ClassVar[str] = "plain"
    isolates: ClassVar[bool] = False


class Bare(Sandbox):
    accept = is_alive = prepare = read_output = sample = kill = kill_now = cpu_now = ended = destroy = None  # type: ignore[assignment]


class Unlimited(Plain):
    async def start(self, limits: Limits) -> Any:
        return Bare()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FakeLike(), r"FakeLike must inherit from toolcell\.sandbox\.Backend"),
        (Nameless(), r"Nameless has no name, isolates; set what toolcell\.sandbox\.Backend declares"),
    ],
)
def test_a_backend_of_another_class_or_without_its_data_hears_what_to_do(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Runtime(backend=given, allow_unisolated=True)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Plain(), r"object must inherit from toolcell\.sandbox\.Sandbox"),
        (Unlimited(), r"Bare has no id, stream, layers, backend, limits; set what"),
    ],
)
async def test_a_sandbox_of_another_class_or_without_its_data_hears_what_to_do(backend: Backend, message: str) -> None:
    async with Runtime(backend=backend, pool=PoolConfig(warm=0), allow_unisolated=True) as runtime:
        with anyio.fail_after(60), pytest.raises(UsageError, match=message):
            await runtime.execute_code("1")


async def test_what_a_backend_and_its_sandboxes_need_not_do_has_a_default() -> None:
    backend, sandbox = Plain(), Bare()
    assert (backend.fixed, backend.descriptors_per_sandbox, backend.lacks) == ((), 0, {})
    assert backend.unsupported == {"cpu_cores": "the backend 'plain' does not bound processors"}
    assert not (sandbox.ask_line() or await sandbox.pause() or sandbox.interrupted_s or sandbox.outside_layers)
    with pytest.raises(TypeError, match="abstract"):
        Sandbox()  # type: ignore[abstract]
