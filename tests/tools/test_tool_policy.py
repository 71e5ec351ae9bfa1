"""Group M: tools that must not be called. No route bypasses a rule."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell.agents import Agent, Network
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.options import CallPolicy, Origin
from toolcell.compat import execute_with_context, register_or_replace
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.tools import Block, RunContext, ToolContext, ToolRegistry
from tools.toolkit import FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


class Dangerous:
    """A registry with one dangerous tool, which tells whether it was ever reached, and one harmless one."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.registry = ToolRegistry()

        @self.registry.tool(prepare=self._prepare)
        async def danger() -> str:
            """Do something dangerous."""
            self.reached.append("executed")
            return "reached"

        @self.registry.tool
        async def harmless() -> str:
            """Do something harmless."""
            return "fine"

        @self.registry.tool
        async def relay(ctx: ToolContext, name: str) -> str:
            """Call another tool by name."""
            return (await ctx.call_tool(name)).text

    def _prepare(self, args: dict[str, Any]) -> dict[str, Any]:
        self.reached.append("prepared")
        return args


async def single(registry: ToolRegistry, name: str) -> None:
    await registry.execute(name)


async def single_as_text(registry: ToolRegistry, name: str) -> None:
    await registry.dispatch(name, "{}", call_id="c", origin=Origin.MODEL, context=RunContext())


async def with_context(registry: ToolRegistry, name: str) -> None:
    await execute_with_context(registry, name, {}, "tg", "1")


async def batch(registry: ToolRegistry, name: str) -> None:
    await registry.execute_batch([(name, {}), ("harmless", {}), (name, {})])


async def sequence(registry: ToolRegistry, name: str) -> None:
    await registry.execute_batch([(name, {}), (name, {})], sequential=True)


async def plan_step(registry: ToolRegistry, name: str) -> None:
    enabled = registry.merged()
    enabled.enable_plan_execution()
    await enabled.execute("execute_plan", {"steps": [{"tool": name, "args": {}}, {"tool": "harmless", "args": {}}]})


async def linked_plan_step(registry: ToolRegistry, name: str) -> None:
    enabled = registry.merged()
    enabled.enable_plan_execution()
    steps = [{"tool": "harmless", "args": {}, "id": "a"}, {"tool": name, "args": {}, "depends_on": ["a"]}]
    await enabled.execute("execute_plan", {"steps": steps})


async def guest_call(registry: ToolRegistry, name: str) -> None:
    async def script(call_tool: Any) -> None:
        await call_tool(name)

    enabled = registry.merged()
    enabled.enable_code_execution(FakeRuntime(script))
    await enabled.execute("execute_code", {"code": "call_tool(...)"})


async def guest_calls_in_parallel(registry: ToolRegistry, name: str) -> None:
    async def script(call_tool: Any) -> None:
        async def one() -> None:
            try:
                await call_tool(name)
            except ToolError:
                pass

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(one)

    enabled = registry.merged()
    enabled.enable_code_execution(FakeRuntime(script))
    await enabled.execute("execute_code", {"code": "call_tools_parallel(...)"})


async def code_in_a_plan(registry: ToolRegistry, name: str) -> None:
    async def script(call_tool: Any) -> None:
        await call_tool(name)

    enabled = registry.merged()
    enabled.enable_plan_execution()
    enabled.enable_code_execution(FakeRuntime(script))
    await enabled.execute("execute_plan", {"steps": [{"tool": "execute_code", "args": {"code": "x"}}]})


async def model_of_an_agent(registry: ToolRegistry, name: str) -> None:
    await Agent(ScriptedModel([calls((name, {}), ("harmless", {})), "done"]), tools=registry).run("go")


async def sub_agent_with_the_same_registry(registry: ToolRegistry, name: str) -> None:
    inner = Agent(ScriptedModel([calls((name, {})), "done"]), tools=registry)
    outer = Agent(ScriptedModel([calls(("aide", {"task": "go"})), "done"]))
    outer.add_subagent("aide", "Helps with everything there is.", inner)
    await outer.run("go")


