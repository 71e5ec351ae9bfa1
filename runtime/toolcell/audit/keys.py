"""Keys that sign checkpoints. The log never holds a key, so write access to the log is not enough to sign.

HMAC-SHA256 needs no extra package; only holders of the same key can verify. Ed25519 needs `toolcell[audit]`;
everybody with the public key can verify.
"""

from __future__ import annotations

import glob
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import platformdirs

from toolcell.errors import AuditError, UsageError
from toolcell.support.files import make_private_folder, read_regular_file, write_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

HMAC, ED25519 = "hmac-sha256", "ed25519"
_HMAC_PREFIX: Final = "toolcell-hmac-sha256:"
KEY_VARIABLE: Final = "TOOLCELL_AUDIT_KEY"
"""Names the file of the signing key. Without it, a key of our own is used and created when needed."""

_HMAC_BYTES: Final = 32
_ID_CHARS: Final = 16
_BY_SIZE: Final = {32: HMAC, 64: ED25519}


class Verifier(Protocol):
    """Checks signatures that were made with one key."""

    @property
    def key_id(self) -> str:
        """Names the key; reveals nothing of it."""

    @property
    def algorithm(self) -> str:
        """`hmac-sha256` or `ed25519`."""

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        """True when the holder of the key signed `data`."""


class Signer(Verifier, Protocol):
    """Signs. Implement this for a key in a KMS or a hardware token."""

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""


