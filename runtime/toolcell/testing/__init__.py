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
    from toolcell.agents.scripted import Request, ScriptedModel, calls
    from toolcell.testing.case import Case
    from toolcell.testing.contract import ContractReport, Line, check_backend, contract_cases, contract_lacks
    from toolcell.testing.fake import FakeBackend
    from toolcell.testing.scripted_guest import Call, Die, Hang, RawOutput, ScriptedSandbox, Step
    from toolcell.testing.stand import Stand
    from toolcell.testing.transcripts import Recorder, Replayed, Transcript, record, replay_transcript

_HOMES = {
    "toolcell.agents.scripted": ("Request", "ScriptedModel", "calls"),
    "toolcell.testing.case": ("Case",),
    "toolcell.testing.contract": (
        "ContractReport", "Line", "check_backend", "contract_cases", "contract_lacks",
    ),
    "toolcell.testing.fake": ("FakeBackend",),
    "toolcell.testing.scripted_guest": ("Call", "Die", "Hang", "RawOutput", "ScriptedSandbox", "Step"),
    "toolcell.testing.stand": ("Stand",),
    "toolcell.testing.transcripts": ("Recorder", "Replayed", "Transcript", "record", "replay_transcript"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Call", "Case", "ContractReport", "Die", "FakeBackend", "Hang", "Line", "RawOutput", "Recorder", "Replayed",
    "Request", "ScriptedModel", "ScriptedSandbox", "Stand", "Step", "Transcript", "calls", "check_backend",
    "contract_cases", "contract_lacks", "record", "replay_transcript",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'toolcell.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
