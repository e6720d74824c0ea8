"""Encryption at rest: AES-256-GCM over each layer of each block, with a separate key for each run file.

The store's key never encrypts anything itself. HKDF derives a file's key from it and 32 random bytes, drawn anew for
every file. With that key, the nonce is the piece's place in the file. So no pair of key and nonce is used twice,
however many files there are (docs/decisions/0013-encryption.md).
"""

from __future__ import annotations

import os

from keepwarm.errors import ConfigError, CorruptRun

KEY_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
_TOKENS = 0  # number of the token ids among a file's pieces; layers begin at 1


def no_cryptography() -> ConfigError:
    """Return the error to raise when the package is not installed."""
    return ConfigError("encryption and signatures need the package cryptography: pip install 'keepwarm[crypto]'")


class StoreKey:
    """The key of an encrypted store. `id` identifies the key and reveals nothing of it."""

    def __init__(self, secret: bytes) -> None:
        """`secret` is 32 random bytes. Raises ConfigError for another length, or without the package cryptography."""
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"a store's key has {KEY_BYTES} bytes, got {len(secret)}")
        self._secret = secret
        self.id = self._derive(b"", b"keepwarm key id 1")[:16].hex()

    def cipher(self, run_id: str, salt: bytes) -> RunCipher:
        """Return the cipher of one run file; `salt` is the file's own, drawn by `new_salt`."""
        return RunCipher(self._derive(salt, b"keepwarm run key 1"), run_id)

    def hidden(self, name: bytes) -> bytes:
        """Return 32 bytes for a name that is derived from content. They are always the same, and reveal nothing without
        the key."""
        return self._derive(name, b"keepwarm hidden name 1")

    def _derive(self, salt: bytes, purpose: bytes) -> bytes:
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise no_cryptography() from error
        return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(self._secret)


def new_salt() -> bytes:
    return os.urandom(SALT_BYTES)


class RunCipher:
    """Seals and opens the pieces of one run file. May be used from several threads.

    A piece is one layer of one block: keys then values, head after head. Its tag authenticates its bytes and where they
    belong: run, layer, ordinal and position. The token ids' tag also authenticates the whole header, and so the other
    tags.
    """

    def __init__(self, key: bytes, run_id: str) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)
        self._invalid = InvalidTag
        self._run_id = run_id

    def seal(self, layer: int, ordinal: int, start: int, plain: bytes | memoryview) -> bytes:
        """Return a piece's ciphertext, followed by its tag. Call it only once per piece."""
        return self._aead.encrypt(_nonce(layer + 1, ordinal), plain, self._place(layer, ordinal, start))

    def open(self, layer: int, ordinal: int, start: int, sealed: bytes | memoryview) -> bytes:
        """Decrypt ciphertext and tag to the plain bytes. Raises CorruptRun."""
        place = self._place(layer, ordinal, start)
        return self._open(f"layer {layer}, block {ordinal}", _nonce(layer + 1, ordinal), sealed, place)

    def seal_tokens(self, header: bytes, tokens: bytes | memoryview) -> bytes:
        """Return ciphertext and tag of the token ids; the tag also authenticates `header`."""
        return self._aead.encrypt(_nonce(_TOKENS, 0), tokens, header)

    def open_tokens(self, header: bytes, sealed: bytes | memoryview) -> bytes:
        """Decrypt what `seal_tokens` returned. Raises CorruptRun."""
        return self._open("the header or the token ids", _nonce(_TOKENS, 0), sealed, header)

    def _open(self, what: str, nonce: bytes, sealed: bytes | memoryview, where: bytes) -> bytes:
        try:
            return self._aead.decrypt(nonce, sealed, where)
        except self._invalid as error:
            raise CorruptRun(f"{what}: the authentication tag does not match") from error

    def _place(self, layer: int, ordinal: int, start: int) -> bytes:
        return f"keepwarm piece 1 {self._run_id} {layer} {ordinal} {start}".encode()


def _nonce(piece: int, ordinal: int) -> bytes:
    return piece.to_bytes(4, "little") + ordinal.to_bytes(8, "little")
