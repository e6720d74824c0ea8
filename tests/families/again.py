"""Another process's answers to the prompts of the matrix: `python -m tests.families.again FOLDER TYPE...`. Each type
has a store of its own in the folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.families.examine import PROMPTS, SETTINGS
from tests.helpers.every_model import make
from tests.helpers.letters import letters

from keepwarm import Engine


def answers(model_type: str, store: Path) -> dict[str, Any]:
    found = {}
    with Engine.from_pretrained((make(model_type), letters()), store=store, **SETTINGS) as engine:
        for name, prompt in PROMPTS.items():
            result = engine.generate(segments=prompt, max_new_tokens=4, trace=True)
            found[name] = [result.logits_digest, result.cached_tokens, result.cached_by_tier]
    return found


def main(folder: str, *model_types: str) -> None:
    print(json.dumps({each: answers(each, Path(folder, each)) for each in model_types}))


if __name__ == "__main__":
    main(*sys.argv[1:])
