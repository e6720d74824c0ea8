"""The stages of a request in the pipeline: checked and compiled, then opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers.cache_utils import Cache

from keepwarm.compiler.segment import CompiledPrompt
from keepwarm.core.blocks import TokenIds
from keepwarm.core.plan import LinkPlan
from keepwarm.core.request import Decoding, PromptArgs
from keepwarm.core.results import Generation, Miss
from keepwarm.core.spans import Reuse
from keepwarm.core.tools import ToolCall
from keepwarm.pipeline.placed import Placed
from keepwarm.runtime.constrain import Constraint
from keepwarm.runtime.execute import Times


@dataclass(frozen=True)
class Prepared:
    """A request that is checked and compiled."""

    compiled: CompiledPrompt
    decoding: Decoding
    reuse: Reuse
    times: Times
    epoch: int  # of the store, when the request began
    constraint: Constraint | None = None
    bases: tuple[PromptArgs, ...] = ()
    predicted: TokenIds | None = None  # what the answer will mostly repeat, by the request
    parse: Callable[[str], list[ToolCall]] | None = None  # finds calls in the answer
    on_result: Callable[[Generation], None] = lambda result: None  # called once, before the answer's last piece

    @property
    def largest(self) -> bool:
        """Whether only the largest logit of each token is asked for."""
        return self.constraint is None and self.decoding.takes_largest


@dataclass(frozen=True)
class Opened:
    """A request under way: what to compute, and the cache to compute it in."""

    placed: Placed | None  # None: it runs without the store, with `bare`
    bare: tuple[LinkPlan, Cache] | None
    uncached: Miss | None  # why it runs without the store

    @property
    def miss(self) -> Miss | None:
        return self.placed.miss if self.placed else self.uncached

    @property
    def plan(self) -> LinkPlan:
        return self.bare[0] if self.bare else self._there.plan

    @property
    def cache(self) -> Cache:
        return self.bare[1] if self.bare else self._there.arena.cache

    @property
    def _there(self) -> Placed:
        assert self.placed is not None
        return self.placed

    @property
    def by_tier(self) -> dict[str, int]:
        return self.placed.by_tier if self.placed else {}

    @property
    def all_by_tier(self) -> dict[str, int]:
        """Tokens reused, by tier, including blended ones."""
        moved = self.placed.blended_by_tier if self.placed else {}
        return {tier: self.by_tier.get(tier, 0) + moved.get(tier, 0) for tier in {**self.by_tier, **moved}}
