"""vLLM on the CPU, prefix caching on, compiled unless `eager` is asked for; token ids in, one engine step at a time.

The engine runs in this process, which spares it the way to a second one; it takes the number of threads from
`OMP_NUM_THREADS`. Kind of hit: `prefix cache`, which takes whole blocks: what of the prefix lies behind the last one is
computed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from protocol import Answer, Prompt, Settings, serve, timed

_BLOCK = 128  # tokens; a hit ends on a block, of at most so many, and may take the questions' first few tokens


class VllmPeer:
    hits = ("prefix cache",)

    def __init__(self, settings: Settings) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(Path(settings.work) / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        import torch
        import vllm

        self.vllm = vllm
        eager = bool(settings.options.get("eager"))
        more = {"block_size": settings.options["block"]} if "block" in settings.options else {}
        if "connector" in settings.options:
            from vllm.config import KVTransferConfig

            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KeepwarmConnector",
                kv_connector_module_path="keepwarm.integrations.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=settings.options["connector"],
            )
        self.llm = vllm.LLM(
            settings.model,
            dtype=settings.dtype,
            max_model_len=settings.capacity,
            enforce_eager=eager,
            enable_prefix_caching=True,
            max_num_batched_tokens=settings.capacity,
            max_num_seqs=settings.options.get("sequences", 4),
            **more,
        )
        self.about = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "mode": "eager" if eager else "compiled",
            "block": self.llm.llm_engine.vllm_config.cache_config.block_size,
        }
        self._number = count()

    def cold(self, prompt: Prompt) -> Answer:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        return self._answer(prompt, 1, cached=(0, 0))

    def hit(self, kind: str, prompt: Prompt, new_tokens: int) -> Answer:
        return self._answer(prompt, new_tokens, cached=(prompt.prefix - _BLOCK, prompt.prefix + 8))

    def batch(self, prompts: list[dict[str, Any]], new_tokens: int) -> dict[str, Any]:
        """Many requests at once: seconds until the last token, all tokens, each one's time to first token in ms."""
        engine, how = self.llm.llm_engine, self.vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens)
        self._run({"first": prompts[0]["ids"]}, self.vllm.SamplingParams(temperature=0.0, max_tokens=1))
        started = time.perf_counter()
        names = [str(next(self._number)) for _ in prompts]
        done, first = self._run(dict(zip(names, (prompt["ids"] for prompt in prompts), strict=True)), how)
        seconds = time.perf_counter() - started
        assert not engine.has_unfinished_requests()
        ttft = [(first[name] - started) * 1e3 for name in names]
        return {"seconds": seconds, "tokens": [done[name] for name in names], "ttft": ttft}

    def _run(self, requests: dict[str, list[int]], how: Any) -> tuple[dict[str, list[int]], dict[str, float]]:
        engine, done, first = self.llm.llm_engine, dict[str, list[int]](), dict[str, float]()
        for name, ids in requests.items():
            engine.add_request(name, {"prompt_token_ids": ids}, how)
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id.split("-")[0]
                first.setdefault(name, time.perf_counter())
                done[name] = list(output.outputs[0].token_ids)
        return done, first

    def stored(self, prompt: dict[str, object], new_tokens: int) -> dict[str, object]:
        """A hit that is none of vLLM's own: from the connector's store, whole pages of the prefix."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        asked = Prompt(**prompt)  # type: ignore[arg-type]
        return vars(self._answer(asked, new_tokens, cached=(asked.prefix, asked.prefix + _BLOCK)))

    def _answer(self, prompt: Prompt, new_tokens: int, cached: tuple[int, int]) -> Answer:
        engine, seen = self.llm.llm_engine, 0
        how = self.vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)

        def tokens() -> Iterator[int]:
            nonlocal seen
            engine.add_request(str(next(self._number)), {"prompt_token_ids": prompt.ids}, how)
            given = 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    ids = output.outputs[0].token_ids
                    yield from ids[given:]
                    given, seen = len(ids), output.num_cached_tokens or 0

        answer = timed(tokens())
        if not cached[0] <= seen <= cached[1]:
            raise RuntimeError(f"vLLM took {seen} tokens from its cache, expected {cached[0]} to {cached[1]}")
        return answer

    def close(self) -> bool:
        """End the engine, so that its connector writes what is queued."""
        self.llm.llm_engine.engine_core.shutdown()
        return True


if __name__ == "__main__":
    serve(VllmPeer)
