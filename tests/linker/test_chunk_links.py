"""Chunks in a plan: which stored content is taken, in part or whole, and what never is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.helpers.identities import ARITHMETIC, MODEL

from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.identity import Namespace, salt_key
from keepwarm.core.plan import Compute, LinkPlan, Relocate, Repair
from keepwarm.core.ports import BlockRef
from keepwarm.core.repair import RepairRule
from keepwarm.core.spans import Exactness
from keepwarm.linker.chunk import Chunk, name_chunk, relocations

OPENING = token_ids([1, 2, 3])
PROMPT = token_ids(np.arange(1000, 1300))


class Stored:
    """What is stored, as an index of blocks knows it."""

    def __init__(self, *chunks: Chunk, blocks: int | None = None) -> None:
        self._refs = {
            block.prefix: BlockRef(block.prefix, block.prefix, "run", 0, block.start, block.length, "ram")
            for chunk in chunks
            for block in chunk.blocks[:blocks]
        }

    def find(self, ids: Sequence[bytes]) -> dict[bytes, BlockRef]:
        return {name: self._refs[name] for name in ids if name in self._refs}


@pytest.fixture
def space() -> Namespace:
    return Namespace(MODEL, ARITHMETIC, purpose="chunks")


def named(space: Namespace, start: int, end: int, step: int = 1000, **extra: bytes) -> Chunk:
    chunk = name_chunk(PROMPT, start, end, OPENING, space, {int(at[1:]): key for at, key in extra.items()}, step)
    assert chunk is not None
    return chunk


def spans(chunks: Sequence[Chunk], index: Stored, reached: int = 4, limit: int = 299) -> list[tuple[int, int, int]]:
    found = relocations(chunks, index, reached, limit, 8)  # type: ignore[arg-type]
    return [(span.start, span.end, span.source_start) for span in found]


def test_stored_chunks_are_found_with_gaps(space: Namespace) -> None:
    chunks = [named(space, 150, 220), named(space, 20, 60), named(space, 70, 140)]
    assert spans(chunks, Stored(chunks[0], chunks[1])) == [(20, 60, 3), (150, 220, 3)]
    assert spans(chunks, Stored()) == []


def test_earlier_candidates_are_preferred(space: Namespace) -> None:
    whole, piece, beside = named(space, 20, 100), named(space, 50, 80), named(space, 100, 120)
    assert spans([whole, piece, beside], Stored(whole, piece, beside)) == [(20, 100, 3), (100, 120, 3)]
    assert spans([whole, piece, beside], Stored(piece, beside)) == [(50, 80, 3), (100, 120, 3)]


def test_a_prefix_may_reach_into_a_chunk_and_the_last_token_is_left(space: Namespace) -> None:
    chunk = named(space, 20, 300)
    assert spans([chunk], Stored(chunk), reached=50) == [(50, 299, 33)]
    assert spans([chunk], Stored(chunk), reached=293) == []  # less than the least
    assert spans([chunk], Stored(chunk), reached=300) == []


def test_of_a_long_chunk_the_stored_beginning_is_taken(space: Namespace) -> None:
    chunk = named(space, 20, 120, step=40)
    assert [(block.start, block.end) for block in chunk.blocks] == [(0, 3), (3, 43), (43, 83), (83, 103)]
    assert spans([chunk], Stored(chunk)) == [(20, 60, 3), (60, 100, 43), (100, 120, 83)]
    assert spans([chunk], Stored(chunk, blocks=3)) == [(20, 60, 3), (60, 100, 43)]
    assert spans([chunk], Stored(chunk, blocks=1)) == []


def test_names_know_start_content_salt_and_purpose_and_not_the_place(space: Namespace) -> None:
    again = name_chunk(np.concatenate([PROMPT[5:], PROMPT]), 15, 55, OPENING, space, {}, 1000)
    assert again is not None
    assert named(space, 20, 60).ids == again.ids
    other = name_chunk(PROMPT, 20, 60, token_ids([1, 2, 4]), space, {}, 1000)
    assert other is not None
    plain = chain(again.tokens, [3, 43], Namespace(space.model, space.arithmetic))
    names = {
        named(space, 20, 60).ids[-1],
        other.ids[-1],
        plain[-1].prefix,
        plain[-1].exact,
        *(named(space, 20, 60, p0=salt_key(salt)).ids[-1] for salt in ("a", "b")),
        named(space, 20, 60, p0=salt_key("a"), p10=salt_key("b")).ids[-1],
        named(space, 20, 60, p20=salt_key("a"), p10=salt_key("b")).ids[-1],
    }
    assert len(names) == 8
    assert named(space, 20, 60, p100=salt_key("a")).ids == again.ids  # it stands before the tenant's region
    assert name_chunk(PROMPT, 20, 60, OPENING, space, {30: salt_key("a")}, 1000) is None
    assert named(space, 20, 60, p0=salt_key("a")).blocks[-1].salts


def test_a_plan_with_chunks(space: Namespace) -> None:
    chunk = named(space, 20, 60)
    (moved,) = relocations([chunk], Stored(chunk), 4, 99, 8)  # type: ignore[arg-type]
    plan = LinkPlan(100, (Compute(0, 20), moved, Repair(20, 60, RepairRule("seam", 4)), Compute(60, 100)))
    assert isinstance(moved, Relocate)
    assert plan.exactness is Exactness.BLENDED
    assert (plan.blended_from, plan.blended_tokens, plan.cached_tokens, plan.prefix_end) == (20, 40, 40, 0)
    assert plan.unblended == LinkPlan(20, (Compute(0, 20),))
    assert plan.unblended.exactness is Exactness.EXACT
    assert LinkPlan(100, (Relocate(0, 60, moved.ref, 3), Compute(60, 100))).unblended is None
