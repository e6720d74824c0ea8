"""A folder in bfloat16 that is loaded in float32: its weights stay as the file has them, and nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import adapter
from tests.helpers.hub import hub
from tests.helpers.lean import compiled
from tests.helpers.lean_families import LEAN, lean_family
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.config import EngineConfig
from keepwarm.core.blocks import token_ids
from keepwarm.runtime import loader, narrow_folder, sources
from keepwarm.runtime.adapters.beside import beside
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.loader import LoadedModel, load
from keepwarm.runtime.narrow_folder import kept_narrow
from keepwarm.runtime.native.narrow import NarrowEmbedding, NarrowLinear, TiedHead, narrow_tensors, widened

CPU = torch.device("cpu")
QUICK = ("biased", "gemma3", "gemma4", "granite4-moe", "lfm2", "phi3", "qwen3-moe")
WIDE = {  # they have experts, or transformers gives tensors other names
    *(
        "flex-olmo",
        "gemma4-moe",
        "glm4-moe",
        "gpt-oss",
        "granite-moe",
        "granite-moe-shared",
        "granite-moe-swa",
        "granite4-moe",
        "lfm2-moe",
    ),
    *("lfm3", "mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "qwen3-next", "qwen3.5-moe"),
}

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("the lean decoder attends to the host's memory"),
]
Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path, tokenizer: Any) -> Write:
    def written(model: Any) -> Path:
        model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return written


def loaded(folder: Path) -> LoadedModel:
    return load(folder, EngineConfig.build(dtype="float32", device="cpu"))


def wide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    with monkeypatch.context() as patch:
        patch.setattr(sources, "kept_narrow", lambda *_: None)
        return loaded(folder)


def logits(model: LoadedModel) -> torch.Tensor:
    lean = model.runner.lean
    assert lean is not None
    ids = token_ids([3 + i * 7919 % 600 for i in range(100)])
    arena = Arena(model.geometry, 128, HostPort(), form=model.form)
    first = lean.step([ids[:70]], [0], [arena.sequenced()], range(70))
    arena.advance(70)
    return torch.cat([first, lean.step([ids[70:]], [70], [arena.sequenced()], range(30))])


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in sorted(LEAN)]
)
def test_answers_and_identities_are_those_of_widened_weights(
    family: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(lean_family(family, torch.float32))
    narrow, usual = loaded(folder), wide(folder, monkeypatch)
    assert bool(narrow_tensors(narrow.model)) is (family not in WIDE)
    assert not narrow_tensors(usual.model)
    assert torch.equal(logits(narrow), logits(usual))
    assert narrow.namespace() == usual.namespace()
    assert narrow.model.dtype is torch.float32


def test_modules_compute_what_widened_ones_do(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(lean_family("gemma3", torch.float32))
    narrow, usual = loaded(folder), wide(folder, monkeypatch)
    ids = torch.tensor([[3 + i * 7 for i in range(40)]])
    with torch.inference_mode():
        torch.testing.assert_close(narrow.model(ids).logits, usual.model(ids).logits)
    kinds = {type(module) for module in narrow.model.modules()}
    assert {NarrowLinear, NarrowEmbedding, TiedHead} <= kinds
    assert torch.nn.Linear not in kinds


def test_neither_modules_nor_kernels_have_wide_weights(write: Write) -> None:
    found = loaded(write(tiny("llama")))
    parameters = sum(each.nbytes for each in found.model.parameters())
    assert found.runner.lean is not None
    held = sum(found.runner.lean.storages.values())
    count = sum(each.numel() for each in (*found.model.parameters(), *found.model.buffers()))
    assert parameters < 0.01 * held
    assert held < 1.1 * 2 * count  # 16 bits each, and the head is the table of embeddings, too


def test_an_engine_answers_alike_and_finds_what_the_other_stored(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompt = write(tiny("llama")), "once upon a time there was " * 40
    asked: dict[str, Any] = {"max_new_tokens": 4, "trace": True}
    with Engine.from_pretrained(folder, dtype="float32", store=tmp_path / "kv") as engine:
        assert narrow_tensors(engine.pipeline.model.model)
        mine = engine.generate(prompt, **asked)
    monkeypatch.setattr(sources, "kept_narrow", lambda *_: None)
    with Engine.from_pretrained(folder, dtype="float32", store=tmp_path / "kv") as engine:
        theirs = engine.generate(prompt, **asked)
    assert theirs.cached_by_tier.keys() == {"disk"}
    assert theirs.text == mine.text
    assert theirs.logits_digest == mine.logits_digest


def test_an_adapter_beside_it(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny("llama")
    one = adapter(tmp_path / "one", base, ("q_proj", "down_proj"), size=0.05)
    folder, found = write(base), []
    for each in (sources.kept_narrow, lambda *_: None):
        monkeypatch.setattr(sources, "kept_narrow", each)
        with Engine.from_pretrained(folder, dtype="float32", adapters={"one": one}) as engine:
            found.append(engine.generate([5, 6, 7], adapter="one", max_new_tokens=1, trace=True).logits_digest)
    assert found[0] == found[1]


def test_a_changed_weight_is_noticed(write: Write) -> None:
    model = loaded(write(tiny("llama")))
    before, old = model.namespace(), logits(model)
    weight = model.model.get_submodule("model.layers.0.mlp.up_proj").weight
    with torch.no_grad():
        weight[0, 0] = 3
    assert model.namespace() != before
    assert not torch.equal(logits(model), old)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("model.layers.0.mlp.up_proj.weight", torch.float32), ("model.embed_tokens.weight", torch.float16)],
)
def test_other_dtypes_are_loaded_by_transformers(name: str, dtype: torch.dtype, write: Write) -> None:
    folder = write(tiny("llama"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, file, {"format": "pt"})
    assert kept_narrow(folder, CPU, torch.float32) is None
    assert not narrow_tensors(loaded(folder).model)


def test_norms_may_be_in_float32(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tiny("llama"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.linspace(0.5, 1.5, 64)  # no numbers of bfloat16
    save_file(tensors, file, {"format": "pt"})
    narrow, usual = loaded(folder), wide(folder, monkeypatch)
    assert narrow_tensors(narrow.model)
    assert torch.equal(logits(narrow), logits(usual))


def test_what_lacks_or_is_too_much_is_left_to_transformers(write: Write) -> None:
    folder = write(tiny("qwen2"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    more = tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(4, 4).bfloat16()}
    fewer = {name: each for name, each in tensors.items() if name != "model.layers.1.self_attn.q_proj.bias"}
    shapes = tensors | {"model.norm.weight": torch.ones(65).bfloat16()}
    for changed in (more, fewer, shapes):
        save_file(changed, file, {"format": "pt"})
        assert kept_narrow(folder, CPU, torch.float32) is None
    file.write_bytes(file.read_bytes()[:-100])
    assert kept_narrow(folder, CPU, torch.float32) is None


@pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"dtype": "float32", "attention": "model"}])
def test_other_ways_to_run_it_widen(how: dict[str, Any], write: Write) -> None:
    assert not narrow_tensors(load(write(tiny("llama")), EngineConfig.build(device="cpu", **how)).model)


def test_without_the_kernels_it_is_widened(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels may turn out to be wrong for it."""
    monkeypatch.setattr(loader, "variance", lambda *_, **__: "a test")
    model = loaded(write(tiny("llama")))
    assert model.runner.lean is None
    assert not narrow_tensors(model.model)


