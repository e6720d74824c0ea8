"""What an answer is made of when its prompt is computed."""

from __future__ import annotations

import hashlib
import logging
from functools import partial

from keepwarm.core.blocks import TokenIds, common_length, token_ids
from keepwarm.core.drafts import Drafter
from keepwarm.core.ports import BlockIndex, Tokenizer
from keepwarm.core.schedule import Pages
from keepwarm.core.spans import Reuse
from keepwarm.linker.recall import recalled
from keepwarm.pipeline.placed import Placed
from keepwarm.pipeline.prepared import Opened, Prepared
from keepwarm.runtime.execute import Answer
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.sampling import Sampler, TextStream

log = logging.getLogger(__name__)


def new_answer(
    prepared: Prepared,
    opened: Opened,
    runner: Runner,
    tokenizer: Tokenizer,
    ends: frozenset[int],
    draft_tokens: int,
    index: BlockIndex,
) -> Answer:
    """Return a request's answer, which is empty so far. `ends` are the tokens that end it. At most `draft_tokens`
    tokens are drafted for a step; none where rows are not invariant, or where a state has no way back. `index` knows
    what is stored."""
    decoding, tokens = prepared.decoding, prepared.compiled.tokens
    drafter, placed = None, opened.placed
    if draft_tokens > 0 and runner.is_invariant and runner.port.is_host and placed and not placed.arena.states:
        followed = partial(_followed, prepared, placed, index)
        drafter = Drafter(tokens, decoding.max_new_tokens, draft_tokens, followed)
    return Answer(
        Sampler(decoding, tokens, runner.port, prepared.constraint, ends),
        TextStream(tokenizer, decoding.stop_strings, decoding.min_tokens),
        decoding.max_new_tokens,
        ends,
        prepared.times,
        hashlib.sha256() if decoding.trace else None,
        decoding.logprobs,
        prepared.parse,
        as_generated=prepared.compiled.match.as_generated,
        on_result=prepared.on_result,
        largest=prepared.largest,
        drafter=drafter,
    )


def _followed(prepared: Prepared, placed: Placed, index: BlockIndex, most: int) -> TokenIds:
    """Return at most `most` tokens of what the answer will perhaps be: of the request's prediction, or else, if it may
    reuse anything, of what followed the prompt before, in an arena or in the store."""
    linked, prompt, beside = placed.linked, prepared.compiled.tokens, placed.beside
    if prepared.predicted is not None:
        return prepared.predicted[:most]
    if prepared.reuse is Reuse.OFF or not isinstance(linked.grid, Pages):
        return token_ids([])
    if beside is not None and len(beside) > len(prompt) and common_length(beside, prompt) == len(prompt):
        return beside[len(prompt) : len(prompt) + most]
    try:
        return recalled(prompt, linked.blocks, linked.names, linked.grid.page, index, most)
    except Exception:  # no answer may fail for want of a hint
        log.exception("what followed a prompt cannot be looked up")
        return token_ids([])
