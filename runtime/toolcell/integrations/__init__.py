"""toolcell in other people's agent frameworks: one module for each, and an extra of the same name.

`pip install 'toolcell[smolagents]'` is what `toolcell.integrations.smolagents` needs. The names here are what an
adapter for another framework is written with; each is imported when it is first used.
"""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = [
    "RuntimeOwner",
    "SyncRuntimeOwner",
    "framework_tool",
    "instructions",
    "missing_package",
    "text_for_model",
    "tools_with",
]

if TYPE_CHECKING:
    from toolcell.integrations.base import (
        RuntimeOwner,
        SyncRuntimeOwner,
        framework_tool,
        instructions,
        missing_package,
        text_for_model,
        tools_with,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.integrations.base": (
                "RuntimeOwner SyncRuntimeOwner framework_tool instructions missing_package text_for_model tools_with"
            )
        },
    )