def test_what_is_in_the_files_later_changes_nothing(write: Write) -> None:
    """They may be written anew, or be cut short."""
    model = loaded(write(tiny("llama", tie_word_embeddings=False)))
    before, named = logits(model), model.namespace()
    file = Path(model.model.config._name_or_path) / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.seek(size // 2)
        opened.write(bytes(size // 2))
    assert torch.equal(logits(model), before)
    os.truncate(file, 100)
    assert torch.equal(logits(model), before)
    assert model.namespace() is named


def test_which_file_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with all weights counts for more than an index, as in transformers."""
    folder = write(tiny("llama", seed=1))
    tiny("llama", seed=2).to(torch.bfloat16).save_pretrained(folder.parent / "other", max_shard_size="1MB")
    for file in (folder.parent / "other").glob("model*"):
        file.rename(folder / file.name)
    assert (folder / "model.safetensors.index.json").exists()
    assert (folder / "model.safetensors").exists()
    narrow = loaded(folder)
    assert narrow_tensors(narrow.model)
    assert torch.equal(logits(narrow), logits(wide(folder, monkeypatch)))


@pytest.mark.parametrize(
    "more",
    [{"auto_map": {"AutoModelForCausalLM": "own.Own"}}, {"transformers_weights": "other.safetensors"}],
    ids=["code", "place"],
)
def test_what_a_configuration_says_of_other_code_or_weights(more: dict[str, Any], write: Write) -> None:
    folder = write(tiny("llama"))
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | more))
    assert kept_narrow(folder, CPU, torch.float32) is None


def test_recommended_sampling_is_that_of_transformers(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tiny("llama"))
    (folder / "generation_config.json").unlink()
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"temperature": 0.6, "top_p": 0.9, "do_sample": True}))
    narrow, usual = loaded(folder), wide(folder, monkeypatch)
    assert narrow.recommended_sampling == usual.recommended_sampling
    assert narrow.stop_tokens == usual.stop_tokens


def test_a_file_with_more_than_its_tensors_is_refused(write: Write) -> None:
    folder = write(tiny("llama"))
    with (folder / "model.safetensors").open("ab") as file:
        file.write(bytes(10))
    assert kept_narrow(folder, CPU, torch.float32) is None


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_other_classes_are_left_to_transformers(kind: str, write: Write) -> None:
    folder = write(tiny("gpt2") if kind == "gpt2" else tiny("llama"))
    if kind == "t5":
        (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert kept_narrow(folder, CPU, torch.float32) is None


def test_widened_is_timed_as_transformers_runs_it(write: Write) -> None:
    model = loaded(write(tiny("qwen2"))).model
    ids = torch.tensor([[3, 4, 5, 6]])
    copied = beside(model, {})
    widened(copied)
    assert not any(isinstance(each, NarrowLinear | TiedHead) for each in copied.modules())
    assert any(isinstance(each, NarrowLinear) for each in model.modules())
    with torch.inference_mode():
        torch.testing.assert_close(copied(ids).logits, model(ids).logits)


def test_an_adapter_of_a_hub_is_left_to_transformers(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie beside a whole model, and transformers then takes the adapter's base."""
    folder = write(tiny("llama"))
    (folder / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(narrow_folder, "cached_file", lambda _, name, **__: str(folder / name))
    assert kept_narrow("somebody/something", CPU, torch.float32) is None


@pytest.mark.parametrize("shards", [1, 3])
def test_from_a_hub(shards: int, write: Write, tmp_path: Path) -> None:
    folder = write(tiny("llama"))
    if shards > 1:
        (folder / "model.safetensors").unlink()
        tiny("llama").to(torch.bfloat16).save_pretrained(folder, max_shard_size="2MB")
    script = (
        "from keepwarm import Engine\n"
        "from keepwarm.runtime.native.narrow import narrow_tensors\n"
        "with Engine.from_pretrained('somebody/something', dtype='float32', device='cpu') as engine:\n"
        "    model = engine.pipeline.model\n"
        "    print(bool(narrow_tensors(model.model)), model.model.config._name_or_path)\n"
        "    print(engine.generate('once upon', max_new_tokens=2).text is not None)\n"
    )
    with hub("somebody/something", folder, tmp_path / "home") as there:
        ran = subprocess.run(
            [sys.executable, "-c", script], env=there.environment, capture_output=True, text=True, timeout=300
        )
    assert ran.stdout.split() == ["True", "somebody/something", "True"], ran.stderr
    assert len([file for file in there.sent if file.endswith(".safetensors")]) == len([*folder.glob("*.safetensors")])
