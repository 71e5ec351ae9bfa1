"""Agents: a model, the tool loop, and tools. Any object with a `chat` method can be the model.

This package depends on `toolcell.tools` and on no sandbox.
"""

from toolcell.agents.agent import Agent, Network
from toolcell.agents.loop import ToolLoopConfig, run_tool_loop
from toolcell.agents.loop_result import ToolLoopResult
from toolcell.agents.processors import Halt, Processor
from toolcell.agents.providers.anthropic import AnthropicProvider
from toolcell.agents.providers.openai import OpenAIProvider
from toolcell.agents.providers.provider import (
    Message,
    MessageUpdate,
    ModelResponse,
    Provider,
    ProviderError,
    assistant,
    system,
    user,
)
from toolcell.agents.providers.retries import RetryPolicy

__all__ = [
    "Agent", "AnthropicProvider", "Halt", "Message", "MessageUpdate", "ModelResponse", "Network", "OpenAIProvider",
    "Processor", "Provider", "ProviderError", "RetryPolicy", "ToolLoopConfig", "ToolLoopResult",
    "assistant", "run_tool_loop", "system", "user",
]  # fmt: skip
