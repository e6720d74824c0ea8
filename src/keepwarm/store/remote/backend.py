"""The service that a remote tier needs: small values by key, large ones read in parts, and sets whose members have
times. `store.remote.redis` and `store.remote.object_store` provide it.

Every method is bounded by `seconds`, or by the deadline of its source. It raises RemoteUnavailable when the service
does not answer in time or fails, and RemoteFull when the service has no room. Keys and members are ASCII.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from keepwarm.errors import RemoteUnavailable
from keepwarm.store.runfile.source import Source


class Blobs(Protocol):
    """One service. Safe for use from several threads."""

    @property
    def name(self) -> str:
        """The tier's name: "redis", "s3", "gs", "az" or "file"."""
        ...

    @property
    def label(self) -> str:
        """The service's address, without secrets."""
        ...

    @property
    def fanout(self) -> int:
        """How many keys `get` reads in about the time of one."""
        ...

    @property
    def threads(self) -> int:
        """With how many threads it is worth reading one body."""
        ...

    def get(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        """Small values; None for those that are not there."""
        ...

    def put(self, items: Mapping[str, bytes], seconds: float) -> None:
        """Store small values, each of them atomically."""
        ...

    def body(self, key: str, size: int, seconds: float, *, whole: bool) -> Source:
        """A large value of a known size, to be read in parts, in at most `seconds` altogether. `whole`: all of it will
        be read."""
        ...

    def put_body(self, key: str, data: memoryview, seconds: float) -> None:
        """Store a large value. Readers may see only a part of it until this returns."""
        ...

    def delete(self, keys: Sequence[str], bodies: Mapping[str, int], seconds: float) -> None:
        """Remove values, and bodies of known sizes. A missing one is not an error."""
        ...

    def renew(self, keys: Sequence[str], bodies: Mapping[str, int], seconds: float) -> None:
        """Restart their times to live, if the service has them."""
        ...

    def add(self, groups: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Add members to sets, or set the time of existing ones to now."""
        ...

    def members(self, group: str, seconds: float) -> dict[str, float]:
        """A set's members, each with the time it was last added, in seconds since the epoch."""
        ...

    def is_member(self, group: str, member: str, seconds: float) -> bool:
        """Whether a set holds a member, however many it has."""
        ...

    def discard(self, groups: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Take members out of sets."""
        ...

    def ping(self, seconds: float) -> None:
        """Ask for a sign of life."""
        ...

    def close(self) -> None: ...


def remaining(deadline: float, what: str) -> float:
    """Seconds until a deadline of `time.monotonic`. Raises RemoteUnavailable when it is over."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise RemoteUnavailable(f"{what}: no time is left")
    return left


def redacted(url: str) -> str:
    """A URL without its user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
