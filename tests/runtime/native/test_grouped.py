"""Weights of 4 bits in groups: what they mean, and how they are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.helpers.int4_folders import How, Quantized, quantized

from keepwarm.runtime.native.blocks import FLOATS, Blocks, Packed, can_compute
from keepwarm.runtime.native.grouped import AWQ, COMPRESSED, GPTQ, GPTQ_2, Grouped, NotMapped

pytestmark = pytest.mark.skipif(not can_compute(), reason="no C++ compiler")
LAYOUTS = {"gptq": GPTQ, "gptq_v2": GPTQ_2, "awq": AWQ, "compressed-tensors": COMPRESSED}
ROWS, COLUMNS = 40, 384
EVERY = [
    *(How("gptq", group, symmetric) for group in (32, 64, 128, None) for symmetric in (True, False)),
    *(How("awq", group, symmetric=False) for group in (32, 64, 128)),
    How("gptq_v2", 96, symmetric=False),
    *(
        How("compressed-tensors", group, symmetric, dtype)
        for group in (32, 128, None)
        for symmetric in (True, False)
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


def some(how: How) -> Quantized:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return quantized(weight * torch.logspace(-4, 1, ROWS)[:, None], how)


def grouped(found: Quantized, how: How, **others: torch.Tensor | None) -> Grouped:
    parts = {**found.tensors, **others}
    names = ("weight_packed", "weight_scale", "weight_zero_point")
    codes, scales, zeros = names if how.method == "compressed-tensors" else ("qweight", "scales", "qzeros")
    held, by = parts[codes], parts[scales]
    assert held is not None
    assert by is not None
    return Grouped.of(LAYOUTS[how.method], (ROWS, COLUMNS), held, by, parts.get(zeros))


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_codes_mean_what_the_format_says(how: How) -> None:
    """To the bit, and so do their products, but for the rounding of float32."""
    found = some(how)
    weight = grouped(found, how)
    assert weight.is_whole
    assert torch.equal(weight.widened(torch.arange(ROWS)).double(), found.meant)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ found.meant.T
    assert torch.allclose(weight.product(x).double(), exact, atol=1e-5 * float(exact.abs().max()))


def test_weights_take_little_more_room_than_the_file() -> None:
    for group, most in ((128, 1.05), (64, 1.1), (32, 1.15)):
        found = quantized(torch.randn(256, 1024), How("awq", group, symmetric=False))
        weight = Grouped.of(AWQ, (256, 1024), *(found.tensors[name] for name in ("qweight", "scales", "qzeros")))
        assert Packed([weight]).nbytes <= most * sum(tensor.nbytes for tensor in found.tensors.values())


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_beside_them_are_floats(dtype: torch.dtype) -> None:
    weight = torch.randn(20, 64).to(dtype)
    held = Blocks(weight.view(torch.uint8), FLOATS[dtype], 64)
    assert held.is_whole
    assert torch.equal(held.widened(torch.arange(20)), weight.float())


@pytest.mark.parametrize("how", EVERY[:1] + EVERY[8:9] + EVERY[-1:], ids=str)
def test_tensors_that_do_not_fit_are_refused(how: How) -> None:
    found = some(how)
    whole = grouped(found, how)
    for name, tensor in found.tensors.items():
        if name in ("g_idx", "weight_shape"):
            continue
        for wrong in (tensor[:-1], tensor[:, :-1], tensor.flatten()):
            with pytest.raises(ValueError, match=r"of the shape|groups of scales"):
                grouped(found, how, **{name: wrong})
        with pytest.raises(NotMapped, match="in torch.float64"):  # another form of the same, not damage
            grouped(found, how, **{name: tensor.double()})
    for wrong in (replace(whole, rows=ROWS - 8), replace(whole, group=48), replace(whole, raw=whole.raw[1:])):
        assert not wrong.is_whole


def test_what_has_no_exact_form_is_not_mapped() -> None:
    odd = some(How("compressed-tensors", 48))
    with pytest.raises(NotMapped, match="groups of 48"):
        grouped(odd, How("compressed-tensors"))
    long = some(How("compressed-tensors", 32, dtype=torch.float32))
    with pytest.raises(NotMapped, match="16 significant bits"):
        grouped(long, How("compressed-tensors"))
    short = long.tensors["weight_scale"].bfloat16().float()
    assert grouped(long, How("compressed-tensors"), weight_scale=short).is_whole
    unclear = some(How("gptq"))
    with pytest.raises(NotMapped, match="16 or 0"):
        grouped(unclear, How("gptq"), qzeros=torch.full_like(unclear.tensors["qzeros"], -1))
