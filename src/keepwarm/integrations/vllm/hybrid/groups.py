"""vLLM's groups of KV, and which pages of each are needed to continue from a position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupRole,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from keepwarm.errors import ConfigError

Kind = Literal["full", "window", "chunks", "state"]

# Exact classes: subclasses may free pages that these keep (RSWASpec does), or have another layout.
_KINDS: dict[type, Kind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "window",
    ChunkedLocalAttentionSpec: "chunks",
    MambaSpec: "state",
}


@dataclass(frozen=True)
class Group:
    """Layers that share one table of pages of `page_size` tokens. A page of a state is the state at its end.

    `span` is the number of positions, its own included, that a token sees in a window, or the size of chunks; 0 for
    other kinds.
    """

    number: int
    kind: Kind
    page_size: int
    span: int
    layers: tuple[str, ...]

    def begin(self, end: int) -> int:
        """Return the first position whose page is needed to continue from `end`, which is between two pages."""
        if self.kind == "full":
            return 0
        if self.kind == "state":
            return end - self.page_size
        seen = max(end - self.span + 1, 0) if self.kind == "window" else end // self.span * self.span
        return seen // self.page_size * self.page_size

    def described(self) -> list[Any]:
        """Return what distinguishes its pages from those of other groups."""
        return [self.number, self.kind, self.page_size, self.span, list(self.layers)]


def groups_of(kv_cache_config: Any, config: Any) -> tuple[Group, ...]:
    """Return the groups that vLLM made. Raises ConfigError, with the reason, if they cannot be stored."""
    groups = kv_cache_config.kv_cache_groups
    _check_positions(config.parallel_config)
    found = tuple(_group(number, group) for number, group in enumerate(groups))
    if not found:
        raise ConfigError("this model keeps no KV that Keepwarm could store: run it without the connector")
    if not is_plain(found):
        _check(groups, found, config)
    return found


def is_plain(groups: Sequence[Group]) -> bool:
    """Whether every page of a prompt is kept for all layers, in one table."""
    return len(groups) == 1 and groups[0].kind == "full"


def is_replicated(kv_cache_config: Any, parallel: Any, *, shares: bool) -> bool:
    """Whether one tensor parallel rank stores for all: each holds the same KV, as MLA's belongs to no head, and finds
    what another one stored. `shares`: there is a remote tier, which ranks on other nodes reach as well. With several
    groups of pages each rank counts as one of its own."""
    groups = kv_cache_config.kv_cache_groups
    is_latent = len(groups) == 1 and all(type(spec) is MLAAttentionSpec for spec in _specs(groups[0]))
    return is_latent and int(parallel.tensor_parallel_size) > 1 and (shares or _is_on_one_node(parallel))


def _is_on_one_node(parallel: Any) -> bool:
    """Whether all ranks are surely on one machine. Ray and external launchers place them anywhere."""
    return parallel.nnodes_within_dp == 1 and parallel.distributed_executor_backend in (None, "mp", "uni")


def unit_of(groups: Iterable[Group]) -> int:
    """Return the number of tokens after which a page ends in every group. Loads end there, like vLLM's own prefix
    hits."""
    return lcm(*(group.page_size for group in groups))


def _group(number: int, group: Any) -> Group:
    specs = _specs(group)
    kinds = {_KINDS.get(type(spec)) for spec in specs}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        names = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ConfigError(
            f"Keepwarm stores full attention, sliding windows, chunks and Mamba states; this model has {names}, whose "
            "pages vLLM fills or frees by other rules: run it without the connector"
        )
    return Group(number, kind, specs[0].block_size, _span(specs[0], kind), tuple(group.layer_names))


def _specs(group: Any) -> list[Any]:
    return list(getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values())


def _span(spec: Any, kind: Kind) -> int:
    if kind == "window":
        return int(spec.sliding_window) + int(spec.extra_retained_tokens)
    return int(spec.attention_chunk_size) if kind == "chunks" else 0


def _check_positions(parallel: Any) -> None:
    """Raise ConfigError where a page does not hold the KV of consecutive tokens."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(
                f"{name} is {size}: each rank then holds other tokens of a page, and Keepwarm would store them under "
                "wrong names. Set it to 1, or run without the connector"
            )


def _check(groups: Sequence[Any], found: Sequence[Group], config: Any) -> None:
    """Raise ConfigError for groups that would be stored or loaded wrongly, or were never tried."""
    for is_so, why in (
        (config.parallel_config.pipeline_parallel_size > 1, "under pipeline parallelism ranks hold other groups"),
        (any(group.is_eagle_group for group in groups), "a drafter's last page changes after it was stored"),
        (
            any(g.host_resident or not g.enable_kv_transfer or g.role != KVCacheGroupRole.DEFAULT for g in groups),
            "vLLM does not show some of its groups",
        ),
        (
            any(spec.num_speculative_blocks for group in groups for spec in _specs(group) if type(spec) is MambaSpec),
            "under speculative decoding a state may be of tokens that are rejected",
        ),
        (
            any(
                spec.mamba_cache_mode != "align"
                for group in groups
                for spec in _specs(group)
                if type(spec) is MambaSpec
            ),
            "vLLM keeps states at the ends of pages only with prefix caching (mamba_cache_mode 'align')",
        ),
    ):
        if is_so:
            kinds = ", ".join(dict.fromkeys(group.kind for group in found))
            raise ConfigError(f"Keepwarm does not store this model's groups of KV ({kinds}): {why}")
