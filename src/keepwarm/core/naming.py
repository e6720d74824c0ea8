"""Names of prompts' blocks. A prompt that begins like a recent one reuses its names and computes only the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepwarm.core.blocks import Chain, PrefixNames, TokenIds, chain, common_length
from keepwarm.core.identity import Namespace

REMEMBERED = 8  # prompts; each of their blocks takes about 70 bytes
_FEW = 16  # with fewer blocks, naming them is faster than a lookup


@dataclass(frozen=True, eq=False)
class _Named:
    namespace: Namespace
    keys: Mapping[int, bytes]
    tokens: TokenIds
    cuts: tuple[int, ...]
    exact: Sequence[bytes]

    def leading(self, other: _Named) -> int:
        """How many blocks the other one shares. Under other extra keys 0, so timing does not reveal their prompts."""
        roots = [(each.namespace.exact_root, each.namespace.prefix_root) for each in (self, other)]
        alike = self.keys == other.keys and roots[0] == roots[1]
        common = common_length(self.tokens, other.tokens) if alike else 0
        agreed, size = 0, min(len(self.cuts), len(other.cuts))
        while agreed < size:  # the first `agreed` blocks are the same
            middle = (agreed + size + 1) // 2
            ends = self.cuts[agreed:middle]
            if ends[-1] <= common and ends == other.cuts[agreed:middle]:
                agreed = middle
            else:
                size = middle - 1
        return agreed


class Naming:
    """Names the blocks of prompts. Safe for use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: deque[_Named] = deque(maxlen=REMEMBERED)
        self._epoch = 0

    def chain(
        self,
        tokens: TokenIds,
        cuts: Sequence[int],
        namespace: Namespace,
        extra_keys: Mapping[int, bytes],
        names: PrefixNames | None = None,
    ) -> Chain:
        """See `core.blocks.chain`."""
        if len(cuts) < _FEW:
            return chain(tokens, cuts, namespace, extra_keys, names=names)
        wanted = _Named(namespace, dict(extra_keys), tokens, tuple(cuts), ())
        with self._lock:
            named, epoch = [*self._named], self._epoch
        counts = [each.leading(wanted) for each in named]
        most = max(counts, default=0)
        start = named[counts.index(most)].exact[:most] if most else ()
        blocks = chain(tokens, wanted.cuts, namespace, extra_keys, start, names)
        with self._lock:
            if epoch == self._epoch:
                if most and most == len(named[counts.index(most)].exact):  # it continues the whole of that prompt
                    self._named = deque(
                        (each for each in self._named if each is not named[counts.index(most)]), REMEMBERED
                    )
                self._named.append(_Named(namespace, wanted.keys, tokens, wanted.cuts, blocks.exact))
        return blocks

    def forget(self) -> None:
        """Forget all prompts, since a salt was purged."""
        with self._lock:
            self._named.clear()
            self._epoch += 1
