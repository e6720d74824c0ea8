"""The protocols through which floors meet without importing each other."""

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
    """Blocks in order, each cut off where the next one begins."""
    cut = [
        ref if ref.end <= following.start else ref._replace(length=following.start - ref.start)
        for ref, following in pairwise(refs)
    ]
    return (*cut, *refs[-1:])


class BlockIndex(Protocol):
    """What a linker policy asks of an archive. No method reads KV or writes anything."""

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is stored (a child is never stored without its parent)."""
        ...

    def find(self, ids: Sequence[bytes], *, far: bool = False) -> dict[bytes, BlockRef]:
        """Those of some blocks that are stored, whatever they stand on; remote tiers are asked with `far` alone."""
        ...

    def children(self, prefix: bytes, *, inside: bool = False, most: int | None = None) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name, no more than `most` of them; `inside` a page there are
        rests alone, which remote tiers do not hold."""
        ...

    def continuing(self, block: Block, key: bytes) -> tuple[tuple[BlockRef, ...], int] | None:
        """Of the exact blocks stored right behind a block's parent, the one that shares most of its first tokens, after
        those that hold the beginning of its page if it is a rest; and how many tokens it shares. None when none shares
        any. `key` is the extra key of a region that starts with the block, else empty."""
        ...

    def beginnings(self, rests: Sequence[tuple[Block, BlockRef, bytes]]) -> list[tuple[BlockRef, ...] | None]:
        """Of pages, each with its stored rest and a key as for `continuing`: the stored blocks that hold what the page
        has before the rest, in order, each to be taken as far as the next one begins; None when it is not there."""
        ...

    def arrives(self, block: Block, common: int) -> bool:
        """Wait a moment for what is being stored right behind a block's parent and begins like the block for more than
        `common` tokens; True when some of it arrived, so that it is worth another look."""
        ...

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids the block was computed for; None when it is gone or unreadable."""
        ...


@runtime_checkable
class WholeSource(Protocol):
    """A source whose layers are all alike, and which copies them all at once."""

    def copy_to(self, data: Bytes, start: int, end: int) -> bool:
        """Copy positions `[start, end)` into flat `data`: layer, K/V, head, token, dim. False: they are to be read."""
        ...


class KVSink(Protocol):
    """Where loaded KV goes: the host view of a sequence's KV, layer by layer."""

    @property
    def geometry(self) -> KVGeometry:
        """Of the KV that it takes; it is given no other."""
        ...

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Writable bytes `[heads, end - start, head_bytes]` of positions `[start, end)`; `kv` 0 keys, 1 values."""
        ...

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        """Take verified bytes `[heads, n, head_bytes]` for positions `[start, start + n)`.

        They may be copied as late as when the layer is first used: `data` must stay as it is.
        """
        ...

    def defer(self, arriving: Arriving) -> bool:
        """Take over asking for each layer of what arrives, when it is first used; False: it is to arrive now."""
        ...

    def encoded(
        self, rows: KVGeometry, codec: BlockCodec, blocks: Sequence[tuple[int, int]], end: int
    ) -> KVSink | None:
        """Where the rows of encoded blocks go if they are to stay encoded here; None: what they decode to is wanted.

        `rows` is their geometry, `blocks` are consecutive ones by first position and tokens; positions from `end` on
        are not taken.
        """
        ...

    def commit(self, layer: int, start: int, end: int) -> None:
        """All of this layer's bytes in `[start, end)` are in place and verified; a device sink uploads them."""
        ...


@runtime_checkable
class OpenSink(KVSink, Protocol):
    """A sink that takes what it is given, of whatever size."""

    def take_form(self, geometry: KVGeometry) -> None:
        """What comes next. Raises CorruptRun for what it does not take."""
        ...


@runtime_checkable
class ReceivingSink(KVSink, Protocol):
    """A sink that knows a quick way to receive what a server sends."""

    def receive(self, coming: Coming) -> bool:
        """Have it received into place and commit every layer; False: it is to come in the usual way. Raises
        RemoteUnavailable."""
        ...


class WindowedSink(KVSink, Protocol):
    """A sink with layers that do not need every position: they attend to a window of the last ones."""

    def needed_from(self, layer: int) -> int:
        """The first position that a layer is to be given. Blocks that end at or before it are not brought: then
        neither `view` nor `fill` nor `commit` is called for them, and not at all for a layer that needs no block."""
        ...


class KVSource(Protocol):
    """Where fresh KV is read from when it is stored."""

    @property
    def geometry(self) -> KVGeometry: ...

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Bytes `[heads, end - start, head_bytes]` of positions `[start, end)`."""
        ...


class BlockCodec(Protocol):
    """Encodes blocks of KV for the store and decodes them on their way back; implementations agree to the bit."""

    @property
    def codec(self) -> Codec: ...

    def encode(self, raw: Bytes, kv: int, dim: int, dtype: str) -> Bytes:
        """One layer's keys or values of a block, `[heads, n, dim * itemsize]`, as `core.codecs.pack` has them.

        Raises ValueError for numbers that are not finite.
        """
        ...

    def decode(self, packed: Bytes, kv: int, dim: int, dtype: str, tokens: int, target: Bytes) -> None:
        """Write the first tokens of a block of `tokens` into `target`, `[heads, m, dim * itemsize]`. Any thread."""
        ...


class Policy(Protocol):
    """A replacement policy over keys with byte sizes: pure bookkeeping, no I/O, O(log n) amortised per call or better.

    Unknown keys are ignored, since a key may be removed while it is in use.
    """

    def add(self, key: Hashable, size: int, content: Hashable = None) -> None:
        """Enter a new key. `content` names what it holds, when the same may come back under another key."""
        ...

    def touch(self, key: Hashable) -> None:
        """Note a use."""
        ...

    def remove(self, key: Hashable) -> None:
        """Forget a key that is gone for another reason than eviction."""
        ...

    def hold(self, key: Hashable) -> None:
        """Pass a key over until it is released as often as it was held; it keeps its place in the order."""
        ...

    def release(self, key: Hashable) -> None: ...

    def evict(self) -> Hashable | None:
        """Choose what goes next and forget it; None when nothing is left that is not held."""
        ...


class Tokenizer(Protocol):
    """What is asked of a tokenizer: ids with the character range each token covers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...
