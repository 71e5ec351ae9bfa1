"""Results as JSON: `to_dict` of the project, with the content of files as base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from toolcell.results import ExecutionResult, OutputFile
from toolcell.service.tenants import Tenant


def plain(record: Any) -> Any:
    """Return a record of the project, or a list of them, as plain data."""
    if isinstance(record, list | tuple):
        return [plain(each) for each in record]
    if not is_dataclass(record):
        return record
    return {each.name: plain(getattr(record, each.name)) for each in fields(record)}


def result_members(result: ExecutionResult) -> dict[str, Any]:
    """Return the members of a run's answer."""
    members = result.to_dict()
    members["files"] = [file_members(each, entry) for each, entry in zip(result.files, members["files"], strict=True)]
    return members


async def kept_result(tenant: Tenant, result: ExecutionResult) -> dict[str, Any]:
    """Return the members of a run's answer. Its files are kept for a time, too."""
    await tenant.files.keep(result.run_id, result.files)
    return result_members(result)


def file_members(file: OutputFile, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a returned file; `data` is None when it was not sent."""
    return {**entry, "data": base64.b64encode(file.data).decode() if file.data is not None else None}
