"""The protocols through which floors work together without importing each other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from keepwarm.core.blocks import Block, TokenIds
from keepwarm.core.codecs import Bytes as Bytes
from keepwarm.core.codecs import Codec
from keepwarm.core.geometry import KVGeometry

if TYPE_CHECKING:
    from keepwarm.core.reads import Arriving, Coming


class BlockRef(NamedTuple):
    """A stored block, as an index knows it."""

    id: bytes  # its exact (or derived) name
    prefix: bytes
    run_id: str
    ordinal: int  # place in its run
    start: int  # position in the prompt it was computed for
    length: int  # tokens
    tier: str  # "device", "ram", "disk": the fastest tier that holds it

    @property
    def end(self) -> int:
        return self.start + self.length


def in_line(refs: Sequence[BlockRef]) -> tuple[BlockRef, ...]:
    """Return blocks in order, each cut off where the next one begins."""
    cut = [
        ref if ref.end <= following.start else ref._replace(length=following.start - ref.start)
        for ref, following in pairwise(refs)
    ]
    return (*cut, *refs[-1:])


class BlockIndex(Protocol):
    """The queries of a linker policy to an archive. No method reads KV or writes anything."""

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """Return the longest leading part of `ids` that is stored (a child is never stored without its parent)."""
        ...

    def find(self, ids: Sequence[bytes], *, far: bool = False) -> dict[bytes, BlockRef]:
        """Return the blocks that are stored, whatever they stand on. Remote tiers are asked only with `far`."""
        ...

    def children(self, prefix: bytes, *, inside: bool = False, most: int | None = None) -> tuple[BlockRef, ...]:
        """Return at most `most` stored blocks whose left context has this prefix name. `inside` a page only rests can
        begin, and remote tiers hold no rests."""
        ...

    def continuing(self, block: Block, key: bytes) -> tuple[tuple[BlockRef, ...], int] | None:
        """Find, among the exact blocks stored right behind a block's parent, the one that shares the most first tokens
        with it. Return it and the number of shared tokens; if it is a rest, the blocks that hold the beginning of its
        page come before it. None when no block shares any. `key` is the extra key of a region that starts with the
        block, else empty."""
        ...

    def beginnings(self, rests: Sequence[tuple[Block, BlockRef, bytes]]) -> list[tuple[BlockRef, ...] | None]:
        """Find the beginnings of pages, each given with its stored rest and a key as for `continuing`. Return for each
        the stored blocks that hold the page before the rest, in order; each serves up to where the next one begins.
        None when they are not there."""
        ...

    def arrivals(self) -> int:
        """Count what arrived so far, to ask `arrives` later."""
        ...

    def arrives(self, block: Block, common: int, since: int | None = None) -> bool:
        """Wait a moment for blocks that are being stored right behind a block's parent and share more than `common`
        first tokens with the block. Return True when some arrived, so that another lookup is worth it; also when
        anything arrived `since` a count of `arrivals`, which a lookup after that count may have missed."""
        ...

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids that the block was computed for; None when it is gone or unreadable."""
        ...


@runtime_checkable
class WholeSource(Protocol):
    """A source whose layers are all alike, and which can copy them all at once."""

    def copy_to(self, data: Bytes, start: int, end: int) -> bool:
        """Copy positions `[start, end)` into flat `data`: layer, K/V, head, token, dim. Return False if `read`
        must be used."""
        ...


class KVSink(Protocol):
    """Where loaded KV goes: the host view of a sequence's KV, layer by layer."""

    @property
    def geometry(self) -> KVGeometry:
        """The geometry of the KV that it takes; it is given no other."""
        ...

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Writable bytes `[heads, end - start, head_bytes]` of positions `[start, end)`; `kv` 0 keys, 1 values."""
        ...

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        """Take verified bytes `[heads, n, head_bytes]` for positions `[start, start + n)`.

        They may be copied only when the layer is first used, so `data` must not change until then.
        """
        ...

    def defer(self, arriving: Arriving) -> bool:
        """Agree to ask `arriving` for each layer when it is first used. False: the KV must be loaded now."""
        ...

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        """Return a sink for the rows of encoded blocks if they stay encoded here; None: they must be decoded.

        `rows` is their geometry. `blocks` are consecutive, given as first position and number of tokens. Positions from
        `end` on are not taken.
        """
        ...

    def commit(self, layer: int, start: int, end: int) -> None:
        """Note that all of this layer's bytes in `[start, end)` are in place and verified. A device sink uploads
        them."""
        ...


@runtime_checkable
class WholeSink(Protocol):
    """A sink that can take all layers at once, if they are alike."""

    def fill_all(self, start: int, data: Bytes) -> bool:
        """Do what `fill` and `commit` do, for all layers. `data` is `[layers, 2, heads, n, head_bytes]`. Return False
        if those must be used."""
        ...


@runtime_checkable
class OpenSink(KVSink, Protocol):
    """A sink that takes KV of any size."""

    def take_form(self, geometry: KVGeometry) -> None:
        """Prepare for KV of this geometry. Raises CorruptRun if the sink does not take it."""
        ...


@runtime_checkable
class ReceivingSink(KVSink, Protocol):
    """A sink with a fast way to receive what a server sends."""

    def receive(self, coming: Coming) -> bool:
        """Receive the KV into place and commit every layer. False: it must be loaded in the usual way. Raises
        RemoteUnavailable."""
        ...


class WindowedSink(KVSink, Protocol):
    """A sink with layers that do not need every position, since they attend to a window of the last ones."""

    def needed_from(self, layer: int) -> int:
        """The first position that a layer needs. Blocks that end at or before it are not loaded: `view`, `fill` and
        `commit` are not called for them, and not at all for a layer that needs no block."""
        ...


class KVSource(Protocol):
    """Where fresh KV is read from when it is stored."""

    @property
    def geometry(self) -> KVGeometry: ...

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Bytes `[heads, end - start, head_bytes]` of positions `[start, end)`."""
        ...


class BlockCodec(Protocol):
    """Encodes blocks of KV for the store and decodes loaded ones. All implementations agree bit for bit."""

    @property
    def codec(self) -> Codec: ...

    def encode(self, raw: Bytes, kv: int, dim: int, dtype: str) -> Bytes:
        """Encode one layer's keys or values of a block, `[heads, n, dim * itemsize]`, as `core.codecs.pack` does.

        Raises ValueError for numbers that are not finite.
        """
        ...

    def decode(self, packed: Bytes, kv: int, dim: int, dtype: str, tokens: int, target: Bytes) -> None:
        """Write the first tokens of a block of `tokens` into `target`, `[heads, m, dim * itemsize]`. Any thread may
        call it."""
        ...


class Policy(Protocol):
    """A replacement policy over keys with byte sizes: pure bookkeeping, no I/O, O(log n) amortised per call or better.

    Unknown keys are ignored, since a key may be removed while it is in use.
    """

    def add(self, key: Hashable, size: int, content: Hashable = None) -> None:
        """Enter a new key. `content` names what it holds, if that may come back under another key."""
        ...

    def touch(self, key: Hashable) -> None:
        """Note a use."""
        ...

    def remove(self, key: Hashable) -> None:
        """Forget a key that is removed for another reason than eviction."""
        ...

    def hold(self, key: Hashable) -> None:
        """Skip a key until it is released as often as it was held; it keeps its place in the order."""
        ...

    def release(self, key: Hashable) -> None: ...

    def evict(self) -> Hashable | None:
        """Choose the next key to evict and forget it. None when all keys are held."""
        ...


class Tokenizer(Protocol):
    """A tokenizer: ids with the range of characters that each token covers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...
