"""The limits that a request may ask for: lower ones than its tenant's, never higher ones."""

from __future__ import annotations

from toolcell.config import Limits
from toolcell.service.problems import Problem


def allowed_limits(wanted: Limits | None, most: Limits) -> Limits | None:
    """Return the limits of a run: those of the tenant, with the lower ones that were asked for.

    Raises:
        Problem: one is higher than the tenant's.
    """
    if wanted is None or not wanted.model_fields_set:
        return None
    given = {name: getattr(wanted, name) for name in sorted(wanted.model_fields_set)}
    for name, value in given.items():
        limit = getattr(most, name)
        if limit is not None and (value is None or value > limit):
            detail = f"limits.{name} = {value}: this tenant may use at most {limit}"
            raise Problem(422, "limit_too_high", "The request asks for too much", detail, field=name, limit=limit)
    return most.model_copy(update=given)
