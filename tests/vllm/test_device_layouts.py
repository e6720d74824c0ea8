"""Pages as vLLM itself makes them, in each of its layouts, on a device that is as late as it may be."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from tests.helpers.vllm_pages import PAGE, PAGES, SPECS, made
from vllm.v1.kv_cache_layout import KVCacheLayout

from keepwarm.integrations.vllm.device_pages import DevicePages
from keepwarm.runtime.device import Stream
from keepwarm.testing.device import AdversarialPort

CHOSEN = (7, 8, 9, 2, 11, 0)


@pytest.mark.parametrize("kernel", [None, 16])
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: str(layout.name))
@pytest.mark.parametrize("kind", list(SPECS))
def test_pages_come_back_whole_and_nothing_else_is_touched(
    kind: str, layout: KVCacheLayout, kernel: int | None
) -> None:
    spec = SPECS[kind]
    try:
        raw, views = made(spec, layout, kernel)
        there, others = made(spec, layout, kernel)
    except (AssertionError, ValueError) as error:
        pytest.skip(f"vLLM has no such pages: {error}")
    for number, view in enumerate(views):
        generator = torch.Generator().manual_seed(number)
        view.view(torch.int8).copy_(torch.randint(-100, 100, view.view(torch.int8).shape, generator=generator))
    port = AdversarialPort()
    adopted = [port.adopt(raw), port.adopt(there)]
    named, other = ({f"layer {at}": view for at, view in enumerate(each)} for each in (views, others))
    source, target = DevicePages(named, PAGE, port, PAGES), DevicePages(other, PAGE, port, PAGES)
    staged = source.stage(len(CHOSEN) * PAGE)
    source.read(staged, CHOSEN)
    staged.ready()
    stream: Stream = target.take_stream()
    target.bring(staged, CHOSEN, stream).synchronize()
    cuts = views[0].shape[0] // PAGES
    chosen = [page * cuts + cut for page in CHOSEN for cut in range(cuts)]
    rest = sorted(set(range(PAGES * cuts)) - set(chosen))
    for mine, theirs in zip(views, others, strict=True):
        assert torch.equal(mine.view(torch.int8)[chosen], theirs.view(torch.int8)[chosen])
        assert not theirs.view(torch.int8)[rest].any()
    plan = target.plan(staged, CHOSEN, inward=True)
    assert plan.nbytes == sum(view.view(torch.int8)[chosen].nbytes for view in views)
    if layout.name == "LBNHC" and kind != "padded":
        assert len(plan) == 2 * 4 + 2 * len(CHOSEN)  # pages that follow one another; the odd layer's halves do not
    assert port.faults == []
    assert len(adopted) == 2
