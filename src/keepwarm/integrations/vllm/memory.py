"""vLLM's pages, wherever they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from keepwarm.integrations.vllm.device_pages import DevicePages
from keepwarm.integrations.vllm.page_copies import Pages
from keepwarm.runtime.device import port_to


def pages_of(views: Mapping[str, torch.Tensor], page_size: int, count: int | None = None) -> Pages | DevicePages:
    """Return vLLM's `count` pages, by layer `[pages, heads, tokens, width]`. Raises ValueError for an unexpected
    layout, and UnsupportedModel for a device to which there is no way."""
    port = port_to(next(iter(views.values())).device)
    return Pages(views, page_size) if port.is_host else DevicePages(distinct(views), page_size, port, count)


def distinct(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the views without those of layers that read another layer's KV."""
    known: set[tuple[int, torch.Size]] = set()
    own = {}
    for name, view in views.items():
        if (place := (view.data_ptr(), view.shape)) not in known:
            known.add(place)
            own[name] = view
    return own
