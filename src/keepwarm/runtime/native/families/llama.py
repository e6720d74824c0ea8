"""Llama, and models that differ from it by a detail: Mistral, Ministral, Qwen 2 and 3, SmolLM3, Falcon 3, Seed-OSS,
CWM, Arcee, Ernie 4.5, Helium. The other families use the functions of this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from keepwarm.runtime.native.blocks import BlockLinears, Blocks
from keepwarm.runtime.native.description import (
    Attention,
    Description,
    LayerParts,
    Linear,
    Mlp,
    Norm,
    NotCovered,
    Order,
    Table,
    alike,
)
from keepwarm.runtime.native.grouped import Grouped

_CHANGING = ("dynamic", "longrope")  # kinds of rotary embedding that change with the sequence's length
_TANH = {"none": "gelu", "tanh": "gelu_tanh"}
_COMPUTED = {  # what classes of torch and transformers compute
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu_squared",
}


def describe(model: Any) -> Description:
    return described(model, layers_of(model))


def layers_of(model: Any, *, more: float = 0.0, before_mlp: str = "post_attention_layernorm") -> tuple[LayerParts, ...]:
    """Return layers with a norm before attention and one, of the name `before_mlp`, before the MLP. `more`: see
    `norm`."""
    return tuple(
        LayerParts(
            attention(layer.self_attn, table=0 if getattr(layer.self_attn, "use_rope", True) else None),  # SmolLM3
            mlp(layer.mlp),
            before=norm(layer.input_layernorm, more),
            before_mlp=norm(getattr(layer, before_mlp), more),
        )
        for layer in model.model.layers
    )


def describe_interleaved(model: Any) -> Description:
    """Describe a model that rotates neighbouring dims, by cosines that it lists as Llama does."""
    tables = (table(model.model.rotary_emb),)
    return described(model, layers_of(model), interleaved=True, tables=tables)


def described(model: Any, layers: tuple[LayerParts, ...], **others: Any) -> Description:
    """Return the description of a model whose parts are Llama's, except `others`."""
    body, config = model.model, model.config
    if model.lm_head.bias is not None:
        raise NotCovered("a bias of the head")
    facts = {"heads": config.num_attention_heads, "embedding": weight(body.embed_tokens), "head": weight(model.lm_head)}
    if "kv_heads" not in others:
        facts["kv_heads"] = config.num_key_value_heads
    if "dim" not in others:
        facts["dim"] = alike([layer.self_attn.head_dim for layer in body.layers], "head widths")
    if "norm" not in others:
        facts["norm"] = norm(body.norm)
    if "tables" not in others:
        facts["tables"] = (table(body.rotary_emb, others.get("interleaved", False)),)
    facts |= others
    first = [each(torch.zeros(1, dtype=torch.long))[0].shape[-1] for each in facts["tables"][:1]]
    rotary = 2 * sum(first)  # no layer of some models rotates
    return Description(layers=layers, rotary=rotary, **facts)


def weight(module: Any) -> torch.Tensor | Blocks:
    """Return a module's weight, in blocks if it is from a GGUF file."""
    found = getattr(module, "blocks", None)
    return found if isinstance(found, Blocks) else module.weight.detach()


def norm(module: Any, more: float = 0.0) -> Norm | None:
    """Return a norm's parts, or None if there is no norm. The module adds `more` to its weight."""
    if module is None:
        return None
    bias = getattr(module, "bias", None)
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(exact(module).float() + more, epsilon, None if bias is None else bias.detach().float())


def norm_if_any(module: Any) -> Norm | None:
    """Return a norm's parts, or None where a model has torch's identity in its place."""
    return None if isinstance(module, nn.Identity) else norm(module)


def exact(module: Any, name: str = "weight") -> torch.Tensor:
    """Return a module's parameter as its file has it. From a GGUF file, the module's own is rounded (`filling`)."""
    found: torch.Tensor = getattr(module, f"exact_{name}", getattr(module, name))
    return found.detach()


