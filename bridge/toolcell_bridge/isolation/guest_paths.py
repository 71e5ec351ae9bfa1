"""Where a sandbox finds what it may write, and its own user. The host plans the root with the same constants."""

from __future__ import annotations

SCRATCH = "/sandbox"
"""The one tmpfs of a sandbox: one filesystem, so one size limit holds for everything that can be written."""

WORKSPACE = f"{SCRATCH}/work"
WRITABLE = (WORKSPACE, f"{SCRATCH}/tmp", f"{SCRATCH}/shm")
LINKS = (
    ("/tmp", WRITABLE[1]),
    ("/dev/shm", WRITABLE[2]),
    ("/work", WORKSPACE),
)
"""Links in the read-only root from the usual paths to the writable directories. They cost nothing per sandbox."""

IDENTITIES = f"{SCRATCH}/etc"
"""passwd and group, in which each sandbox finds its own user. Owned by root; no Landlock rule lets a script write.

Only where each sandbox has an id of its own. Elsewhere all have `GUEST_ID`, and the files are in the read-only root: a
script would own them here.
"""

IDENTITY_LINKS = (("/etc/passwd", f"{IDENTITIES}/passwd"), ("/etc/group", f"{IDENTITIES}/group"))

PASSWD = "sandbox:x:{0}:{0}::/work:/usr/sbin/nologin\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
GROUP = "sandbox:x:{0}:\nnobody:x:65534:\n"

GUEST_ID = 1000
"""The uid and gid that a script sees where the zygote runs as an ordinary user."""
