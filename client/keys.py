"""A client's key: who it is to the server, from one run to the next."""

import contextlib
import hashlib
import os
from pathlib import Path
from secrets import token_hex

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from coterie.errors import CoterieError


def load_or_create_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in ``path``, made there when the file does not exist yet (curve P-384, OpenSSH format, mode 0600).

    Of several processes that make the same file at once, one wins and all get its key. A stock Flower SuperNode can
    use the file as ``--auth-supernode-private-key``. Raises ``CoterieError`` for a file that cannot be read or
    written or is no such key: it is never replaced, since a new key is a new client to the server.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path)
        content = path.read_bytes()
    except OSError as error:
        raise CoterieError(f"Expected a client key in {path}, found: {error.strerror}") from error
    try:
        key = load_ssh_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CoterieError(
            f"Expected an unencrypted OpenSSH private key in {path}, found something else: "
            "restore it, or move it away to join as a new client"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CoterieError(f"Expected an elliptic-curve key in {path}, found {type(key).__name__}")
    return key


def _create(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was faster: its key is the key
            os.link(draft, path)
    finally:
        draft.unlink()


def fingerprint(key: ec.EllipticCurvePrivateKey) -> str:
    """Hexadecimal SHA-256 of the public key's DER SubjectPublicKeyInfo: the client's identity, safe to show."""
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()
