"""`Llama.set_cache(KeepwarmCache(...))` under a real llama.cpp: what a new process answers, and from what."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import GGML_TYPE_F32, GGML_TYPE_Q8_0
from llama_cpp.llama_cache import LlamaRAMCache
from tests.helpers.llamacpp_host import Host, prompt

from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.integrations.llamacpp import KeepwarmCache

LENGTH = 200
CUTTABLE = {
    "plain": ("llama", {}),
    "flash": ("llama", {"flash_attn": True}),
    "float32": ("llama", {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}),
    "quantized": ("llama", {"flash_attn": True, "type_k": GGML_TYPE_Q8_0, "type_v": GGML_TYPE_Q8_0}),
    "windows kept": ("gemma3", {"swa_full": True}),
}
WHOLE = {"windows": ("gemma3", {"swa_full": False}), "states": ("mamba", {}), "hybrid": ("lfm2", {})}


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_new_process_answers_as_the_librarys_own_cache(name: str, start: Any, model: Callable[..., Path]) -> None:
    """To the bit: both go on from the same KV, at the same token, and so does a context that was never emptied."""
    kind, settings = CUTTABLE[name]
    ids = prompt(LENGTH, 1)
    first = start(kind, **settings)
    cold = first.ask(ids)
    assert cold.cached == 0
    first.close()
    own = start(kind, cache={}, **settings)
    own.cache.close()
    own.cache = LlamaRAMCache()
    own.llm.set_cache(own.cache)
    assert own.ask(ids).equals(cold)
    resident = own.ask(ids)
    own.forget()
    second = start(kind, **settings)
    warm = second.ask(ids)
    assert warm.cached == LENGTH - 1
    assert warm.equals(resident)
    if kind != "gemma3":  # the library restores a window with its first cell next to be overwritten
        assert warm.equals(own.ask(ids))
    assert warm.agrees(cold)


@pytest.mark.parametrize("name", CUTTABLE)
def test_prompts_share_a_beginning_up_to_the_token_where_they_part(name: str, start: Any) -> None:
    kind, settings = CUTTABLE[name]
    ids = prompt(LENGTH, 2)
    with_first = start(kind, **settings)
    with_first.ask(ids)
    with_first.flush()
    host = start(kind, **settings)
    for parted in (1, 31, 32, 33, 64, 107, 150):
        other = [*ids[:parted], ids[parted] % 250 + 5, *prompt(40, parted)]
        host.forget()
        answer = host.ask(other)
        assert answer.cached == parted
        assert answer.agrees(host.cold(other))


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_cut_goes_on_from_a_snapshot(name: str, start: Any) -> None:
    kind, settings = WHOLE[name]
    ids = prompt(LENGTH, 3)
    cache = {"snapshot_tokens": 64}
    first = start(kind, cache=cache, **settings)
    cold = first.ask(ids)
    assert cold.agrees(first.cold(ids))
    first.close()
    second = start(kind, cache=cache, **settings)
    warm = second.ask(ids)
    assert warm.cached == LENGTH - 1
    if kind != "gemma3":  # a window's cells are in another order, and so are its sums
        assert warm.equals(cold)  # it computes the last token alone, as the first did
    assert warm.agrees(cold)
    second.forget()
    parted = [*ids[:150], *prompt(40, 4)]
    answer = second.ask(parted)
    assert answer.cached == 128
    assert answer.agrees(second.cold(parted))
    turn = [*ids, *cold.tokens[:-1], *prompt(30, 5)]  # a conversation's next turn
    second.forget()
    following = second.ask(turn)
    assert following.cached >= LENGTH
    assert following.agrees(second.cold(turn))


@pytest.mark.parametrize("name", [*CUTTABLE, *WHOLE])
def test_a_conversation_in_one_process(name: str, start: Any) -> None:
    """The context holds the last turn; the store is asked beside it and changes nothing."""
    kind, settings = (CUTTABLE | WHOLE)[name]
    host, plain = start(kind, **settings), start(kind, **settings)
    said = prompt(40, 6)
    for turn in range(4):
        answer = host.ask(said)
        assert answer.agrees(plain.cold(said)), turn
        said = [*said, *answer.tokens, *prompt(25, 10 + turn)]


def test_scores_are_neither_stored_nor_copied(start: Any, tmp_path: Path) -> None:
    host = start()
    host.ask(prompt(LENGTH, 7))
    host.flush()
    assert sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.suffix == ".kv") < (1 << 20)


def test_two_processes_share_a_store(start: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    """Both write and read at the same time; what one stores the other finds."""
    code = f"""
