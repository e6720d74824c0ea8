"""Documents, and an engine that reuses them as chunks."""

from __future__ import annotations

from typing import Any

import torch
from tests.helpers.models import tiny

from keepwarm import Engine

DOCUMENTS = [
    {"title": "Ferry", "text": "The night ferry leaves pier four at 21:40 in summer and at 20:15 in winter. " * 3},
    {"title": "Rye", "text": "Rye is sown in the last third of September, at 130 kilograms per hectare on sand. " * 3},
    {"title": "Clock", "text": "The tower clock was built in 1784 by a gunsmith who had never made a clock. " * 3},
]


ASK = [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": "When does it leave?"}]


OFF = {"max_new_tokens": 6, "trace": True}


def make(tokenizer: Any, family: str = "llama", **settings: Any) -> Engine:
    dtype = settings.pop("dtype", torch.float32)
    model = settings.pop("model", None) or tiny(family, dtype)
    return Engine.from_pretrained(
        (model, tokenizer), **{"reuse": "chunks", "step": 256, "learn_chunks": False} | settings
    )


def ask(engine: Engine, documents: Any = DOCUMENTS, **arguments: Any) -> Any:
    return engine.generate(messages=ASK, documents=documents, **OFF | arguments)
