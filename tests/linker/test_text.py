"""Canonical ids are those of the whole text; ids kept as generated are those that were run, and say the same text.

With the real tokenizers: SmolLM2 (GPT-2's splitting), Qwen 3 (normalises to NFC), Llama 3.2 (adds a BOS), Mistral Nemo.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers import tokenizers

from keepwarm.core.blocks import token_ids
from keepwarm.core.texts import Outcome, StoredText
from keepwarm.linker.text import TextPolicy, grown
from keepwarm.models.tokenizer import HFTokenizer

SPECIALS = {
    "smollm2": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "tok-qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>"],
    "tok-llama3.2": ["<|eot_id|>", "<|start_header_id|>", "<|begin_of_text|>"],
    "tok-mistral-nemo": ["[INST]", "[/INST]", "</s>", "<s>"],
}
PARTS = [
    "a",
    " b",
    "word",
    " two words",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "é",
    "e\u0301",
    " \u0301",
    "中文",
    "🙂",
    "👩\u200d👧",
    "1",
    "23",
    "4567",
    "don't",
    "'",
    '{"a b": "c"}',
    "\u00a0",
    "\u2028",
    "ﬁ",
    "\u1100\u1161",
    "<|im_",
    "end|>",
    "[IN",
    "ST]",
]
PROSE = "The clerk of the harbour writes down every ship that comes in and every ship that leaves, "

SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


USUAL, OTHERS = tokenizers.NAMES[:2], tokenizers.NAMES[2:]


@pytest.fixture(params=[*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def named(request: pytest.FixtureRequest) -> tuple[str, HFTokenizer]:
    return request.param, tokenizers.wrapped(request.param)


def drawn(data: st.DataObject, name: str, most: int = 10) -> str:
    part = st.sampled_from(PARTS + SPECIALS[name]) | st.text(max_size=4)
    return "".join(data.draw(st.lists(part, max_size=most)))


def whole(name: str, text: str, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
    found = tokenizers.loaded(name)(text, add_special_tokens=special, return_offsets_mapping=True)
    return found["input_ids"], found["offset_mapping"]


@SETTINGS
@given(data=st.data(), special=st.booleans())
def test_canonical_ids_are_those_of_the_whole_text(
    named: tuple[str, HFTokenizer], data: st.DataObject, special: bool
) -> None:
    name, tokenizer = named
    policy = TextPolicy(tokenizer)
    head = SPECIALS[name][0] + PROSE * 8 + drawn(data, name)
    texts = [head + drawn(data, name) + PROSE * data.draw(st.integers(0, 7)) + drawn(data, name) for _ in range(3)]
    cut = data.draw(st.integers(0, len(texts[0])))
    texts += [texts[0][:cut] + drawn(data, name) + texts[0][cut:], texts[0][:cut], texts[1].strip(), texts[1] * 2]
    for text in texts:
        encoded = policy.compile(text, special=special)
        assert (encoded.ids.tolist(), [tuple(pair) for pair in encoded.offsets.tolist()]) == whole(name, text, special)
    memo = tokenizer._memo
    assert memo is not None
    assert not memo.failed
    assert tokenizer._added is not None


def test_most_of_a_known_text_is_not_tokenized_again(named: tuple[str, HFTokenizer]) -> None:
    name, tokenizer = named
    first = SPECIALS[name][0] + PROSE * 40
    TextPolicy(tokenizer).compile(first, special=True)
    for text, outcome in ((first + "and more", Outcome.EXTEND), (first, Outcome.EXACT), (first[:-9], Outcome.DIVERGE)):
        encoded = TextPolicy(tokenizer).compile(text, special=True)
        assert encoded.match.outcome is outcome
        assert encoded.match.kept > 0.9 * len(encoded.ids)
        assert not encoded.match.as_generated
    assert tokenizer._memo is not None
    assert tokenizer._memo.resyncs >= 3


def wild(name: str, text: str, data: st.DataObject) -> list[int]:
    """Ids that say `text` but are not the tokenizer's own choice: split at random places, as a model may."""
    cuts = sorted({0, len(text), *(data.draw(st.integers(0, len(text))) for _ in range(3))})
    return [i for a, b in pairwise(cuts) for i in whole(name, text[a:b], False)[0]]


def sayable(name: str, text: str) -> str:
    """A text that comes back from its ids: some tokenizers normalise, SmolLM2's drops rare control characters."""
    return said(name, whole(name, text, False)[0])


def said(name: str, ids: Any) -> str:
    text: str = tokenizers.loaded(name).decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


