"""The size of a recurrent state, from a configuration alone.

Sizes are those of transformers' own layers (`models/*/modeling_*.py`, version 5.23). Each layer keeps the last inputs
of a short convolution in the model's dtype, and a state whose scan runs in float32 whatever the model's dtype is. A
snapshot has a short description of each layer before its tensors (`runtime.arena.state_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepwarm.core.geometry import ITEMSIZE, geometry_of
from keepwarm.core.kinds import STATE_KINDS, layer_kinds, text_config

DESCRIPTION = 350  # approximate bytes of one: 319 to 353 were seen
_SCAN = 4  # bytes of float32


@dataclass(frozen=True)
class LayerState:
    """One layer's state: numbers of elements in the model's dtype (`conv`), and in float32 (`scan`)."""

    conv: int
    scan: int
    family: str

    def nbytes(self, itemsize: int) -> int:
        return DESCRIPTION + self.conv * itemsize + self.scan * _SCAN


@dataclass(frozen=True)
class SnapshotSize:
    """Size of one snapshot of a model's state."""

    layers: int
    nbytes: int
    family: str  # in words

    def tokens(self, bytes_per_token: int) -> float | None:
        """How many tokens of KV have the same size; None for a model without KV."""
        return self.nbytes / bytes_per_token if bytes_per_token else None


def snapshot_size(config: Mapping[str, Any], dtype: str | None = None) -> SnapshotSize | None:
    """Size of a snapshot. None for a model whose layers keep no state, or whose state has an unknown size
    (`stateful_layers` tells them apart)."""
    layers = stateful_layers(config)
    state = layer_state(text_config(config)) if layers else None
    if state is None:
        return None
    itemsize = ITEMSIZE[geometry_of(config, dtype).dtype]
    return SnapshotSize(layers, layers * state.nbytes(itemsize), state.family)


def stateful_layers(config: Mapping[str, Any]) -> int:
    """How many layers keep a recurrent state, with or without keys and values."""
    return sum(kind in STATE_KINDS for kind, _ in layer_kinds(config))


def layer_state(config: Mapping[str, Any]) -> LayerState | None:
    """The state of one stateful layer; None if the formula is not known."""
    if config.get("model_type") in _UNKNOWN:
        return None
    for formula in (_gated_delta, _mamba2, _mamba1, _short_convolution):
        if (found := formula(config)) is not None:
            return found
    return None


# These look like one of the families below, but keep more.
_UNKNOWN = ("qwen4_exp", "qwen4_exp_text")


def _gated_delta(config: Mapping[str, Any]) -> LayerState | None:
    """Gated delta nets: Qwen3-Next, Qwen3.5, OLMo hybrid (`Qwen3NextGatedDeltaNet`), and Kimi's, with a single width
    (`KimiLinearDeltaAttention`). The convolution runs over queries, keys and values; the state has a matrix for each
    value head."""
    one = config.get("linear_attn_config")
    if isinstance(one, Mapping):  # as Kimi publishes it
        heads, width, kernel = one.get("num_heads"), one.get("head_dim"), one.get("short_conv_kernel_size")
        config = {"linear_num_heads": heads, "linear_head_dim": width, "linear_conv_kernel_dim": kernel}
    kernel = config.get("linear_conv_kernel_dim")
    if not kernel:
        return None
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    both = ("linear_num_heads", "linear_head_dim") * 2
    keys, key, values, value = (_of(config, name, other) for name, other in zip(names, both, strict=True))
    if not (keys and key and values and value):
        return None
    return LayerState((2 * keys * key + values * value) * kernel, values * key * value, "gated delta net")


def _mamba2(config: Mapping[str, Any]) -> LayerState | None:
    """Mamba-2: Granite 4, Bamba, Falcon-H1, Nemotron-H, Zamba 2 (`GraniteMoeHybridMambaLayer`). The convolution runs
    over the inner width and two vectors of each group; the state has a matrix for each head."""
    heads = _of(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    if heads is None and config.get("model_type") == "mamba2":
        heads = config.get("num_heads")
    groups = _of(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    state = _of(config, "mamba_d_state", "ssm_state_size", "state_size")
    kernel = _of(config, "mamba_d_conv", "conv_kernel")
    inner = config.get("mamba_d_ssm") or _inner(config)
    width = _of(config, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if heads and (config.get("mamba_head_dim") or not inner):  # the width of Nemotron-H's heads decides
        inner = heads * width if width else None
    if not (heads and groups and state and kernel and inner):
        return None
    return LayerState((inner + 2 * groups * state) * kernel, inner * state, "Mamba-2")


def _mamba1(config: Mapping[str, Any]) -> LayerState | None:
    """Mamba-1: Mamba, Falcon-Mamba, Jamba, Zamba (`MambaMixer`). The state has a vector for each inner channel."""
    state, kernel = _of(config, "mamba_d_state", "state_size"), _of(config, "mamba_d_conv", "conv_kernel")
    inner = _inner(config)
    if not (state and kernel and inner):
        return None
    return LayerState(inner * kernel, inner * state, "Mamba-1")


def _short_convolution(config: Mapping[str, Any]) -> LayerState | None:
    """LFM2 (`Lfm2ShortConv`): only the last inputs of a convolution over the hidden width, and no other state."""
    kernel, hidden = config.get("conv_L_cache"), config.get("hidden_size")
    if not (isinstance(kernel, int) and isinstance(hidden, int)):
        return None
    return LayerState(hidden * kernel, 0, "short convolution")


def _inner(config: Mapping[str, Any]) -> int | None:
    factor, hidden = _of(config, "mamba_expand", "expand"), config.get("hidden_size")
    return factor * hidden if factor and isinstance(hidden, int) else None


def _of(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first field that is a number; some files say "auto"."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
