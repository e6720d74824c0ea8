"""Blocks: the unit of identity, and the hashes that name it.

Under invariant arithmetic a block is a page of tokens at absolute positions. Under scheduled arithmetic it is one
prefill step (`core.schedule` says where blocks end). Each block has three names:

* `exact`: chained over blocks under one arithmetic: `e_i = H(e_{i-1}, tokens_i, extra keys_i)`. Equal names mean the
  same arithmetic on the same numbers, so the KV is equal bit for bit.
* `prefix`: over tokens alone. The chain is unrolled: the name at a position is the hash of everything left of it
  (model, extra keys, token ids). So prompts that are cut differently still have equal names where their tokens agree.
* `content`: over this block's tokens only, whatever came before (for chunks, and for saying why something missed).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import ge, itemgetter
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from keepwarm.core.identity import DIGEST_BYTES, Namespace, digest, salt_tag

TokenIds = npt.NDArray[np.uint32]

TOKEN_BYTES = 4
_TAG = b"keepwarm exact block 1"
_EXACT = len(_TAG).to_bytes(8, "little") + _TAG + DIGEST_BYTES.to_bytes(8, "little")
_NO_KEY = bytes(8)
_STATES = 6  # of the hash of one prompt's tokens: looks go back and forth around where reuse ended
_POSITION: Callable[[tuple[int, Any]], int] = itemgetter(0)
_EXTRA = b"\xff\xff\xff\xff"  # no token id: an extra key of 32 bytes follows in the prefix stream


class Block(NamedTuple):
    """Positions `[start, end)` of one prompt and their names (32 bytes each)."""

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

    @property
    def content(self) -> bytes:
        """The third name (32 bytes), computed on demand: most requests never need it."""
        return content_id(self.tokens)


def token_ids(ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenIds:
    """Token ids as a contiguous little-endian uint32 array `[n]`."""
    return np.ascontiguousarray(ids, dtype="<u4")


def common_length(a: TokenIds, b: TokenIds) -> int:
    """Length of the common beginning of two token sequences."""
    size = min(len(a), len(b))
    first = (a[:size] != b[:size]).tobytes().find(1)
    return size if first < 0 else first


def content_id(tokens: TokenIds) -> bytes:
    """Name of a token sequence, independent of its position."""
    return digest("keepwarm content 1", tokens.tobytes())


def _region_keys(extra_keys: Mapping[int, bytes] | None) -> dict[int, bytes]:
    for position, key in (extra_keys or {}).items():
        if len(key) != DIGEST_BYTES:
            raise ValueError(f"the extra key at {position} has {len(key)} bytes, expected {DIGEST_BYTES}")
    return dict(extra_keys or {})


class Chain(Sequence[Block]):
    """The blocks of one prompt, in order. A block is made on demand: a long prompt has a thousand blocks, and most are
    only looked up by name."""

    __slots__ = ("_make", "_part", "ends", "exact")

    def __init__(
        self,
        ends: Sequence[int],
        exact: Sequence[bytes],
        make: Callable[[int], Block],
        part: Callable[[int, int], Block] | None = None,
    ) -> None:
        """`ends` and `exact` are the ends and exact names of all blocks. `make` makes a block from its number, and
        `part` the block that would begin there in a prompt that ends at a position."""
        self.ends, self.exact, self._make, self._part = ends, exact, make, part

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def last_start(self) -> int:
        return self.start(len(self.ends) - 1)

    def start(self, number: int) -> int:
        """Where a block begins: where the one before it ends."""
        return self.ends[number - 1] if number else 0

    def up_to(self, position: int) -> Block:
        """Return the last block of a prompt that is this one up to a position: a whole block, or the beginning of one.
        Under invariant arithmetic its KV is that of the whole block."""
        number = bisect_left(self.ends, position)
        if self.ends[number] == position or self._part is None:
            return self._make(number)
        return self._part(number, position)

    @overload
    def __getitem__(self, key: int) -> Block: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Block, ...]: ...

    def __getitem__(self, key: int | slice) -> Block | tuple[Block, ...]:
        numbers = range(len(self.ends))[key]
        return self._make(numbers) if isinstance(numbers, int) else tuple(map(self._make, numbers))


def chain(
    tokens: TokenIds,
    cuts: Sequence[int],
    namespace: Namespace,
    extra_keys: Mapping[int, bytes] | None = None,
    known: Sequence[bytes] = (),
    names: PrefixNames | None = None,
) -> Chain:
    """Return the blocks of a prompt that is cut at `cuts`; `known` are the exact names of the first ones, and `names`
    are its prefix names, if the caller has them.

    `extra_keys` maps a position to the 32-byte key (a salt) of the region that starts there. The position must be 0 or
    a cut, since a region's key belongs to its first block. Raises ValueError otherwise, and for cuts that do not rise
    strictly within the prompt.
    """
    keys = _region_keys(extra_keys)
    named = PrefixNames(tokens, namespace, keys) if names is None else names
    starts = (0, *cuts)[: len(cuts)]
    if any(map(ge, starts, cuts)) or (cuts and cuts[-1] > len(tokens)):
        raise ValueError(f"cuts {list(cuts)} do not rise strictly within the prompt's {len(tokens)} tokens")
    if keys and (stray := set(keys) - {0, *cuts}):
        raise ValueError(f"extra keys at {sorted(stray)} are not at a cut; cuts are {list(cuts)}")
    exact = [namespace.exact_root, *known]
    exact += _exact_names(tokens, starts[len(known) :], cuts[len(known) :], keys, exact[-1])

    def block(number: int) -> Block:
        start, end = starts[number], cuts[number]
        above = exact[number], named.opening(start)
        return Block(start, end, tokens[start:end], exact[number + 1], named.at(end), *above, named.salts(start))

    def part(number: int, end: int) -> Block:
        start = starts[number]
        name = exact_name(exact[number], tokens[start:end].tobytes(), keys.get(start, b""))
        above = exact[number], named.opening(start)
        return Block(start, end, tokens[start:end], name, named.at(end), *above, named.salts(start))

    return Chain(cuts, exact[1:], block, part)


def _exact_names(
    tokens: TokenIds, starts: Sequence[int], ends: Sequence[int], keys: Mapping[int, bytes], parent: bytes
) -> list[bytes]:
    """Compute the exact names of consecutive blocks; the first stands on `parent`."""
    first = starts[0] if starts else 0
    raw = tokens[first:].tobytes()
    places = [TOKEN_BYTES * (start - first) for start in (*starts, *ends[-1:])]
    found = [parent]

    def name(numbers: range) -> None:
        for at in numbers:
            found.append(exact_name(found[-1], raw[places[at] : places[at + 1]], keys.get(starts[at], b"")))

    under_keys = bisect_right(starts, max(keys)) if keys else 0
    name(range(under_keys))
    for page in _pages(raw, places[under_keys:]):  # a faster loop, since a long prompt has a thousand
        found.append(hashlib.sha256(_EXACT + found[-1] + page).digest())
    name(range(len(found) - 1, len(starts)))
    return found[1:]


def _pages(raw: bytes, places: Sequence[int]) -> tuple[bytes, ...]:
    """Return, for all blocks except the last, the bytes that an exact name hashes after the parent's name. Return
    nothing if they are not equally long."""
    count = len(places) - 2
    if count < 1:
        return ()
    start, end, size = places[0], places[-2], places[1] - places[0]
    if [*places[:-1]] != [*range(start, end + 1, size)]:
        return ()
    framed = np.zeros((count, 8 + size + len(_NO_KEY)), np.uint8)
    framed[:, :8] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
    framed[:, 8 : 8 + size] = np.frombuffer(raw[start:end], np.uint8).reshape(count, size)
    return struct.unpack(f"{framed.shape[1]}s" * count, framed.tobytes())


def exact_name(parent: bytes, raw: bytes, key: bytes = b"") -> bytes:
    """Exact name of the block that follows `parent`. `raw` are its token ids as bytes, `key` is the extra key of a
    region that starts there. Equals `digest("keepwarm exact block 1", parent, raw, key)`, without its loop."""
    behind = len(key).to_bytes(8, "little") + key if key else _NO_KEY
    return hashlib.sha256(b"".join((_EXACT, parent, len(raw).to_bytes(8, "little"), raw, behind))).digest()


def lead(tokens: TokenIds, salts: Sequence[bytes] = (), before: bytes = b"") -> bytes:
    """Return the sort key of a block among those that follow the same parent, so that blocks with a common beginning
    are neighbours. It is the tag of the block's salt, so that no block under another salt matches, then its page's
    token ids: those `before` the block, as bytes, and its own. Compare leads with `leading`."""
    return (salts[-1] if salts else b"") + before + tokens.tobytes()


def led(found: bytes, salts: Sequence[bytes]) -> bytes:
    """The token ids in a lead, as bytes."""
    return found[DIGEST_BYTES:] if salts else found


def leading(wanted: bytes, found: bytes, salts: Sequence[bytes] = ()) -> int:
    """How many first tokens two leads have in common; 0 under different salts."""
    head = DIGEST_BYTES if salts else 0
    if wanted[:head] != found[:head]:
        return 0
    return common_length(np.frombuffer(wanted[head:], "<u4"), np.frombuffer(found[head:], "<u4"))


def derived_id(parent: bytes, block: Block) -> bytes:
    """Name of a block whose KV depends on KV that was not `exact`. It is found by its prefix name, never by an exact
    one."""
    return digest("keepwarm derived block 1", parent, block.prefix)


class PrefixNames:
    """Prefix names of one prompt at any position, without building blocks for it. Safe for use from several threads."""

    def __init__(self, tokens: TokenIds, namespace: Namespace, extra_keys: Mapping[int, bytes] | None = None) -> None:
        self._tokens = tokens
        self.namespace = namespace
        self.keys = _region_keys(extra_keys)
        self._extra = sorted(self.keys.items())
        self._known: dict[int, bytes] = {0: namespace.prefix_root}
        self._lock = threading.Lock()
        # The state of the hash at some positions, which rise; the first is 0.
        self._states: list[tuple[int, hashlib._Hash]] = [(0, hashlib.sha256(namespace.prefix_root))]

    def at(self, position: int) -> bytes:
        """The name of everything left of `position`, which is the name of the block that ends there."""
        found = self._known.get(position)
        if found is None:
            with self._lock:
                found = self._known[position] = self._up_to(position).digest()
        return found

    def of(self, tokens: TokenIds, common: int = 0) -> PrefixNames:
        """The names of another prompt under the same extra keys. Its first `common` tokens are this one's, too."""
        other = PrefixNames(tokens, self.namespace, self.keys)
        with self._lock:
            other._known |= {at: name for at, name in self._known.items() if at <= common}
            other._states = [(at, state) for at, state in self._states if at <= common]
        return other

    def opening(self, position: int) -> bytes:
        """The parent name of a block that begins at `position`. It includes the key of a region that starts there, so a
        lookup without the key does not find the block."""
        key = self.keys.get(position)
        if key is None:
            return self.at(position)
        with self._lock:
            stream = self._up_to(position).copy()
        stream.update(_EXTRA + key)
        return stream.digest()

    def salts(self, position: int) -> tuple[bytes, ...]:
        """Tags of the salts that a block beginning at `position` is under."""
        return tuple(salt_tag(key) for start, key in self._extra if start <= position)

    def _up_to(self, position: int) -> hashlib._Hash:
        """Return the hash state of everything left of a position. The caller must not change it."""
        number = bisect_right(self._states, position, key=_POSITION)
        at, nearest = self._states[number - 1]
        if at == position:
            return nearest
        state = nearest.copy()
        for start, key in self._extra:
            if at <= start < position:
                state.update(self._tokens[at:start].tobytes() + _EXTRA + key)
                at = start
        state.update(self._tokens[at:position].tobytes())
        self._states.insert(number, (position, state))
        if len(self._states) > _STATES:
            del self._states[1 if number > 1 else 2]
        return state