async def sub_agent_with_its_own_copy(registry: ToolRegistry, name: str) -> None:
    """The sub-agent has the tool from somewhere else; the rule is its parent's."""
    own = ToolRegistry()
    entry = registry.registered(name)
    assert entry is not None
    own.add(entry.spec)
    inner = Agent(ScriptedModel([calls((name, {})), "done"]), tools=own)
    outer = Agent(ScriptedModel([calls(("aide", {"task": "go"})), "done"]), tools=registry)
    register_or_replace(outer.registry, inner.as_tool("aide", "Helps with everything there is."))
    await outer.run("go")


async def network(registry: ToolRegistry, name: str) -> None:
    inner = Agent(ScriptedModel([calls((name, {})), "done"]), tools=registry)
    model = ScriptedModel([calls(("agent_inner", {"task": "go"})), "done"])
    await Network(model, {"inner": ("Helps with everything there is.", inner)}).run("go")


async def alias(registry: ToolRegistry, name: str) -> None:
    renamed = registry.merged()
    renamed.alias("innocent", name)
    await renamed.execute("innocent")


async def namespace(registry: ToolRegistry, name: str) -> None:
    spaced = registry.namespaced("ns")
    await spaced.execute(f"ns_{name}")


async def subset(registry: ToolRegistry, name: str) -> None:
    await registry.subset([name]).execute(name)


async def snapshot(registry: ToolRegistry, name: str) -> None:
    await registry.snapshot().execute(name)


async def other_tool(registry: ToolRegistry, name: str) -> None:
    await registry.execute("relay", {"name": name})


async def replaced_tools(registry: ToolRegistry, name: str) -> None:
    fresh = ToolRegistry()
    entry = registry.registered(name)
    assert entry is not None
    fresh.add(entry.spec)
    await Agent(ScriptedModel([calls((name, {})), "done"]), tools=registry).run("go", tools=fresh)


PATHS = [
    single, single_as_text, with_context, batch, sequence, plan_step, linked_plan_step, guest_call,
    guest_calls_in_parallel, code_in_a_plan, model_of_an_agent, sub_agent_with_the_same_registry,
    sub_agent_with_its_own_copy, network, alias, namespace, subset, snapshot, other_tool, replaced_tools,
]  # fmt: skip


@pytest.mark.conforms("M-b1", "M1", "G-b2", "N-b3", "R6", "EX-27", "EX-34")
@each_row("path", PATHS, ids=lambda path: path.__name__)
async def test_no_path_leads_to_a_forbidden_tool(path: Any) -> None:
    for rule in ("none", "exact", "glob", "allow-list", "hook"):
        await try_path(path, rule)


async def try_path(path: Any, rule: str) -> None:
    dangerous = Dangerous()
    registry = dangerous.registry
    match rule:
        case "exact":
            registry.blacklist("danger")
        case "glob":
            registry.blacklist("dan*")
        case "allow-list":
            registry.allow_only("harmless", "relay", "execute_*", "aide", "agent_*", "ns_harmless")
        case "hook":
            registry.add_hook(before=lambda call: Block("no") if "danger" in call.aliases else None)

    await path(registry, "danger")

    if rule == "none":
        assert "executed" in dangerous.reached, "the path leads nowhere, so it proves nothing"
    elif rule == "hook":
        assert "executed" not in dangerous.reached, rule
    else:
        assert dangerous.reached == [], rule


@pytest.mark.conforms("M2", "M3", "M4", "M-b2", "V-12")
async def test_a_forbidden_call_is_logged_answered_and_no_failure_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    dangerous = Dangerous()
    agent = Agent(ScriptedModel([calls(("danger", {})), "something else then"]), tools=dangerous.registry)
    agent.blacklist("danger")

    with caplog.at_level(logging.WARNING):
        run = await agent.run("go")

    assert run.messages[2]["content"] == 'tool "danger" is not permitted'
    assert "tool danger failed" in caplog.text
    assert (run.content, run.error, run.stop_reason) == ("something else then", None, "final")
    assert dangerous.registry.has("danger")


