"""Checks whether the kernels can run what a family described. The kernels trust every shape, so all are checked
here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from keepwarm.runtime.native.blocks import COLUMNS, Blocks
from keepwarm.runtime.native.description import (
    ACTIVATIONS,
    Attention,
    Convolution,
    DeltaNet,
    Description,
    LayerParts,
    Linear,
    Mixer,
    Mlp,
    Norm,
    NotCovered,
    StateSpace,
)

_DIMS = (16, 32, 64, 128, 256, 512)
_LANES = 16
_DEEP = 32  # the matrix units multiply so many elements at once
_MOST_EXPERTS = 1024  # as in model.h
_MOST_INPUTS = 8  # as in recurrent.h
_MOST_KEYS = 256  # as in delta.h

_Tensor = torch.Tensor | Blocks | None
_Shape = tuple[str, _Tensor, tuple[int, ...]]  # a tensor's name, itself, and the shape that it must have


def check(found: Description, layers: int) -> None:
    """Raise NotCovered, with the reason, if the kernels cannot run it. `layers` is how many the model's code runs."""
    if {len(found.layers), len(found.windows)} != {layers}:
        raise NotCovered(f"{layers} layers in the configuration, and {len(found.layers)} that are there")
    if found.activation not in ACTIVATIONS:
        raise NotCovered(f"activation {found.activation!r}")
    _ = found.epsilon, found.scaling  # both raise NotCovered if layers differ
    _check_blocks(found)
    _check_shapes(found)
    inner, dims = {mlp.down.weight.shape[1] for mlp in found.mlps}, _dims(found)
    widths = {found.head.shape[1], *(found.heads * dim for dim in dims), *inner}
    if not dims <= {*_DIMS} or any(width % _LANES for width in widths):
        raise NotCovered("widths that are no multiple of 16, or an unusual head width")
    if (len(inner) > 1 or len(dims) > 1 or found.per_layer) and any(width % _DEEP for width in widths):
        raise NotCovered("layers of different widths, which are no multiples of 32")  # they share scratch memory
    for attention in found.attentions:
        dims_rotated = 0 if attention.table is None else found.rotated[attention.table]
        if dims_rotated % 2 or dims_rotated > found.shape(attention)[1]:
            raise NotCovered(f"a rotary embedding of {dims_rotated} dims")
    _check_shared(found)
    _check_per_layer(found)
    if found.experts:
        _check_experts(found)
    if found.recurrent:
        _check_recurrent(found)


def _dims(found: Description) -> set[int]:
    """Return the widths of all layers' heads."""
    return {found.shape(attention)[1] for attention in found.attentions}


def _check_shared(found: Description) -> None:
    """Check layers that read keys and values of others: these must keep some, and have the same shape and window."""
    for at, layer in enumerate(found.layers):
        attention = layer.attention
        if attention is None or attention.shares is None:
            if any(each.attention and each.attention.shares is not None for each in found.layers[:at]):
                raise NotCovered(f"layer {at} keeps something behind a layer that shares keys and values")
            continue
        other = found.layers[attention.shares].attention
        if attention.shares >= at or attention.shares not in found.keeping or other is None or found.wide_norms:
            raise NotCovered(f"layer {at} reads what layer {attention.shares} does not keep")
        alike = found.shape(other) == found.shape(attention) and other.k.weight is attention.k.weight
        if not alike or found.windows[at] != found.windows[attention.shares]:
            raise NotCovered(f"layer {at} has another shape or window than layer {attention.shares}, which it reads")


def _check_per_layer(found: Description) -> None:
    """Check per-layer embeddings: all layers have them or none, and their last norms take the layers' factors."""
    parts, hidden = found.per_layer, found.head.shape[1]
    if any((layer.per_layer is None) != (parts is None) for layer in found.layers):
        raise NotCovered("per-layer embeddings of some layers alone")
    if any(layer.factor != 1 and layer.after_mlp is None for layer in found.layers) or (
        parts and (found.parallel or found.experts or not found.layers[0].after_mlp)
    ):
        raise NotCovered("per-layer embeddings or factors of layers, and no norm behind the MLP")
    if parts is None:
        return
    width, each = parts.width, len(found.layers) * parts.width
    if width % _DEEP or width > min(hidden, *(mlp.down.weight.shape[1] for mlp in found.mlps)):
        raise NotCovered(f"per-layer embeddings of {width} dims")
    rows = max(parts.table.shape[0], found.head.shape[0])
    _refuse("the model", "the table of per-layer embeddings", parts.table, (rows, each))
    for name, tensor, shape in _linear("their projection", parts.projection, each, hidden):
        _refuse("the model", name, tensor, shape)


