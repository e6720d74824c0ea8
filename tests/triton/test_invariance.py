"""A row's bits depend on the tokens at and before it: not on steps, batches, shared pages, or where pages are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.on_triton import SMALL, OnTriton, kept
from tests.helpers.prompts import ids

from keepwarm.core.blocks import token_ids
from keepwarm.runtime.native.places import MOVE, PAGE, Region, Sequenced
from keepwarm.runtime.native.proof import variance

COUNT = 24
LONG = 600  # more than one part of 512 positions


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", torch.float32),
        pytest.param(("gemma2", torch.bfloat16), marks=pytest.mark.slow),
        pytest.param(("olmo2", torch.float16), marks=pytest.mark.slow),
        pytest.param(("gpt-oss", torch.bfloat16), marks=pytest.mark.slow),
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def made(request: pytest.FixtureRequest) -> OnTriton:
    found = OnTriton(*request.param)
    found.model.config._experts_implementation = "eager"  # the others do not run in float64
    return found


@settings(max_examples=2, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, COUNT - 1), max_size=4))
def test_no_cut_changes_a_bit(made: OnTriton, cuts: set[int]) -> None:
    prompt = ids(COUNT, 1, SMALL)
    whole, parts = made.arena(COUNT), made.arena(COUNT)
    assert torch.equal(made.run(prompt, [], whole), made.run(prompt, sorted(cuts), parts))
    assert all(map(torch.equal, kept(whole, COUNT), kept(parts, COUNT)))


def test_tokens_one_by_one_and_some_wanted_rows(made: OnTriton) -> None:
    prompt = ids(14, 2, SMALL)
    whole = made.run(prompt)
    assert torch.equal(made.run(prompt, range(1, 14)), whole)
    assert torch.equal(made.alone(prompt, [13, 3, 3]), whole[[13, 3, 3]])
    assert len(made.alone(prompt, [])) == 0
    assert len(made.decoder.step([token_ids([])], [0], [made.arena(8).sequenced()], [])) == 0


@pytest.mark.slow
def test_the_self_test_at_load_finds_nothing(made: OnTriton) -> None:
    assert variance(made.decoder, made.geometry, SMALL, form=made.form, least=75) == ""


class Pool:
    """Pages of a whole sequence and of others, in one memory."""

    def __init__(self, made: OnTriton, pages: int) -> None:
        layer = made.geometry.layers[0]
        row = layer.key_dim * made.geometry.itemsize
        head = pages * PAGE * row
        self.memory = torch.full((2 * len(made.geometry.layers) * layer.kv_heads * head,), 0xFF, dtype=torch.uint8)
        self.region = Region.even(self.memory.data_ptr(), layer.kv_heads * head, head, self.memory)

    def sequence(self, pages: Sequence[int]) -> Sequenced:
        return Sequenced((self.region,), np.array(pages, dtype=np.int64) * PAGE)


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True)
@given(shared=st.sampled_from([64, 128, 512, 576]), seed=st.integers(0, 3))
def test_sequences_that_share_pages_have_the_bits_of_each_alone(made: OnTriton, shared: int, seed: int) -> None:
    """The shared prefix ends within a part, or with it. Pages lie in any order."""
    common = ids(shared, seed, SMALL)
    prompts = [common + ids(10 + 30 * i, 10 * seed + i, SMALL) for i in range(3)]
    alone = [made.run(prompt)[shared:] for prompt in prompts]
    count = -(-max(map(len, prompts)) // PAGE)
    pool = Pool(made, 4 * count)
    order = np.random.default_rng(seed).permutation(4 * count).tolist()
    first, own = order[: shared // PAGE], [order[i * count : (i + 1) * count] for i in (1, 2, 3)]
    tables = [
        pool.sequence(first + each[: -(-len(p) // PAGE) - len(first)]) for each, p in zip(own, prompts, strict=True)
    ]
    made.decoder.step([token_ids(common)], [0], [tables[0]], [])
    rest = [token_ids(prompt[shared:]) for prompt in prompts]
    logits = made.decoder.step(rest, [shared] * 3, tables, range(sum(map(len, rest))))
    assert torch.equal(logits, torch.cat(alone))


def test_decoding_together_equals_decoding_alone(made: OnTriton) -> None:
    prompts = [ids(20, 5, SMALL), ids(33, 6, SMALL)]
    alone = [made.run(prompt)[-1] for prompt in prompts]
    arenas = [made.arena(40) for _ in prompts]
    for prompt, arena in zip(prompts, arenas, strict=True):
        made.run(prompt[:-1], [], arena)
    last = [token_ids(prompt[-1:]) for prompt in prompts]
    starts, sequences = [len(prompt) - 1 for prompt in prompts], [arena.sequenced() for arena in arenas]
    assert torch.equal(made.decoder.step(last, starts, sequences, [0, 1]), torch.stack(alone))


@pytest.mark.slow
def test_more_than_one_part(made: OnTriton) -> None:
    prompt = ids(LONG, 7, SMALL)
    whole = made.run(prompt)
    cuts = [500, 511, 512, 513, 514, 576, LONG - 1]
    assert torch.equal(made.run(prompt, cuts), whole)
    exact = made.in_float64(prompt)
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}[made.decoder.dtype]
    assert (whole.double() - exact).abs().max() < bound * exact.abs().max()


def test_results_that_do_not_fit_are_computed_in_goes(made: OnTriton) -> None:
    prompt = ids(40, 8, SMALL)
    whole = made.run(prompt)
    few = made.decoder.apart()
    few._most = 7
    assert torch.equal(made.alone(prompt, range(40), few), whole)


def test_rows_at_chosen_positions(made: OnTriton) -> None:
    """Rows whose KV was damaged are computed again, beside others that stay."""
    prompt, arena = ids(60, 9, SMALL), made.arena(60)
    whole = made.run(prompt, [], arena)
    before = kept(arena, 60)
    at = np.array([3, 17, 18, 40, 59])
    for plane in (layer.plane(kv) for layer in arena.layers for kv in (0, 1)):
        plane.tensor()[:, at] = 7.0
    seen: list[tuple[int, torch.Size]] = []
    logits = made.decoder.rows(
        token_ids([prompt[i] for i in at]),
        at,
        arena.sequenced(),
        [4],
        seen=lambda layer, queries: seen.append((layer, queries.shape)),
    )
    assert torch.equal(logits[0], whole[59])
    assert all(map(torch.equal, kept(arena, 60), before))
    heads, layers = made.model.config.num_attention_heads, len(made.geometry.layers)
    assert seen == [(layer, torch.Size([5, heads, made.geometry.layers[0].key_dim])) for layer in range(layers)]


def test_the_pass_ends_with_the_keys_of_a_layer(made: OnTriton) -> None:
    prompt, arena = ids(12, 9, SMALL), made.arena(12)
    made.run(prompt, [], arena)
    before = kept(arena, 12)
    for layer in arena.layers:
        layer.plane(0).tensor().fill_(7.0)
    made.decoder.rows(token_ids(prompt), np.arange(12), arena.sequenced(), [], layers=1)
    after = kept(arena, 12)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[2], before[2])


def test_rows_are_copied_and_moved(made: OnTriton) -> None:
    prompt, arena = ids(32, 3, SMALL), made.arena(40)
    whole = made.run(prompt, [], arena)
    pool = Pool(made, 8)
    made.decoder.copy_rows(arena.region, 0, pool.region, 5, 31)
    own = made.arena(40)
    moves = np.array([(1 << 32 | 5, 0, 31)], MOVE)  # all rows lie beside whole pages
    found = own.sequenced()
    sequence = replace(found, regions=(*found.regions, pool.region), moves=moves)
    logits = made.decoder.step([token_ids(prompt[31:])], [31], [sequence], [0])
    assert torch.equal(logits[0], whole[31])
    assert all(map(torch.equal, kept(own, 32), kept(arena, 32)))
