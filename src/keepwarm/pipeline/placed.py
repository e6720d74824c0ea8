"""A linked prompt in an arena: what of it is in place, and what was computed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.core.plan import LinkPlan
from keepwarm.core.results import Miss
from keepwarm.core.spans import Reuse
from keepwarm.errors import CorruptRun
from keepwarm.pipeline.linked import Linked
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.arena.held import Held
from keepwarm.runtime.arena.states import Snapshot
from keepwarm.runtime.blend.repair import Blended

log = logging.getLogger(__name__)


@dataclass
class Placed:
    """A linked prompt whose stored KV is in an arena, or on its way there."""

    linked: Linked
    reuse: Reuse
    capacity: int
    warming: bool
    overlap: bool  # layers may arrive while earlier ones are in use; `prefill` then handles failures
    arena: Arena
    plan: LinkPlan = field(init=False)
    beside: TokenIds | None = None  # tokens of an arena that begin like the prompt
    miss: Miss | None = None  # why the plan reuses no more
    by_tier: dict[str, int] = field(default_factory=dict)
    blended_by_tier: dict[str, int] = field(default_factory=dict)  # tokens of chunks; not part of `by_tier`
    blended: Blended | None = None  # set once a prompt with chunks is computed
    link_ms: float = 0.0
    load_ms: float = 0.0
    failures: int = 0
    own_states: bool = False  # states behind KV of other arithmetic turned out to have another form
    computed_to: int = 0  # position up to which the engine's own steps have computed the prompt
    generated: Sequence[int] = ()  # the answer, decoded into the arena after the prompt
    largest: bool = False  # of the last token's logits only the largest is asked for
    goes_on: bool = False  # outside the arena: `answered` stores from there what follows the last whole block
    behind: Mapping[int, Snapshot] = field(default_factory=dict)  # snapshots, of which `answered` stores those in it

    @property
    def keeps_tail(self) -> bool:
        """Whether the last step's block is stored, under scheduled arithmetic."""
        return self.warming or self.reuse is Reuse.PREFIX

    def failed(self, error: CorruptRun) -> None:
        """Note that a stored run turned out unusable."""
        log.warning("a stored run cannot be used and is recomputed: %s", error)
        self.failures += 1

    @property
    def wanted(self) -> Held | None:
        """What to look for in arenas."""
        return self.linked.held if self.reuse is not Reuse.OFF else None

    @property
    def run_tokens(self) -> TokenIds:
        """The tokens whose KV the engine's own steps left in the arena: the prompt's, as far as computed, then the
        answer's."""
        prompt = self.linked.prompt.tokens
        if self.computed_to < len(prompt):
            return prompt[: self.computed_to]
        answered = self.arena.length - len(prompt)
        return np.concatenate([prompt, token_ids(self.generated[:answered])]) if answered > 0 else prompt