@SETTINGS
@given(data=st.data())
def test_ids_that_were_run_are_kept_and_say_the_text(named: tuple[str, HFTokenizer], data: st.DataObject) -> None:
    name, tokenizer = named
    start = sayable(name, SPECIALS[name][0] + PROSE * 4 + drawn(data, name))
    prompt = TextPolicy(tokenizer).compile(start, special=False)
    answer = wild(name, sayable(name, "Surely. " + drawn(data, name)), data)
    if data.draw(st.booleans()):
        answer = answer[:-1]  # cut short, perhaps inside a character
    ran = grown(StoredText(start, prompt.ids, prompt.offsets), answer, tokenizer)
    assert ran.text == start + said(name, answer)
    assert ran.ids.tolist() == [*prompt.ids.tolist(), *answer]
    assert np.all(np.diff(ran.offsets[:, 1]) >= 0)

    edit = data.draw(st.integers(0, len(ran.text)))
    more = SPECIALS[name][1] + "\n" + drawn(data, name)
    for text in (ran.text + more, ran.text, ran.text[:edit] + more, ran.text[:edit], ran.text.strip() + more):
        encoded = TextPolicy(tokenizer, ran).compile(text, special=False)
        match = encoded.match
        if not match.as_generated:
            assert encoded.ids.tolist() == whole(name, text, False)[0]
            continue
        assert encoded.ids[: match.kept].tolist() == ran.ids[: match.kept].tolist()
        assert said(name, encoded.ids) in (text, sayable(name, text))
        assert match.share >= 0.8
        ends = encoded.offsets[:, 1]
        assert np.all(np.diff(ends) >= 0)
        if text != sayable(name, text):
            continue
        assert ends[-1] == len(text)
        for token in range(0, len(ends), 5):  # the map is right: what is before a token is what its left says
            if token == len(ends) - 1 or encoded.offsets[token + 1, 0] >= ends[token]:
                assert said(name, encoded.ids[: token + 1]) == text[: ends[token]]


def test_what_the_model_wrote_stays_what_it_wrote(named: tuple[str, HFTokenizer]) -> None:
    name, tokenizer = named
    end, start = SPECIALS[name][1], SPECIALS[name][0] + PROSE
    prompt = TextPolicy(tokenizer).compile(start, special=False)
    unusual = [i for letter in "Harbour!" for i in whole(name, letter, False)[0]]
    ran = grown(StoredText(start, prompt.ids, prompt.offsets), unusual, tokenizer)
    text = f"{start}Harbour!{end}\nNext"
    canonical = TextPolicy(tokenizer).compile(text, special=False)
    kept = TextPolicy(tokenizer, ran).compile(text, special=False)
    assert canonical.ids.tolist() == whole(name, text, False)[0]
    assert kept.ids.tolist() != canonical.ids.tolist()
    assert kept.ids[: len(ran.ids)].tolist() == ran.ids.tolist()
    assert (kept.match.outcome, kept.match.as_generated) == (Outcome.EXTEND, True)
    again = TextPolicy(tokenizer, ran).compile(ran.text, special=False)
    assert (again.match.outcome, again.ids.tolist()) == (Outcome.EXACT, ran.ids.tolist())


def test_a_text_that_leaves_too_early_is_tokenized_whole(named: tuple[str, HFTokenizer]) -> None:
    name, tokenizer = named
    start = SPECIALS[name][0] + PROSE * 20
    prompt = TextPolicy(tokenizer).compile(start, special=False)
    ran = grown(StoredText(start, prompt.ids, prompt.offsets), whole(name, "Yes.", False)[0], tokenizer)
    for share, kept in ((0.85, True), (0.75, False)):
        text = start[: int(share * len(start))] + " something else"
        encoded = TextPolicy(tokenizer, ran).compile(text, special=False)
        assert encoded.match.as_generated is kept
        assert TextPolicy(tokenizer, ran, least_share=0.5).compile(text, special=False).match.as_generated
        assert said(name, encoded.ids) == text


def test_a_map_of_another_text_is_never_used(tokenizer: Any) -> None:
    wrapped = HFTokenizer(tokenizer)
    text = "<|im_start|>" + PROSE * 3
    encoded = wrapped.compile(text, special=False)
    other = StoredText(text.replace("ship", "boat"), token_ids(encoded.ids), encoded.offsets)
    found = TextPolicy(wrapped, other).compile(text, special=False)
    assert not found.match.as_generated
    assert found.ids.tolist() == encoded.ids.tolist()
