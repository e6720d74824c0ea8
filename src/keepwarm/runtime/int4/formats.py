"""How GPTQ, AWQ and compressed-tensors describe weights of 4 bits: which settings the kernels have a form for, and what
a module's tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keepwarm.runtime.native.grouped import AWQ, COMPRESSED, GPTQ, GPTQ_2, Grouped, NotMapped

Settings = Mapping[str, Any]
_GPTQ_VERSIONS = {"gptq": GPTQ, "gptq_v2": GPTQ_2}
_OTHERS = ("g_idx", "weight_shape", "weight_g_idx")  # tensors of a module beside those of `Format.names`


@dataclass(frozen=True)
class Format:
    """What one module's tensors are called, and how they are laid out."""

    layout: int
    codes: str
    scales: str
    zeros: str
    needs_zeros: bool
    group: int = 0  # columns that share a scale, as the settings say; -1: all; 0: not told, or differing

    def module_of(self, name: str) -> str:
        """Return the module of a tensor if it is one of a quantized weight; else an empty text."""
        module, _, last = name.rpartition(".")
        return module if last in (self.codes, self.scales, self.zeros, *_OTHERS) else ""

    def weight(self, shape: tuple[int, int], found: Mapping[str, torch.Tensor]) -> Grouped:
        """Return the weight of a module from its tensors, by their last names. Raises NotMapped, and ValueError for
        tensors that are missing or do not fit each other."""
        needed = (self.codes, self.scales, *([self.zeros] if self.needs_zeros else []))
        if missing := [name for name in needed if name not in found]:
            raise ValueError(f"no {missing[0]}; there are {', '.join(sorted(found))}")
        told = found.get("weight_shape")
        if told is not None and told.tolist() != list(shape):
            raise ValueError(f"a weight_shape of {told.tolist()}; expected {list(shape)}")
        weight = Grouped.of(self.layout, shape, found[self.codes], found[self.scales], found.get(self.zeros))
        if self.group and weight.group != (shape[1] if self.group < 0 else self.group):
            raise ValueError(f"scales of groups of {weight.group} columns; its configuration says {self.group}")
        order = found.get("g_idx", found.get("weight_g_idx"))
        if order is not None and not torch.equal(order.long(), torch.arange(shape[1]) // weight.group):
            raise NotMapped("columns that are reordered (desc_act)")
        return weight


def format_of(settings: Settings) -> Format | None:
    """Return a folder's format from its `quantization_config`. Returns None for a method that is not one of 4 bits in
    groups; raises NotMapped, with the reason, for settings that the kernels have no form for."""
    read = _READ.get(str(settings.get("quant_method")))
    return None if read is None else read(settings)


def _gptq(settings: Settings) -> Format:
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _expect("bits", settings.get("bits"), [4])
    _expect("checkpoint_format", version, _GPTQ_VERSIONS)
    if settings.get("desc_act") and not settings.get("static_groups"):
        raise NotMapped("columns that are reordered (desc_act)")
    if settings.get("dynamic"):
        raise NotMapped("modules with settings of their own (dynamic)")
    group = int(settings.get("group_size") or 0)
    return Format(_GPTQ_VERSIONS[version], "qweight", "scales", "qzeros", needs_zeros=True, group=group)


def _awq(settings: Settings) -> Format:
    _expect("bits", settings.get("bits", settings.get("w_bit")), [4])
    _expect("version", str(settings.get("version") or settings.get("format") or "gemm").lower(), ["gemm"])
    _expect("zero_point", settings.get("zero_point", True), [True])
    group = int(settings.get("group_size") or settings.get("q_group_size") or 0)
    return Format(AWQ, "qweight", "scales", "qzeros", needs_zeros=True, group=group)


def _compressed(settings: Settings) -> Format:
    groups = [each for each in (settings.get("config_groups") or {}).values() if isinstance(each, Mapping)]
    weights = [each.get("weights") or {} for each in groups]
    _expect("format", settings.get("format"), ["pack-quantized"])
    for group, each in zip(groups, weights, strict=True):
        _expect("format", group.get("format") or "pack-quantized", ["pack-quantized"])
        _expect("num_bits", each.get("num_bits"), [4])
        _expect("type", each.get("type", "int"), ["int"])
        _expect("strategy", each.get("strategy"), ["group", "channel"])
        _expect("input_activations", group.get("input_activations"), [None])
        _expect("output_activations", group.get("output_activations"), [None])
    _expect("kv_cache_scheme", settings.get("kv_cache_scheme"), [None])
    _expect("transform_config", settings.get("transform_config") or None, [None])
    _expect("sparsity_config", (settings.get("sparsity_config") or {}).get("format", "dense"), ["dense"])
    symmetric = [each.get("symmetric", True) for each in weights]
    needs_zeros = bool(symmetric) and not any(symmetric)
    sizes = {-1 if each.get("strategy") == "channel" else int(each.get("group_size") or 0) for each in weights}
    size = sizes.pop() if len(sizes) == 1 else 0
    return Format(COMPRESSED, "weight_packed", "weight_scale", "weight_zero_point", needs_zeros, size)


def _expect(name: str, found: object, expected: Iterable[object]) -> None:
    if found not in (known := list(expected)):
        raise NotMapped(f"{name} is {found!r}; the kernels have {' and '.join(map(repr, known))}")


_READ: dict[str, Callable[[Settings], Format]] = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
