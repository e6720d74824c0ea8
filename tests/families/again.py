"""Another process's answers to the prompts of the matrix: `python -m tests.families.again TYPE STORE`."""

from __future__ import annotations

import json
import sys

from tests.families.examine import PROMPTS, SETTINGS
from tests.helpers.every_model import make
from tests.helpers.letters import letters

from keepwarm import Engine


def main(model_type: str, store: str) -> None:
    found = {}
    with Engine.from_pretrained((make(model_type), letters()), store=store, **SETTINGS) as engine:
        for name, prompt in PROMPTS.items():
            result = engine.generate(segments=prompt, max_new_tokens=4, trace=True)
            found[name] = [result.logits_digest, result.cached_tokens, result.cached_by_tier]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
