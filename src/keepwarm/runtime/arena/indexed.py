"""A layer with index keys, a third tensor per token besides keys and values, as in sparse attention (DeepSeek V3.2,
GLM-MoE-DSA). In an arena the index keys are a layer of their own, in two halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from keepwarm.runtime.arena.layer import ArenaLayer


class IndexedArenaLayer(ArenaLayer):
    """Does what transformers' `DynamicIndexedLayer` does, in an arena."""

    def __init__(self, kv: Mapping[str, Any], index: ArenaLayer, position_rows: int) -> None:
        """`kv` are the arguments of `ArenaLayer`; `index` holds the index keys, `[1, capacity, width]` per half."""
        super().__init__(**kv)
        self.index = index
        self._rows = position_rows

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """`[rows, 1, length]`: a text's positions, counted from 0; None in layers without any."""
        if not self._rows or not self.length:
            return None
        return torch.arange(self.length, device=self.device).expand(self._rows, 1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: torch.Tensor | None) -> None:
        """Ignore the value: positions follow from the length."""

    @property
    def is_indexer_initialized(self) -> bool:
        return True

    @property
    def indexer_keys(self) -> torch.Tensor:
        """`[1, length, index_head_dim]`."""
        first, second = (self.index.plane(kv).tensor()[:, : self.index.length] for kv in (0, 1))
        return torch.cat([first, second], dim=-1)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append `[1, n, index_head_dim]`. Return all index keys."""
        half = self.index.plane(0).shape[2]
        rows = indexer_key_states[:, None]
        first, second = self.index.update(rows[..., :half], rows[..., half:])
        return torch.cat([first[0], second[0]], dim=-1)
