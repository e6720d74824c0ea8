"""Prompt caches of every kind become bytes and come back; what is not such a state is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model
from tests.helpers.mlx_host import prompt
from tests.helpers.mlx_models import CONFIGS

from keepwarm.errors import CorruptRun, UnsupportedModel
from keepwarm.integrations.mlx.form import Quantization, Unsuitable, form_of, leaves_of, makers_of, position_of
from keepwarm.integrations.mlx.memory import CacheSink, CacheSource, pack, tail_of, unpack

LENGTH = 50
EIGHT_BITS = Quantization(bits=8, group_size=32)


def filled(model: Any, length: int = LENGTH) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt(length, 1)]), cache=caches))
    return caches


def bits_of(caches: list[Any]) -> list[Any]:
    """Everything that a prompt cache holds up to its position, as plain values."""
    found: list[Any] = []
    for leaf in leaves_of(caches):
        if hasattr(leaf, "keys_and_values"):
            found += [np.array(array).tolist() for _, array in tree_flatten(leaf.keys_and_values())]
        else:
            found += [np.array(array).tolist() for _, array in tree_flatten(leaf.state)]
        found.append(getattr(leaf, "offset", None))
    return found


def copied(caches: list[Any], maker: Any) -> list[Any]:
    """Take a prompt cache to bytes and back."""
    source = CacheSource(caches, maker.form)
    sink = CacheSink(maker, LENGTH, tail_of(caches))
    for layer in range(len(source.geometry.layers)):
        for kv in (0, 1):
            sink.fill(layer, kv, 0, source.read(layer, kv, 0, LENGTH))
    return sink.finish()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prompt_cache_comes_back_as_it_was(kind: str, model: Callable[..., Path]) -> None:
    loaded, _ = load_model(model(kind))
    caches = filled(loaded)
    (maker,) = makers_of(loaded, None)
    assert form_of(caches) == maker.form
    assert position_of(caches, LENGTH) == LENGTH
    assert bits_of(copied(caches, maker)) == bits_of(caches)


def test_a_quantized_prompt_cache_comes_back_as_it_was(model: Callable[..., Path]) -> None:
    loaded, _ = load_model(model())
    _, maker = makers_of(loaded, EIGHT_BITS)
    caches = [cache.to_quantized(group_size=32, bits=8) for cache in filled(loaded)]
    assert form_of(caches) == maker.form
    assert bits_of(copied(caches, maker)) == bits_of(caches)


@pytest.mark.parametrize(("kind", "group_size"), [("llama", 64), ("gemma3_text", 32)])
def test_a_form_that_mlx_lm_cannot_make_is_not_expected(kind: str, group_size: int, model: Callable[..., Path]) -> None:
    loaded, _ = load_model(model(kind))
    assert len(makers_of(loaded, Quantization(bits=8, group_size=group_size))) == 1


def test_a_model_that_cannot_be_tried_is_refused(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, _ = load_model(model())
    monkeypatch.setattr(type(loaded), "__call__", lambda self, tokens, cache: tokens[0, 99, 99, 99])
    with pytest.raises(UnsupportedModel, match="one token cannot be computed"):
        makers_of(loaded, None)


def test_what_waits_to_be_stored_does_not_change_while_mlx_goes_on(model: Callable[..., Path]) -> None:
    loaded, _ = load_model(model())
    caches = filled(loaded)
    source = CacheSource(caches, form_of(caches))
    before = [source.read(layer, kv, 0, LENGTH).copy() for layer in range(3) for kv in (0, 1)]
    for cache in caches:
        cache.trim(20)
    mx.eval(loaded(mx.array([prompt(20, 2)]), cache=caches))  # the same rows are written anew
    after = [source.read(layer, kv, 0, LENGTH) for layer in range(3) for kv in (0, 1)]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    changed = CacheSource(caches, form_of(caches))
    assert not np.array_equal(changed.read(2, 1, 0, LENGTH), before[-1])


def test_states_are_written_and_read() -> None:
    held = [[mx.arange(6).reshape(2, 3), None, 7], [mx.array([1.5, 2.5], mx.bfloat16), "a", True, mx.array(3.0)]]
    found = unpack(pack(held))
    assert found[0][1:] == [None, 7]
    assert found[1][1:3] == ["a", True]
    for one, other in ((found[0][0], held[0][0]), (found[1][0], held[1][0]), (found[1][3], held[1][3])):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert mx.array_equal(one, other)
    with pytest.raises(Unsuitable, match="object"):
        pack([[object()]])
    with pytest.raises(Unsuitable, match="bool"):
        pack([[mx.array([True])]])


def test_bytes_that_are_no_state_are_damage(model: Callable[..., Path]) -> None:
    good = pack([[mx.arange(6), 7]])
    head = int.from_bytes(good[:8].tobytes(), "little")
    told = good[8 : 8 + head].tobytes()
    others = [b"", good[:-1].tobytes(), good.tobytes() + b"x", b"\xff" * 20]
    for text in (b"[[1", b"7", b'[[{"array": ["object", [1]]}]]', b'[[{"array": ["int32", [-3]]}]]', b'[[{"a": 1}]]'):
        others.append(len(text).to_bytes(8, "little") + text + good[8 + head :].tobytes())
    assert told.startswith(b"[[{")
    for data in others:
        with pytest.raises(CorruptRun):
            unpack(np.frombuffer(data, np.uint8))
    loaded, _ = load_model(model("mamba"))
    (maker,) = makers_of(loaded, None)
    with pytest.raises(CorruptRun):
        CacheSink(maker, LENGTH, good).finish()


def test_positions_that_do_not_fit_are_refused(model: Callable[..., Path]) -> None:
    loaded, _ = load_model(model())
    caches = filled(loaded)
    assert position_of(caches, LENGTH + 5) == LENGTH
    assert position_of(caches, LENGTH - 5) == LENGTH - 5  # rows belong to tokens
    caches[0].trim(1)
    with pytest.raises(Unsuitable, match="different positions"):
        position_of(caches, LENGTH)
    window = RotatingKVCache(16)
    window.update_and_fetch(mx.zeros((1, 1, 9, 4)), mx.zeros((1, 1, 9, 4)))
    with pytest.raises(Unsuitable, match="does not end with the tokens"):
        position_of([window], 8)


def test_several_sequences_are_refused() -> None:
    two = KVCache()
    two.update_and_fetch(mx.zeros((2, 1, 9, 4)), mx.zeros((2, 1, 9, 4)))
    with pytest.raises(Unsuitable, match="several sequences"):
        form_of([two])
    with pytest.raises(Unsuitable, match="keeps nothing"):
        form_of([KVCache()])
