"""A real vLLM whose pages are on a late device: the answers are those of vLLM without the connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.helpers.vllm_process import answers, ask, cached, ids, start, whole

HEAD = ids(640, 1)
LONG = ids(3000, 5)
PROMPTS = [HEAD + ids(count, 100 + count) for count in (5, 31, 33, 300)]
MANY = [HEAD + ids(40, 300 + number) for number in range(6)]
FEW_PAGES = {"num_gpu_blocks_override": 160, "max_num_batched_tokens": 1536, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def tiny(saved: Callable[..., Path]) -> Path:
    return saved("llama", hidden_size=128, head_dim=32, max_position_embeddings=4096)


def test_answers_are_those_of_vllm_alone(tiny: Path, tmp_path: Path) -> None:
    """Prompts computed in steps, preempted and aborted ones, hits while others are answered."""
    store = {"store": str(tmp_path / "store"), "max_disk": "1GiB", "max_ram": 0}
    asked = ask(PROMPTS), ask([LONG]), ask(MANY, max_tokens=40, together=True)
    alone = start(tiny, None, *asked, enable_prefix_caching=False)
    steps = (*asked, {"abort": ids(2000, 3)}, {"sleep": 3})
    first = start(tiny, store, *steps, late=True, enable_prefix_caching=False, **FEW_PAGES)
    again = start(tiny, store, *steps, late=True, **FEW_PAGES)
    for found in (first, again):
        assert [answers(each) for each in found[:3]] == [answers(each) for each in alone]
    assert cached(again[0]) == [whole(len(prompt)) for prompt in PROMPTS]
    assert cached(again[1]) == [whole(len(LONG))]
    assert min(cached(again[2])) >= len(HEAD)
