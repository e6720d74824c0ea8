"""llama.cpp through llama-cpp-python: evaluate, then take the best token, without anything around it.

Kinds of hit: `slot` (the context still holds the prefix; what follows it is dropped), `restored` (the prefix's saved
state is set back into an emptied context, from memory). Flash attention is off, as the library has it: on the CPU it
makes cold runs of thousands of tokens quicker, and hits and decoding slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import llama_cpp
import numpy as np
from protocol import Answer, Prompt, Settings, serve, timed

GGML_TYPE_BF16 = 30  # as in ggml.h; the package names the others only


class LlamacppPeer:
    hits = ("slot", "restored")

    def __init__(self, settings: Settings) -> None:
        kv = settings.options["kv"]
        kind = GGML_TYPE_BF16 if kv == "bf16" else getattr(llama_cpp, f"GGML_TYPE_{kv.upper()}")
        self.llama = llama_cpp.Llama(
            settings.model,
            n_ctx=settings.capacity,
            n_batch=512,
            n_threads=settings.threads,
            n_threads_batch=settings.threads,
            verbose=False,
            type_k=kind,
            type_v=kind,
        )
        self.context = self.llama._ctx.ctx
        self.saved = (ctypes.c_uint8 * 0)()
        system = llama_cpp.llama_print_system_info().decode()
        self.about = {"llama-cpp-python": llama_cpp.__version__, "kv": kv, "system": system.strip()}

    def cold(self, prompt: Prompt) -> Answer:
        self.llama.reset()
        self._cut(0)
        answer = timed(self._tokens(prompt.ids, 1))
        self._cut(prompt.prefix)
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        self.saved = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self.context, self.saved, size, 0) != size:
            raise RuntimeError("llama.cpp did not save its state")
        return answer

    def hit(self, kind: str, prompt: Prompt, new_tokens: int) -> Answer:
        suffix = prompt.ids[prompt.prefix :]
        if kind == "restored":
            self._cut(0)

        def tokens() -> Iterator[int]:
            if kind == "slot":
                self._cut(prompt.prefix)
            elif llama_cpp.llama_state_seq_set_data(self.context, self.saved, len(self.saved), 0) != len(self.saved):
                raise RuntimeError("llama.cpp did not take its state back")
            self.llama.n_tokens = prompt.prefix
            yield from self._tokens(suffix, new_tokens)

        return timed(tokens())

    def _cut(self, length: int) -> None:
        """Keep the first `length` positions."""
        memory = llama_cpp.llama_get_memory(self.context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp did not cut its context back to {length}")

    def _tokens(self, ids: list[int], new_tokens: int) -> Iterator[int]:
        vocabulary = self.llama.n_vocab()
        for _ in range(new_tokens):
            self.llama.eval(ids)
            logits = llama_cpp.llama_get_logits_ith(self.context, -1)
            token = int(np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax())
            yield token
            ids = [token]


if __name__ == "__main__":
    serve(LlamacppPeer)
