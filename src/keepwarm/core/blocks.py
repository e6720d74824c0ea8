"""Blocks: the KV of one prefill step, and the hashes that name it.

Each block has three names:

* `exact`: chained over tokens *and cuts* under one arithmetic: `e_i = H(e_{i-1}, tokens_i, extra keys_i)`, with one
  link per block. Equal names mean the same arithmetic on the same numbers, so KV equal to the bit.
* `prefix`: over tokens alone. The chain is unrolled: the name at a position is the hash of everything left of it
  (model, extra keys, token ids), so prompts cut differently still meet where their tokens agree.
* `content`: over this block's tokens only, whatever came before (for chunks, and for saying why something missed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from keepwarm.core.identity import DIGEST_BYTES, Namespace, digest, salt_tag

TokenIds = npt.NDArray[np.uint32]

_EXTRA = b"\xff\xff\xff\xff"  # no token id: an extra key of 32 bytes follows in the prefix stream


@dataclass(frozen=True, eq=False)
class Block:
    """One prefill step of one prompt: positions `[start, end)` and its names (32 bytes each)."""

    start: int
    end: int
    tokens: TokenIds  # [end - start], uint32
    exact: bytes
    prefix: bytes
    parent_exact: bytes
    parent_prefix: bytes
    salts: tuple[bytes, ...] = ()  # tags of the salts it is under, so that a tenant's blocks can be found and purged

    @property
    def length(self) -> int:
        return self.end - self.start

    @cached_property
    def content(self) -> bytes:
        """The third name (32 bytes); most requests never ask for it."""
        return content_id(self.tokens)


def token_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """Token ids as a contiguous little-endian uint32 array `[n]`."""
    return np.ascontiguousarray(ids, dtype="<u4")


def common_length(a: TokenIds, b: TokenIds) -> int:
    """Length of the common beginning of two token sequences."""
    size = min(len(a), len(b))
    differ = np.nonzero(a[:size] != b[:size])[0]
    return int(differ[0]) if len(differ) else size


def content_id(tokens: TokenIds) -> bytes:
    """Name of a token sequence wherever it stands."""
    return digest("keepwarm content 1", tokens.tobytes())


def _region_keys(extra_keys: Mapping[int, bytes] | None) -> dict[int, bytes]:
    for position, key in (extra_keys or {}).items():
        if len(key) != DIGEST_BYTES:
            raise ValueError(f"the extra key at {position} has {len(key)} bytes, expected {DIGEST_BYTES}")
    return dict(extra_keys or {})


def chain(
    tokens: TokenIds, cuts: Sequence[int], namespace: Namespace, extra_keys: Mapping[int, bytes] | None = None
) -> tuple[Block, ...]:
    """The blocks of a prompt cut at `cuts`, in order.

    `extra_keys` maps a position to the 32-byte key of the region that starts there (a salt); such a position must be 0
    or a cut, since a region's key belongs to its first block. Raises ValueError otherwise, and for cuts that do
    not rise strictly within the prompt.
    """
    extra = _region_keys(extra_keys)
    if any(b <= a for a, b in pairwise((0, *cuts))) or (cuts and cuts[-1] > len(tokens)):
        raise ValueError(f"cuts {list(cuts)} do not rise strictly within the prompt's {len(tokens)} tokens")
    if stray := set(extra) - {0, *cuts}:
        raise ValueError(f"extra keys at {sorted(stray)} are not at a cut; cuts are {list(cuts)}")
    stream = hashlib.sha256(namespace.prefix_root)
    blocks: list[Block] = []
    start, exact, prefix = 0, namespace.exact_root, namespace.prefix_root
    salts: tuple[bytes, ...] = ()
    for end in cuts:
        part = tokens[start:end]
        raw = part.tobytes()
        key = extra.get(start, b"")
        if key:  # the region's key is part of what its blocks hang on: no lookup without it finds them
            stream.update(_EXTRA + key)
            prefix = stream.digest()
            salts = (*salts, salt_tag(key))
        stream.update(raw)
        below = Block(
            start=start,
            end=end,
            tokens=part,
            exact=digest("keepwarm exact block 1", exact, raw, key),
            prefix=stream.digest(),
            parent_exact=exact,
            parent_prefix=prefix,
            salts=salts,
        )
        blocks.append(below)
        start, exact, prefix = end, below.exact, below.prefix
    return tuple(blocks)


def derived_id(parent: bytes, block: Block) -> bytes:
    """Name of a block whose KV stands on KV that was not `exact`: found by its prefix name, never by an exact one."""
    return digest("keepwarm derived block 1", parent, block.prefix)


class PrefixNames:
    """Prefix names of one prompt at any position, without building blocks for it."""

    def __init__(self, tokens: TokenIds, namespace: Namespace, extra_keys: Mapping[int, bytes] | None = None) -> None:
        self._tokens = tokens
        self._namespace = namespace
        self._extra = sorted(_region_keys(extra_keys).items())
        self._known: dict[int, bytes] = {0: namespace.prefix_root}

    def at(self, position: int) -> bytes:
        """The name of everything left of `position`: of the block that ends there."""
        if position not in self._known:
            self._known[position] = self._stream(position).digest()
        return self._known[position]

    def of(self, tokens: TokenIds) -> PrefixNames:
        """The names of another prompt under the same extra keys."""
        other = PrefixNames(tokens, self._namespace)
        other._extra = self._extra
        return other

    def opening(self, position: int) -> bytes:
        """The name that a block beginning at `position` hangs on: with the key of a region that starts there."""
        keys = [key for start, key in self._extra if start == position]
        if not keys:
            return self.at(position)
        stream = self._stream(position)
        stream.update(_EXTRA + keys[0])
        return stream.digest()

    def _stream(self, position: int) -> hashlib._Hash:
        stream = hashlib.sha256(self._namespace.prefix_root)
        last = 0
        for start, key in self._extra:
            if start >= position:
                break
            stream.update(self._tokens[last:start].tobytes() + _EXTRA + key)
            last = start
        stream.update(self._tokens[last:position].tobytes())
        return stream