@pytest.mark.conforms("M1", "M-b4")
async def test_a_rule_counts_from_the_next_call_on_also_in_a_run_that_is_going_on() -> None:
    dangerous = Dangerous()

    @dangerous.registry.tool
    async def forbid() -> str:
        """Forbid the dangerous tool."""
        dangerous.registry.blacklist("danger")
        return "forbidden"

    model = ScriptedModel([calls(("danger", {})), calls(("forbid", {})), calls(("danger", {})), "done"])

    run = await Agent(model, tools=dangerous.registry).run("go")
    dangerous.registry.unblacklist("danger")
    again = await dangerous.registry.execute("danger")

    answers = [message["content"] for message in run.messages if message["role"] == "tool"]
    assert answers == ["reached", "forbidden", 'tool "danger" is not permitted']
    assert model.requests[3].tool_names == ["harmless", "relay", "forbid"]
    assert again.text == "reached"


@pytest.mark.conforms("M-b3")
def test_forbidden_tools_are_not_advertised_unless_wanted() -> None:
    registry = Dangerous().registry
    registry.blacklist("danger")
    registry.enable_code_execution(FakeRuntime(lambda call_tool: call_tool("x")))

    assert registry.names() == ["harmless", "relay", "execute_code"]
    assert "danger" not in repr(registry.definitions())
    registry.policy.advertise_blocked = True
    assert "danger" in registry.names()
    registry.policy.advertise_blocked = False
    assert "danger" not in registry.names()
    registry.unblacklist("danger")
    assert "danger" in registry.names()


@pytest.mark.conforms("M-b4")
async def test_rules_may_be_about_one_origin_and_hold_for_what_that_origin_starts() -> None:
    dangerous = Dangerous()
    registry = dangerous.registry
    registry.blacklist("danger", origins=[Origin.CODE])

    await guest_call(registry, "danger")
    await code_in_a_plan(registry, "danger")
    assert dangerous.reached == []

    async def script(call_tool: Any) -> None:
        await call_tool("aide", {"task": "go"})

    inner = Agent(ScriptedModel([calls(("danger", {})), "done"]), tools=registry)
    enabled = registry.merged()
    enabled.add(inner.as_tool("aide", "Helps with everything there is."))
    enabled.enable_code_execution(FakeRuntime(script))
    await enabled.execute("execute_code", {"code": "x"})
    assert dangerous.reached == []

    await single(registry, "danger")
    assert "executed" in dangerous.reached
    assert (registry.names(Origin.MODEL), registry.names(Origin.CODE)) == (
        ["danger", "harmless", "relay"],
        ["harmless", "relay"],
    )


@pytest.mark.conforms("M-b4", "N-b3")
async def test_a_child_never_has_more_than_its_parent() -> None:
    dangerous = Dangerous()
    registry = dangerous.registry
    child = registry.subset(["danger", "harmless"])
    child.allow_only("*")

    registry.allow_only("harmless")

    assert child.names() == ["harmless"]
    assert (await child.execute("danger")).is_error
    child.blacklist("harmless")
    assert (await registry.execute("harmless")).text == "fine"
    assert dangerous.reached == []


names = st.sampled_from(["read", "read_all", "write", "shell_exec"])
origins = st.sampled_from([Origin.MODEL, Origin.PLAN, Origin.CODE, Origin.SUBAGENT])
globs = st.sampled_from(["read", "read*", "*", "shell_*", "w????"])
changes = st.lists(
    st.tuples(
        st.sampled_from(["blacklist", "unblacklist", "allow_only", "allow_all"]),
        globs,
        st.none() | st.sets(origins, min_size=1),
    ),
    max_size=6,
)

MATCHES = {
    "read": {"read"},
    "read*": {"read", "read_all"},
    "*": {"read", "read_all", "write", "shell_exec"},
    "shell_*": {"shell_exec"},
    "w????": {"write"},
}


