"""The lean decoder: transformers' logits, and rows whose bits depend on nothing that stands beside them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.lean import LENGTH, Lean, compiled, prompt, windows
from tests.helpers.models import tiny
from torch import nn

from keepwarm import Engine
from keepwarm.core.blocks import token_ids
from keepwarm.runtime.native import build
from keepwarm.runtime.native.decoder import LeanDecoder, unsupported
from keepwarm.runtime.native.places import PAGE, UNIT, Region, Sequenced, works

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in DTYPES], ids=lambda p: f"{p[0]}-{p[1]}")
def lean(request: pytest.FixtureRequest) -> Lean:
    return Lean(request.param[0], DTYPES[request.param[1]])


@pytest.mark.slow
def test_logits_are_as_near_to_float64_as_transformers(lean: Lean) -> None:
    """The reference is transformers' own eager attention in float64."""
    ids = prompt(LENGTH, 0)
    mine = lean.run(ids, [], lean.arena(), range(LENGTH)).double()
    reference = type(lean.model)(lean.model.config).double().eval()
    reference.load_state_dict({name: tensor.double() for name, tensor in lean.model.state_dict().items()})
    reference.config._attn_implementation = "eager"
    with torch.inference_mode():
        exact = reference(torch.tensor([ids])).logits[0]
        theirs = lean.model(torch.tensor([ids])).logits[0].double()
    error, theirs_error = (mine - exact).abs().mean(), (theirs - exact).abs().mean()
    assert error < 1.5 * theirs_error
    if lean.decoder.dtype is torch.float32:
        assert (mine - exact).abs().max() < 1e-4 * exact.abs().max()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=5), seed=st.integers(0, 2))
def test_no_cut_changes_a_bit(lean: Lean, cuts: set[int], seed: int) -> None:
    """Chunked prefill, one token at a time, or all at once: the same logits and the same keys and values."""
    ids = prompt(LENGTH, seed)
    whole, parts = lean.arena(), lean.arena()
    assert torch.equal(lean.run(ids, [], whole), lean.run(ids, sorted(cuts), parts))
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert a.keys is not None
        assert b.keys is not None
        assert torch.equal(a.keys[:, :, :LENGTH], b.keys[:, :, :LENGTH])
        assert torch.equal(a.values[:, :, :LENGTH], b.values[:, :, :LENGTH])  # type: ignore[index]


WIDTHS = (
    {},
    {"head_dim": 32, "hidden_size": 80, "intermediate_size": 176, "vocab_size": 49160},  # no multiples of a tile
    {"head_dim": 64, "num_key_value_heads": 1},
    {"head_dim": 128},
)


# Of kernels, by what they are compiled with; the best is this machine's own.
KINDS: dict[str, tuple[str, ...] | None] = {"best": None, "pairs": (build.PAIRS,), "vectors": ()}


# What this machine would not choose is compiled for the tests alone: half a minute each.
CASES = [
    pytest.param((kind, widths), marks=() if kind == "best" else pytest.mark.slow)
    for kind in KINDS
    for widths in WIDTHS
]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0]}-{p[1].get('head_dim', 16)}")
def half(request: pytest.FixtureRequest) -> Lean:
    """In bfloat16, by whatever this machine has for it, and by what others have."""
    kind, widths = request.param
    kernels = compiled if (defines := KINDS[kind]) is None else build.compiled(build._KERNELS, *defines)
    if kind != "best" and (kernels is compiled or (kind == "pairs" and "avx512_bf16" not in build.cpu_flags())):
        pytest.skip("it is the best here, or cannot be had")
    return Lean("llama", torch.bfloat16, kernels, **widths)


def test_a_row_is_the_same_in_steps_of_one_to_a_hundred_rows(half: Lean) -> None:
    ids, arena = prompt(600, 5), half.arena()
    half.run(ids[:500], [], arena)
    sequence = half.sequenced(arena)

    def step(start: int, end: int, wanted: Sequence[int]) -> torch.Tensor:
        return half.decoder.step([token_ids(ids[start:end])], [start], [sequence], wanted)

    alone = torch.cat([step(at, at + 1, [0]) for at in range(500, 600)])
    for rows in [*range(1, 36), 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 96, 97, 100]:
        assert torch.equal(step(500, 500 + rows, [0, rows - 1]), alone[[0, rows - 1]])
    assert torch.equal(step(500, 520, [19, 3, 3]), alone[[19, 3, 3]])
    assert step(500, 600, []).shape[0] == 0
    assert torch.equal(step(500, 600, range(100)), alone)


def test_the_number_of_threads_changes_no_bit(half: Lean) -> None:
    ids = prompt(LENGTH, 6)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5, 70):  # also more than there are columns to take, and more than take any
            torch.set_num_threads(threads)
            arena = half.arena()
            found.append(half.run(ids, [23, 40, 141], arena, range(-20, 0)))
            assert arena.layers[1].keys is not None
            found.append(arena.layers[1].keys[:, :, :LENGTH].clone())
    finally:
        torch.set_num_threads(before)
    for logits, keys in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(logits, found[0])
        assert torch.equal(keys, found[1])


