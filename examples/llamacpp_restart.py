"""llama-cpp-python with its prompts kept on disk: run it twice, and the second run's first answer is quick.

python examples/llamacpp_restart.py MODEL.gguf [STORE]
"""

from __future__ import annotations

import sys
import time

from llama_cpp import Llama

from keepwarm.integrations.llamacpp import KeepwarmCache

MANUAL = "You are the manual of a coffee machine. " + " ".join(
    f"Part {n} is cleaned every {n % 9 + 1} days and costs {n * 7 % 50} crowns." for n in range(60)
)


def main(model: str, store: str = "~/.cache/keepwarm/llamacpp") -> None:
    llm = Llama(model, n_ctx=8192, verbose=False)
    with KeepwarmCache(llm, store=store, max_disk="4GiB") as cache:
        llm.set_cache(cache)
        for question in ("What does part 7 cost?", "How often is part 12 cleaned?"):
            chat = [{"role": "system", "content": MANUAL}, {"role": "user", "content": question}]
            started = time.perf_counter()
            answer = llm.create_chat_completion(chat, max_tokens=12, temperature=0)
            seconds = time.perf_counter() - started
            print(f"{question} -> {answer['choices'][0]['message']['content']!r}")
            print(f"  {cache.cached_tokens} of {cache.prompt_tokens} tokens from the store, {seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
