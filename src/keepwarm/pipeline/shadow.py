"""How far blended answers are from cold ones: a sample of them is run again when nothing else runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from keepwarm.core.blocks import TokenIds, token_ids
from keepwarm.runtime.arena.pool import ArenaPool
from keepwarm.runtime.runner import Runner

IDLE_STEP = 256  # tokens that idle work computes at a time: a request waits at most this long


@dataclass(frozen=True, eq=False)
class Shadow:
    """A blended answer to compare with a cold run."""

    tokens: TokenIds  # of the prompt
    answer: tuple[int, ...]
    logits: torch.Tensor  # of the first step, `[vocab]`


def compare(shadow: Shadow, runner: Runner, pool: ArenaPool, wait_turn: Callable[[], None]) -> tuple[float, float]:
    """Run a blended answer's prompt cold and follow the answer. Return the KL divergence of its first token, in nats,
    and the share of its tokens that the cold run would choose too. `wait_turn` is called before each step."""
    tokens, answer = shadow.tokens, shadow.answer
    arena = pool.acquire(None, len(tokens) + len(answer))
    try:
        pool.wait_readers(arena, 0)
        arena.seek(0)
        for at in range(0, len(tokens) - 1, IDLE_STEP):
            wait_turn()
            runner.extend(tokens[at : min(at + IDLE_STEP, len(tokens) - 1)], arena.cache, at)
        same = 0
        for number, said in enumerate(answer):
            wait_turn()
            position = len(tokens) - 1 + number
            token = tokens[-1:] if number == 0 else token_ids([answer[number - 1]])
            cold = runner.step(token, arena.cache, position).float().cpu()
            if number == 0:
                divergence = kl_divergence(cold, shadow.logits)
            same += int(cold.argmax().item() == said)
    finally:
        arena.seek(0)
        pool.release(arena)
    return divergence, same / len(answer)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return KL(reference || other) of the distributions of two rows of logits, in nats."""
    p, q = reference.float().log_softmax(-1), other.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum().clamp_min(0).item())
