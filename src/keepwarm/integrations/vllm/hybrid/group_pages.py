"""One group's pages as a `vllm.page_copies.Pages`, or on a device as a `vllm.device_pages.DevicePages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from keepwarm.integrations.vllm.device_pages import DevicePages
from keepwarm.integrations.vllm.hybrid.groups import Group
from keepwarm.integrations.vllm.hybrid.naming import STATE_TOKENS
from keepwarm.integrations.vllm.memory import distinct, pages_of
from keepwarm.integrations.vllm.page_copies import Pages


class GroupPages:
    """A group's memory in one worker. vLLM's kernels may cut each of its blocks into several pages."""

    def __init__(self, group: Group, views: Mapping[str, torch.Tensor]) -> None:
        """`views` are those of all layers: `[pages, heads, page_size, width]`, or states of `[pages, 1, 1, bytes]`.
        Raises ValueError for an unexpected layout."""
        own = distinct({name: views[name] for name in group.layers if name in views})
        if not own:
            raise ValueError(f"vLLM registered no memory for group {group.number} ({group.kind})")
        if group.kind == "state":
            own = {name: _state_rows(name, view) for name, view in own.items()}
        sizes = {view.shape[2] for view in own.values()}
        cut = sizes.pop()
        whole = STATE_TOKENS if group.kind == "state" else group.page_size
        if sizes or whole % cut:
            raise ValueError(
                f"layers of group {group.number} have pages of {[cut, *sizes]} tokens in blocks of {whole}"
            )
        memory = pages_of(own, cut)
        if isinstance(memory, DevicePages) and cut != whole:  # there a block is moved as a whole
            memory = pages_of(own, whole)
        self._cuts = whole // memory.page_size
        self.memory: Pages | DevicePages = memory

    def of(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return the pages that make up vLLM's blocks."""
        return [block * self._cuts + cut for block in blocks for cut in range(self._cuts)]


def _state_rows(name: str, view: torch.Tensor) -> torch.Tensor:
    """Return a layer's states as pages of two rows; their bytes are not interpreted."""
    raw = view.view(torch.uint8)
    if raw.dim() != 4 or raw.shape[1:3] != (1, 1) or raw.shape[3] % (2 * STATE_TOKENS):
        raise ValueError(
            f"layer {name}: expected states of shape [pages, 1, 1, bytes], a multiple of {2 * STATE_TOKENS} bytes; got "
            f"{list(view.shape)} of {view.dtype}"
        )
    return raw.view(raw.shape[0], 1, STATE_TOKENS, raw.shape[3] // STATE_TOKENS)
