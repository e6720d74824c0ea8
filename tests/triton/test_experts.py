"""Experts: which rows choose them, float64's numbers, and rows whose bits depend on nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.helpers.on_triton import SMALL, OnTriton, kept
from tests.helpers.prompts import ids
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from keepwarm.core.blocks import token_ids
from keepwarm.runtime.gpu_kernels import experts, routes
from keepwarm.runtime.gpu_kernels.experts import Mixture, Routes
from keepwarm.runtime.gpu_kernels.launch import Launch
from keepwarm.runtime.gpu_kernels.tiles import Tiles
from keepwarm.runtime.native.description import Experts, Linear, Mlp

HIDDEN, INNER, COUNT, CHOSEN = 64, 32, 7, 3
ALPHA, LIMIT = 1.702, 1.5
KINDS = ("plain", "shared", "turned")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mixture(dtype: torch.dtype = torch.float32, **given: Any) -> Mixture:
    return Mixture(Launch(dtype, False, Tiles.of(dtype, 1)), ALPHA, LIMIT, **given)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Made:
    """Experts of one kind, and the MLP beside them."""

    experts: Experts
    own: Mlp | None = None

    @classmethod
    def of(cls, kind: str, dtype: torch.dtype = torch.float32, count: int = COUNT, chosen: int = CHOSEN) -> Made:
        router = Linear(random(count, HIDDEN, seed=1, dtype=dtype) / 8)
        if kind == "turned":  # as gpt-oss has them
            return cls(Experts(Linear(router.weight, random(count, seed=2, dtype=dtype)), turned(dtype, count), chosen))
        gates, ups = random(count, 2 * INNER, HIDDEN, seed=3, dtype=dtype).chunk(2, dim=1)
        down = Linear(random(count, HIDDEN, INNER, seed=4, dtype=dtype))
        experts = Experts(router, Mlp(Linear(ups), down, "silu", Linear(gates)), chosen)
        if kind == "plain":
            return cls(experts)
        up, gate = random(2, 48, HIDDEN, seed=5, dtype=dtype)
        own = Mlp(Linear(up), Linear(random(HIDDEN, 48, seed=6, dtype=dtype)), "silu", Linear(gate))
        beside = random(1, HIDDEN, seed=8, dtype=dtype) / 8
        return cls(Experts(router, experts.all, chosen, over_all=True, gate=beside), own)

    def exact(self, h: torch.Tensor) -> torch.Tensor:
        """What they give in float64."""
        x, e = h.double(), self.experts
        scores = linear(x, e.router.weight, e.router.bias)
        chosen = scores.topk(e.chosen).indices
        counted = scores if e.over_all else scores.gather(1, chosen)
        shares = torch.exp(scores.gather(1, chosen) - counted.logsumexp(-1, keepdim=True))
        y = torch.zeros_like(x)
        for row, number in [(row, number) for row in range(len(x)) for number in range(e.chosen)]:
            y[row] += shares[row, number] * half(e.all, x[row], int(chosen[row, number]))
        if self.own is None:
            return y
        assert e.gate is not None
        return y + torch.sigmoid(x @ e.gate.double().T) * torch.stack([half(self.own, row) for row in x])


def turned(dtype: torch.dtype, count: int) -> Mlp:
    both, biases = random(count, HIDDEN, 2 * INNER, seed=3, dtype=dtype), random(count, 2 * INNER, seed=4, dtype=dtype)
    down, bias = random(count, INNER, HIDDEN, seed=5, dtype=dtype), random(count, HIDDEN, seed=6, dtype=dtype)
    gate, up = (Linear(both[..., at::2].transpose(1, 2), biases[..., at::2]) for at in (0, 1))
    return Mlp(up, Linear(down.transpose(1, 2), bias), "clamped", gate)


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight.double().T
    return y if bias is None else y + bias.double()


def half(mlp: Mlp, x: torch.Tensor, *expert: int) -> torch.Tensor:
    """An MLP of one row in float64, or one `expert` of many."""

    def product(by: Linear, of: torch.Tensor) -> torch.Tensor:
        bias = None if by.bias is None else by.bias[expert]
        return linear(of, by.weight[expert], bias)

    assert mlp.gate is not None
    up, gate = product(mlp.up, x), product(mlp.gate, x)
    if mlp.activation == "clamped":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    return product(mlp.down, up * gate * torch.sigmoid(gate * (ALPHA if mlp.activation == "clamped" else 1)))


def numbers(found: Routes) -> list[list[int]]:
    """Each row's experts, in order of its pairs. A tile is of one expert, and every pair is in one tile."""
    each: dict[int, int] = {}
    for expert, begin, end, _ in found.tiles.tolist():
        for pair in found.order[begin:end].tolist():
            assert pair not in each
            each[pair] = expert
    assert sorted(each) == list(range(len(found.order)))
    return [[each[at + rank] for rank in range(found.chosen)] for at in range(0, len(each), found.chosen)]


@pytest.mark.parametrize(("count", "chosen", "rows"), [(7, 3, 37), (40, 1, 40), (40, 8, 3), (2, 2, 20), (1, 1, 5)])
@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_rows_are_grouped_by_the_experts_with_the_highest_scores(kind: str, count: int, chosen: int, rows: int) -> None:
    made, h = Made.of(kind, count=count, chosen=chosen), random(rows, HIDDEN)
    scores = linear(h.double(), made.experts.router.weight, None)
    found = mixture().routed(h, made.experts)
    expected = scores.topk(chosen).indices.sort().values
    assert numbers(found) == expected.tolist()
    counted = scores if kind == "shared" else scores.gather(1, expected)
    shares = torch.exp(scores.gather(1, expected) - counted.logsumexp(-1, keepdim=True))
    assert (found.shares.view(rows, chosen) - shares).abs().max() < 1e-6


