"""A compiled prompt with its blocks' names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.blocks import Chain, PrefixNames, TokenIds, chain
from keepwarm.core.identity import Namespace, salt_tag
from keepwarm.core.naming import Naming
from keepwarm.core.schedule import Grid
from keepwarm.linker.link import Blending
from keepwarm.runtime.arena.held import Held


@dataclass(frozen=True)
class Linked:
    """A compiled prompt with its blocks and names under one namespace."""

    prompt: CompiledPrompt
    blocks: Chain
    names: PrefixNames
    namespace: Namespace
    grid: Grid
    epoch: int  # of the store, when the request began
    blending: Blending | None = None  # with reuse="chunks"
    stateful: bool = False  # for a model with recurrent state

    @classmethod
    def of(
        cls,
        prompt: CompiledPrompt,
        namespace: Namespace,
        grid: Grid,
        epoch: int,
        naming: Naming,
        *,
        stateful: bool = False,
    ) -> Linked:
        keys, cuts = _cut(prompt, prompt.tokens, grid)
        names = PrefixNames(prompt.tokens, namespace, prompt.extra_keys)
        blocks = naming.chain(prompt.tokens, cuts, namespace, keys, names)
        return cls(prompt, blocks, names, namespace, grid, epoch, stateful=stateful)

    @property
    def tags(self) -> tuple[bytes, ...]:
        """Tags of the prompt's salts."""
        return tuple(salt_tag(key) for key in self.prompt.extra_keys.values())

    @property
    def held(self) -> Held:
        """What an arena holds when it has the whole prompt."""
        return self.held_of(self.prompt.tokens)

    def blocks_of(self, tokens: TokenIds, also: int | None = None) -> Chain:
        """Return the blocks of a part of the prompt, or of the prompt and what follows it; `also` is one more end."""
        keys, cuts = _cut(self.prompt, tokens, self.grid, also)
        known = sum(takewhile(bool, map(eq, self.blocks.ends, cuts)))
        return chain(tokens, cuts, self.namespace, keys, self.blocks.exact[:known], self.names_of(tokens))

    def names_of(self, tokens: TokenIds) -> PrefixNames:
        """Return the prefix names of a part of the prompt, or of the prompt and what follows it."""
        return self.names.of(tokens, min(len(tokens), len(self.prompt.tokens)))

    def held_of(self, tokens: TokenIds) -> Held:
        cuts = None if self.grid.inside else tuple(end for end in self.blocks.ends if end <= len(tokens))
        return Held(self.namespace.exact_root, self.prompt.extra_keys, tokens, cuts)


def _cut(
    prompt: CompiledPrompt, tokens: TokenIds, grid: Grid, also: int | None = None
) -> tuple[dict[int, bytes], tuple[int, ...]]:
    """Return the extra keys and cuts of `tokens`, which share their beginning with the prompt."""
    keys = {at: key for at, key in prompt.extra_keys.items() if at < len(tokens)}
    return keys, grid.cuts(len(tokens), prompt.breakpoints, [*keys] if also is None else [*keys, also])
