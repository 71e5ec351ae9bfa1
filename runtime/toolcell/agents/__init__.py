"""Agents: a model, a loop, tools. Any model will do that can `chat`.

Builds on `toolcell.tools` alone; knows no sandbox.
"""

from toolcell.agents.agent import Agent, Network
from toolcell.agents.loop import ToolLoopConfig, ToolLoopResult, run_tool_loop
from toolcell.agents.processors import Halt, Processor
from toolcell.agents.providers.provider import Message, ModelResponse, Provider, ProviderError, assistant, system, user
from toolcell.agents.providers.retry import RetryPolicy
from toolcell.agents.subagent import SubAgent

__all__ = [
    "Agent", "Halt", "Message", "ModelResponse", "Network", "Processor", "Provider", "ProviderError", "RetryPolicy",
    "SubAgent", "ToolLoopConfig", "ToolLoopResult", "assistant", "run_tool_loop", "system", "user",
]  # fmt: skip
