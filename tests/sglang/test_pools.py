"""Several pools (interface version 2) through SGLang's own factory, against what its file backend says exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.hicache import PAGE, HostPool, backend, config, hashes

from keepwarm.errors import ConfigError


class StatePool:
    """Recurrent states in host memory, one page each, with the methods of SGLang's `MambaPoolHost`: a page is bytes."""

    page_size = 1
    layout = "page_first"
    conv_dtype, temporal_dtype = torch.bfloat16, torch.float32

    def __init__(self, slots: int = 16, width: int = 24) -> None:
        self.memory = torch.zeros((slots, width), dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.memory[index].clone()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.memory.shape[1], dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.memory[index] = data_page


class MHATokenToKVPoolHost(HostPool):
    """Named as SGLang's."""


def filled(pool: Any, seed: int) -> Any:
    pool.memory.copy_(torch.randint(0, 100, pool.memory.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def places(pages: list[int], size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def transfer(name: str, keys: list[str], pages: list[int] | None = None, size: int = 1, trailing: bool = False) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    policy = PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES
    indices = None if pages is None else places(pages, size)
    return PoolTransfer(PoolName(name), host_indices=indices, keys=keys, hit_policy=policy)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"store": str(tmp_path / "store"), "max_disk": "256MiB", "interface_v1": 1}


def test_pools_outlive_the_process(saved: Any, settings: dict[str, Any]) -> None:
    """KV, the window's pages and a state, each into other places; what is not stored leaves memory as it was."""
    model, keys = saved("llama"), hashes(6)
    kv, window, state = filled(HostPool(), 1), filled(HostPool(pages=8), 2), filled(StatePool(), 3)
    with backend(config(model), settings, kv) as first:
        for pool, name in ((kv, "kv"), (window, "swa"), (state, "mamba")):
            first.register_mem_host_pool_v2(pool, name)
        assert first.batch_set_v1(keys, places([7, 2, 5, 0, 1, 3], PAGE)) == [True] * 6
        stored = [transfer("swa", keys[2:4], [4, 1], PAGE), transfer("mamba", keys[3:4], [9])]
        assert list(first.batch_set_v2(stored).values()) == [[True] * 2, [True]]
    into, near, after = HostPool(), HostPool(pages=8), StatePool()
    with backend(config(model), settings, into) as second:
        second.register_mem_host_pool_v2(near, "swa")
        second.register_mem_host_pool_v2(after, "mamba")
        asked = [transfer("swa", ["x"] * 2, trailing=True), transfer("mamba", ["x"], trailing=True)]
        found = second.batch_exists_v2(keys, asked)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
        assert {str(name): pages for name, pages in found.extra_pool_hit_pages.items()} == {
            "kv": 6,
            "swa": 4,
            "mamba": 4,
        }
        got = second.batch_get_v2([transfer("swa", keys[1:4], [0, 2, 3], PAGE), transfer("mamba", keys[3:4], [5])])
        assert {str(name): each for name, each in got.items()} == {"swa": [False, True, True], "mamba": [True]}
        short = second.batch_get_v2([transfer("swa", keys[2:4], [1], PAGE), transfer("mamba", keys[3:4])])
        assert {str(name): each for name, each in short.items()} == {"swa": [False, False], "mamba": [False]}
    assert torch.equal(near.memory[:, :, 2 * PAGE : 3 * PAGE], window.memory[:, :, 4 * PAGE : 5 * PAGE])
    assert torch.equal(near.memory[:, :, 3 * PAGE : 4 * PAGE], window.memory[:, :, PAGE : 2 * PAGE])
    assert not near.memory[:, :, : 2 * PAGE].any()
    assert torch.equal(after.memory[5], state.memory[9])
    assert not after.memory[[*range(5), *range(6, 16)]].any()


@pytest.mark.parametrize("seed", range(20))
def test_what_exists_is_what_sglangs_own_file_backend_says(saved: Any, settings: dict[str, Any], seed: int) -> None:
    """Pages of three pools are stored at random; SGLang's fold over them and ours agree, pool by pool."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    class Theirs(HiCacheFile):  # type: ignore[misc]  # SGLang is not there when types are checked
        """Its fold over a set of names, without files."""

        def __init__(self, names: set[str]) -> None:
            self.names = names

        def _get_component_key(self, key: str, component_name: str | None = None) -> str:
            return key if component_name is None else f"{key}.{component_name}"

        def _collect_existing_component_keys(self, keys: list[str], pool_transfers: Any = None) -> set[str]:
            return {f"{name}.bin" for name in self.names}

    random, keys = np.random.default_rng(seed), hashes(8, str(seed))
    there = {name: random.random(8) < share for name, share in (("kv", 0.95), ("swa", 0.7), ("mamba", 0.5))}
    names = {f"{key}.{name}" for name in ("swa", "mamba") for key, has in zip(keys, there[name], strict=True) if has}
    names |= {key for key, has in zip(keys, there["kv"], strict=True) if has}
    pools = {"kv": HostPool(), "swa": HostPool(), "mamba": StatePool()}
    with backend(config(saved("llama")), settings, pools["kv"]) as storage:
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, name)
            at = [number for number, has in enumerate(there[name]) if has]
            storage.batch_set_v2([transfer(name, [keys[number] for number in at], at, pool.page_size)])
        storage._archive.flush()
        for window in (1, 2, 3):
            for policies in ((True, True), (False, True), (False, False)):
                asked = [
                    transfer("swa", ["x"] * window, trailing=policies[0]),
                    transfer("mamba", ["x"], trailing=policies[1]),
                ]
                ours, theirs = storage.batch_exists_v2(keys, asked), Theirs(names).batch_exists_v2(keys, asked)
                assert ours.kv_hit_pages == theirs.kv_hit_pages
                assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
                reported = theirs.extra_pool_hit_pages
                assert {name: ours.extra_pool_hit_pages[name] for name in reported} == reported
        assert storage.batch_exists_v2(keys).kv_hit_pages == Theirs(names).batch_exists_v2(keys).kv_hit_pages


def test_a_damaged_state_is_a_miss(saved: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    model, keys = saved("llama"), hashes(2)
    with backend(config(model), settings) as first:
        state = filled(StatePool(), 3)
        first.register_mem_host_pool_v2(state, "mamba")
        first.batch_set_v2([transfer("mamba", keys[1:], [4])])
    (path,) = (tmp_path / "store" / "runs").iterdir()
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with backend(config(model), settings) as second:
        after = StatePool()
        second.register_mem_host_pool_v2(after, "mamba")
        (got,) = second.batch_get_v2([transfer("mamba", keys[1:], [5])]).values()
        assert got == [False]
        assert not after.memory.any()
        asked = [transfer("mamba", ["x"], trailing=True)]
        assert second.batch_exists_v2(keys, asked).kv_hit_pages == 0


def test_ranks_and_pools_are_told_apart(saved: Any, settings: dict[str, Any]) -> None:
    """Under MLA ranks share KV and what has its indices, and never a recurrent state."""
    model, keys = saved("llama"), hashes(1)
    made = config(model, is_mla_model=True, tp_size=2)
    with backend(made, settings) as writer:
        writer.register_mem_host_pool_v2(filled(StatePool(), 1), "mamba")
        writer.register_mem_host_pool_v2(filled(HostPool(), 1), "indexer")
        writer.batch_set_v1(keys, places([0], PAGE))
        writer.batch_set_v2([transfer("mamba", keys, [0]), transfer("indexer", keys, [0], PAGE)])
    for rank, width, expected in ((0, 24, [True, True]), (1, 24, [False, True]), (0, 32, [False, True])):
        with backend(replace(made, tp_rank=rank), settings) as reader:
            reader.register_mem_host_pool_v2(StatePool(width=width), "mamba")
            reader.register_mem_host_pool_v2(HostPool(), "indexer")
            assert reader.batch_exists(keys) == 1
            got = reader.batch_get_v2([transfer("mamba", keys, [2]), transfer("indexer", keys, [2], PAGE)])
            assert [found for each in got.values() for found in each] == expected


def test_what_is_not_known_is_refused(saved: Any, settings: dict[str, Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    model, keys = saved("llama"), hashes(2)
    with backend(config(model, is_mla_model=True, tp_size=2), settings) as storage:
        with pytest.raises(ConfigError, match="heads of its own"):
            storage.register_mem_host_pool_v2(MHATokenToKVPoolHost(), "draft")
        with pytest.raises(RuntimeError, match="no pool swa"):
            storage.batch_set_v2([transfer("swa", keys, [0, 1], PAGE)])
        groups = replace(transfer("swa", keys), hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        with pytest.raises(ValueError, match="block_groups"):
            storage.batch_exists_v2(keys, [groups])
