"""A model whose code comes with it from a hub is cached by the same probe as any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families.examine import PROMPTS, SETTINGS
from tests.helpers import hub_model
from tests.helpers.letters import letters
from tests.helpers.prompts import ids
from transformers import AutoModelForCausalLM

from keepwarm import Engine, attach
from keepwarm.runtime.runner import CACHE_NAMES, cache_name


@pytest.fixture(scope="module", autouse=True)
def copied_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Transformers copies a folder's code, and imports it from there: not into the user's cache here."""
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        yield


def opened(folder: Path, store: Path) -> Engine:
    settings: dict[str, Any] = SETTINGS | {"store": store, "trust_remote_code": True, "dtype": "float32"}
    return Engine.from_pretrained(folder, **settings)


def answer(engine: Engine, name: str, **arguments: Any) -> Any:
    return engine.generate(segments=PROMPTS[name], max_new_tokens=4, trace=True, **arguments)


@pytest.mark.parametrize("named", CACHE_NAMES)
def test_its_state_is_kept(named: str, tmp_path: Path) -> None:
    folder = hub_model.write(tmp_path / named, letters(), reads_its_state=True, named=named)
    with opened(folder, tmp_path / "store") as engine:
        assert not engine.pipeline.model.uncached_reason
        assert engine.pipeline.model.form.state_bytes
        cold = {name: answer(engine, name, reuse="off").logits_digest for name in PROMPTS}
        for name in PROMPTS:
            assert answer(engine, name).logits_digest == cold[name]
            engine.flush()
    with opened(folder, tmp_path / "store") as engine:
        for name in PROMPTS:
            warm = answer(engine, name)
            assert (warm.logits_digest, warm.exactness) == (cold[name], "exact")
            assert warm.cached_tokens > 0


@pytest.mark.parametrize("named", CACHE_NAMES)
def test_generate_gives_it_the_cache_under_its_name_or_runs_uncached(named: str, tmp_path: Path) -> None:
    folder = hub_model.write(tmp_path / named, letters(), reads_its_state=True, named=named)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompt = torch.tensor([ids(90, 1, 100)])
    theirs = model.generate(prompt, max_new_tokens=4, do_sample=False)
    with attach(model, letters(), step=32, min_step=4) as attached:
        is_given = named == cache_name(model.prepare_inputs_for_generation)  # by this version of transformers
        for expected in (0, 64):
            assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), theirs)
            assert attached.cached_tokens == (expected if is_given else 0)
            assert ("under a name" in attached.uncached_reason) == (not is_given)


def test_code_that_starts_anew_at_each_step_is_not_cached(tmp_path: Path) -> None:
    folder = hub_model.write(tmp_path / "forgetful", letters(), reads_its_state=False)
    with opened(folder, tmp_path / "store") as engine:
        assert "does not go on from what was kept of it" in engine.pipeline.model.uncached_reason
        assert answer(engine, "first").cached_tokens == answer(engine, "first").cached_tokens == 0
