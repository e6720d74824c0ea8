"""The remote tiers of one archive, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef
from keepwarm.errors import ConfigError, CorruptRun, RemoteUnavailable, StoreError, StoreLocked, StoreTooNew
from keepwarm.store.admin.purge_epochs import Epochs
from keepwarm.store.health import Health
from keepwarm.store.remote.backend import Blobs, redacted
from keepwarm.store.remote.limits import Limits
from keepwarm.store.remote.records import Fetch
from keepwarm.store.remote.tier import RemoteTier
from keepwarm.store.remote.write_behind import Behind
from keepwarm.store.runfile.codec import Coding
from keepwarm.store.runfile.crypto import StoreKey
from keepwarm.store.runfile.layout import Run

_REDIS = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_OBJECTS = ("s3", "gs", "az", "file")


class Remotes:
    """None, one or several remote tiers. Only `purge` raises when a service fails."""

    def __init__(self, all_of_them: Sequence[Behind] = ()) -> None:
        self._all = tuple(all_of_them)
        self._by_name = {behind.tier.name: behind for behind in self._all}

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Behind]:
        return iter(self._all)

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers' names, as in `BlockRef.tier`."""
        return tuple(self._by_name)

    def tier(self, name: str) -> RemoteTier | None:
        behind = self._by_name.get(name)
        return None if behind is None else behind.tier

    # Finding

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """Return the longest leading part of a chain that the tiers together hold."""
        refs: tuple[BlockRef, ...] = ()
        for behind in self._all:
            if len(refs) < len(ids):
                refs += behind.tier.lookup(ids[len(refs) :])
        return refs

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        """Return the blocks that any tier holds."""
        found: dict[bytes, BlockRef] = {}
        for behind in self._all:
            if missing := [block_id for block_id in ids if block_id not in found]:
                found |= behind.tier.find(missing)
        return found

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name, from the first tier that has any."""
        return next((found for behind in self._all if (found := behind.tier.children(prefix))), ())

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids of a block that one of the tiers holds; None when it is gone or unreadable."""
        tier = self.tier(ref.tier)
        if tier is None:
            return None
        try:
            header = tier.header(ref.run_id)
        except CorruptRun as error:
            tier.quarantine(ref.run_id, error)
            return None
        return header.tokens[ref.start - header.start : ref.end - header.start]

    def holds(self, block_id: bytes) -> bool:
        return any(behind.tier.find([block_id]) for behind in self._all)

    # Writing

    def submit(self, run: Run, epoch: int) -> None:
        """Queue a run, whose request began at `epoch`, for all tiers."""
        for behind in self._all:
            behind.submit(run, epoch)

    def replicate(self, ids: Sequence[bytes], fetch: Fetch, epoch: int) -> None:
        """Queue for each tier the blocks of a chain that it does not hold. The request began at `epoch`; `fetch` finds
        runs in RAM or on disk."""

        def missing(behind: Behind) -> None:
            stored = behind.tier.find_now(ids)
            sent: set[bytes] = set()
            for block_id in ids:
                if block_id not in stored and block_id not in sent and (run := fetch(block_id)) is not None:
                    sent |= {block_id, *(block.id for block in run.blocks)}
                    behind.submit(run, epoch)

        for behind in self._all:
            behind.do(lambda behind=behind: missing(behind))  # type: ignore[misc]

    def name(self, name: str, leaf: bytes, allowed: Callable[[], bool] = lambda: True) -> None:
        """Name a prompt in all tiers, if that is still allowed when it is done."""
        for behind in self._all:
            behind.do(lambda behind=behind: behind.books.name(name, leaf, allowed))  # type: ignore[misc]

    def purge(self, tags: Collection[bytes]) -> tuple[set[str], int]:
        """Remove everything under these salts. Return the ids of the removed runs, and their bytes.

        Raises StoreError when a service fails; another call then finishes the work.
        """
        gone: set[str] = set()
        size = 0
        failed: list[str] = []
        for behind in self._all:
            for tag in tags:
                try:
                    runs, nbytes = behind.purge(tag)
                except RemoteUnavailable as error:
                    failed.append(str(error))
                    break
                gone |= runs
                size += nbytes
        if failed:
            raise StoreError(f"the purge is not complete ({'; '.join(failed)}); run it again")
        return gone, size

    def flush(self) -> None:
        """Wait until everything queued is written or given up."""
        for behind in self._all:
            behind.flush()

    def close(self) -> None:
        for behind in self._all:
            behind.close()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics by tier, JSON-ready."""
        return {behind.tier.name: behind.stats() for behind in self._all}

    def report(self, counters: Callable[[], Mapping[str, Any]]) -> None:
        """Set the source of the counters that this replica stores for `keepwarm stats --fleet`."""
        for behind in self._all:
            behind.reporting = counters


def open_remotes(
    urls: Iterable[str],
    limits: Limits,
    health: Health,
    key: StoreKey | None,
    fetch: Fetch,
    epochs: Epochs | None = None,
    on_purged: Callable[[Collection[bytes]], bool] = lambda tags: True,
    *,
    coding: Coding | None = None,
) -> Remotes:
    """Open tiers for these URLs. A service that does not answer is no error: it is tried again in the background.

    Raises ConfigError for an invalid URL, and StoreTooNew or StoreLocked for a store that answers but cannot be used by
    this version or with this key.
    """
    opened: list[Behind] = []
    try:
        for url in urls:
            tier = RemoteTier(open_blobs(url, limits), limits=limits, health=health, key=key, coding=coding)
            if any(tier.name == other.tier.name for other in opened):
                raise ConfigError(f"two remotes of the kind {tier.name!r} are given; one of each can be used at once")
            opened.append(Behind(tier, fetch, epochs=epochs, on_purged=on_purged))
            try:
                tier.bounded(lambda deadline, tier=tier: tier.check())  # type: ignore[misc]
            except (StoreTooNew, StoreLocked):
                raise
            except Exception as error:
                tier.broke(error)
    except BaseException:
        for behind in opened:
            behind.close()
        raise
    return Remotes(opened)


def open_blobs(url: str, limits: Limits) -> Blobs:
    """Return the service at a URL. Raises ConfigError."""
    scheme = urlsplit(url).scheme
    if scheme in _REDIS:
        from keepwarm.store.remote.redis import RedisBlobs

        return RedisBlobs(url, timeout=limits.timeout, ttl=limits.ttl)
    if scheme in _OBJECTS:
        from keepwarm.store.remote.object_store import ObjectBlobs

        return ObjectBlobs(url, timeout=limits.timeout, reading=limits.load_timeout, writing=limits.write_timeout)
    known = ", ".join(f"{each}://" for each in (*_REDIS, *_OBJECTS))
    raise ConfigError(f"a remote is a URL that begins with {known}; got {redacted(url) or 'nothing'!r}")
