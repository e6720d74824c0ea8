"""The memo gives exactly the ids and offsets of tokenizing the whole text."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import token_ids
from keepwarm.errors import PromptTooLong
from keepwarm.models import tokenizer as module
from keepwarm.models.shortest import Shortest
from keepwarm.models.tokenizer import Encoded, HFTokenizer

PARTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_start|>user\n",
    "<|endoftext|>",
    "<|im_",
    "end|>",
    "\n",
    "\n\n",
    " ",
    "a",
    "word",
    " two words",
    "é",
    "e\u0301",
    "中",
    "🙂",
    "1234",
    "\t",
    "don't",
    "'",
    "}\n",
    '{"a b": "c"}',
]
TEXT = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=12).map("".join)


def whole(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return expected["input_ids"], expected["offset_mapping"]


def as_lists(encoded: Encoded) -> tuple[list[int], list[tuple[int, int]]]:
    return encoded.ids.tolist(), [(a, b) for a, b in encoded.offsets.tolist()]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(heads=st.lists(TEXT, min_size=1, max_size=2), tails=st.lists(TEXT, min_size=2, max_size=4))
def test_ids_equal_those_of_the_whole(tokenizer: Any, heads: list[str], tails: list[str]) -> None:
    wrapped = HFTokenizer(tokenizer)
    assert wrapped._memo is not None, "the tokenizer splits at special tokens"
    filler = "<|im_start|>system\n" + "many words " * (module._NEAR // 8)
    for tail in tails:
        for head in heads:
            text = filler + head + tail
            assert as_lists(wrapped.compile(text, special=False)) == whole(tokenizer, text)
    assert len(wrapped._memo._known) >= 1


@pytest.mark.parametrize("between", ["<|im_end|>\n", "some words. "])
def test_the_memo_takes_the_head_from_an_earlier_text(tokenizer: Any, between: str) -> None:
    wrapped = HFTokenizer(tokenizer)
    seen: list[str] = []
    assert wrapped._memo is not None
    encode = wrapped._memo._whole
    wrapped._memo._whole = lambda text: (seen.append(text), encode(text))[1]  # type: ignore[func-returns-value]
    head = "<|im_start|>system\n" + "many words " * 500 + between
    wrapped.compile(head + "<|im_start|>user\nfirst<|im_end|>", special=False)
    wrapped.compile(head + "<|im_start|>user\nsecond", special=False)
    assert seen[1].endswith("<|im_start|>user\nsecond")
    assert len(seen[1]) < 400, "a seam and what is new"
    assert (wrapped._memo.resyncs, wrapped._memo.failed) == (1, 0)


def test_a_text_without_special_tokens_is_split_between_words(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    seen: list[str] = []
    assert wrapped._memo is not None
    encode = wrapped._memo._whole
    wrapped._memo._whole = lambda text: (seen.append(text), encode(text))[1]  # type: ignore[func-returns-value]
    head = "many words " * 500 + '{"a": 1}\n\n'
    for tail in ("first", "\n second"):
        assert as_lists(wrapped.compile(head + tail, special=False)) == whole(tokenizer, head + tail)
    assert len(seen[1]) < 100, "a seam and what is new"


def test_a_tokenizer_that_does_not_meet_is_given_whole_texts(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    memo = wrapped._memo
    assert memo is not None
    encode = memo._whole

    def looks_behind(text: str) -> Encoded:
        found = encode(text)
        return found if text.startswith("<|im_start|>system") else Encoded(found.ids[::-1].copy(), found.offsets)

    memo._whole = looks_behind
    head = "<|im_start|>system\n" + "many words and more " * 200
    for tail in ("first", "second", "third"):
        assert as_lists(wrapped.compile(head + tail, special=False)) == whole(tokenizer, head + tail)
    assert (memo.resyncs, memo.failed) == (1, 1)


def without_byte_fallback() -> Any:
    """Words of a small alphabet, each with a `▁` before it; any other character is `<unk>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*"▁abcdefghijklmnopqrstuvwxyz.", "▁a", "▁b"]
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", "<s>", *pieces])}
    made = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("between", ["\u2603", "\u2603 ", "<unk>", "<s>", "<s>\u2603"])
@pytest.mark.parametrize("length", [200, 2000])
def test_a_character_that_nobody_knows_is_no_place_to_split_at(between: str, length: int) -> None:
    """Its id is that of `<unk>`, but nothing was split there: what follows has no `\u2581` of its own."""
    tokenizer = without_byte_fallback()
    wrapped = HFTokenizer(tokenizer)
    assert wrapped._memo is not None
    head = "a b cd " * length + between + "b a bc " * 300
    for tail in ("a.", "b\u2603b", "<unk>b", "cd <s>a"):
        assert as_lists(wrapped.compile(head + tail, special=False)) == whole(tokenizer, head + tail)
    assert not wrapped._memo.failed


def test_encode_is_the_tokenizers_own(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    for special in (False, True):
        expected = tokenizer("Hi there", add_special_tokens=special, return_offsets_mapping=True)
        assert wrapped.encode("Hi there", special) == (expected["input_ids"], expected["offset_mapping"])
        assert as_lists(wrapped.compile("Hi there", special=special)) == wrapped.encode("Hi there", special)


def test_truncation_asked_of_the_tokenizer_elsewhere_changes_nothing(tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    wrapped = HFTokenizer(changed)
    expected = wrapped.compile("one two three four", special=False).ids.tolist()
    changed(["one two three four"] * 2, truncation=True, max_length=2, padding="max_length")
    assert wrapped.compile("one two three four", special=False).ids.tolist() == expected


def test_cuts_count_whole_tokens_only() -> None:
    encoded = Encoded(token_ids([5, 6, 7, 8]), np.array([(0, 3), (3, 3), (3, 7), (7, 8)]))
    assert encoded.cuts_at(range(9)) == [0, 0, 0, 2, 2, 2, 2, 3, 4]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    text=st.lists(TEXT | st.sampled_from(["#" * 200, " " * 300, "\U00080000", "\x00\x01", "\ufdfa" * 9])).map("".join)
)
def test_no_text_has_fewer_tokens_than_is_told(tokenizer: Any, text: str) -> None:
    told = Shortest.of(tokenizer.backend_tokenizer)
    assert told is not None
    assert told.count(text) <= len(whole(tokenizer, text)[0])


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer, window=100)
    encode = wrapped._whole
    wrapped._memo._whole = lambda text: pytest.fail("it was tokenized")  # type: ignore[union-attr]
    with pytest.raises(PromptTooLong, match="100"):
        wrapped.compile("a" * 100_000, special=False)
    wrapped._memo._whole = encode  # type: ignore[union-attr]
    with pytest.raises(PromptTooLong) as refused:
        wrapped.compile("7" * 1000, special=False)  # only tokenizing tells
    assert refused.value.length == 1000
    assert len(wrapped.compile("7" * 100, special=False).ids) == 100
    assert wrapped.count("7" * 1000, special=False) == 1000
    theirs = copy.deepcopy(tokenizer)
    wrapped = HFTokenizer(theirs, window=100)
    theirs("7777", truncation=True, max_length=2)  # the setting stays behind
    assert wrapped.count("7" * 1000, special=False) == 1000


def test_nothing_is_told_of_tokenizers_that_drop_or_swallow_text(tokenizer: Any) -> None:
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    def changed() -> Any:
        return copy.deepcopy(tokenizer).backend_tokenizer

    assert Shortest.of(changed()) is not None
    backend = changed()
    backend.model.end_of_word_suffix = "</w>"
    assert Shortest.of(backend) is None
    backend = changed()
    backend.normalizer = normalizers.Strip()
    assert Shortest.of(backend) is None
    backend = changed()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Shortest.of(backend) is None
    backend = changed()
    backend.add_tokens([AddedToken("<greedy>", lstrip=True)])
    assert Shortest.of(backend) is None