def _check_blocks(found: Description) -> None:
    """Check weights in blocks. A separate library computes with them; only routers are floats there."""
    routers = [id(each.router) for each in found.experts]
    products = [each for layer in found.layers for each in layer.products if id(each) not in routers]
    more = [found.per_layer.table, found.per_layer.projection.weight] if found.per_layer else []
    weights = [found.head, found.embedding, *more, *(each.weight for each in products)]
    blocks = [each for each in weights if isinstance(each, Blocks)]
    if not blocks:
        return
    if len(blocks) < len(weights):
        raise NotCovered("weights of which only some are in blocks")
    if any(dim % COLUMNS for dim in _dims(found)) or any(each.columns % COLUMNS for each in blocks):
        raise NotCovered(f"weights in blocks, and widths that are no multiple of {COLUMNS}")
    if not all(each.is_whole for each in blocks):
        raise NotCovered("blocks of another kind or length")


def _check_experts(found: Description) -> None:
    """Check experts. Layers and experts of different widths share scratch memory, where the padding of a last tile
    would not stay zero. So all widths must fill whole tiles."""
    mlps = [*found.mlps, *(experts.all for experts in found.experts)]
    widths = {found.head.shape[1], *(mlp.down.weight.shape[-1] for mlp in mlps)}
    if any(width % _DEEP or not width for width in widths):
        raise NotCovered("experts, and widths that are no multiple of 32, or zero")
    if len({experts.all.down.weight.shape[-1] for experts in found.experts}) > 1:
        raise NotCovered("experts whose width differs from layer to layer")
    for layer in found.layers:
        if layer.experts is None:
            continue
        if found.parallel or layer.experts.all.gate is None or (layer.mlp and layer.mlp.down.bias is not None):
            raise NotCovered("experts of another shape")
        if layer.experts.norms and (layer.mlp is None or layer.mlp.up.bias is not None or layer.after_mlp is None):
            raise NotCovered("experts with norms of their own, and no plain MLP beside them")
        if not 0 < layer.experts.chosen <= len(layer.experts.router.weight) <= _MOST_EXPERTS:
            raise NotCovered(f"{layer.experts.chosen} of {len(layer.experts.router.weight)} experts")


def _check_recurrent(found: Description) -> None:
    """Check layers with a state. Their results share scratch memory with those of attention, so all widths must fill
    whole tiles, as in a model with experts."""
    hidden, kernels = found.head.shape[1], {each.weight.shape[1] for each in found.recurrent}
    nets = [each for each in found.recurrent if not isinstance(each, Convolution)]
    reads = [each.weight for net in nets for each in net.reads]
    if any(isinstance(each, Blocks) and len(each) % _LANES for each in reads):
        raise NotCovered("layers with a state and weights in blocks, and products whose widths are no multiple of 16")
    widths = {hidden, found.heads * found.dim, *(net.heads * net.dim for net in nets)}
    if any(width % _DEEP for width in widths):
        raise NotCovered("layers with a state, and widths that are no multiple of 32")
    if not 1 < min(kernels) <= max(kernels) <= _MOST_INPUTS:
        raise NotCovered(f"short convolutions over more than {_MOST_INPUTS} inputs, or one")
    if found.parallel:
        raise NotCovered("layers with a state beside an MLP")
    for net in nets:
        if net.dim % _LANES or net.key_dim % _LANES or net.key_dim > _MOST_KEYS or net.heads % net.key_heads:
            raise NotCovered(f"states of {net.heads} heads of {net.key_dim} by {net.dim}, {net.key_heads} of keys")


def _check_shapes(found: Description) -> None:
    hidden = found.head.shape[1]
    if not found.attentions:
        raise NotCovered("no layer with attention")
    _refuse("the model", "embeddings", found.embedding, tuple(found.head.shape))
    _refuse("the model", "the last norm", found.norm.weight, (hidden,))
    _refuse("the model", "the last norm's bias", found.norm.bias, (hidden,))
    for at, layer in enumerate(found.layers):
        for name, tensor, shape in _shapes(found, layer):
            _refuse(f"layer {at}", name, tensor, shape)
        first = next(at for at, other in enumerate(found.layers) if type(other.mixer) is type(layer.mixer))
        for other in {0, first}:  # norms of queries and keys are those of the first layer that has attention
            if _norms(layer, found.layers[other]) != _norms(found.layers[other], layer):
                raise NotCovered(f"layer {at} has norms elsewhere than layer {other}")


def _norms(layer: LayerParts, beside: LayerParts) -> list[bool]:
    """Return which norms a layer has, of those that both may have."""
    norms = layer.norms if type(layer.mixer) is type(beside.mixer) else layer.own_norms
    return [norm is not None for norm in norms]


