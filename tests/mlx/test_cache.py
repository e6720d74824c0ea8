"""`KeepwarmPromptCache` under a real mlx-lm: what a new process answers, and from what."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import LRUPromptCache, RotatingKVCache, make_prompt_cache
from tests.helpers.mlx_host import Host, prompt
from tests.helpers.mlx_models import CONFIGS, WINDOW

from keepwarm.errors import ConfigError
from keepwarm.integrations.mlx import KeepwarmPromptCache, Loaded
from keepwarm.integrations.mlx.form import Quantization

LENGTH = 200
SYSTEM = 80  # tokens
CUTTABLE = ("llama", "deepseek_v32")
WHOLE = ("gemma3_text", "mamba", "lfm2")
EIGHT_BITS = Quantization(bits=8, group_size=32, start=0)
LATER = Quantization(bits=4, group_size=32, start=120)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_new_process_answers_as_mlx_lms_own_cache(kind: str, start: Any) -> None:
    """To the bit, in every logit: both go on from the same KV, at the same token."""
    ids = prompt(LENGTH, 1)
    first = start(kind)
    cold = first.ask(ids, system=SYSTEM)
    assert cold.cached == 0
    first.close()
    own = start(kind, cache=LRUPromptCache())
    assert own.ask(ids, system=SYSTEM).equals(cold)
    resident = own.ask(ids, system=SYSTEM)
    second = start(kind)
    warm = second.ask(ids, system=SYSTEM)
    assert warm.cached == resident.cached == LENGTH - 1
    assert second.cache.cached_by_tier == {"disk": LENGTH - 1}
    assert warm.equals(resident)
    assert warm.agrees(second.cold(ids))
    again = second.ask(ids, system=SYSTEM)  # mlx-lm's own cache holds it now
    assert second.cache.cached_by_tier == {"memory": LENGTH - 1}
    assert again.equals(resident)


@pytest.mark.parametrize("how", [EIGHT_BITS, LATER])
def test_quantized_caches(how: Quantization, start: Any) -> None:
    ids = prompt(LENGTH, 2)
    first = start(quantization=how)
    cold = first.ask(ids)
    first.close()
    own = start(cache=LRUPromptCache(), quantization=how)
    assert own.ask(ids).equals(cold)
    second = start(quantization=how)
    warm = second.ask(ids)
    assert warm.cached == LENGTH - 1
    assert warm.equals(own.ask(ids))
    second.forget()
    other = [*ids[:130], *prompt(20, 3)]
    edited = second.ask(other)
    assert edited.cached == 130
    assert edited.equals(own.ask(other))
    assert start().ask(ids).cached == 0  # without quantization this is no KV


@pytest.mark.parametrize("kind", CUTTABLE)
def test_prompts_share_a_beginning_up_to_the_token_where_they_part(kind: str, start: Any) -> None:
    ids = prompt(LENGTH, 4)
    first = start(kind)
    first.ask(ids)
    first.flush()
    own = start(kind, cache=LRUPromptCache())
    own.ask(ids)
    host = start(kind)
    for parted in (1, 31, 32, 33, 64, 107, 150):
        other = [*ids[:parted], ids[parted] % 250 + 5, *prompt(40, parted)]
        host.forget()
        answer = host.ask(other)
        assert answer.cached == parted
        assert answer.equals(own.ask(other))
        assert answer.agrees(host.cold(other))


@pytest.mark.parametrize("kind", WHOLE)
def test_what_cannot_be_cut_goes_on_from_where_mlx_lm_handed_it_over(kind: str, start: Any) -> None:
    ids = prompt(LENGTH, 5)
    first = start(kind)
    cold = first.ask(ids, system=SYSTEM)
    first.close()
    own = start(kind, cache=LRUPromptCache())
    own.ask(ids, system=SYSTEM)
    second = start(kind)
    parted = [*ids[:150], *prompt(40, 6)]
    answer = second.ask(parted, system=SYSTEM)
    assert answer.cached == SYSTEM
    assert answer.equals(own.ask(parted, system=SYSTEM))
    assert answer.agrees(second.cold(parted))
    turn = [*ids, *cold.tokens, *prompt(30, 7)]  # a conversation's next turn
    second.forget()
    following = second.ask(turn)
    assert following.cached == LENGTH + len(cold.tokens)
    assert following.equals(own.ask(turn))
    assert following.agrees(second.cold(turn))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_conversation_in_one_process(kind: str, start: Any) -> None:
    host, plain = start(kind), start(kind, cache=LRUPromptCache())
    said = prompt(40, 8)
    for turn in range(4):
        answer = host.ask(said)
        assert answer.equals(plain.ask(said)), turn
        if turn % 2:
            host.flush()
            host.forget()
        said = [*said, *answer.tokens, *prompt(25, 10 + turn)]


def test_requests_at_once_are_kept_apart(start: Any) -> None:
    head = prompt(90, 20)
    asked = [([*head, *prompt(40 + 17 * at, 21 + at)], 90) for at in range(4)]
    first = start()
    cold = first.ask_all(asked)
    first.close()
    own = start(cache=LRUPromptCache())
    own.ask_all(asked)
    second = start()
    warm = second.ask_all(asked)
    assert [answer.cached for answer in warm] == [len(ids) - 1 for ids, _ in asked]
    assert all(one.equals(other) for one, other in zip(warm, own.ask_all(asked), strict=True))
    assert all(one.agrees(other) for one, other in zip(warm, cold, strict=True))


def test_a_prompt_that_is_stored_as_a_whole_leaves_a_token_to_compute(start: Any) -> None:
    ids = prompt(LENGTH, 9)
    host = start()
    whole = [*ids, *host.ask(ids).tokens]  # mlx-lm's own cache has exactly this, and returns it with nothing left
    own = start(cache=LRUPromptCache())
    own.ask(ids)
    with pytest.raises(ValueError, match="empty prompt"):
        own.ask(whole)
    for forgotten in (False, True):
        if forgotten:
            host.flush()
            host.forget()
        answer = host.ask(whole)
        assert answer.cached == len(whole) - 1
        assert answer.agrees(host.cold(whole))


def test_two_processes_share_a_store(start: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    """Both write and read at the same time; what one stores the other finds."""
    code = f"""
