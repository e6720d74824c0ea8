"""What the probe at load finds, by what a model does and not by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.every_model import make

from keepwarm.runtime import probe as probing
from keepwarm.runtime.arena.form import LayerForm
from keepwarm.runtime.probe import Kept, checked, probe
from keepwarm.runtime.runner import Runner


def found(model: Any) -> Kept:
    runner = Runner(model, None)
    return checked(runner, probe(runner))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "qwen3_5_text",
        "granitemoehybrid",
        "falcon_h1",
        "nemotron_h",
        "lfm2",
        "mamba2",
        "minimax",
        "xlstm",
        "rwkv",
        "deepseek_v4",
        "inkling2_text",
        "qwen4_exp_text",
    ],
)
def test_what_goes_on_rightly_is_cached(name: str) -> None:
    kept = found(make(name))
    assert not kept.uncached_reason
    assert not kept.serial
    assert kept.form.has_states == (name not in ("llama", "gemma3_text"))
    assert bool(kept.form.state_bytes) == kept.form.has_states


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_a_scan_without_a_beginning_is_run_token_by_token(name: str, dtype: torch.dtype) -> None:
    """Mamba-1's takes no state for several tokens at once, and starts anew silently."""
    kept = found(make(name).to(dtype))
    assert not kept.uncached_reason
    assert kept.serial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_in_the_modules_is_found(dtype: torch.dtype) -> None:
    kept = found(make("recurrent_gemma").to(dtype))
    assert "does not go on from what was kept of it" in kept.uncached_reason
    assert not kept.geometry.layers


def test_a_sequence_in_between_changes_what_is_kept_elsewhere() -> None:
    """A layer that adds what it saw last, of whatever sequence, keeps that outside of the cache."""
    model = make("llama")
    layer = model.model.layers[0]
    layer.register_buffer("seen", torch.zeros(1), persistent=False)

    def remember(module: Any, arguments: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        changed = hidden + 1e-6 * module.seen
        module.seen = hidden[:, -1:].detach().clone()
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    layer.register_forward_hook(remember)
    assert "does not go on" in found(model).uncached_reason


def test_layers_without_any_state_and_shared_ones_keep_nothing() -> None:
    assert any(form == LayerForm() for form in found(make("nemotron_h")).form.each)
    assert any(form == LayerForm() for form in found(make("gemma4_text")).form.each)


def test_index_keys_are_a_third_tensor() -> None:
    kept = found(make("deepseek_v32"))
    assert not kept.uncached_reason
    assert all(form.index_keys is not None for form in kept.form.each)


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_that_are_chosen_otherwise_are_no_difference(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, if most prompts agree; a model that goes on wrongly differs on all of them."""
    model = make("qwen3_moe").to(torch.bfloat16)
    real, tried = probing._logits, []

    def logits(runner: Runner, kept: Kept, tokens: Any, ends: Any, **more: Any) -> torch.Tensor:
        found = real(runner, kept, tokens, ends, **more)
        tried.append(int(tokens[1]))
        return found.roll(1) if len(ends) > 2 and (wrong or tried[0] == tried[-1]) else found

    monkeypatch.setattr(probing, "_logits", logits)
    reason = found(model).uncached_reason
    assert len(set(tried)) > 1
    assert ("in parts differ" in str(reason)) == wrong