def test_torchs_default_dtype_changes_nothing(lean: Lean) -> None:
    """transformers sets it for the whole process while it loads a model, in whatever thread."""
    ids = prompt(LENGTH, 8)
    before = lean.run(ids, [300], lean.arena(), range(-40, 0))
    lean.decoder._scratch = torch.empty(0)  # to be made anew
    torch.set_default_dtype(torch.bfloat16)
    try:
        during = lean.run(ids, [300], lean.arena(), range(-40, 0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert during.dtype == torch.float32
    assert torch.equal(during, before)


@pytest.mark.slow
def test_kinds_of_kernels_agree_within_rounding(half: Lean) -> None:
    """Whatever a processor has for bfloat16; each is another identity."""
    assert compiled is not None
    plain = build.compiled(build._KERNELS)
    assert plain is not None
    other = LeanDecoder(half.model, plain, windows(half.geometry))
    assert other.deep == 1
    assert (half.decoder.deep > 1) == (plain.digest != half.decoder.digest)
    ids, arena = prompt(LENGTH, 7), half.arena()
    mine = half.run(ids, [], half.arena(), range(LENGTH)).double()
    theirs = other.step([token_ids(ids)], [0], [arena.sequenced()], range(LENGTH)).double()
    assert (mine - theirs).abs().mean() < 0.15 * theirs.abs().mean()


def test_matrix_units_the_system_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "_XTILEDATA", 62)  # a feature that no processor has
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert build._may_use_tiles.__wrapped__() is False
    assert platform.machine() != "x86_64" or "does not let this process use the matrix units" in caplog.text


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data(), shared=st.integers(0, 600), count=st.integers(2, 6), threads=st.sampled_from([1, 2]))
def test_batched_rows_equal_solo_rows(lean: Lean, data: st.DataObject, shared: int, count: int, threads: int) -> None:
    """Sequences that share pages of a prefix, of different lengths and with different numbers of new tokens."""
    head = prompt(shared, 1)
    tails = [prompt(data.draw(st.integers(1, 80)), 10 + i) for i in range(count)]
    new = [data.draw(st.integers(1, len(tail))) for tail in tails]
    solo, arenas = [], []
    for tail, fresh in zip(tails, new, strict=True):
        ids, arena = [*head, *tail], lean.arena()
        cut = len(ids) - fresh
        solo.append(lean.run(ids, [cut] if cut else [], arena)[-1])
        arenas.append(arena)
    sequences = share([lean.sequenced(arena) for arena in arenas], shared // PAGE)
    ends = [shared + len(tail) for tail in tails]
    steps = [token_ids(tail[-fresh:]) for tail, fresh in zip(tails, new, strict=True)]
    last = np.cumsum(new) - 1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        starts = [end - fresh for end, fresh in zip(ends, new, strict=True)]
        batched = lean.decoder.step(steps, starts, sequences, last.tolist())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(batched, torch.stack(solo))


@pytest.mark.parametrize("rows", [1, 24])
def test_threads_that_take_each_others_columns_change_no_bit(half: Lean, rows: int) -> None:
    """More threads than processors: most of a step's products end with columns that another thread takes."""
    ids = prompt(300 + rows, 3)
    arena = half.arena()
    alone = half.run(ids, [300], arena)[-1:]
    half.decoder.threads = 4
    try:
        for _ in range(200):
            assert torch.equal(
                half.decoder.step([token_ids(ids[300:])], [300], [half.sequenced(arena)], [rows - 1]), alone
            )
    finally:
        half.decoder.threads = None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_threads_that_share_a_part_add_up_a_row_in_order(dtype: torch.dtype) -> None:
    """Each row reads a shared beginning and its own end, which lie in one part. With one head of keys there are few
    tasks, so two threads divide the rows. What goes wrong between threads goes wrong seldom."""
    lean = Lean("llama", dtype, num_key_value_heads=1)
    head, tails = prompt(300, 1), [prompt(40 + 5 * i, 10 + i) for i in range(8)]
    arenas = [lean.arena() for _ in tails]
    solo = [lean.run([*head, *tail], [299 + len(tail)], at)[-1] for tail, at in zip(tails, arenas, strict=True)]
    sequences = share([lean.sequenced(arena) for arena in arenas], len(head) // PAGE)
    steps, starts = [token_ids(tail[-1:]) for tail in tails], [299 + len(tail) for tail in tails]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(1000):
            batched = lean.decoder.step(steps, starts, sequences, range(len(tails)))
            assert torch.equal(batched, torch.stack(solo))
    finally:
        torch.set_num_threads(before)


def share(sequences: Sequence[Sequenced], pages: int) -> list[Sequenced]:
    """All sequences read their first pages where the first one has them."""
    first = sequences[0]
    shared = [first]
    for sequence in sequences[1:]:
        table = sequence.pages + (len(first.regions) << 32)
        table[:pages] = first.pages[:pages]
        shared.append(Sequenced((*first.regions, *sequence.regions), table))
    return shared


@given(data=st.data(), count=st.integers(1, 6))
def test_works_cover_every_row_once_and_in_order(data: st.DataObject, count: int) -> None:
    """What a row reads, gathered from the works, is its own page table: whoever shares it."""
    regions = tuple(Region.even(1000 * i, 8, 8) for i in range(3))
    trunk = np.arange(64, dtype=np.int64) * PAGE
    sequences, starts, ends = [], [], []
    for i in range(count):
        end = data.draw(st.integers(1, 64 * PAGE))
        pages = trunk.copy()
        fork = data.draw(st.integers(0, 64))
        pages[fork:] += (1 + i % 2) << 32
        sequences.append(Sequenced(regions, pages))
        ends.append(end)
        starts.append(data.draw(st.integers(max(0, end - 40), end - 1)))
    placed = works(starts, ends, sequences)
    for work in placed.work:
        assert (np.diff(placed.members[work["row"] : work["row"] + work["rows"]]) > 0).all()  # the kernels search them
    first = 0
    for sequence, start, end in zip(sequences, starts, ends, strict=True):
        for row in range(first, first + end - start):
            mine = [w for w in placed.work if row in placed.members[w["row"] : w["row"] + w["rows"]]]
            units = [u for w in mine for u in range(w["first_unit"], w["last_unit"])]
            assert units == list(range(-(-end // UNIT)))
            read = np.concatenate([
                placed.pages[w["pages"] :][: (w["last_unit"] - w["first_unit"]) * UNIT // PAGE] for w in mine
            ])
            used = -(-end // PAGE)
            assert read[:used].tolist() == sequence.pages[:used].tolist()
            position = start + row - first
            assert placed.slots[row] == sequence.pages[position // PAGE] + position % PAGE
        first += end - start


def test_what_it_does_not_run_is_named() -> None:
    whole = [None] * 2
    assert "GPT2LMHeadModel" in unsupported(tiny("gpt2"), whole)
    assert "window of fewer" in unsupported(tiny("mistral", sliding_window=24), [24, 24])
    assert "activation" in unsupported(tiny("llama", hidden_act="mish"), whole)
    assert "float16" in unsupported(tiny("llama", torch.float16), whole)
    long = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "length" in unsupported(tiny("llama", rope_parameters=long), whole)
    hooked = tiny("llama")
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    assert "hooks" in unsupported(hooked, whole)
    quantized = tiny("llama")
    quantized.model.layers[1].mlp.up_proj = type("Other", (nn.Linear,), {})(64, 96, bias=False)
    assert "plain" in unsupported(quantized, whole)


def test_weights_changed_in_place_are_packed_again(tokenizer: Any) -> None:
    model = tiny("llama")
    ids = prompt(40, 3)
    with Engine.from_pretrained((model, tokenizer)) as engine:
        before = engine.generate(ids, max_new_tokens=4, trace=True)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        after = engine.generate(ids, max_new_tokens=4, trace=True)
    with Engine.from_pretrained((model, tokenizer)) as engine:
        fresh = engine.generate(ids, max_new_tokens=4, trace=True)
    assert before.logits_digest != after.logits_digest == fresh.logits_digest


def test_a_run_evicted_while_it_is_read_stays_readable(tokenizer: Any) -> None:
    """A hit in RAM is read in place; the memory goes when the last reader does."""
    ids = prompt(200, 4)
    with Engine.from_pretrained((tiny("llama"), tokenizer), step=64) as engine:
        cold = engine.generate(ids, max_new_tokens=20, trace=True, reuse="off")
        engine.generate(ids, max_new_tokens=1)
        engine.flush()
        engine.pipeline.pool.forget()
        stream = engine.stream(ids, max_new_tokens=20, trace=True)
        next(stream)
        engine.pipeline.archive.clear_ram()
        *_, last = stream
    assert last.result is not None
    assert last.result.cached_by_tier == {"ram": 199}
    assert last.result.logits_digest == cold.logits_digest


def test_without_a_compiler_steps_run_through_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build._tell_of_no_compiler.cache_clear()
    level = build._native()  # no installation brings its libraries
    for library in (build._KERNELS, build.WATCH):
        assert build.compiled_for.__wrapped__(level, library) is None
    assert caplog.text.count("no C++ compiler") == 1
    monkeypatch.setenv("CXX", "false")
    assert build.compiled_for.__wrapped__(level, build._KERNELS) is None
    assert "kernels.cpp does not compile" in caplog.text
