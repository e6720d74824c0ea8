"""Block names: what they depend on, and that they never change between processes and versions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.helpers.identities import ARITHMETIC, MODEL, NAMESPACE
from tests.helpers.names import golden

from keepwarm.core.blocks import Block, PrefixNames, chain, content_id, derived_id, token_ids
from keepwarm.core.identity import Namespace, digest, salt_key
from keepwarm.core.schedule import Breakpoint, Schedule

IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=120)
SALTS = st.text(max_size=8)


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...]]:
    ids = draw(IDS)
    inner = draw(st.sets(st.integers(1, len(ids)), max_size=8))
    return ids, tuple(sorted(inner | {len(ids)}))


def names(blocks: tuple[Block, ...]) -> list[tuple[int, bytes, bytes, bytes]]:
    return [(b.end, b.exact, b.prefix, b.content) for b in blocks]


def test_blocks_cover_the_prompt_and_link() -> None:
    blocks = chain(token_ids([7, 8, 9, 10, 11]), (2, 3, 5), NAMESPACE)
    assert [(b.start, b.end, b.length) for b in blocks] == [(0, 2, 2), (2, 3, 1), (3, 5, 2)]
    assert [b.tokens.tolist() for b in blocks] == [[7, 8], [9], [10, 11]]
    assert blocks[0].parent_exact == NAMESPACE.exact_root
    assert blocks[0].parent_prefix == NAMESPACE.prefix_root
    for parent, child in pairwise(blocks):
        assert (child.parent_exact, child.parent_prefix) == (parent.exact, parent.prefix)
    assert all(len(name) == 32 for b in blocks for name in (b.exact, b.prefix, b.content))


def test_no_cuts_no_blocks() -> None:
    assert tuple(chain(token_ids([]), (), NAMESPACE)) == ()


@pytest.mark.parametrize("cuts", [(3, 2, 4), (2, 2, 4), (0, 4), (2, 5), (-1, 4)])
def test_cuts_that_do_not_rise_within_the_prompt_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rise"):
        chain(token_ids([1, 2, 3, 4]), cuts, NAMESPACE)


def test_extra_keys_stand_at_cuts_and_have_32_bytes() -> None:
    tokens = token_ids([1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"\[3\] are not at a cut"):
        chain(tokens, (2, 4), NAMESPACE, {3: salt_key("a")})
    for short in (b"", b"tenant"):
        with pytest.raises(ValueError, match="32"):
            chain(tokens, (2, 4), NAMESPACE, {2: short})
        with pytest.raises(ValueError, match="32"):
            PrefixNames(tokens, NAMESPACE, {2: short})


def test_token_ids_are_little_endian_words() -> None:
    ids = token_ids(np.array([1, 258], dtype=np.int64))
    assert ids.tobytes() == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    with pytest.raises(OverflowError):
        token_ids([-1])


@given(cut_prompts(), cut_prompts())
def test_agreement_gives_equal_names_and_a_difference_gives_other_names_for_good(
    first: tuple[list[int], tuple[int, ...]], second: tuple[list[int], tuple[int, ...]]
) -> None:
    """Names are shared up to the last common cut; after the first difference none is."""
    (a, a_cuts), (b, b_cuts) = first, second
    shared = min(len(a), len(b)) // 2
    b = a[:shared] + b[shared:]
    common = tuple(cut for cut in a_cuts if cut <= shared)
    b_cuts = common + tuple(cut for cut in b_cuts if cut > (common[-1] if common else 0))
    agree = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    one, two = chain(token_ids(a), a_cuts, NAMESPACE), chain(token_ids(b), b_cuts, NAMESPACE)
    same_cuts = True
    for x, y in zip(one, two, strict=False):
        same_cuts = same_cuts and x.end == y.end
        same = same_cuts and x.end <= agree
        assert (x.exact == y.exact) == same
    by_position = {block.end: block for block in two}
    for x in one:
        if x.end in by_position:
            assert (x.prefix == by_position[x.end].prefix) == (x.end <= agree)


@given(IDS, IDS, st.integers(1, 40), st.integers(0, 40), st.lists(st.integers(1, 120), max_size=4))
def test_scheduled_prompts_share_exact_names_up_to_the_last_common_cut(
    left: list[int], right: list[int], step: int, least: int, points: list[int]
) -> None:
    schedule = Schedule(step, min(least, step))
    breakpoints = [Breakpoint(p) for p in points if p <= len(left)]
    whole = left + right
    alone = chain(token_ids(left), schedule.cuts(len(left), breakpoints), NAMESPACE)
    longer = chain(token_ids(whole), schedule.cuts(len(whole), breakpoints), NAMESPACE)
    common = {b.end for b in alone} & {b.end for b in longer}
    for a, b in zip(alone, longer, strict=False):
        assert (a.exact == b.exact) == (a.end in common and a.end == b.end)
    # All steps but the shorter prompt's last end where the longer one's do.
    assert [b.exact for b in alone[:-1]] == [b.exact for b in longer[: len(alone) - 1]]


@given(IDS, st.data())
def test_other_cuts_keep_prefix_names_and_change_exact_ones(ids: list[int], data: st.DataObject) -> None:
    assume(len(ids) > 1)
    tokens = token_ids(ids)
    both = [data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=6)) for _ in range(2)]
    assume(both[0] != both[1])
    one, two = (chain(tokens, (*sorted(inner), len(ids)), NAMESPACE) for inner in both)
    differs = min(both[0] ^ both[1])
    by_position = {block.end: block for block in two}
    for block in one:
        if block.end in by_position:
            assert block.prefix == by_position[block.end].prefix
            assert (block.exact == by_position[block.end].exact) == (block.end < differs)


@given(cut_prompts(), st.dictionaries(st.integers(0, 120), SALTS, max_size=3))
def test_prefix_names_agree_with_the_chain(prompt: tuple[list[int], tuple[int, ...]], salts: dict[int, str]) -> None:
    ids, cuts = prompt
    keys = {at: salt_key(salt) for at, salt in salts.items() if at in (0, *cuts)}
    blocks = chain(token_ids(ids), cuts, NAMESPACE, keys)
    lookup = PrefixNames(token_ids(ids), NAMESPACE, keys)
    assert lookup.at(0) == NAMESPACE.prefix_root
    for block in reversed(blocks):
        assert lookup.at(block.end) == block.prefix == lookup.at(block.end)
        assert lookup.opening(block.start) == block.parent_prefix


@given(
    st.integers(1, 300), st.integers(1, 40), st.dictionaries(st.integers(0, 8), SALTS, max_size=2), st.integers(0, 9)
)
def test_pages_are_named_as_one_block_after_another_is(
    length: int, page: int, salts: dict[int, str], known: int
) -> None:
    tokens = token_ids(range(length))
    keys = {at * page: salt_key(salt) for at, salt in salts.items() if at * page < length}
    cuts = (*range(page, length, page), length)
    expected = [NAMESPACE.exact_root]
    for start, end in zip((0, *cuts), cuts, strict=False):
        parts = (expected[-1], tokens[start:end].tobytes(), keys.get(start, b""))
        expected.append(digest("keepwarm exact block 1", *parts))
    assert chain(tokens, cuts, NAMESPACE, keys, expected[1:][:known]).exact == expected[1:]


@given(cut_prompts(), SALTS, SALTS, st.data())
def test_a_salt_separates_all_that_follows_and_nothing_before(
    prompt: tuple[list[int], tuple[int, ...]], mine: str, yours: str, data: st.DataObject
) -> None:
    ids, cuts = prompt
    at = data.draw(st.sampled_from((0, *cuts[:-1])))
    tokens = token_ids(ids)
    plain = chain(tokens, cuts, NAMESPACE)
    salted = chain(tokens, cuts, NAMESPACE, {at: salt_key(mine)})
    assert names(salted) == names(chain(tokens, cuts, NAMESPACE, {at: salt_key(mine)}))
    for a, b in zip(plain, salted, strict=True):
        assert (a.exact == b.exact) == (a.prefix == b.prefix) == (a.end <= at)
        assert a.content == b.content
    other = chain(tokens, cuts, NAMESPACE, {at: salt_key(yours)})
    for a, b in zip(salted, other, strict=True):
        assert (a.exact == b.exact) == (a.prefix == b.prefix) == (mine == yours or a.end <= at)


def test_a_salted_region_is_no_token_sequence_of_the_public_one() -> None:
    """The bytes of a key cannot be spelled in token ids: position and marker keep them apart."""
    key = salt_key("tenant")
    salted = chain(token_ids([5]), (1,), NAMESPACE, {0: key})
    spelled = token_ids([*np.frombuffer(key, dtype="<u4").tolist(), 5])
    assert salted[0].prefix != chain(spelled, (len(spelled),), NAMESPACE)[0].prefix


def test_content_ids_ignore_place_and_model() -> None:
    a = chain(token_ids([1, 2, 3, 4, 5]), (3, 5), NAMESPACE)[1]
    other = Namespace(replace(MODEL, weights="x"), ARITHMETIC)
    b = chain(token_ids([9, 4, 5]), (1, 3), other)[1]
    assert a.content == b.content == content_id(token_ids([4, 5]))
    assert a.content != content_id(token_ids([5, 4]))


def test_another_model_shares_no_name_and_another_arithmetic_only_prefix_names() -> None:
    tokens, cuts = token_ids(range(10)), (4, 10)
    ours = chain(tokens, cuts, NAMESPACE)
    model = chain(tokens, cuts, Namespace(replace(MODEL, tokenizer="x"), ARITHMETIC))
    threads = chain(tokens, cuts, Namespace(MODEL, replace(ARITHMETIC, threads=1)))
    assert not {b.exact for b in ours} & {b.exact for b in model}
    assert not {b.prefix for b in ours} & {b.prefix for b in model}
    assert not {b.exact for b in ours} & {b.exact for b in threads}
    assert [b.prefix for b in ours] == [b.prefix for b in threads]


def test_derived_blocks_have_names_of_their_own() -> None:
    blocks = chain(token_ids([1, 2, 3]), (2, 3), NAMESPACE)
    derived = derived_id(blocks[0].exact, blocks[1])
    assert derived not in {b.exact for b in blocks} | {b.prefix for b in blocks}
    assert derived == derived_id(blocks[0].exact, blocks[1])
    assert derived != derived_id(blocks[1].exact, blocks[1])


# --- names are for ever: what is stored today must be found by any later process and version ---

GOLDEN = [
    "b7dc93204715c951378f97585eaa257b3f77b41aa7bcebb3c8ad24c457766bc1",
    "073eb62886babd16b079fb22eed451b917697cdbcdb6976c923347c02e8c913a",
    "6c5015a79b549044266f445c6fea89c6d6793e562a127b63797b36036e981597",
    "42bdb596a5f375752d0eaf188236945cb4721842f9302747332add916581f12c",
    "1fc9e8d5ac592f80f564e499a104907f12aa4c6adf3a8f77475a262597fbcfac",
    "72df0333a59b1e67778d5629bcab0758fbff23bce16f1f1d2caaf740d36299ef",
    "a1d9734da6bab57bf46e75e44f07802cb41a1491054dc03831dfe4c586cd8b32",
    "5d69215a38d2f723b992c82ca256a230bb305504bd246110f62de0a4d014d1d4",
    "c2899e3d982d57e477d18605133d052e70f1d6aef797a9ffb28f2455c3559d18",
]


def test_golden_names() -> None:
    assert golden() == GOLDEN


def test_names_are_what_the_documentation_says() -> None:
    def framed(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(len(p).to_bytes(8, "little") + p for p in parts)).digest()

    def words(*ids: int) -> bytes:
        return b"".join(i.to_bytes(4, "little") for i in ids)

    key = framed(b"keepwarm salt 1", b"tenant")
    first = framed(b"keepwarm exact block 1", NAMESPACE.exact_root, words(1, 2), b"")
    second = framed(b"keepwarm exact block 1", first, words(3, 70_000), key)
    prefix = hashlib.sha256(NAMESPACE.prefix_root + words(1, 2) + b"\xff" * 4 + key + words(3, 70_000)).digest()
    assert GOLDEN[0] == first.hex()
    assert GOLDEN[3:6] == [second.hex(), prefix.hex(), framed(b"keepwarm content 1", words(3, 70_000)).hex()]


def test_names_are_the_same_in_another_process() -> None:
    code = "from tests.helpers.names import golden; print(*golden())"
    for seed in ("0", "1"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == GOLDEN
