"""mlx-lm with its prompts kept on disk: run it twice, and the second run's first answer is quick.

python examples/mlx_restart.py MODEL [STORE]
"""

from __future__ import annotations

import sys
import time

from mlx_lm import load, stream_generate
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.integrations.mlx import KeepwarmPromptCache, Loaded

MANUAL = "You are the manual of a coffee machine. " + " ".join(
    f"Part {n} is cleaned every {n % 9 + 1} days and costs {n * 7 % 50} crowns." for n in range(60)
)


def main(path: str, store: str = "~/.cache/keepwarm/mlx") -> None:
    model, tokenizer = load(path)
    loaded = Loaded(model, path)
    with KeepwarmPromptCache(loaded, store=store, max_disk="4GiB") as prompts:
        for question in ("What does part 7 cost?", "How often is part 12 cleaned?"):
            chat = [{"role": "system", "content": MANUAL}, {"role": "user", "content": question}]
            tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            started = time.perf_counter()
            cache, rest = prompts.fetch_nearest_cache(loaded.key, tokens)
            cache = cache if cache is not None else make_prompt_cache(model)
            answer = [*stream_generate(model, tokenizer, rest, max_tokens=12, prompt_cache=cache)]
            prompts.insert_cache(loaded.key, [*tokens, *(part.token for part in answer)], cache)
            seconds = time.perf_counter() - started
            print(f"{question} -> {''.join(part.text for part in answer)!r}")
            print(f"  {len(tokens) - len(rest)} of {len(tokens)} tokens were kept, {seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
