"""Made-up prompts."""

from __future__ import annotations

import torch
from tests.helpers.models import VOCABULARY


def ids(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()
