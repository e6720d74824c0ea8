"""Single kernels: products in both forms, activations, and attention with windows, caps and sinks against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from keepwarm.runtime.gpu_kernels import products
from keepwarm.runtime.gpu_kernels.graphs import padded
from keepwarm.runtime.gpu_kernels.launch import Heads, Launch
from keepwarm.runtime.gpu_kernels.plan import JOB
from keepwarm.runtime.gpu_kernels.step import Step, arranged, brought
from keepwarm.runtime.gpu_kernels.tiles import Tiles
from keepwarm.runtime.native.description import ACTIVATIONS, Linear, Mlp, Norm
from keepwarm.runtime.native.places import Region, Sequenced, works

HEADS, KV_HEADS, DIM = 6, 2, 16
CPU = torch.device("cpu")


def launch(dtype: torch.dtype = torch.float32, *, centred: bool = False) -> Launch:
    return Launch(dtype, centred, Tiles.of(dtype, HEADS // KV_HEADS))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 48, 80), (37, 300, 64)], ids=str)
def test_products_are_near_and_a_row_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, out, depth = shape
    x, weight, bias = random(rows, depth, dtype=dtype), random(out, depth, seed=1, dtype=dtype), random(out, seed=2)
    by = Linear(weight, bias.to(dtype))
    found = launch(dtype).product(x, by)
    exact = x.double() @ weight.double().T + bias.to(dtype).double()
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    for first, last in ((0, 1), (rows // 2, rows), (rows - 1, rows)):
        assert torch.equal(launch(dtype).product(x[first:last].contiguous(), by), found[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_product_that_a_gpu_runs_agrees_with_the_one_by_hand(dtype: torch.dtype) -> None:
    """The interpreter's `tl.dot` is NumPy's product: near, but not to the bit. It has none of bfloat16."""
    x, weight = random(20, 100, dtype=dtype), random(50, 100, seed=1, dtype=dtype)
    y = torch.empty(20, 50)
    how: dict[str, Any] = {"BIASED": False, "CAPPED": False, "LOGITS": False, "ROUND": False, "BY_HAND": False}
    products.product[2, 2](x, weight, None, y, 20, 50, 100, 50, 1.0, 0.0, **how, ROWS=16, COLUMNS=32, DEPTH=32)
    assert (y - launch(dtype).product(x, Linear(weight))).abs().max() < 1e-4


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "clamped"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_the_first_half_of_an_mlp(name: str, gated: bool) -> None:
    x, up, gate = random(5, 32), random(40, 32, seed=1), random(40, 32, seed=2)
    found = launch().widen(x, Mlp(Linear(up), Linear(up.T), name, Linear(gate) if gated else None))
    of = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "relu_squared": lambda t: torch.relu(t).square(),
    }[name]
    ups, gates = x.double() @ up.double().T, x.double() @ gate.double().T
    exact = of(gates) * ups if gated else of(ups)
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("centred", [True, False])
def test_norms(centred: bool) -> None:
    x, by = 3 + random(4, 48), Norm(random(48, seed=1), 1e-5, random(48, seed=2) if centred else None)
    found = launch(centred=centred).norm(x, by)
    wide = x.double() - x.double().mean(-1, keepdim=True) if centred else x.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * by.weight
    assert (found - (exact + by.bias if by.bias is not None else exact)).abs().max() < 1e-5
    more = random(4, 48, seed=3)
    summed = x.clone()
    launch(centred=centred).add(summed, more, None, 0.5)
    assert torch.equal(summed, x + more * 0.5)


def attended(
    count: int, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, **how: Any
) -> tuple[torch.Tensor, Step]:
    """Attention of the last rows of a sequence, `[rows, HEADS * DIM]`; with `pads`, as a graph computes it."""
    window, sinks = how.get("window"), how.get("sinks")
    heads = Heads(launch(), HEADS, KV_HEADS, DIM, DIM, False, False, 0.25, how.get("cap", 0.0))
    memory = torch.stack([keys, values]).contiguous()
    plane = memory.stride(0) * 4
    region = Region.even(memory.data_ptr(), plane, memory.stride(1) * 4, memory)
    pages = np.arange(0, keys.shape[1], 8, dtype=np.int64)
    sequence = Sequenced((region,), how.get("pages", pages))
    rows = len(queries)
    placed = works([count - rows], [count], [sequence])
    at = np.arange(count - rows, count, dtype=np.int64)
    plan = arranged(at, at, placed, range(rows), {window}, heads.rows, how.get("most", 1000))
    plan = padded(plan) if how.get("pads") else plan
    _, step = brought(plan, CPU)
    queries = queries[step.tokens - (count - rows)]
    size = step.results * HEADS
    results = torch.empty(size), torch.empty(size), torch.full((size * DIM,), torch.nan)
    out = torch.empty(len(queries), HEADS * DIM)
    for each in step.every:
        where = step.pages, step.regions, each.cells, results
        heads.attend(queries, step.positions, each.members, each.jobs[window], *where, 0, window)
        heads.merge(results, sinks, each.rows, step.positions, each.cells, out, window)
    return out[:rows], step


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windowed": {"window": 70},
    "long window": {"window": 515},
    "capped": {"cap": 2.0},
    "sinks": {"sinks": random(HEADS, seed=5)},
    "all": {"window": 300, "cap": 3.0, "sinks": random(HEADS, seed=6), "most": 3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [3, 64, 600, 1030])
def test_attention_is_that_of_float64(case: str, count: int) -> None:
    """What follows the last position, or lies before a window, is garbage."""
    how = CASES[case]
    rows, room = min(count, 20), -(-count // 64) * 64
    keys, values = random(KV_HEADS, room, DIM, seed=1), random(KV_HEADS, room, DIM, seed=2)
    queries = random(rows, HEADS, DIM, seed=3)
    first = max(0, count - rows - how["window"] + 1) if "window" in how else 0
    for each in (keys, values):
        each[:, count:] = each[:, :first] = torch.nan
    found, _ = attended(count, keys, values, queries, **how)
    position = torch.arange(count - rows, count)[:, None]
    at = torch.arange(count)[None]
    seen = (at <= position) & (at > position - how.get("window", count + 1))
    group = HEADS // KV_HEADS
    for head in range(HEADS):
        k, v = (each[head // group, :count].nan_to_num().double() for each in (keys, values))
        score = queries[:, head].double() @ k.T * 0.25
        if cap := how.get("cap"):
            score = cap * torch.tanh(score / cap)
        score = score.masked_fill(~seen, -torch.inf)
        sink = how["sinks"][head].double().expand(rows, 1) if "sinks" in how else torch.full((rows, 1), -torch.inf)
        weight = torch.cat([score, sink.double()], dim=1).softmax(-1)[:, :-1]
        assert (found[:, head * DIM : (head + 1) * DIM] - weight @ v).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 300])
def test_rows_in_one_piece_and_in_scattered_pages_have_the_same_bits(window: int | None) -> None:
    count = 600
    keys, values = random(KV_HEADS, count, DIM), random(KV_HEADS, count, DIM, seed=1)
    queries = random(3, HEADS, DIM, seed=2)
    whole, step = attended(count, keys, values, queries, window=window)
    assert (step.every[0].jobs[window].view(-1, JOB)[:, 4] >= 0).all()
    pages = np.random.default_rng(0).permutation(count // 8) * 8
    apart = [torch.empty_like(each) for each in (keys, values)]
    for number, page in enumerate(pages):
        for target, source in zip(apart, (keys, values), strict=True):
            target[:, page : page + 8] = source[:, 8 * number : 8 * number + 8]
    scattered, step = attended(count, *apart, queries, window=window, pages=pages)
    assert (step.every[0].jobs[window].view(-1, JOB)[:, 4] == -1).all()
    assert torch.equal(whole, scattered)


def test_jobs_leave_out_what_no_row_attends_to() -> None:
    keys = random(KV_HEADS, 1088, DIM)
    _, step = attended(1030, keys, keys, random(4, HEADS, DIM), window=70)
    assert {int(job[2]) for job in step.every[0].jobs[70].view(-1, JOB)} == {3, 4}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [3, 513])
def test_what_pads_a_step_changes_no_bit(case: str, count: int) -> None:
    keys, values = random(KV_HEADS, 576, DIM, seed=1), random(KV_HEADS, 576, DIM, seed=2)
    queries, how = random(3, HEADS, DIM, seed=3), CASES[case] | {"most": 1000}
    alone, _ = attended(count, keys, values, queries, **how)
    found, step = attended(count, keys, values, queries, pads=True, **how)
    assert torch.equal(found, alone)
    assert len(step.tokens) == 4
    assert all((jobs.view(-1, JOB)[:, 1] == 0).any() for part in step.every for jobs in part.jobs.values())


@pytest.mark.parametrize("window", [None, 1, 70, 4096])
def test_a_job_without_rows_reads_and_writes_nothing(window: int | None) -> None:
    """Every address that it could read is invalid, and what it could write stays NaN."""
    heads = Heads(launch(), HEADS, KV_HEADS, DIM, DIM, False, False, 0.25, 0.0)
    nowhere, results = torch.full((16,), -1), [torch.full((size,), torch.nan) for size in (64, 64, 64 * DIM)]
    queries, jobs = torch.full((4, HEADS, DIM), torch.nan), torch.zeros(2 * JOB, dtype=torch.int64)
    where = nowhere, nowhere, nowhere, tuple(results)
    heads.attend(queries, nowhere, nowhere, jobs, *where, 0, window)
    assert all(each.isnan().all() for each in results)
