"""Ed25519 signatures, by the package `cryptography`. Keys are PEM files, as openssl writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keepwarm.errors import ConfigError
from keepwarm.store.runfile.crypto import no_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_BYTES = 64
_CONTEXT = b"keepwarm bundle 1\0"  # so a signature for another purpose is not valid for a bundle


def private_key(file: Path) -> Ed25519PrivateKey:
    """Read a private key. Raises ConfigError for anything but an unencrypted Ed25519 private key in PEM."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise no_cryptography() from error
    try:
        key = load_pem_private_key(_read(file), None)
    except (ValueError, TypeError) as error:
        raise _bad(file, "private", "openssl genpkey -algorithm ed25519 -out FILE") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _bad(file, "private", "openssl genpkey -algorithm ed25519 -out FILE")
    return key


def public_key(file: Path) -> Ed25519PublicKey:
    """Read a public key. Raises ConfigError for anything but an Ed25519 public key in PEM."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise no_cryptography() from error
    try:
        key = load_pem_public_key(_read(file))
    except (ValueError, TypeError) as error:
        raise _bad(file, "public", "openssl pkey -in PRIVATE -pubout -out FILE") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _bad(file, "public", "openssl pkey -in PRIVATE -pubout -out FILE")
    return key


def sign(key: Ed25519PrivateKey, message: bytes) -> bytes:
    return key.sign(_CONTEXT + message)


def verify(key: Ed25519PublicKey, message: bytes, signature: bytes) -> bool:
    """Whether the signature is valid for the message."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _CONTEXT + message)
    except InvalidSignature:
        return False
    return True


def _read(file: Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"the key file {file} cannot be read: {error.strerror or error}") from error


def _bad(file: Path, kind: str, cure: str) -> ConfigError:
    return ConfigError(f"{file} holds no Ed25519 {kind} key in PEM; `{cure}` makes one")
