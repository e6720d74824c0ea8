"""The protocols through which floors meet without importing each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from keepwarm.core.blocks import TokenIds
from keepwarm.core.geometry import KVGeometry

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class BlockRef:
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


class BlockIndex(Protocol):
    """What a linker policy asks of an archive. No method reads KV or writes anything."""

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]:
        """The longest leading part of `ids` that is stored (a child is never stored without its parent)."""
        ...

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]:
        """Stored blocks whose left context has this prefix name."""
        ...

    def token_ids(self, ref: BlockRef) -> TokenIds | None:
        """The token ids the block was computed for; None when it is gone or unreadable."""
        ...


class KVSink(Protocol):
    """Where loaded KV goes: the host view of a sequence's KV, layer by layer."""

    def view(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Writable bytes `[heads, end - start, head_bytes]` of positions `[start, end)`; `kv` 0 keys, 1 values."""
        ...

    def fill(self, layer: int, kv: int, start: int, data: Bytes) -> None:
        """Take verified bytes `[heads, n, head_bytes]` for positions `[start, start + n)`.

        They may be copied as late as when the layer is first used: `data` must stay as it is.
        """
        ...

    def commit(self, layer: int, start: int, end: int) -> None:
        """All of this layer's bytes in `[start, end)` are in place and verified; a device sink uploads them."""
        ...


class KVSource(Protocol):
    """Where fresh KV is read from when it is stored."""

    @property
    def geometry(self) -> KVGeometry: ...

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        """Bytes `[heads, end - start, head_bytes]` of positions `[start, end)`."""
        ...


class Policy(Protocol):
    """A replacement policy over keys with byte sizes: pure bookkeeping, no I/O, O(1) amortised per call."""

    def add(self, key: Hashable, size: int) -> None: ...

    def touch(self, key: Hashable) -> None: ...

    def remove(self, key: Hashable) -> None: ...

    def victims(self) -> Iterable[Hashable]:
        """Keys in the order in which they would be given up; the policy itself is unchanged."""
        ...


class Tokenizer(Protocol):
    """What is asked of a tokenizer: ids with the character range each token covers."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def render(self, messages: list[dict[str, Any]], **kwargs: Any) -> str: ...
