"""Test tools: fakes for tests of code that runs scripts, and the contract for tests of a backend.

    FakeBackend                  runs scripts without isolation, or plays a scripted guest
    ScriptedModel                a model with scripted answers
    check_backend                checks a backend against the contract; contract_cases returns the single cases

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

if TYPE_CHECKING:
    from toolcell.agents.providers.scripted import ScriptedModel, calls
    from toolcell.testing.contract.case import Case
    from toolcell.testing.contract.check import (
        check_backend,
        contract_cases,
        contract_lacks,
    )
    from toolcell.testing.fake import FakeBackend
    from toolcell.testing.harness import BackendHarness
    from toolcell.testing.scripted import Die, Hang, RawOutput, ScriptedCall

__all__ = [
    "BackendHarness",
    "Case",
    "Die",
    "FakeBackend",
    "Hang",
    "RawOutput",
    "ScriptedCall",
    "ScriptedModel",
    "calls",
    "check_backend",
    "contract_cases",
    "contract_lacks",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.agents.providers.scripted": "ScriptedModel calls",
            "toolcell.testing.contract.case": "Case",
            "toolcell.testing.contract.check": "check_backend contract_cases contract_lacks",
            "toolcell.testing.fake": "FakeBackend",
            "toolcell.testing.harness": "BackendHarness",
            "toolcell.testing.scripted": "Die Hang RawOutput ScriptedCall",
        },
    )
