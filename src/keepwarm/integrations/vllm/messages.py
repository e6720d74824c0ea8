"""What the scheduler's half tells the workers' halves in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef
from keepwarm.store.admin.purge_epochs import Began


@dataclass(frozen=True)
class Prefix:
    """The beginning of a request whose KV is in, or shall come into, vLLM's pages: whole pages only."""

    request_id: str
    tokens: TokenIds  # [n]
    pages: tuple[int, ...]  # vLLM's block ids, of all n tokens in order
    extra_keys: Mapping[int, bytes]  # by position, as `core.blocks.chain` takes them
    variant: str  # digest of the adapter and of images on the first page, "none" without
    began: Began  # when the request came: what was purged since is not stored


@dataclass(frozen=True)
class Load:
    """Bring positions `[start, len(prefix.tokens))` from the store into their pages.

    With `apart` no step waits for it: it is reported when it ended. `found` says for each rank where the blocks of
    these positions are.
    """

    prefix: Prefix
    start: int
    found: tuple[tuple[BlockRef, ...], ...]
    apart: bool = False


@dataclass(frozen=True)
class Save:
    """Store what is new of a prefix whose KV is computed up to its end; `start` is what is known to be stored.

    `last` is true for a request that ended: its pages are held until the save is reported.
    """

    prefix: Prefix
    start: int
    last: bool = False


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """One scheduler step's work. `names` are the roots of the names that the scheduler looks for, by rank."""

    names: tuple[bytes, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
