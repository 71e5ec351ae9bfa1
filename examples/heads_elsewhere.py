"""Shows signed heads of the audit log kept elsewhere: in a write-once store, and with a time stamp of a service.

Whoever can change the record and the heads on its machine, and even use its key, could write history anew. What this
program handed to others still contradicts them. The store and the service are stand-ins: put an object store with
object lock, and an authority of time stamps (RFC 3161), in their place.
"""

import hashlib
import hmac
import json
import shutil
import tempfile
import time
from pathlib import Path

import anyio

from toolcell import Runtime
from toolcell.audit import AuditLog, Head, HmacKey, verify


class WriteOnceStore:
    """Keeps each object under a name that cannot be written twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def put(self, name: str, content: dict[str, object]) -> None:
        with open(self.folder / name, "x", encoding="utf-8") as file:
            json.dump(content, file)

    def objects(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.iterdir())]


class TimeStampService:
    """Signs that it was shown a digest, and when. Only the service has the key."""

    _key = b"the key of the service, which nobody else has"

    def stamp(self, digest: str) -> dict[str, object]:
        at = round(time.time())
        return {"at": at, "signature": hmac.digest(self._key, f"{digest} {at}".encode(), "sha256").hex()}

    def confirms(self, digest: str, token: dict[str, object]) -> bool:
        expected = hmac.digest(self._key, f"{digest} {token['at']}".encode(), "sha256").hex()
        return hmac.compare_digest(expected, str(token["signature"]))


def digest_of(head: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()


async def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        path, key = Path(home) / "runs.db", HmacKey.generate()
        store, service = WriteOnceStore(Path(home) / "store"), TimeStampService()

        def keep(head: Head) -> None:  # called in the thread that signs, about once a second while records come
            plain = head.to_dict()
            store.put(f"{head.chain}-{head.seq:012}", {"head": plain, "token": service.stamp(digest_of(plain))})

        def log() -> AuditLog:
            return AuditLog(path, key=key, heads=Path(home) / "heads", on_checkpoint=keep)

        async with Runtime(record=log()) as runtime:
            await runtime.execute_code("print('first')")
        shutil.copy(path, Path(home) / "older.db")
        async with Runtime(record=log()) as runtime:
            await runtime.execute_code("print('second')")

        kept = store.objects()
        heads = [Head.from_dict(each["head"]) for each in kept]
        print("heads kept:", len(heads) >= 2)
        print("stamped:", all(service.confirms(digest_of(each["head"]), each["token"]) for each in kept))
        print("the log agrees with them:", verify(path, [key], heads=heads).ok)

        shutil.copy(Path(home) / "older.db", path)  # somebody puts the older copy back
        print("alone, the older copy verifies:", verify(path, [key], heads=[]).ok)
        print("with them:", verify(path, [key], heads=heads).findings[-1].message)


anyio.run(main)
