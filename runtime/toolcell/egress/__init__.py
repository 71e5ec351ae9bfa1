"""Where scripts may send HTTP requests, with which secrets, and the tools that send them."""

from typing import TYPE_CHECKING

from toolcell.support.lazy import lazy_names

__all__ = ["Allow", "Egress", "PackageIndex", "Resolver"]

if TYPE_CHECKING:
    from toolcell.egress.egress import Egress
    from toolcell.egress.packages import PackageIndex
    from toolcell.egress.resolver import Resolver
    from toolcell.egress.rules import Allow
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "toolcell.egress.packages": "PackageIndex",
            "toolcell.egress.resolver": "Resolver",
            "toolcell.egress.egress": "Egress",
            "toolcell.egress.rules": "Allow",
        },
    )
