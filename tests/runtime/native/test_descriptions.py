"""What a family says of a loaded model: its windows, its shapes, its values; and what is left to transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tests.helpers.lean import Lean, compiled, windows
from tests.helpers.lean_families import LEAN, WINDOW, lean_family
from torch import nn

from keepwarm import Engine
from keepwarm.runtime.agreement import disagreement
from keepwarm.runtime.native.decoder import LeanDecoder, unsupported
from keepwarm.runtime.native.description import Description
from keepwarm.runtime.native.families import described
from keepwarm.runtime.native.outline import Outline
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner

COUNT = 150  # positions: twice a window
IDS = [3 + i * 7919 % 600 for i in range(COUNT)]
FULL = {"layer_types": ["full_attention"] * 3}
MIXED = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
STRAY = {"sliding_window": WINDOW}


def reason(model: Any, layers: list[int | None] | None = None) -> str:
    return unsupported(model, [None] * 3 if layers is None else layers)


@pytest.mark.parametrize(
    ("family", "changes", "layer"),
    [
        ("mistral-windowed", FULL, 0),  # one mask, with a window, whatever the types say
        ("mistral-windowed", MIXED, 0),
        ("phi3", STRAY | FULL, 0),
        ("starcoder2", STRAY | FULL, 0),
        ("mixtral", STRAY | FULL, 0),
        ("biased", STRAY, 0),  # one mask, without a window, whatever the configuration says
        ("granite", STRAY, 0),
        ("olmo2", STRAY, 0),
        ("olmoe", STRAY, 0),
        ("glm4", STRAY, 0),
        ("cohere", STRAY, 0),
        ("gemma", STRAY | MIXED, 1),
    ],
)
def test_a_cache_that_is_made_for_other_windows_than_the_masks_is_refused(
    family: str, changes: dict[str, Any], layer: int
) -> None:
    model = lean_family(family, **changes)
    told = reason(model, windows(probe(Runner(model, None)).geometry))
    assert told.startswith(f"layer {layer} attends to ")
    assert f"{WINDOW} positions" in told


@pytest.mark.parametrize("family", sorted(LEAN))
def test_a_family_states_the_windows_of_its_masks(family: str) -> None:
    """They are those of the cache where the configuration is as released models have it."""
    model = lean_family(family)
    assert described(model).attended == windows(probe(Runner(model, None)).geometry)


@pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers")
@pytest.mark.parametrize(
    ("family", "changes"), [("mistral-windowed", FULL), pytest.param("biased", STRAY, marks=pytest.mark.slow)]
)
def test_such_a_model_goes_on_through_transformers(
    tokenizer: Any, tmp_path: Any, family: str, changes: dict[str, Any]
) -> None:
    model = lean_family(family, **changes)
    with Engine.from_pretrained((model, tokenizer), store=tmp_path, step=32) as engine:
        assert engine.pipeline.model.runner.lean is None
        cold = engine.generate(IDS, max_new_tokens=4, trace=True)
        engine.flush()
        engine.pipeline.pool.forget()
        warm = engine.generate(IDS, max_new_tokens=4, trace=True)
    assert warm.cached_tokens
    assert warm.logits_digest == cold.logits_digest


@pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers")
@pytest.mark.parametrize(("family", "cap"), [("gemma3", 0.0), ("gemma2", 2.0)])
def test_scores_are_capped_where_the_forward_pass_does_it(family: str, cap: float) -> None:
    lean = Lean(family, torch.float32, attn_logit_softcapping=2.0)
    assert described(lean.model).score_cap == cap
    with torch.inference_mode():
        theirs = lean.model(torch.tensor([IDS[:40]])).logits[0, -1]
    mine = lean.run(IDS[:40], [], lean.arena())[0]
    assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers")
@pytest.mark.host_memory("the compiled kernels run in host memory")
def test_in_float32_the_comparison_at_load_sees_a_small_fault() -> None:
    """Of a percent in a factor of scores, say, which rounding in half precision would hide."""
    assert compiled is not None
    model = lean_family("granite")
    own = Runner(model, None)
    kept = probe(own)
    ours = Runner(model, None, LeanDecoder(model, compiled, windows(kept.geometry)), own.port)
    assert disagreement(ours, own, kept) == ""
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.01
    assert disagreement(ours, own, kept).startswith("logits differ by ")


@pytest.mark.parametrize("family", sorted(LEAN))
def test_a_tensor_of_another_size_is_refused(family: str) -> None:
    """In any layer, at any place: the kernels would read past the end of what was packed."""
    model = lean_family(family)
    assert reason(model, described(model).attended) == ""
    for name, parameter in model.named_parameters():
        whole = parameter.data
        tied = parameter is model.lm_head.weight and parameter is model.model.embed_tokens.weight
        for dim in range(1 if tied else 0, whole.dim()):  # fewer words are another vocabulary
            parameter.data = whole.narrow(dim, 0, whole.shape[dim] // 2).clone()
            assert reason(model), f"{name} of shape {list(parameter.shape)}"
        parameter.data = whole


def test_a_narrower_layer_is_refused_unless_it_fills_whole_tiles() -> None:
    model = lean_family("biased", mlp_bias=False)
    mlp = model.model.layers[2].mlp
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, nn.Linear(64, 16, bias=False))
    mlp.down_proj = nn.Linear(16, 64, bias=False)
    assert reason(model) == "layers of different widths, which are no multiples of 32"


def test_another_number_of_layers_is_refused() -> None:
    model = lean_family("biased")
    del model.model.layers[2]
    assert "3 layers in the configuration" in reason(model)


def test_layers_whose_norms_stand_elsewhere_are_refused() -> None:
    model = lean_family("qwen3-moe")
    model.model.layers[1].self_attn.q_norm = None
    assert reason(model) == "layer 1 has norms elsewhere than layer 0"


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.2


def _width(model: Any) -> None:
    model.model.layers[1].self_attn.head_dim = 32


def _residual(model: Any) -> None:
    model.model.layers[1].residual_multiplier = 0.5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_activation, "activations that differ within the model (relu, silu)"),
        (_epsilon, "epsilons of norms that differ"),
        (_scaling, "factors of scores that differ"),
        (_width, "head widths that differ"),
        (_residual, "factors of layers' results that differ"),
    ],
)
def test_values_that_differ_between_layers_are_refused(change: Callable[[Any], None], told: str) -> None:
    model = lean_family("granite")
    assert reason(model) == ""
    change(model)
    assert reason(model).startswith(told)


def test_the_activation_is_the_modules() -> None:
    model = lean_family("granite")
    for module, name in ((nn.ReLU(), "relu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.GELU(), "gelu")):
        for layer in model.model.layers:
            layer.mlp.act_fn = module
        assert described(model).activation == name
    for name, expected in (("gelu_new", "gelu_tanh"), ("relu2", "relu_squared"), ("swish", "silu")):
        assert described(lean_family("granite", hidden_act=name)).activation == expected
    assert reason(lean_family("granite", hidden_act="quick_gelu")) == "activation 'QuickGELUActivation'"


def test_attention_to_what_follows_is_refused() -> None:
    for family in ("gemma", "gemma3", "biased"):
        model = lean_family(family)
        model.config.is_causal = False
        assert reason(model) == "attention to what follows"


def _first(parts: Description, **changes: Any) -> Description:
    return replace(parts, layers=(replace(parts.layers[0], **changes), *parts.layers[1:]))


def test_the_outline_tells_descriptions_apart() -> None:
    """With the same weights: what stands where, what was added to a norm, and which rows of a product are which."""
    model = lean_family("phi3")
    parts = described(model)
    first, outline = parts.layers[0], Outline(model)
    assert first.mlp is not None
    assert first.mlp.gate is not None
    assert first.before is not None
    assert first.attention is not None
    turned = replace(first.attention, k=first.attention.v, v=first.attention.k)
    others = [
        _first(parts, mixer=turned),
        _first(parts, mlp=replace(first.mlp, up=first.mlp.gate, gate=first.mlp.up)),
        _first(parts, before=replace(first.before, weight=first.before.weight + 1)),
        _first(parts, before=None, after=first.before),
        replace(parts, parallel=True),
        replace(parts, windows=(WINDOW, None, None)),
    ]
    found = [str(outline.of(each)) for each in (parts, *others)]
    assert len(set(found)) == len(found)
    again = lean_family("phi3")
    assert str(Outline(again).of(described(again))) == found[0]


def test_the_outline_has_every_part() -> None:
    model = lean_family("gpt-oss")
    told = Outline(model).of(described(model))
    assert set(told) == {field.name for field in fields(Description)} - {"tables", "factors"}
    assert told["layers"][0]["experts"]["all"]["gate"]["weight"][0] == "model.layers.0.mlp.experts.gate_up_proj"
