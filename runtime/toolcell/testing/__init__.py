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
    from toolcell.agents.providers.scripted import Request, ScriptedModel, calls
    from toolcell.testing.contract.case import Case
    from toolcell.testing.contract.check import (
        CaseResult,
        ContractReport,
        check_backend,
        contract_cases,
        contract_lacks,
    )
    from toolcell.testing.fake import FakeBackend
    from toolcell.testing.harness import BackendHarness
    from toolcell.testing.scripted import Die, Hang, RawOutput, ScriptedCall, ScriptedSandbox

__all__ = [
    "BackendHarness",
    "Case",
    "CaseResult",
    "ContractReport",
    "Die",
    "FakeBackend",
    "Hang",
    "RawOutput",
    "Request",
    "ScriptedCall",
    "ScriptedModel",
    "ScriptedSandbox",
    "calls",
    "check_backend",
    "contract_cases",
    "contract_lacks",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.agents.providers.scripted": "Request ScriptedModel calls",
            "toolcell.testing.contract.case": "Case",
            "toolcell.testing.contract.check": "CaseResult ContractReport check_backend contract_cases contract_lacks",
            "toolcell.testing.fake": "FakeBackend",
            "toolcell.testing.harness": "BackendHarness",
            "toolcell.testing.scripted": "Die Hang RawOutput ScriptedCall ScriptedSandbox",
        },
    )