from pathlib import Path
from tests.helpers.mlx_host import Host, prompt
host = Host(Path({str(model())!r}), {{"store": {str(tmp_path / "store")!r}, "max_ram": 0}})
for round in range(6):
    host.ask(prompt(100, round))
host.close()
"""
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [other.wait(timeout=60) for other in others] == [0, 0]
    host = start()
    for seed in range(6):
        ids = prompt(100, seed)
        answer = host.ask(ids)
        assert answer.cached == 99
        assert answer.agrees(host.cold(ids))


def test_a_process_finds_what_another_stored_meanwhile(start: Any) -> None:
    ids = prompt(LENGTH, 10)
    one, other = start(), start()
    assert other.ask(ids[:50]).cached == 0
    one.ask(ids)
    one.flush()
    answer = other.ask(ids)
    assert (answer.cached, other.cache.cached_by_tier) == (LENGTH - 1, {"disk": LENGTH - 1})
    assert answer.agrees(other.cold(ids))


def test_what_kv_depends_on_is_part_of_its_name(start: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    ids = prompt(LENGTH, 11)
    first = start()
    first.ask(ids)
    first.close()
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"changes": {"rope_theta": 20000.0}},
        {"changes": {"rms_norm_eps": 1e-6}},
        {"quantization": EIGHT_BITS},
        {"cache": {"salt": "a tenant"}},
        {"adapter": _adapter(tmp_path / "adapter")},
    ]
    for settings in others:
        assert start(**settings).ask(ids).cached == 0, settings
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in model().iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    host = Host(moved, {"store": tmp_path / "store"})
    assert host.ask(ids).cached == LENGTH - 1  # the same bytes in another folder
    host.close()


def _adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora"}))
    return folder


def test_the_type_of_kv_is_part_of_its_name(start: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    ids = prompt(LENGTH, 12)
    start().ask(ids)
    half = tmp_path / "half"
    half.mkdir()
    for path in model().iterdir():
        (half / path.name).write_bytes(path.read_bytes())
    weights = mx.load(str(half / "model.safetensors"))
    smaller = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(weights)}
    mx.save_safetensors(str(half / "model.safetensors"), smaller)
    for cached in (0, LENGTH - 1):
        host = Host(half, {"store": tmp_path / "store"})
        assert host.ask(ids).cached == cached
        host.close()


def test_a_salt_is_a_tenants_own_and_can_be_purged(start: Any) -> None:
    ids = prompt(LENGTH, 13)
    tenant, other = start(cache={"salt": "one"}), start(cache={"salt": "two"})
    tenant.ask(ids)
    tenant.flush()
    assert other.ask(ids).cached == 0
    other.flush()
    assert tenant.cache.purge() > 0
    assert len(tenant.cache) == 0
    assert tenant.ask(ids).cached == 0
    other.forget()
    assert other.ask(ids).cached == LENGTH - 1
    with pytest.raises(ConfigError, match="no salt"):
        start().cache.purge()


def test_memory_is_bounded_and_the_store_serves_what_it_drops(start: Any) -> None:
    host = start(cache={"max_ram": "200KiB"})
    prompts = [prompt(100, 30 + seed) for seed in range(5)]
    for ids in prompts:
        host.ask(ids)
        assert host.cache.nbytes <= 200 << 10
    host.flush()
    assert host.ask(prompts[0]).cached == 99
    assert host.cache.cached_by_tier == {"disk": 99}
    assert host.cache.stats()["cached"] == {"disk": 99}
    assert host.cache.stats()["asked"] == {"prompts": 6, "tokens": 600}


def test_what_the_store_does_not_take_is_counted_and_still_served_from_memory(
    start: Any, model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(LENGTH, 14)
    host = start()
    images = [*ids[:50], -7, -7, *ids[50:]]
    assert host.cache.fetch_nearest_cache(host.loaded.key, images) == (None, images)
    caches = make_prompt_cache(host.model)
    mx.eval(host.model(mx.array([ids]), cache=caches))
    host.cache.insert_cache(host.loaded.key, images[: len(ids)], caches)
    found, rest = host.cache.fetch_nearest_cache(host.loaded.key, images)
    assert (found is not None, len(rest)) == (True, 2)
    assert host.cache.insert_cache(("another", None, None), ids, caches) is None
    assert host.cache.stats()["refused"] == {
        "the prompt has images, and token ids do not name those": 3,
        "another model is loaded": 1,
    }
    drafted = Loaded(host.model, str(model()), draft_path="small")
    with KeepwarmPromptCache(drafted, store=tmp_path / "drafted") as cache:
        cache.insert_cache(drafted.key, ids, caches)
        assert cache.fetch_nearest_cache(drafted.key, [*ids, 5])[1] == [5]
        assert cache.stats()["refused"] == {"there is a draft model, whose state is not stored": 1}
    assert not list((tmp_path / "drafted" / "runs").iterdir())
    assert "images" in caplog.text


def test_a_class_that_is_not_known_is_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(RotatingKVCache):  # type: ignore[misc]
        """A model's own cache."""

    host = start()
    monkeypatch.setattr(
        type(host.model), "make_cache", lambda self: [Strange(WINDOW) for _ in self.layers], raising=False
    )
    ids = prompt(LENGTH, 15)
    assert host.ask(ids, new=2).cached == 0
    (reason,) = host.cache.stats()["refused"]
    assert "Strange" in reason
    host.flush()
    assert host.cache.stats()["store"]["blocks"]["disk"] == 0


def test_wrong_settings_are_refused(start: Any, tmp_path: Path) -> None:
    loaded = start().loaded
    for settings, message in (
        ({"stor": "x"}, "known are store"),
        ({}, "got neither"),
        ({"store": tmp_path, "max_ram": "much"}, "max_ram"),
    ):
        with pytest.raises(ConfigError, match=message):
            KeepwarmPromptCache(loaded, **settings)


def test_torch_is_not_imported() -> None:
    code = "import sys, keepwarm.integrations.mlx; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["False"]
