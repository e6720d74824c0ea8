"""transformers: its own model and `DynamicCache`, and a greedy loop without anything around it.

Kinds of hit: `copied` (a deep copy of the prefilled cache, as its documentation shows, then the suffix), `cropped` (the
one cache, cut back to the prefix: no copy, for one user at a time).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from protocol import Answer, Prompt, Settings, serve, timed
from transformers import AutoModelForCausalLM, DynamicCache


class TransformersPeer:
    hits = ("copied", "cropped")

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype)).eval()
        self.prefilled = DynamicCache(config=self.model.config)
        attention = self.model.config._attn_implementation
        self.about = {"transformers": transformers.__version__, "torch": torch.__version__, "attention": attention}

    def cold(self, prompt: Prompt) -> Answer:
        cache = DynamicCache(config=self.model.config)
        answer = timed(self._tokens(prompt.ids, cache, 1))
        self.prefilled = cache
        self._crop(prompt.prefix)
        return answer

    def hit(self, kind: str, prompt: Prompt, new_tokens: int) -> Answer:
        suffix = prompt.ids[prompt.prefix :]

        def copied() -> Iterator[int]:
            yield from self._tokens(suffix, copy.deepcopy(self.prefilled), new_tokens)

        def cropped() -> Iterator[int]:
            self._crop(prompt.prefix)
            yield from self._tokens(suffix, self.prefilled, new_tokens)

        answer = timed({"copied": copied, "cropped": cropped}[kind]())
        self._crop(prompt.prefix)
        return answer

    def batch(self, prompts: list[dict[str, Any]], new_tokens: int) -> dict[str, Any]:
        """Many requests at once through continuous batching, whose blocks of equal content are shared: seconds until
        the last token, all tokens, each one's time to first token in ms."""
        ids = [prompt["ids"] for prompt in prompts]
        how = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=2, pad_token_id=2)
        started = time.perf_counter()
        found = self.model.generate_batch(ids, how, record_timestamps=True, persistent_manager=True, warmup=False)
        seconds = time.perf_counter() - started
        results = sorted(found.values(), key=lambda result: ids.index(list(result.prompt_ids)))
        ttft = [(result.timestamps[0] - started) * 1e3 if result.timestamps else 0.0 for result in results]
        return {"seconds": seconds, "tokens": [list(r.generated_tokens) for r in results], "ttft": ttft}

    def _crop(self, length: int) -> None:
        if behind := self.prefilled.get_seq_length() - length:
            self.prefilled.crop(-behind)

    @torch.inference_mode()
    def _tokens(self, ids: list[int], cache: DynamicCache, new_tokens: int) -> Iterator[int]:
        for _ in range(new_tokens):
            out = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = int(out.logits[0, -1].argmax())
            yield token
            ids = [token]


if __name__ == "__main__":
    serve(TransformersPeer)
