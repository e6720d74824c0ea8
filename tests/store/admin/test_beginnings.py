"""Stored runs as a tree of shared beginnings: it holds what was stored, and parts where prompts part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.core.blocks import TokenIds, chain, token_ids
from keepwarm.core.geometry import KVGeometry, LayerGeometry
from keepwarm.core.identity import salt_key
from keepwarm.core.schedule import Pages
from keepwarm.store import Archive
from keepwarm.store.admin.beginnings import Stretch, latest
from keepwarm.testing.kv import MemoryKV, namespace

GRID = Pages(2048, page=4)
TINY = KVGeometry((LayerGeometry(1, 1, 1),), "float16")


def put(archive: Archive, tokens: TokenIds, salt: str = "") -> None:
    """Store of a prompt what is not."""
    keys = {0: salt_key(salt)} if salt else {}
    blocks = chain(tokens, GRID.cuts(len(tokens)), namespace(), keys)
    found = len(archive.lookup([block.exact for block in blocks]))
    archive.put(MemoryKV(TINY, len(tokens)), blocks[found:], namespace())
    archive.flush()


def tree(archive: Archive) -> list[Stretch]:
    return archive.contents.beginnings(archive.contents.tree())


def paths(found: list[Stretch]) -> dict[str, list[int]]:
    """The tokens from the beginning to each stretch's end."""
    told: dict[str, list[int]] = {}
    for one in found:
        above = told[one.parent] if one.parent is not None else []
        assert len(above) == one.start
        told[one.id] = above + one.tokens.tolist()
    return told


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8)


@pytest.mark.parametrize("on_disk", [False, True])
@settings(max_examples=30, deadline=None)
@given(asked=PROMPTS)
def test_the_tree_is_that_of_the_prompts(
    tmp_path_factory: pytest.TempPathFactory, on_disk: bool, asked: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("store") if on_disk else None
    with Archive.open(folder, max_ram=0 if on_disk else 1 << 20, max_disk=1 << 30) as archive:
        for prompt in asked:
            put(archive, token_ids(prompt))
        found = tree(archive)
        told = paths(found)
        assert len({one.id for one in found}) == len(found)
        for prompt in asked:
            assert any(path[: len(prompt)] == prompt for path in told.values())  # each is in it, to its end
        for one in found:
            assert any(told[one.id] == prompt[: one.end] for prompt in asked)
            below = [other for other in found if other.parent == one.id]
            assert len({int(other.tokens[0]) for other in below}) == len(below)  # they part at their first token
            assert one.prompts == (sum(other.prompts for other in below) or 1)
            first = one.runs[0].entry
            assert first.start <= one.start
            assert one.end <= first.start + first.tokens
        total = sum(node.entry.bytes for node in archive.contents.tree())
        assert abs(sum(one.nbytes for one in found) - total) <= len(found)


def test_prompts_that_part_inside_a_page_part_at_the_token(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 30) as archive:
        for last in ([7, 7, 7], [8, 8], [9]):
            put(archive, token_ids([1, 2, 3, 4, 5, *last]))
        found = tree(archive)
    assert [(one.start, one.tokens.tolist(), one.prompts) for one in found] == [
        (0, [1, 2, 3, 4, 5], 3),
        (5, [7, 7, 7], 1),
        (5, [8, 8], 1),
        (5, [9], 1),
    ]
    assert len(found[0].runs) == 3


def test_what_is_under_other_salts_is_never_shared() -> None:
    with Archive.open(None, max_ram=1 << 20, max_disk=0) as archive:
        for salt in ("", "one", "other", "one"):
            put(archive, token_ids([1, 2, 3, 4, 5]), salt)
        found = tree(archive)
    assert [one.prompts for one in found] == [1, 1, 1]
    assert len({one.runs[0].salts for one in found}) == 3


def test_a_deep_conversation_and_the_latest_of_it() -> None:
    blocks = chain(token_ids(np.arange(1200)), range(1, 1200), namespace())
    with Archive.open(None, max_ram=1 << 24, max_disk=0) as archive:
        for block in blocks:
            archive.put(MemoryKV(TINY, 1200), [block], namespace())
            if block.end % 32 == 0:
                archive.flush()
        archive.flush()
        nodes = {node.entry.id: node for node in archive.contents.tree()}
        assert len(tree(archive)) == 1199
        assert len(archive.contents.beginnings(latest(nodes, 5000))) == 1199
        some = latest(nodes, 10)
        begins = archive.contents.beginnings(some)
    assert [node.entry.end for node in some] == [*range(1199, 1189, -1)]  # its end, where one goes on
    assert len(begins) == 10
    assert begins[0].parent is None
    assert begins[0].start == some[-1].entry.start


def test_what_is_cut_goes_by_the_use_that_is_told() -> None:
    """Not by the true one, nor by the order in which the runs come, which is that of the true one."""
    with Archive.open(None, max_ram=1 << 20, max_disk=0) as archive:
        for first in (1, 10, 20):
            put(archive, token_ids(range(first, first + 8)))
        nodes = {node.entry.id: node for node in archive.contents.tree()}
    one = sorted(nodes)
    told = {run: float(turn) for turn, run in enumerate(one)}
    for order in (nodes, dict(reversed(nodes.items()))):
        assert [node.entry.id for node in latest(order, 1, lambda node: told[node.entry.id])] == one[-1:]
        assert [node.entry.id for node in latest(order, 1, lambda node: 1.0)] == one[:1]
