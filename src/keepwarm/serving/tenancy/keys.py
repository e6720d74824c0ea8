"""API keys, hashed at rest: one JSON file that `keepwarm keys` writes and the service reads again when it changes.

A key is `kw-ID-SECRET` with 256 random bits in its secret, so one SHA-256 is as good a hash as a slow one. Beside the
hashes the file holds the random secret from which tenants' salts are derived; it is written for its owner only.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from keepwarm.core.identity import digest
from keepwarm.errors import ConfigError

_FORMAT = 1
_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent", "max_new_tokens")


@dataclass(frozen=True)
class Key:
    """What is stored about one key, without the key itself."""

    id: str
    tenant: str
    hash: str  # hex SHA-256
    created: float  # seconds since the epoch
    admin: bool = False  # may read what concerns all tenants: /metrics, the whole of /status
    limits: dict[str, int] = field(default_factory=dict)  # they replace the service's for this tenant


@dataclass(frozen=True)
class KeyRing:
    """The content of a keys file."""

    secret: bytes = field(repr=False)
    keys: tuple[Key, ...] = ()

    def find(self, given: str) -> Key | None:
        """Return the key that was given, compared in constant time; None for an unknown or malformed one."""
        parts = given.split("-", 2)
        if len(parts) != 3 or parts[0] != "kw":
            return None
        found = next((key for key in self.keys if key.id == parts[1]), None)
        hashed = _hashed(given)
        same = hmac.compare_digest(hashed, found.hash if found else "0" * len(hashed))
        return found if same and found else None

    def salt(self, tenant: str, narrowed: str | None = None) -> str:
        """Return the salt of everything a tenant stores. `narrowed`, a client's own salt, gives another, never another
        tenant's."""
        parts = (tenant,) if narrowed is None else (tenant, narrowed)
        return hmac.new(self.secret, digest("keepwarm tenant salt 1", *parts), hashlib.sha256).hexdigest()


def _hashed(key: str) -> str:
    return hashlib.sha256(b"keepwarm api key 1\0" + key.encode()).hexdigest()


def read_keys(file: Path) -> KeyRing:
    """Read a keys file. Raises ConfigError when it is missing, readable by others, or not as `keepwarm keys` writes
    it."""
    try:
        mode = file.stat().st_mode
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no keys file {file}: `keepwarm keys add TENANT --file {file}` makes one") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the keys file {file} cannot be read: {error}") from None
    if mode & 0o077:
        raise ConfigError(f"the keys file {file} can be read by others: chmod 600 {file}")
    try:
        if record["format"] != _FORMAT:
            raise ConfigError(f"the keys file {file} has format {record['format']}, this version reads {_FORMAT}")
        ring = KeyRing(bytes.fromhex(record["secret"]), tuple(Key(**key) for key in record["keys"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the keys file {file} is not as `keepwarm keys` writes it: {error!r}") from None
    if len(ring.secret) != 32:
        raise ConfigError(f"the keys file {file} holds no secret of 32 bytes")
    return ring


def add_key(file: Path, tenant: str, *, admin: bool = False, limits: dict[str, int] | None = None) -> tuple[Key, str]:
    """Make a key for a tenant. Return it with its text, which only its user will know. Raises ConfigError."""
    if not _TENANT.fullmatch(tenant):
        raise ConfigError(f"a tenant's name is lower-case letters, digits, - and _, at most 63 of them; got {tenant!r}")
    if unknown := sorted(set(limits or {}) - set(_LIMITS)):
        raise ConfigError(f"unknown limit {', '.join(unknown)}; known are {', '.join(_LIMITS)}")
    number = secrets.token_hex(6)
    text = f"kw-{number}-{secrets.token_urlsafe(32)}"
    key = Key(number, tenant, _hashed(text), time.time(), admin, dict(limits or {}))
    with _changing(file) as ring:
        _write(file, replace(ring, keys=(*ring.keys, key)))
    return key, text


def revoke_key(file: Path, number: str) -> Key:
    """Forget a key by its id. What its tenant stored stays, for the tenant's other keys. Raises ConfigError."""
    with _changing(file) as ring:
        found = next((key for key in ring.keys if key.id == number), None)
        if found is None:
            raise ConfigError(f"no key has the id {number!r}; `keepwarm keys list` shows them")
        _write(file, replace(ring, keys=tuple(key for key in ring.keys if key.id != number)))
    return found


@contextmanager
def _changing(file: Path) -> Iterator[KeyRing]:
    """Yield the keys to one writer at a time. A missing file is an empty ring with a new secret."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_keys(file) if file.exists() else KeyRing(secrets.token_bytes(32))


def _write(file: Path, ring: KeyRing) -> None:
    record = {"format": _FORMAT, "secret": ring.secret.hex(), "keys": [asdict(key) for key in ring.keys]}
    temporary = Path(f"{file}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as out:
        json.dump(record, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)
