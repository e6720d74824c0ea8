"""Keepwarm: `Engine.generate` on chat messages, so with rendering, tokenizing, lookup and verification in the clock.

Kinds of hit: `ram` (KV in the RAM tier only), `device` (KV in an arena), `runner` (no request at all: the bare forward
pass over the suffix with the KV in place, then bare steps). It also makes the prompts and measures the machine.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from protocol import Answer, Prompt, Settings, serve, timed

from keepwarm import Batcher, Engine
from keepwarm.core.blocks import token_ids
from keepwarm.core.request import Request
from keepwarm.core.results import Generation
from keepwarm.core.schedule import PAGE_TOKENS

_READ = 512 << 20  # bytes; far more than any cache holds
_SIDE = 1536  # of the multiplied matrices
_LONG = 0.7  # seconds
_ALIKE = 8  # tokens behind the prefix that two prompts may have in common: the template's, and a first word


class KeepwarmPeer:
    hits = ("ram", "device", "runner")

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._store = tempfile.TemporaryDirectory(dir=settings.work)
        self.engine = Engine.from_pretrained(settings.model, dtype=settings.dtype, store=self._store.name)
        model = self.engine.pipeline.model
        runner = model.runner
        embedding = model.model.get_output_embeddings().weight.numel()
        heads = model.model.config.num_attention_heads
        self.about = {
            "torch": torch.__version__,
            "kernels": "lean" if runner.lean is not None else runner.attention or "the model's own",
            "weight_bytes": sum(p.numel() * p.element_size() for p in model.model.parameters()),
            "kv_bytes_per_token": model.geometry.bytes_per_token,
            # multiplications: per token in the layers, in the head, and per token and token seen in attention
            "body": sum(p.numel() for p in model.model.parameters()) - embedding,
            "head": embedding,
            "attention": 4 * heads * model.geometry.layers[0].key_dim * len(model.geometry.layers),
        }

    def cold(self, prompt: Prompt) -> Answer:
        result = self._generate(prompt, 1, reuse="off")
        if result.cached_tokens:
            raise RuntimeError("a cold request took something from the cache")
        self.engine.generate(messages=prompt.messages, max_new_tokens=1)  # stores the prefix, if need be
        self.engine.flush()
        return _answer(result)

    def hit(self, kind: str, prompt: Prompt, new_tokens: int) -> Answer:
        engine = self.engine
        engine.pipeline.pool.forget()
        if kind == "runner":
            return self._bare(prompt, new_tokens)
        if kind == "device":  # what comes from disk stays in an arena
            engine.pipeline.archive.clear_ram()
            engine.generate(messages=[prompt.messages[0], {"role": "user", "content": "."}], max_new_tokens=1)
            engine.flush()
        result = self._generate(prompt, new_tokens)
        engine.flush()
        near, reused = result.cached_by_tier.get(kind, 0), result.cached_tokens - prompt.prefix
        if near <= prompt.prefix - PAGE_TOKENS or not 0 <= reused <= _ALIKE:  # the last page may lie in another tier
            raise RuntimeError(f"wanted {prompt.prefix} tokens from {kind}, got {result.cached_by_tier}")
        return _answer(result)

    def _generate(self, prompt: Prompt, new_tokens: int, reuse: str | None = None) -> Generation:
        result = self.engine.generate(messages=prompt.messages, max_new_tokens=new_tokens, reuse=reuse)
        if result.prompt_tokens != len(prompt.ids):
            raise RuntimeError(f"the prompt has {result.prompt_tokens} tokens, the others get {len(prompt.ids)}")
        return result

    def _bare(self, prompt: Prompt, new_tokens: int) -> Answer:
        engine = self.engine
        compiled = engine.pipeline.prompts.compile(Request(messages=prompt.messages), new_tokens)
        runner = engine.pipeline.model.runner
        length = len(compiled.tokens)
        inside = engine.pipeline
        with inside.lease(inside.linked(compiled), inside.config.reuse, length + new_tokens) as placed:
            (span,) = placed.plan.computes
            placed.arena.materialize()
            cache = placed.arena.cache

            def tokens() -> Iterator[int]:
                logits = runner.step(compiled.tokens[span.start :], cache, span.start)
                for position in range(length, length + new_tokens):
                    yield (token := int(logits.argmax()))
                    if position < length + new_tokens - 1:
                        logits = runner.step(token_ids([token]), cache, position)

            return timed(tokens())

    def batch(self, prompts: list[dict[str, Any]], new_tokens: int) -> dict[str, Any]:
        """Many requests at once: seconds until the last token, all tokens, each one's time to first token in ms."""
        self.engine.generate(messages=prompts[0]["messages"], max_new_tokens=1)
        self.engine.flush()
        with Batcher(self.engine, max_batch=len(prompts)) as batcher:
            started = time.perf_counter()
            tickets = [batcher.submit(messages=prompt["messages"], max_new_tokens=new_tokens) for prompt in prompts]
            results = [ticket.result() for ticket in tickets]
            seconds = time.perf_counter() - started
        tokens = [list(result.token_ids) for result in results]
        return {"seconds": seconds, "tokens": tokens, "ttft": [result.ttft_ms for result in results]}

    def prompts(self, chats: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
        """The chats as `Prompt`s: token ids as everyone gets them, and where the system prompt ends."""
        made = [(chat, self.engine.pipeline.prompts.compile(Request(messages=chat), 1)) for chat in chats]
        return [
            {"messages": chat, "ids": compiled.tokens.tolist(), "prefix": compiled.breakpoints[0].position}
            for chat, compiled in made
        ]

    def machine(self) -> dict[str, float]:
        """Bytes read and floating-point operations done per second, all threads: the best of five, and the operations
        also over as long as a cold prompt takes, since a processor at work for long is slower than a rested one."""
        memory = mmap.mmap(-1, _READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        one, other = torch.frombuffer(memory, dtype=torch.float32).fill_(1).chunk(2)
        square = torch.ones(_SIDE, _SIDE, dtype=self.engine.pipeline.model.model.dtype)
        read = min(_seconds(lambda: one @ other) for _ in range(5))
        product = min(_seconds(lambda: square @ square) for _ in range(5))
        begun, products = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begun) < _LONG:
            square @ square
            products += 1
        each = 2 * _SIDE**3
        return {
            "bytes_per_second": _READ / read,
            "operations_per_second": each / product,
            "sustained_per_second": each * products / elapsed,
        }


def _answer(result: Generation) -> Answer:
    return Answer(list(result.token_ids), result.ttft_ms, result.total_ms)


def _seconds(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    serve(KeepwarmPeer)
