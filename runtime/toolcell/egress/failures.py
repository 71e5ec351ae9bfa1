"""How a request fails: codes that the guest turns into the exceptions of each library."""

from __future__ import annotations

from typing import Final

from toolcell.errors import ToolError

REFUSED: Final = "EgressRefused"
"""By a rule. It was not sent."""
CONNECT: Final = "EgressConnectError"
"""The host was not found, or refused the connection."""
CERTIFICATE: Final = "EgressCertificateError"
"""The host is reached, and its certificate is not valid for it."""
TIMEOUT: Final = "EgressTimeout"
PROTOCOL: Final = "EgressProtocolError"
"""The answer is broken, or ended early."""
RESET: Final = "EgressConnectionReset"
"""The other side broke the connection."""
LIMIT: Final = "EgressLimit"


def refused(message: str) -> ToolError:
    """Return the failure of a request that the rules do not allow."""
    return ToolError(message, code=REFUSED)
