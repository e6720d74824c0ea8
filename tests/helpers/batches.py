"""What holds after every batch, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from keepwarm import Batcher, Generation

STEP = 48
SECONDS = 60  # until a test stops waiting


def same(together: Generation, alone: Generation) -> None:
    assert together.logits_digest == alone.logits_digest
    assert together.token_ids == alone.token_ids
    assert together.text == alone.text
    assert together.finish_reason == alone.finish_reason
    assert together.prompt_tokens == alone.prompt_tokens


def nothing_held(batcher: Batcher) -> None:
    batcher.engine.flush()  # pages are held for as long as an answer is being stored from them
    counts = batcher.stats().pages
    assert (counts.referenced, counts.reserved) == (0, 0)
    assert counts.free + counts.cached == counts.capacity


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)
