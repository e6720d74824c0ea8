"""Where content is divided: by content alone, and only nearby when it is edited."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import token_ids
from keepwarm.core.chunking import Chunking, Text, content_cuts
from keepwarm.core.repair import RepairRule
from keepwarm.errors import ConfigError


def text_of(words: str) -> tuple[Text, np.ndarray]:
    """One token per character."""
    offsets = np.array([[i, i + 1] for i in range(len(words))], dtype=np.int64).reshape(-1, 2)
    return Text(words, offsets), token_ids([ord(letter) for letter in words])


def chunks_of(chunking: Chunking, words: str) -> list[str]:
    text, tokens = text_of(words)
    return [words[a:b] for a, b in chunking.divide(tokens, 0, len(tokens), text)]


tokens_strategy = st.integers(0, 2**32).map(
    lambda seed: np.random.default_rng(seed).integers(0, 50_000, 1200).astype(np.uint32)
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(tokens=tokens_strategy, at=st.integers(0, 1200), size=st.integers(1, 40), reach=st.sampled_from([8, 32, 64]))
def test_an_insertion_moves_borders_only_nearby(tokens: np.ndarray, at: int, size: int, reach: int) -> None:
    new = np.arange(100_000, 100_000 + size, dtype=np.uint32)
    edited = np.concatenate([tokens[:at], new, tokens[at:]])
    before = content_cuts(token_ids(tokens), reach)
    after = content_cuts(token_ids(edited), reach)
    near = reach + 8
    assert [cut for cut in before if cut < at - near] == [cut for cut in after if cut < at - near]
    assert [cut + size for cut in before if cut > at + near] == [cut for cut in after if cut > at + size + near]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(tokens=tokens_strategy, reach=st.sampled_from([8, 32, 64]))
def test_borders_keep_their_distance(tokens: np.ndarray, reach: int) -> None:
    cuts = content_cuts(token_ids(tokens), reach)
    assert all(b - a > reach for a, b in pairwise(cuts))
    assert 0.4 * len(tokens) < len(cuts) * (2 * reach + 1) < 1.8 * len(tokens)


def test_content_borders_are_the_same_everywhere() -> None:
    tokens = token_ids(np.arange(600) * 7919 % 50_021)
    assert content_cuts(tokens, 32)[:5] == [11, 82, 201, 239, 281]  # what is stored is named by them: never change
    assert all(cut <= 8 for cut in content_cuts(token_ids([5] * 400), 32))  # nothing stands out in what repeats itself
    assert content_cuts(token_ids([]), 32) == content_cuts(token_ids([1]), 32) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    words=st.text(alphabet="ab. \n`#-", max_size=400),
    name=st.sampled_from(["fixed", "semantic", "document", "content"]),
    size=st.integers(4, 40),
    start=st.integers(0, 50),
)
def test_chunks_rise_inside_the_span(words: str, name: str, size: int, start: int) -> None:
    text, tokens = text_of(words)
    start = min(start, len(words))
    if start == len(words):
        return
    chunks = Chunking(name, size, 2, partial=True).divide(tokens, start, len(words), text)
    edges = [edge for chunk in chunks for edge in chunk]
    assert edges == sorted(edges)
    assert all(start <= a < b <= len(words) and b - a >= 2 for a, b in chunks)


def test_fixed_leaves_out_the_last_partial_chunk() -> None:
    text, tokens = text_of("x" * 300)
    assert Chunking("fixed").divide(tokens, 0, 300, text) == ((0, 128), (128, 256))
    assert Chunking("fixed", partial=True).divide(tokens, 0, 300, text) == ((0, 128), (128, 256), (256, 300))
    assert Chunking("fixed", partial=True).divide(tokens, 0, 280, text) == ((0, 128), (128, 256))  # 24 < 32


def test_semantic_follows_paragraphs_sentences_and_code() -> None:
    first, second = "One two three. Four five six.", "Seven eight nine ten eleven."
    code = "```\na = 1\n\nb = 2\n\n```"
    chunking = Chunking("semantic", 40, 8)
    assert chunks_of(chunking, f"{first}\n\n{second}\n\n{code}") == [f"{first}\n\n", f"{second}\n\n", code]
    sentences = " ".join(f"This is sentence number {number}." for number in range(10))
    found = chunks_of(Chunking("semantic", 60, 8), sentences)
    assert "".join(found) == sentences
    assert len(found) > 3
    assert all(part.rstrip().endswith(".") for part in found)


def test_document_separators() -> None:
    parts = [
        "The first text.\n---\n",
        "The second text.\n\f",
        "<document>The third.</document>\n",
        "# The fourth\ntext",
    ]
    assert chunks_of(Chunking("document", 40, 8), "".join(parts)) == parts


def test_without_text() -> None:
    tokens = token_ids(np.arange(600) * 7919 % 50_021)
    assert Chunking("document").divide(tokens, 0, 600, None) == ((0, 600),)
    assert Chunking("semantic", 64).divide(tokens, 0, 600, None) == Chunking("content", 64).divide(tokens, 0, 600, None)


@pytest.mark.parametrize("settings", [{"name": "none"}, {"size": 1}, {"least": 0}, {"least": 129}])
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Chunking(**settings)


def test_rules_are_read_and_written() -> None:
    for text in ("none", "seam:16", "leading:32", "deviation:0.15", "attention:1"):
        assert str(RepairRule.parse(text)) == text
    assert str(RepairRule.parse("seam")) == "seam:16"
    assert RepairRule.parse("leading:0").is_none