def short_convolution(module: Any, kernel: int) -> torch.Tensor:
    """Return the weight `[channels, kernel]` of a convolution over each channel's last inputs. Raises NotCovered for
    another one."""
    usual = nn.Conv1d(1, 1, kernel, padding=kernel - 1)
    if any(getattr(module, name) != getattr(usual, name) for name in ("padding", "stride", "dilation", "kernel_size")):
        raise NotCovered("a convolution of another shape")
    return exact(module).flatten(1)


def linear(module: Any) -> Linear:
    own, outputs, inputs = weight(module), getattr(module, "outputs", None), getattr(module, "inputs", None)
    order = None
    if outputs is not None or inputs is not None:  # a file's order: `BlockLinear`
        order = Order(own, None if outputs is None else outputs.argsort(), inputs)
    return Linear(own, None if module.bias is None else module.bias.detach(), order)


def split(module: Any, *sizes: int) -> tuple[Linear, ...]:
    """Return the parts of a fused product. `sizes` are their numbers of outputs; by default it is halved."""
    if isinstance(module, BlockLinears):
        return tuple(map(linear, module.parts))
    fused = weight(module)
    sizes = sizes or (len(fused) // 2,) * 2
    weights = fused.split(sizes)
    biases = [None] * len(sizes) if module.bias is None else module.bias.detach().split(sizes)
    orders: Sequence[Order | None] = [None] * len(sizes)
    if isinstance(fused, Grouped):  # its parts lie at one address
        orders = [Order(fused, numbers) for numbers in torch.arange(len(fused)).split(sizes)]
    return tuple(map(Linear, weights, biases, orders))


def attention(module: Any, *, table: int | None = 0, more: float = 0.0) -> Attention:
    """Return the parts of an attention module, with its norms of queries and keys (`more`: see `norm`)."""
    q, k, v, o = map(linear, (module.q_proj, module.k_proj, module.v_proj, module.o_proj))
    q_norm, k_norm = (norm(getattr(module, name, None), more) for name in ("q_norm", "k_norm"))
    return Attention(q, k, v, o, module.scaling, q_norm, k_norm, table)


def mlp(module: Any) -> Mlp:
    gate = linear(module.gate_proj) if hasattr(module, "gate_proj") else None
    return Mlp(linear(module.up_proj), linear(module.down_proj), activation(module.act_fn), gate)


def activation(module: Any) -> str:
    """Return a module's or function's activation by its name in the kernels. If they lack it, return its own name."""
    name = getattr(module, "__name__", type(module).__name__)
    return _TANH[str(getattr(module, "approximate", "none"))] if name == "GELU" else _COMPUTED.get(name, name)


def fused_mlp(module: Any) -> Mlp:
    """Return the parts of an MLP whose gate and up are one product."""
    gate, up = split(module.gate_up_proj)
    return Mlp(up, linear(module.down_proj), activation(module.activation_fn), gate)


def table(module: Any, interleaved: bool = False, **which: str) -> Table:
    """Return the rotary embedding that a module computes, in float32. `which` names the type of layer."""
    kind = module.rope_type if isinstance(module.rope_type, str) else module.rope_type[which["layer_type"]]
    if kind in _CHANGING:
        raise NotCovered(f"a rotary embedding that changes with the sequence's length ({kind})")
    return partial(_rotary, module, interleaved, which)


def _rotary(
    module: Any, interleaved: bool, which: Mapping[str, str], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    where = next(module.buffers(), torch.empty(0)).device  # the computing device, not that of the positions
    given = torch.empty(1, dtype=torch.float32, device=where), positions[None].to(where)
    cosine, sine = (each[0] for each in module(*given, **which))
    if interleaved:
        return cosine[:, ::2], sine[:, ::2]
    half = cosine.shape[-1] // 2
    return cosine[:, :half], sine[:, :half]


def tables_of(model: Any) -> tuple[tuple[Table, ...], list[int]]:
    """Return a model's rotary embeddings, one for each type of layer where they differ, and each layer's number."""
    module, count = model.model.rotary_emb, len(model.model.layers)
    if not hasattr(module, "layer_types"):
        return (table(module),), [0] * count
    types = model.config.layer_types
    kinds = sorted(set(types))
    return tuple(table(module, layer_type=kind) for kind in kinds), [kinds.index(each) for each in types]
