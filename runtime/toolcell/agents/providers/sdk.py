"""What the adapters of both SDKs share: owning the client, and options their methods may not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

from toolcell.agents.providers.provider import DEFAULT_OPTIONS


class SdkProvider:
    """Owns an SDK's client. `async with` closes its connections; so does `aclose()`."""

    def __init__(self, client: Any, supports_images: bool) -> None:
        # The loop decides what is asked again; two layers of retries would multiply.
        self._client = client.with_options(max_retries=0)
        self.supports_images = supports_images

    async def aclose(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


def known_options(method: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as keyword arguments of `method`. SDKs drop and gain parameters: what this one does not have goes into
    the request's body as it is, except defaults of ours that nobody asked for."""
    parameters = inspect.signature(method).parameters.values()
    names = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    known = {name: value for name, value in options.items() if name in names}
    unknown = {name: value for name, value in options.items() if name not in names}
    if unknown and options is not DEFAULT_OPTIONS:
        known["extra_body"] = {**unknown, **(known.get("extra_body") or {})}
    return known