def test_of_equal_scores_the_first_is_chosen() -> None:
    weight = random(1, HIDDEN).expand(COUNT, HIDDEN).contiguous()
    weight[2] = weight[5] = random(HIDDEN, seed=1)
    experts = Experts(Linear(weight), Made.of("plain").experts.all, CHOSEN)
    x = random(20, HIDDEN)
    scores = x @ weight.T
    expected = [[0, 1, 3] if row[0] > row[2] else [0, 2, 5] for row in scores.tolist()]
    assert numbers(mixture().routed(x, experts)) == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scores_that_are_no_numbers_choose_some_experts_and_change_no_other_row() -> None:
    made, h = Made.of("plain"), random(5, HIDDEN)
    whole = mixture().mixed(h, made.experts, None)
    h[1], h[3, 0] = torch.nan, torch.inf
    found = numbers(mixture().routed(h, made.experts))
    assert all(len(set(row)) == CHOSEN and max(row) < COUNT for row in found)
    again = mixture().mixed(h, made.experts, None)
    assert torch.equal(again[[0, 2, 4]], whole[[0, 2, 4]])
    assert again[[1, 3]].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_near_float64_and_a_row_does_not_depend_on_its_neighbours(kind: str, dtype: torch.dtype) -> None:
    made, h = Made.of(kind, dtype), random(37, HIDDEN, dtype=dtype)
    found = mixture(dtype).mixed(h, made.experts, made.own)
    exact = made.exact(h)
    near = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    assert (found - exact).abs().max() < near * exact.abs().max()
    for rows in ([0], [36], range(20, 37), [5] * 18, [9, 36, 5]):
        some = mixture(dtype).mixed(h[list(rows)], made.experts, made.own)
        assert torch.equal(some, found[list(rows)])


def test_results_that_do_not_fit_are_computed_in_goes() -> None:
    made, h = Made.of("shared"), random(11, HIDDEN)
    few = mixture(results=4 * 4 * CHOSEN * HIDDEN)
    assert torch.equal(few.mixed(h, made.experts, made.own), mixture().mixed(h, made.experts, made.own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_products_that_a_gpu_runs_agree_with_those_by_hand(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's `tl.dot` is NumPy's product: near, but not to the bit. It has none of bfloat16."""
    made, h = Made.of(kind, dtype), random(20, HIDDEN, dtype=dtype)
    found = mixture(dtype).mixed(h, made.experts, made.own)
    by_hand = experts.tiled
    monkeypatch.setattr(experts, "tiled", lambda tile: by_hand(tile) | {"BY_HAND": False})
    dotted = mixture(dtype).mixed(h, made.experts, made.own)
    assert (found - dotted).abs().max() < {torch.float32: 1e-5, torch.float16: 2e-3}[dtype] * found.abs().max()


def test_results_are_added_by_rising_expert_and_the_own_mlp_last() -> None:
    rows, width = 3, 40
    results, shares = random(rows, CHOSEN, width), random(rows, CHOSEN, seed=1)
    own, gate = random(rows, width, seed=2), random(rows, 1, seed=3)
    y, expected = torch.empty(rows, width), torch.zeros(rows, width)
    how = {"CHOSEN": CHOSEN, "OWN": True, "BLOCK": 64}
    routes.collect[rows, 1](results, shares, own, None, y, width, GATED=False, **how)
    for number in range(CHOSEN):
        expected = expected + results[:, number] * shares[:, number, None]
    assert torch.equal(y, expected + own)
    routes.collect[rows, 1](results, shares, own, gate, y, width, GATED=True, **how)
    assert (y - (expected + own * torch.sigmoid(gate))).abs().max() < 1e-6


class Called(TorchDispatchMode):
    """Notes which operators of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_nothing_and_launches_the_same_whatever_is_chosen(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a CUDA graph can hold a step."""
    made, launched, begin = Made.of(kind), [], interpreter.GridExecutor.__init__

    def noted(self: Any, fn: Any, names: Any, grid: Any, *others: Any, **more: Any) -> None:
        launched.append((fn.__name__, grid))
        begin(self, fn, names, grid, *others, **more)

    monkeypatch.setattr(interpreter.GridExecutor, "__init__", noted)
    every = []
    for h in (random(20, HIDDEN), random(1, HIDDEN).expand(20, HIDDEN).contiguous()):
        launched.clear()
        with Called() as called:
            mixture().mixed(h, made.experts, made.own)
        every.append(list(launched))
        assert called.names.isdisjoint({"_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "bincount"})
    assert every[0] == every[1]
    assert {name for name, _ in every[0]} >= {"choose", "group", "widen", "narrow", "collect"}


@pytest.mark.parametrize(
    "family", ["qwen2-moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "qwen3-moe"))]
)
def test_neither_cuts_nor_other_sequences_change_a_bit(family: str) -> None:
    made = OnTriton(family)
    assert made.decoder.is_routed
    prompts = [ids(6, 1, SMALL), ids(3, 2, SMALL)]
    arenas = [made.arena(6) for _ in prompts]
    whole = [made.run(prompt, [], arena) for prompt, arena in zip(prompts, arenas, strict=True)]
    parts = made.arena(6)
    assert torch.equal(made.run(prompts[0], [4, 5], parts), whole[0])
    assert all(map(torch.equal, kept(arenas[0], 6), kept(parts, 6)))
    both = [made.arena(6) for _ in prompts]
    places, tokens = [arena.sequenced() for arena in both], [token_ids(prompt) for prompt in prompts]
    with torch.inference_mode():
        logits = made.decoder.step(tokens, [0, 0], places, range(9), both[0].arriving)
    assert torch.equal(logits, torch.cat(whole))
