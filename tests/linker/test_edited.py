"""What an edited prompt shares with the one it was, behind the edit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.identities import ARITHMETIC, MODEL

from keepwarm.core.blocks import Block, PrefixNames, chain, common_length, token_ids
from keepwarm.core.identity import Namespace
from keepwarm.core.plan import Load, Relocate
from keepwarm.core.ports import BlockRef
from keepwarm.core.repair import RepairRule
from keepwarm.core.schedule import Schedule
from keepwarm.core.spans import Exactness, Reuse
from keepwarm.linker.edited import shared_chunks
from keepwarm.linker.link import Blending, NamedPrompt, link

SPACE = Namespace(MODEL, ARITHMETIC)
GRID = Schedule(300, 1)
PARTS = [np.random.default_rng(number).integers(0, 500, 40 + number).astype(np.uint32) for number in range(8)]


def joined(*parts: int) -> np.ndarray:
    return token_ids(np.concatenate([PARTS[part] for part in parts]))


def shared(tokens: np.ndarray, base: np.ndarray, step: int = 50, least: int = 32) -> list[tuple[int, int, int]]:
    blocks = chain(base, [*range(step, len(base), step), len(base)], SPACE)
    found = shared_chunks(tokens, base, blocks, least)
    for chunk in found:
        source = chunk.opening
        assert np.array_equal(tokens[chunk.start : chunk.end], base[source : source + chunk.end - chunk.start])
        names = [block.exact for block in blocks if block.end > source and block.start < len(chunk.tokens)]
        assert list(chunk.content) == names
        assert not chunk.learn
    return [(chunk.start, chunk.end, chunk.opening) for chunk in found]


def test_what_stands_behind_a_part_that_moved_last_is_found_whole() -> None:
    first, changed = len(PARTS[0]), len(PARTS[1])
    moved = len(joined(2, 3, 4))
    assert shared(joined(0, 2, 3, 4, 5), joined(0, 1, 2, 3, 4)) == [(first, first + moved, first + changed)]


def test_what_is_new_or_only_before_the_edit_is_not_shared() -> None:
    assert shared(joined(0, 1, 2), joined(0, 1, 2, 3)) == []
    assert shared(joined(0, 1, 2, 5), joined(0, 1, 2)) == []
    assert shared(joined(0, 5, 6), joined(0, 1, 2)) == []
    assert shared(joined(0), joined(0)) == []


def test_stretches_that_the_earlier_prompt_holds_twice_are_found_by_what_is_beside_them() -> None:
    base = joined(0, 1, 2, 7, 3, 7)
    tokens = joined(0, 2, 7, 3, 7)
    assert shared(tokens, base) == [(len(PARTS[0]), len(tokens), len(PARTS[0]) + len(PARTS[1]))]


class Stored:
    """An earlier prompt's blocks, as an index knows them."""

    def __init__(self, tokens: np.ndarray, step: int, first: int = 0) -> None:
        self.tokens = tokens
        self.blocks = chain(tokens, [*range(step, len(tokens), step), len(tokens)], SPACE)
        self._refs = {
            block.exact: BlockRef(block.exact, block.prefix, "run", 0, block.start, block.length, "ram")
            for block in self.blocks[first:]
        }

    def find(self, ids: list[bytes]) -> dict[bytes, BlockRef]:
        return {name: self._refs[name] for name in ids if name in self._refs}

    def arrivals(self) -> int:
        return 0

    def arrives(self, block: Block, common: int, since: int | None = None) -> bool:
        return False

    def lookup(self, ids: list[bytes]) -> tuple[BlockRef, ...]:
        found = []
        for name in ids:
            if name not in self._refs:
                break
            found.append(self._refs[name])
        return tuple(found)


def test_a_plan_loads_the_head_moves_the_tail_and_computes_the_edit() -> None:
    stored, tokens = Stored(joined(0, 1, 2, 3, 4), 30), joined(0, 2, 3, 4, 5)
    first, changed, moved = len(PARTS[0]), len(PARTS[1]), len(joined(2, 3, 4))
    blocks = chain(tokens, [30, 60, len(tokens)], SPACE)
    chunks = tuple(shared_chunks(tokens, stored.tokens, stored.blocks, 32))
    blending = Blending(chunks, RepairRule("impact", 0.15), 32)
    names = PrefixNames(tokens, SPACE)
    index: Any = stored
    plan = link(NamedPrompt(tokens, blocks, names, GRID), index, Reuse.CHUNKS, blending=blending)
    assert plan.exactness is Exactness.BLENDED
    assert (plan.prefix_end, plan.blended_from, plan.blended_tokens) == (30, first, moved)
    assert isinstance(plan.spans[0], Load)
    assert [(span.start, span.end) for span in plan.computes] == [(30, first), (first + moved, len(tokens))]
    for span in plan.relocates:
        assert isinstance(span, Relocate)
        assert span.source_start - span.start == changed
        own = [*span.before, *tokens[span.start : span.end].tolist()]
        assert own == stored.tokens[span.ref.start : span.source_start + span.end - span.start].tolist()
    gone: Any = Stored(stored.tokens, 30, first=4)  # a block of the tail is no longer stored
    assert not link(NamedPrompt(tokens, blocks, names, GRID), gone, Reuse.CHUNKS, blending=blending).relocates


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 7), max_size=10), st.lists(st.integers(0, 7), max_size=10), st.integers(7, 90))
def test_stretches_are_equal_rising_and_never_overlap(ours: list[int], theirs: list[int], step: int) -> None:
    tokens, base = joined(0, *ours), joined(0, *theirs)
    reached = common_length(tokens, base)
    for start, end, _ in shared(tokens, base, step):
        assert start >= reached
        assert end - start >= 32
        reached = end