from pathlib import Path
from tests.helpers.llamacpp_host import Host, prompt
host = Host(Path({str(model())!r}), {{"store": {str(tmp_path / "store")!r}, "max_ram": 0}}, {{}})
for round in range(6):
    host.ask(prompt(100, round))
host.close()
"""
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [other.wait(timeout=60) for other in others] == [0, 0]
    host = start()
    for seed in range(6):
        ids = prompt(100, seed)
        host.forget()
        answer = host.ask(ids)
        assert answer.cached == 99
        assert answer.agrees(host.cold(ids))


def test_what_kv_depends_on_is_part_of_its_name(start: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    ids = prompt(LENGTH, 8)
    start().ask(ids)
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"n_ctx": 256},
        {"rope_freq_base": 20000.0},
        {"type_k": GGML_TYPE_F32},
        {"flash_attn": True},
        {"cache": {"salt": "a tenant"}},
    ]
    for settings in others:
        assert start(**settings).ask(ids).cached == 0, settings
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(model().read_bytes())
    host = Host(renamed, {"store": tmp_path / "store", "max_ram": 0}, {})
    assert host.ask(ids).cached == LENGTH - 1  # the same bytes under another name
    host.close()


def test_a_salt_is_a_tenants_own_and_can_be_purged(start: Any) -> None:
    ids = prompt(LENGTH, 9)
    tenant, other = start(cache={"salt": "one"}), start(cache={"salt": "two"})
    tenant.ask(ids)
    tenant.flush()
    assert other.ask(ids).cached == 0
    other.flush()
    assert tenant.cache.purge() == 1
    tenant.forget()
    assert ids not in tenant.cache
    assert ids in other.cache
    assert tenant.ask(ids).agrees(tenant.cold(ids))
    with pytest.raises(ConfigError, match="no salt"):
        start().cache.purge()


def test_the_interface_of_the_library(start: Any) -> None:
    host, ids = start(cache={"max_ram": "8MiB"}), prompt(LENGTH, 10)
    assert ids not in host.cache
    with pytest.raises(KeyError):
        host.cache[ids]
    host.ask(ids)
    host.flush()
    assert ids in host.cache
    assert host.cache.cache_size > 10_000
    assert host.cache.capacity_bytes == 64 << 20
    host.forget()
    state = host.cache[[*ids[:50], 7]]
    assert (state.n_tokens, state.input_ids.tolist()) == (50, ids[:50])
    assert host.llm.n_tokens == 50  # it is in place already
    assert host.cache.cached_by_tier == {"ram": 50}
    with pytest.raises(KeyError):
        host.cache[[-1, 2]]
    assert [-1, 2] not in host.cache


def test_streams_and_chats_go_through_it(start: Any) -> None:
    host = start()
    messages = [{"role": "user", "content": "Which of the two is longer, and by how much? " * 3}]
    asked = {"messages": messages, "max_tokens": 4, "temperature": 0}
    whole = host.llm.create_chat_completion(**asked)["choices"][0]["message"]["content"]
    host.forget()
    stream = host.llm.create_chat_completion(**asked, stream=True)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in stream) == whole
    assert host.cache.cached_tokens == host.cache.prompt_tokens - 1


def test_wrong_settings_are_refused(start: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    llm = start().llm
    for settings, message in (
        ({"stor": "x"}, "known are store"),
        ({}, "got neither"),
        ({"store": tmp_path, "snapshot_tokens": 1}, "greater than or equal to 64"),
        ({"store": tmp_path, "max_ram": "much"}, "max_ram"),
    ):
        with pytest.raises(ConfigError, match=message):
            KeepwarmCache(llm, **settings)

    class Images:
        """Named as the library's own handlers of images have it."""

        mtmd_ctx = None

    llm.chat_handler = Images()
    with pytest.raises(UnsupportedModel, match="images"):
        KeepwarmCache(llm, store=tmp_path)


def test_torch_is_not_imported() -> None:
    code = "import sys, keepwarm.integrations.llamacpp; print('torch' in sys.modules, 'transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["False", "False"]