def _refuse(where: str, name: str, tensor: _Tensor, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise NotCovered(f"{where}: {name} of shape {list(tensor.shape)}, where the kernels need {list(shape)}")


def _shapes(found: Description, layer: LayerParts) -> Iterator[_Shape]:
    """Yield the tensors of one layer."""
    hidden = found.head.shape[1]
    yield from _mixer(found, layer.mixer, hidden)
    for name, norm in zip(("before", "after", "before_mlp", "after_mlp"), layer.own_norms, strict=True):
        yield from _norm(name, norm, hidden)
    if layer.mlp is not None:
        yield from _mlp("", layer.mlp, (layer.mlp.down.weight.shape[-1], hidden))
    if layer.per_layer is not None and found.per_layer is not None:
        yield from _linear("the per-layer gate", layer.per_layer.gate, found.per_layer.width, hidden)
        yield from _linear("the per-layer product", layer.per_layer.up, hidden, found.per_layer.width)
        yield from _norm("the per-layer norm", layer.per_layer.after, hidden)
    if layer.experts is not None:
        count, inner = len(layer.experts.router.weight), layer.experts.all.down.weight.shape[-1]
        yield from _linear("router", layer.experts.router, count, hidden)
        yield "the shared expert's gate", layer.experts.gate, (1, hidden)
        yield "factors of experts", layer.experts.scale, (count,)
        for norm in layer.experts.norms or ():
            yield from _norm("a norm of experts", norm, hidden)
        if layer.experts.sigmoid is not None:
            yield "the router's correction", layer.experts.sigmoid.correction, (count,)
        yield from _mlp("experts' ", layer.experts.all, (inner, hidden), (count,))


def _mixer(found: Description, mixer: Mixer, hidden: int) -> Iterator[_Shape]:
    if isinstance(mixer, Convolution):
        yield from _linear("the convolution's first product", mixer.read, 3 * hidden, hidden)
        yield from _linear("the convolution's last product", mixer.o, hidden, hidden)
        yield "the convolution", mixer.weight, (hidden, mixer.weight.shape[-1])
        yield "the convolution's bias", mixer.bias, (hidden,)
    elif isinstance(mixer, Attention):
        yield from _attention(found, mixer, hidden)
    else:
        yield from _matrices(mixer, hidden)


def _matrices(net: DeltaNet | StateSpace, hidden: int) -> Iterator[_Shape]:
    values, is_net = net.heads * net.dim, isinstance(net, DeltaNet)
    channels = 2 * net.key_heads * net.key_dim + values
    rows = sum(each.weight.shape[0] for each in net.reads)
    whole = torch.empty(rows, hidden, device="meta")
    yield "the first products", whole, (channels + values + (2 if is_net else 1) * net.heads, hidden)
    for each in net.reads:
        yield from _linear("a first product", each, each.weight.shape[0], hidden)
    yield from _linear("the last product", net.o, hidden, values)
    yield "the convolution", net.weight, (channels, net.weight.shape[-1])
    yield "the convolution's bias", net.bias, (channels,)
    yield "the steps", net.step, (net.heads,)
    yield from _norm("the norm of results", net.norm, net.dim if is_net else values)
    if isinstance(net, StateSpace):
        yield "the factors of values", net.skip, (net.heads,)


def _attention(found: Description, mixer: Attention, hidden: int) -> Iterator[_Shape]:
    kv_heads, dim = found.shape(mixer)
    queries, keys = found.heads * dim, kv_heads * dim
    if found.heads % kv_heads:
        raise NotCovered(f"{found.heads} heads for {kv_heads} of keys")
    yield from _linear("q", mixer.q, queries, hidden)
    yield from _linear("k", mixer.k, keys, hidden)
    yield from _linear("v", mixer.v, keys, hidden)
    yield from _linear("o", mixer.o, hidden, queries)
    if mixer.gate is not None:
        yield from _linear("gate", mixer.gate, queries, hidden)
    yield "sinks", mixer.sinks, (found.heads,)
    heads = (queries, keys) if found.wide_norms else (dim, dim)
    yield from _norm("q_norm", mixer.q_norm, heads[0])
    yield from _norm("k_norm", mixer.k_norm, heads[1])
    yield from _norm("v_norm", mixer.v_norm, dim)


def _norm(name: str, norm: Norm | None, width: int) -> Iterator[_Shape]:
    if norm is not None:
        yield name, norm.weight, (width,)
        yield f"{name}'s bias", norm.bias, (width,)


def _mlp(name: str, mlp: Mlp, shape: tuple[int, int], many: tuple[int, ...] = ()) -> Iterator[_Shape]:
    inner, hidden = shape
    yield from _linear(f"{name}up", mlp.up, inner, hidden, many)
    yield from _linear(f"{name}down", mlp.down, hidden, inner, many)
    if mlp.gate is not None:
        yield from _linear(f"{name}gate", mlp.gate, inner, hidden, many)


def _linear(name: str, linear: Linear, out: int, width: int, many: tuple[int, ...] = ()) -> Iterator[_Shape]:
    yield name, linear.weight, (*many, out, width)
    yield f"{name}'s bias", linear.bias, (*many, out)
