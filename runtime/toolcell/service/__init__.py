"""toolcell as a service: sandboxes here, agents elsewhere. `toolcell serve` runs it, and `create_app` embeds it."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = ["Client", "ServiceConfig", "SyncClient", "TenantConfig", "create_app"]

if TYPE_CHECKING:
    from toolcell.service.app import create_app
    from toolcell.service.client import Client
    from toolcell.service.config import ServiceConfig, TenantConfig
    from toolcell.service.sync_client import SyncClient
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.service.app": "create_app",
            "toolcell.service.client": "Client",
            "toolcell.service.config": "ServiceConfig TenantConfig",
            "toolcell.service.sync_client": "SyncClient",
        },
    )
