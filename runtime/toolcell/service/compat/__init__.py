"""The compatible front: `POST /execute` with callbacks over HTTP, and a client for services that speak it."""

from typing import TYPE_CHECKING

from toolcell.lazy import lazy_names

__all__ = [
    "CodeFile",
    "CodeRequest",
    "CodeResult",
    "CompatSettings",
    "HttpRunner",
    "RunnerOptions",
    "create_compat_app",
]

if TYPE_CHECKING:
    from toolcell.service.compat.app import create_compat_app
    from toolcell.service.compat.runner import HttpRunner
    from toolcell.service.compat.runner_options import CodeFile, CodeRequest, CodeResult, RunnerOptions
    from toolcell.service.compat.settings import CompatSettings
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        "toolcell.service.compat.settings",
        "toolcell.service.compat.runner_options",
        "toolcell.service.compat.runner",
        "toolcell.service.compat.app",
    )
