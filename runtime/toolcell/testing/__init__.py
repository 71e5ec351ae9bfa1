"""For tests: of your own code that runs scripts (fakes), and of a backend of your own (the contract).

    FakeBackend       runs scripts without walls, or plays a guest from a list of messages
    ScriptedModel     a model that says what it was told to say
    check_backend     everything a backend must do, as one suite; contract_cases: the same, promise by promise
    record, replay_transcript    a conversation on the bridge, kept and played to another backend

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from toolcell.testing.scripted import Die, Hang, RawOutput, ScriptedCall, ScriptedSandbox, Step
    from toolcell.testing.transcripts import Replayed, Transcript, TranscriptRecorder, record, replay_transcript

_HOMES = {
    "toolcell.agents.providers.scripted": ("Request", "ScriptedModel", "calls"),
    "toolcell.testing.contract.case": ("Case",),
    "toolcell.testing.contract.check": (
        "ContractReport", "CaseResult", "check_backend", "contract_cases", "contract_lacks",
    ),
    "toolcell.testing.fake": ("FakeBackend",),
    "toolcell.testing.scripted": ("ScriptedCall", "Die", "Hang", "RawOutput", "ScriptedSandbox", "Step"),
    "toolcell.testing.harness": ("BackendHarness",),
    "toolcell.testing.transcripts": ("TranscriptRecorder", "Replayed", "Transcript", "record", "replay_transcript"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BackendHarness",
    "Case",
    "CaseResult",
    "ContractReport",
    "Die",
    "FakeBackend",
    "Hang",
    "RawOutput",
    "Replayed",
    "Request",
    "ScriptedCall",
    "ScriptedModel",
    "ScriptedSandbox",
    "Step",
    "Transcript",
    "TranscriptRecorder",
    "calls",
    "check_backend",
    "contract_cases",
    "contract_lacks",
    "record",
    "replay_transcript",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolcell.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
