"""The backend through SGLang's own factory and interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.hicache import HEADS, LAYERS, PAGE, WIDTH, HostPool, backend, config, hashes
from tests.helpers.remotes import redis_server, s3_server

from keepwarm.errors import ConfigError, StoreError


def pages(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2 * LAYERS * PAGE * HEADS * WIDTH, generator=generator).bfloat16() for _ in range(count)]


def targets(count: int) -> list[torch.Tensor]:
    return [HostPool().get_dummy_flat_data_page() for _ in range(count)]


@pytest.fixture(params=["disk", "redis", "s3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A store that two instances share: a folder, or nothing but a service."""
    if request.param == "disk":
        yield {"store": str(tmp_path / "store"), "max_disk": "256MiB"}
    elif request.param == "redis":
        with redis_server(tmp_path) as server:
            yield {"remote": server.url, "remote_timeout": 20, "remote_load_timeout": 20}
    else:
        with s3_server() as server:
            yield {"remote": server.bucket("sglang"), "remote_timeout": 20, "remote_load_timeout": 20}


def test_pages_outlive_the_process(saved: Any, settings: dict[str, Any]) -> None:
    model, keys, values = saved("llama"), hashes(6), pages(6)
    with backend(config(model), settings) as first:
        assert first.batch_exists(keys) == 0
        assert first.batch_set(keys[:4], values[:4])
        assert first.set(keys[5], values[5])
    with backend(config(model), settings) as second:
        assert second.batch_exists(keys) == 4  # consecutive from the start
        assert second.exists(keys[5])
        assert not second.exists(keys[4])
        found = targets(6)
        got = second.batch_get(keys, found)
        assert [each is not None for each in got] == [True] * 4 + [False, True]
        assert all(torch.equal(got[at], values[at]) for at in (0, 1, 2, 3, 5))
        assert not found[4].any()
        assert second.get(keys[4], targets(1)[0]) is None


def test_the_interface_of_version_one(saved: Any, settings: dict[str, Any]) -> None:
    model, keys = saved("llama"), hashes(3, "one")
    pool = HostPool()
    pool.memory.copy_(torch.randn(pool.memory.shape).bfloat16())
    order = torch.cat([torch.arange(at * PAGE, (at + 1) * PAGE) for at in (7, 2, 5)])
    with backend(config(model), settings | {"interface_v1": 1}, pool) as first:
        assert first.batch_set_v1(keys, order) == [True] * 3
    other = HostPool()
    into = torch.cat([torch.arange(at * PAGE, (at + 1) * PAGE) for at in (1, 3, 0)])
    with backend(config(model), settings | {"interface_v1": 1}, other) as second:
        assert second.batch_get_v1([*keys[:2], "ab" * 32], into) == [True, True, False]
    assert torch.equal(other.memory[:, :, PAGE : 2 * PAGE], pool.memory[:, :, 7 * PAGE : 8 * PAGE])
    assert torch.equal(other.memory[:, :, 3 * PAGE : 4 * PAGE], pool.memory[:, :, 2 * PAGE : 3 * PAGE])
    assert not other.memory[:, :, :PAGE].any()


def test_what_shapes_a_page_is_part_of_its_name(saved: Any, tmp_path: Path) -> None:
    model, keys, settings = saved("llama"), hashes(2), {"store": str(tmp_path / "store")}
    made = config(model, tp_rank=0, tp_size=2)
    with backend(made, settings) as first:
        first.batch_set(keys, pages(2))
    others = {
        "rank": (replace(made, tp_rank=1), HostPool()),
        "size": (replace(made, tp_size=4), HostPool()),
        "pipeline": (replace(made, pp_size=2), HostPool()),
        "mla": (replace(made, is_mla_model=True), HostPool()),
        "dtype": (made, HostPool(dtype=torch.float16)),
        "page": (made, HostPool(page_size=PAGE * 2)),
        "weights": (replace(made, model_name=str(saved("llama", seed=1))), HostPool()),
    }
    for name, (other, pool) in others.items():
        with backend(other, settings, pool) as second:
            assert second.batch_exists(keys) == 0, name
    with backend(made, settings) as again:
        assert again.batch_exists(keys) == 2
        assert again.batch_exists(hashes(2, "tenant a")) == 0  # the salt is in SGLang's hashes


def test_ranks_of_an_mla_model_share(saved: Any, tmp_path: Path) -> None:
    model, keys, values = saved("llama"), hashes(2), pages(2)
    settings = {"store": str(tmp_path / "store")}
    with backend(config(model, is_mla_model=True, tp_size=2), settings) as writer:
        writer.batch_set(keys, values)
    with backend(config(model, is_mla_model=True, tp_rank=1, tp_size=2), settings) as reader:
        assert torch.equal(reader.get(keys[1], targets(1)[0]), values[1])


def test_damaged_pages_are_misses(saved: Any, tmp_path: Path) -> None:
    model, keys, settings = saved("llama"), hashes(2), {"store": str(tmp_path / "store")}
    with backend(config(model), settings) as first:
        first.batch_set(keys, pages(2))
    for path in (tmp_path / "store" / "runs").iterdir():
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    with backend(config(model), settings) as second:
        found = targets(2)
        assert second.batch_get(keys, found) == [None, None]
        assert not any(page.any() for page in found)  # unverified bytes stay out
        assert second.batch_exists(keys) == 0
        second.batch_set(keys, pages(2))
    with backend(config(model), settings) as third:
        assert third.batch_exists(keys) == 2


def test_with_sglangs_failure_injector(saved: Any, tmp_path: Path) -> None:
    """Any order of writing, and calls that fail: what is given is right or missing, what exists is what was written."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    keys, values = hashes(40), pages(40)
    written: set[int] = set()
    with backend(config(saved("llama")), {"store": str(tmp_path / "store")}) as storage:
        for start, end in ((0, 7), (3, 12), (20, 24), (11, 21), (30, 31)):
            storage.batch_set(keys[start:end], values[start:end])
            written |= set(range(start, end))
        storage._archive.flush()
        for start in (0, 5, 24, 30, 31):
            count = next(at for at in range(start, 41) if at not in written) - start
            assert storage.batch_exists(keys[start:]) == count
        failing = HiCacheStorageFailureInjector(storage, 0.0, 0.3)
        served = 0
        for _ in range(20):
            for at, page in enumerate(failing.batch_get(keys, targets(40))):
                assert page is None or (at in written and torch.equal(page, values[at]))
                served += page is not None
        assert served


def test_wrong_settings_are_refused(saved: Any, tmp_path: Path) -> None:
    model = saved("llama")
    for settings, message in (
        ({"stor": "x"}, "known are store"),
        ({}, "got neither"),
        ({"store": str(tmp_path), "model": str(tmp_path / "nowhere")}, "pass a folder"),
    ):
        with pytest.raises(ConfigError, match=message), backend(config(model), settings):
            pass
    with backend(config(model), {"store": str(tmp_path / "store")}) as storage:
        with pytest.raises(StoreError, match="shared"):
            storage.clear()
        with pytest.raises(ValueError, match="bytes"):
            storage.set(hashes(1)[0], torch.zeros(5))
