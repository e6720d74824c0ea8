"""Messages from the scheduler's half to the workers' halves in one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from keepwarm.core.blocks import TokenIds
from keepwarm.core.ports import BlockRef
from keepwarm.store.admin.purge_epochs import Began


@dataclass(frozen=True)
class Prefix:
    """The beginning of a request whose KV is in vLLM's pages, or is to be loaded into them: whole pages only."""

    request_id: str
    tokens: TokenIds  # [n]
    pages: tuple[int, ...]  # vLLM's block ids, of all n tokens in order
    extra_keys: Mapping[int, bytes]  # by position, for `core.blocks.chain`
    variant: str  # digest of the adapter and of images on the first page; "none" without any
    began: Began  # when the request arrived: what was purged since then is not stored


@dataclass(frozen=True)
class Load:
    """Load positions `[start, len(prefix.tokens))` from the store into their pages.

    With `apart` no step waits for the load; its end is reported. `found` tells for each rank where the blocks of these
    positions are.
    """

    prefix: Prefix
    start: int
    found: tuple[tuple[BlockRef, ...], ...]
    apart: bool = False


@dataclass(frozen=True)
class Save:
    """Store a prefix, whose KV is computed up to its end, from `start` on; all before `start` is stored already.

    `last` is true for a request that ended: its pages are held until the save is reported.
    """

    prefix: Prefix
    start: int
    last: bool = False


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """The work of one scheduler step. `names` are the roots of the names that the scheduler looks up, by rank."""

    names: tuple[bytes, ...] = ()
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