class HmacKey:
    """A shared secret: signs and verifies."""

    algorithm = HMAC

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _HMAC_BYTES:
            raise UsageError(f"an HMAC key has at least {_HMAC_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self.key_id = self.sign(b"toolcell audit key id").hex()[:_ID_CHARS]

    @classmethod
    def generate(cls) -> HmacKey:
        """A fresh key."""
        return cls(os.urandom(_HMAC_BYTES))

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return hmac.digest(self._secret, data, "sha256")

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        """True when the holder of the key signed `data`."""
        return hmac.compare_digest(self.sign(data), signature)

    def save(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write the key to a file that only its owner may read.

        Raises:
            FileExistsError: the file exists, and it is not to be replaced.
            AuditError: the file cannot be written.
        """
        save_private(Path(path), self.to_text(), replace=replace)

    def to_text(self) -> str:
        """Return the text of the key's file."""
        return f"{_HMAC_PREFIX}{self._secret.hex()}\n"


class Ed25519Verifier:
    """A public key."""

    algorithm = ED25519

    def __init__(self, public: Ed25519PublicKey) -> None:
        self._public = public
        self.key_id = hashlib.sha256(public.public_bytes_raw()).hexdigest()[:_ID_CHARS]

    def is_valid(self, data: bytes, signature: bytes) -> bool:
        """True when the holder of the private key signed `data`."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    def to_text(self) -> str:
        """PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


class Ed25519Signer(Ed25519Verifier):
    """A private key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        super().__init__(private.public_key())
        self._private = private

    @classmethod
    def generate(cls) -> Ed25519Signer:
        """A fresh key.

        Raises:
            UsageError: `cryptography` is not installed.
        """
        return cls(_ed25519().Ed25519PrivateKey.generate())

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`."""
        return self._private.sign(data)

    def save(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write the key to a file that only its owner may read, and the public one to `.pub` beside it, for everybody.

        Raises:
            FileExistsError: one of the files exists, and it is not to be replaced.
            AuditError: a file cannot be written.
        """
        save_private(Path(path), self.private_text(), replace=replace)
        save_private(public := Path(f"{os.fspath(path)}.pub"), self.to_text(), replace=replace, mode=0o644)
        public.chmod(0o644)  # whatever the umask is

    def private_text(self) -> str:
        """PEM of the private key."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as exc:
        raise UsageError("Ed25519 needs the cryptography package: pip install 'toolcell[audit]'") from exc
    return ed25519


# Files


def default_key_path() -> Path:
    """Return $TOOLCELL_AUDIT_KEY, or audit.key in the user's configuration directory (~/.config/toolcell on Linux)."""
    if named := os.environ.get(KEY_VARIABLE):
        return Path(named)
    return platformdirs.user_config_path("toolcell", appauthor=False) / "audit.key"


def load_signer(path: str | os.PathLike[str]) -> Signer:
    """Load a signing key: a file of our own for HMAC, or a PEM of an Ed25519 private key.

    Raises:
        AuditError: the file cannot be read, other users may read it, or it is no such key.
    """
    text = _read(Path(path), is_private=True)
    if text.startswith(_HMAC_PREFIX):
        return HmacKey(_hex(text, path))
    if "PRIVATE KEY" in text:
        return Ed25519Signer(_pem(text, path))
    raise AuditError(f"{path} holds neither an HMAC key of toolcell's nor an Ed25519 private key")


def load_verifier(path: str | os.PathLike[str]) -> Verifier:
    """Load a key to check signatures with: an Ed25519 public key, or any signing key.

    Raises:
        AuditError: as `load_signer`.
    """
    text = _read(Path(path), is_private=False)
    return Ed25519Verifier(_pem(text, path, is_public=True)) if "PUBLIC KEY" in text else load_signer(path)


def load_verifiers(path: str | os.PathLike[str] | None = None, *, is_needed: bool = True) -> list[Verifier]:
    """Load what checks the signatures of the key at `path`, or of our own, and of those whose place it has taken.

    If `is_needed` is False and the key cannot be read, only the keys that it replaced are returned.

    Raises:
        AuditError: as `load_signer`, if the key is needed.
    """
    path = default_key_path() if path is None else Path(path)
    found = retired_keys(path)
    try:
        found.insert(0, load_verifier(path))
    except AuditError as exc:
        if is_needed:
            raise AuditError(f"{exc}; the key that checks signatures is {WHERE_KEYS_ARE}") from exc
    return found


def retired_key_path(path: Path, key_id: str) -> Path:
    """Return where a key is kept after another took its place."""
    return path.with_name(f"{path.name}.{key_id}")


def retired_keys(path: Path) -> list[Verifier]:
    """Load the keys that were once at `path`, to check with. A file counts if its name ends in the id of its key."""
    found = []
    for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.*")):
        with suppress(AuditError):
            verifier = load_verifier(file)
            if file.name == retired_key_path(path, verifier.key_id).name:
                found.append(verifier)
    return found


def signer_of(key: Signer | str | os.PathLike[str] | None, log: Path | None) -> Signer:
    """Return the signer for a log: one of the caller's, the key in a file, or our own.

    Raises:
        AuditError: the key cannot be loaded.
        UsageError: it is not a signer, or its file lies in the log.
    """
    if key is not None and not isinstance(key, str | os.PathLike):
        if not all(hasattr(key, name) for name in ("key_id", "algorithm", "sign", "is_valid")):
            raise UsageError(f"key must be a file's path or sign by itself (a Signer), not {type(key).__name__}")
        return key
    path = Path(key) if key is not None else default_key_path()
    if log is not None and path.resolve() == log.resolve():
        raise UsageError(f"the key {path} is the record that it would sign")
    return own_signer() if key is None else load_signer(path)


def own_signer() -> Signer:
    """Load the key at `default_key_path`. If $TOOLCELL_AUDIT_KEY is not set, create an HMAC key there when needed.

    Raises:
        AuditError: the file cannot be read or created, or $TOOLCELL_AUDIT_KEY names a missing file.
    """
    path = default_key_path()
    if not path.exists():
        if os.environ.get(KEY_VARIABLE):
            raise AuditError(
                f"${KEY_VARIABLE} names {path}, which is not there; `toolcell audit keygen {path}` makes it"
            )
        with suppress(FileExistsError):
            HmacKey.generate().save(path)
    return load_signer(path)


def save_private(path: Path, text: str, *, replace: bool = False, mode: int = 0o600) -> None:
    """Write a key, by default one that only its owner may read.

    Raises:
        FileExistsError: the file exists, and it is not to be replaced: two processes may create the first key.
        AuditError: the file cannot be written.
    """
    try:
        make_private_folder(path.parent)
        write_file(path, text.encode(), replace=replace, mode=mode)
    except FileExistsError:
        raise
    except OSError as exc:
        raise AuditError(f"cannot write the key {path}: {exc.strerror}") from exc


def by_id(verifiers: Iterable[Verifier]) -> Mapping[str, Verifier]:
    """Map key ids, which records name, to verifiers."""
    return {verifier.key_id: verifier for verifier in verifiers}


def algorithm_of(signature: object) -> str:
    """Guess a signature's algorithm from its size. Empty: the caller's own signer made it."""
    return _BY_SIZE.get(len(signature), "") if isinstance(signature, bytes) else ""


WHERE_KEYS_ARE: Final = (
    "the file that its writer named (`key=`, $TOOLCELL_AUDIT_KEY), or tenants/NAME/audit.key in the state folder of a "
    "service (--state; on Linux ~/.local/state/toolcell/service without it)"
)


def key_wanted(key: str, signature: object) -> str:
    """Say which key is missing and how to give it."""
    algorithm = algorithm_of(signature)
    named = f"key {key} ({algorithm})" if algorithm else f"key {key}"
    return f"{named}, which was not given; pass it with --key: {WHERE_KEYS_ARE}"


def _read(path: Path, is_private: bool) -> str:
    try:
        return read_regular_file(path, 64 * 1024, is_private=is_private, may_be_link=True).decode("ascii")
    except OSError as exc:
        raise AuditError(f"cannot read the key {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise AuditError(f"cannot read the key {path}: {exc}") from exc


def _hex(text: str, path: object) -> bytes:
    try:
        return bytes.fromhex(text.removeprefix(_HMAC_PREFIX).strip())
    except ValueError as exc:
        raise AuditError(f"the HMAC key in {path} is damaged") from exc


def _pem(text: str, path: object, is_public: bool = False) -> Any:
    module = _ed25519()
    from cryptography.hazmat.primitives import serialization

    try:
        if is_public:
            key: Any = serialization.load_pem_public_key(text.encode())
        else:
            key = serialization.load_pem_private_key(text.encode(), None)
    except (ValueError, TypeError) as exc:
        raise AuditError(f"{path} is not a PEM key that can be used: {exc}") from exc
    wanted = module.Ed25519PublicKey if is_public else module.Ed25519PrivateKey
    if not isinstance(key, wanted):
        raise AuditError(f"{path} holds a key of another kind; want Ed25519")
    return key
