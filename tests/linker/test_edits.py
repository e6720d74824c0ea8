"""The stress script of edited conversations, for a moment. See tests/stress/edits.py for the real thing."""

from __future__ import annotations

import pytest
from tests.stress.edits import main


@pytest.mark.parametrize("seed", [1, 2])
def test_reused_kv_belongs_to_the_tokens_it_is_used_for(seed: int) -> None:
    figures = main(["--edits", "60", "--seed", str(seed), "--tokenizer", "smollm2"])
    assert figures["reused_tokens"] > 0.2 * figures["tokens"]
    assert figures["as_generated"] > 5
    assert figures["seams_that_differed"] == 0
