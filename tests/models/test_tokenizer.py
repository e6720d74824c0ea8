"""The memo gives exactly the ids and offsets of tokenizing the whole text."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.models import tokenizer as module
from keepwarm.models.tokenizer import HFTokenizer, cut_at

PARTS = ["<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<|im_", "end|>", "\n", "\n\n", " ", "a",
         "word", "é", "中", "🙂", "1234", "\t", "don't"]  # fmt: skip
TEXT = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=12).map("".join)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(heads=st.lists(TEXT, min_size=1, max_size=2), tails=st.lists(TEXT, min_size=2, max_size=4))
def test_ids_equal_those_of_the_whole(tokenizer: Any, heads: list[str], tails: list[str]) -> None:
    wrapped = HFTokenizer(tokenizer)
    assert wrapped._memo is not None, "the tokenizer splits at special tokens"
    filler = "<|im_start|>system\n" + "many words " * (module._WORTH // 8)
    for tail in tails:
        for head in heads:
            text = filler + head + tail
            expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = wrapped.encode(text, add_special_tokens=False)
            assert ids == expected["input_ids"]
            assert offsets == expected["offset_mapping"]
    assert len(wrapped._memo._known) >= 1


def test_the_memo_takes_the_head_from_an_earlier_text(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    seen: list[str] = []
    assert wrapped._memo is not None
    whole = wrapped._memo._whole
    wrapped._memo._whole = lambda text: (seen.append(text), whole(text))[1]  # type: ignore[func-returns-value]
    head = "<|im_start|>system\n" + "many words " * 500 + "<|im_end|>\n"
    wrapped.encode(head + "<|im_start|>user\nfirst<|im_end|>", add_special_tokens=False)
    wrapped.encode(head + "<|im_start|>user\nsecond", add_special_tokens=False)
    assert seen[1] == "<|im_start|>user\nsecond"


def test_cut_at_counts_whole_tokens_only() -> None:
    offsets = [(0, 3), (3, 3), (3, 7), (7, 8)]
    assert [cut_at(offsets, char) for char in range(9)] == [0, 0, 0, 2, 2, 2, 2, 3, 4]
