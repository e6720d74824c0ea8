"""transformers' own `model.generate`, with the cache attached.

python examples/attach_generate.py [MODEL_FOLDER]
"""

from __future__ import annotations

import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

import keepwarm
from keepwarm.runtime.demo_model import demo_model

MANUAL = "You are the manual of a coffee machine. " + " ".join(
    f"Part {n} is cleaned every {n % 9 + 1} days and costs {n * 7 % 50} crowns." for n in range(60)
)


def main(folder: str | None = None) -> None:
    path = folder or str(demo_model())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with keepwarm.attach(model, tokenizer) as attached:
        for question in ("What does part 7 cost?", "How often is part 12 cleaned?"):
            chat = [{"role": "system", "content": MANUAL}, {"role": "user", "content": question}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            started = time.perf_counter()
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            seconds = time.perf_counter() - started
            answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            print(f"{question} -> {answer!r}")
            print(f"  {attached.cached_tokens} of {attached.prompt_tokens} tokens reused, {seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