def change(policy: CallPolicy, kind: str, glob: str, only: set[Origin] | None) -> None:
    match kind:
        case "blacklist":
            policy.blacklist(glob, origins=only)
        case "allow_only":
            policy.allow_only(glob, origins=only)
        case "allow_all":
            policy.allow_all()
        case _:
            with contextlib.suppress(UsageError):  # there is no such rule
                policy.unblacklist(glob)


@pytest.mark.conforms("M-b4")
@given(changes=changes, name=names, origin=origins)
def test_a_name_is_permitted_when_no_black_list_has_it_and_an_allow_list_of_its_origin_does(
    changes: list[tuple[str, str, set[Origin] | None]], name: str, origin: Origin
) -> None:
    policy = CallPolicy()
    blocked: list[tuple[str, set[Origin] | None]] = []
    allowed: list[tuple[str, set[Origin] | None]] = []
    for kind, glob, only in changes:
        change(policy, kind, glob, only)
        if kind == "blacklist":
            blocked.append((glob, only))
        elif kind == "allow_only":
            allowed.append((glob, only))
        elif kind == "allow_all":
            allowed = []
        else:
            blocked = [(each, its) for each, its in blocked if each != glob]
        on_black = {name in MATCHES[each] for each, its in blocked if not its or origin in its}
        on_allow = {name in MATCHES[each] for each, its in allowed if not its or origin in its}

        assert policy.permits(name, origin) == (True not in on_black and (not on_allow or True in on_allow))


@pytest.mark.conforms("M-b4")
@given(parents=changes, childs=changes, name=names, origin=origins)
def test_no_rule_of_a_child_permits_what_its_parent_forbids(
    parents: list[tuple[str, str, set[Origin] | None]],
    childs: list[tuple[str, str, set[Origin] | None]],
    name: str,
    origin: Origin,
) -> None:
    registry = ToolRegistry()
    for each in ("read", "read_all", "write", "shell_exec"):
        registry.register(each, "One of four tools", {"type": "object", "properties": {}}, lambda args: "")
    child = registry.subset(["read", "read_all", "write", "shell_exec"])
    for kind, glob, only in childs:
        change(child.policy, kind, glob, only)
    for kind, glob, only in parents:
        change(registry.policy, kind, glob, only)

    assert set(child.names(origin)) <= set(registry.names(origin))
    if not registry.policy.permits(name, origin):
        assert name not in child.names(origin)


def test_an_alias_needs_a_tool_and_a_free_name() -> None:
    registry = Dangerous().registry

    with pytest.raises(RegistrationError, match="no tool 'ghost'"):
        registry.alias("other", "ghost")
    with pytest.raises(RegistrationError, match="already registered"):
        registry.alias("harmless", "danger")


def test_a_rule_that_would_do_nothing_is_refused_with_what_was_meant() -> None:
    registry = Dangerous().registry

    with pytest.raises(
        UsageError, match=r"no tool 'dangr' to blacklist \(did you mean `danger`\?\); .*registry\.policy"
    ):
        registry.blacklist("dangr")
    registry.blacklist("dang*")
    with pytest.raises(UsageError, match=r"there is no rule 'danger' to take back; there are: 'dang\*'"):
        registry.unblacklist("danger")

    assert "danger" not in registry.names(Origin.CODE)
    assert "harmless" in registry.names(Origin.CODE)
    registry.unblacklist("dang*")
    registry.blacklist("not_yet_*")
    registry.policy.blacklist("not_yet_there")
    assert "danger" in registry.names(Origin.CODE)


def test_allow_only_can_be_taken_back_and_black_lists_stay() -> None:
    registry = Dangerous().registry
    before = registry.names(Origin.CODE)
    registry.allow_only("harmless")
    assert registry.names(Origin.CODE) == ["harmless"]

    registry.allow_all()

    assert registry.names(Origin.CODE) == before
    registry.blacklist("danger")
    registry.allow_only("harmless", "danger")
    registry.allow_all()
    assert "danger" not in registry.names(Origin.CODE)
