"""LoRA adapters beside one model: each is exact at any token, and none is given what another one computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.adapters import ATTENTION, EVERY, MLP, adapter
from tests.helpers.batches import same
from tests.helpers.gguf_files import write
from tests.helpers.lean import compiled
from tests.helpers.models import tiny

from keepwarm import Batcher, Engine
from keepwarm.errors import ConfigError, ModelNotFound, UnsupportedModel

pytestmark = [
    pytest.mark.slow,  # their kernels are compiled first
    pytest.mark.skipif(compiled is None, reason="no C++ compiler: steps run through transformers"),
    pytest.mark.host_memory("adapters run on the lean decoder"),
]

PROMPT = [3 + i * 7919 % 40000 for i in range(150)]
NAMES = (None, "every", "values", "mlp")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    targets = {"every": EVERY, "values": ("v_proj",), "mlp": MLP}
    return {name: adapter(folder / name, model, which, seed=i) for i, (name, which) in enumerate(targets.items())}


@pytest.fixture(scope="module")
def cold(model: Any, tokenizer: Any, folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine.from_pretrained((model, tokenizer), adapters=folders, reuse="off") as engine:
        yield engine


def asked(engine: Engine, name: str | None, prompt: list[int] = PROMPT, **more: Any) -> Any:
    return engine.generate(prompt, adapter=name, max_new_tokens=6, trace=True, **more)


def test_cold_and_warm_are_equal_to_the_bit_and_nothing_is_shared(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine, tmp_path: Path
) -> None:
    """Also after a restart, in which adapters have other names."""
    alone = {name: asked(cold, name) for name in NAMES}
    assert len({found.logits_digest for found in alone.values()}) == len(NAMES)
    with Engine.from_pretrained((model, tokenizer), adapters=folders, store=tmp_path) as engine:
        for name in NAMES:
            found = asked(engine, name)
            assert found.cached_tokens == 0
            same(found, alone[name])
        engine.flush()
        for name in NAMES:
            found = asked(engine, name)
            assert (found.cached_tokens, found.exactness) == (len(PROMPT) - 1, "exact")
            same(found, alone[name])
    again = {f"other-{name}": folder for name, folder in folders.items()}
    with Engine.from_pretrained((model, tokenizer), adapters=again, store=tmp_path) as engine:
        for name in NAMES:
            found = asked(engine, name and f"other-{name}", [*PROMPT[:77], 9, 9])
            assert (found.cached_tokens, found.exactness) == (77, "exact")
            same(found, asked(cold, name, [*PROMPT[:77], 9, 9]))


def test_without_an_adapter_all_names_are_those_of_an_engine_that_has_none(
    model: Any, tokenizer: Any, cold: Engine
) -> None:
    with Engine.from_pretrained((model, tokenizer)) as engine:
        mine, theirs = (each.pipeline.model.namespace() for each in (cold, engine))
        assert (mine.exact_root, mine.prefix_root) == (theirs.exact_root, theirs.prefix_root)
        assert asked(engine, None).logits_digest == asked(cold, None).logits_digest


def test_decoded_tokens_are_found_by_the_next_prompt(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine
) -> None:
    with Engine.from_pretrained((model, tokenizer), adapters=folders) as engine:
        first = asked(engine, "every")
        engine.flush()
        longer = [*PROMPT, *first.token_ids, 5]
        found = asked(engine, "every", longer)
        assert found.cached_tokens == len(longer) - 2  # the last token was chosen, not run
        same(found, asked(cold, "every", longer))
        assert engine.explain(longer, adapter="mlp").cached_tokens == 0
        assert engine.explain(longer).cached_tokens == 0


def test_a_batch_of_several_adapters_answers_as_each_alone(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine
) -> None:
    prompts = [PROMPT[: 40 + 7 * i] for i in range(8)]
    names = [NAMES[i % len(NAMES)] for i in range(8)]
    with Engine.from_pretrained((model, tokenizer), adapters=folders) as engine, Batcher(engine) as batcher:
        for _ in range(2):  # cold, then from pages and the store
            tickets = [
                batcher.submit(prompt, adapter=name, max_new_tokens=6, trace=True)
                for prompt, name in zip(prompts, names, strict=True)
            ]
            for ticket, prompt, name in zip(tickets, prompts, names, strict=True):
                same(ticket.result(60), asked(cold, name, prompt))


def test_a_request_keeps_the_adapter_with_which_it_began(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine
) -> None:
    with Engine.from_pretrained((model, tokenizer), adapters=folders) as engine:
        stream = engine.stream(PROMPT, adapter="every", max_new_tokens=6, trace=True)
        next(stream)
        engine.adapters.remove("every")
        engine.adapters.load("every", folders["mlp"])
        result = [piece.result for piece in stream][-1]
        assert result is not None
        same(result, asked(cold, "every"))
        same(asked(engine, "every"), asked(cold, "mlp"))
        assert engine.adapters.names == ("values", "mlp", "every")


def test_adapters_come_and_go_while_requests_run(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine
) -> None:
    expected = asked(cold, "values").logits_digest
    with Engine.from_pretrained((model, tokenizer), adapters={"values": folders["values"]}) as engine:
        found: list[str | None] = []

        def ask() -> None:
            found.extend(asked(engine, "values", reuse="off").logits_digest for _ in range(5))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            engine.adapters.load("every", folders["every"])
            engine.adapters.remove("every")
        for thread in threads:
            thread.join()
        assert found == [expected] * 10


def test_a_session_keeps_its_adapter(model: Any, tokenizer: Any, folders: dict[str, Path]) -> None:
    with Engine.from_pretrained((model, tokenizer), adapters=folders) as engine:
        first = engine.generate("Good morning.", session="s", adapter="every", max_new_tokens=4)
        engine.flush()
        again = engine.generate("And a good evening.", session="s", max_new_tokens=4)
        assert again.cached_tokens >= first.prompt_tokens - 1
        other = engine.generate("Good night.", session="s", adapter=None, max_new_tokens=4)
        assert other.cached_tokens == 0


def test_an_adapter_is_what_it_computes(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine, tmp_path: Path
) -> None:
    """Whatever its name is; its scale counts, too."""
    scaled = adapter(tmp_path / "scaled", model, EVERY, alpha=4)
    with Engine.from_pretrained((model, tokenizer)) as engine:
        engine.adapters.load("same", folders["every"])
        engine.adapters.load("scaled", scaled)
        every, same, other = cold.adapters.get("every"), engine.adapters.get("same"), engine.adapters.get("scaled")
        assert every is not None
        assert same is not None
        assert other is not None
        assert every.digest == same.digest != other.digest


def test_logits_are_pefts(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """With ranks and scales by pattern, and rank-stabilized."""
    import peft

    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=[*ATTENTION, "down_proj"],
        rank_pattern={"q_proj": 7, r"layers\.1\.self_attn\.v_proj": 2},
        alpha_pattern={"down_proj": 3},
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(tiny("llama"), settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        adapted.save_pretrained(tmp_path)
        theirs = adapted(torch.tensor([PROMPT])).logits[0, -1]
    with Engine.from_pretrained((model, tokenizer), adapters={"one": tmp_path}) as engine:
        found = engine.generate(PROMPT, adapter="one", max_new_tokens=1, logprobs=5)
        assert found.logprobs is not None
        top = theirs.log_softmax(-1).topk(5)
        mine = found.logprobs[0].top
        assert [token for token, _ in mine] == top.indices.tolist()
        assert torch.allclose(torch.tensor([value for _, value in mine]), top.values, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_weights_in_blocks(dtype: Any, tmp_path: Path) -> None:
    """Loading compares with transformers over the same file; then cold and warm are equal to the bit."""
    file = write(tmp_path / "tiny.gguf")
    with Engine.from_pretrained(file, dtype=dtype, store=tmp_path / "store") as engine:
        model = engine.pipeline.model.model
        folder = adapter(tmp_path / "adapter", model, size=0.1)
        engine.adapters.load("one", folder)
        prompt = [3 + i * 7 % 200 for i in range(80)]
        first, base = asked(engine, "one", prompt), asked(engine, None, prompt)
        engine.flush()
        again = asked(engine, "one", prompt)
        assert (again.cached_tokens, again.exactness) == (79, "exact")
        same(again, first)
        assert first.logits_digest != base.logits_digest
        assert asked(engine, "one", prompt, reuse="off").logits_digest == first.logits_digest


def test_a_bundle_carries_what_an_adapter_computed(
    model: Any, tokenizer: Any, folders: dict[str, Path], cold: Engine, tmp_path: Path
) -> None:
    """It is found by that adapter alone, whatever its name is there."""
    file = tmp_path / "prompt.bundle"
    with Engine.from_pretrained((model, tokenizer), adapters=folders, store=tmp_path / "here") as engine:
        engine.warm(PROMPT, adapter="every", name="prompt")
        engine.flush()
        engine.pipeline.archive.contents.export("prompt", file)
    given = {"a": folders["every"], "b": folders["mlp"]}
    with Engine.from_pretrained((model, tokenizer), adapters=given, store=tmp_path / "there") as engine:
        assert engine.pipeline.archive.contents.import_(file).tokens == len(PROMPT)
        assert [engine.explain(PROMPT, adapter=name).cached_tokens for name in ("b", None)] == [0, 0]
        found = asked(engine, "a")
        assert (found.cached_tokens, found.exactness) == (len(PROMPT) - 1, "exact")
        same(found, asked(cold, "every"))


# ---- what is refused ----


def test_names_are_known_and_free(model: Any, folders: dict[str, Path], cold: Engine) -> None:
    with pytest.raises(ConfigError, match=r"no adapter 'x': loaded are every, values, mlp"):
        cold.generate(PROMPT, adapter="x")
    with pytest.raises(ConfigError, match="no adapter"):
        cold.adapters.remove("x")
    with pytest.raises(ConfigError, match="loaded already"):
        cold.adapters.load("mlp", folders["mlp"])
    with pytest.raises(ConfigError, match="1 to 200 characters"):
        cold.adapters.load("", folders["mlp"])


def test_chunks_are_refused(model: Any, tokenizer: Any, folders: dict[str, Path]) -> None:
    with Engine.from_pretrained((model, tokenizer), adapters=folders, reuse="chunks") as engine:
        with pytest.raises(ConfigError, match="reuse='chunks' is for requests without an adapter"):
            engine.generate(PROMPT, adapter="mlp")
        with pytest.raises(ConfigError, match="reuse='chunks'"):
            engine.warm(PROMPT, adapter="mlp")
        assert engine.generate(PROMPT, adapter="mlp", reuse="exact", max_new_tokens=1).token_ids


def test_a_model_without_compiled_kernels_has_no_adapters(tokenizer: Any, folders: dict[str, Path]) -> None:
    with (
        Engine.from_pretrained((tiny("gpt2"), tokenizer)) as engine,
        pytest.raises(UnsupportedModel, match="need the compiled kernels"),
    ):
        engine.adapters.load("mlp", folders["mlp"])


def test_a_model_that_stops_to_run_on_the_kernels_answers_no_request_of_an_adapter(
    tokenizer: Any, folders: dict[str, Path]
) -> None:
    model = tiny("llama")
    with Engine.from_pretrained((model, tokenizer), adapters=folders) as engine:
        asked(engine, "mlp")
        model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModel, match="the kernels do not run the model now: forward hooks"):
            engine.adapters.load("other", folders["mlp"])
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight += 1
        with pytest.raises(UnsupportedModel, match="stopped to run"):
            asked(engine, "mlp")
        assert asked(engine, None).token_ids
        model.train()
        with pytest.raises(UnsupportedModel, match="training mode"):
            asked(engine, "mlp")


def test_an_adapter_is_looked_at_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json cannot be read"):
        Engine.from_pretrained(tmp_path / "no-such-model", adapters={"one": tmp_path})
