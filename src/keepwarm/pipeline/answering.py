"""What an answer is made of when its prompt is computed."""

from __future__ import annotations

import hashlib

from keepwarm.core.drafts import Drafter
from keepwarm.core.ports import Tokenizer
from keepwarm.pipeline.prepared import Opened, Prepared
from keepwarm.runtime.execute import Answer
from keepwarm.runtime.runner import Runner
from keepwarm.runtime.sampling import Sampler, TextStream


def new_answer(
    prepared: Prepared, opened: Opened, runner: Runner, tokenizer: Tokenizer, ends: frozenset[int], draft_tokens: int
) -> Answer:
    """Return a request's answer, which is empty so far. `ends` are the tokens that end it. At most `draft_tokens`
    tokens are drafted for a step; none where rows are not invariant, or where a state has no way back."""
    decoding, tokens = prepared.decoding, prepared.compiled.tokens
    takes_back = opened.placed is not None and not opened.placed.arena.states
    has_drafts = draft_tokens > 0 and takes_back and runner.is_invariant and runner.port.is_host
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
        drafter=Drafter(tokens, decoding.max_new_tokens, draft_tokens) if has_drafts else None,
    )
