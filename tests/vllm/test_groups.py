"""Several groups of pages without an engine: what each needs, what is refused, and what comes where."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, MambaManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from keepwarm.core.blocks import token_ids
from keepwarm.errors import ConfigError
from keepwarm.integrations.vllm.hybrid.finding import Finder
from keepwarm.integrations.vllm.hybrid.groups import Group, groups_of, is_plain, unit_of
from keepwarm.integrations.vllm.hybrid.messages import Part, PartsLoad, PartsSave, PartsStep
from keepwarm.integrations.vllm.hybrid.scheduler import NULL
from keepwarm.integrations.vllm.hybrid.worker import PartsWorker
from keepwarm.integrations.vllm.messages import Prefix
from keepwarm.store import Archive
from keepwarm.store.admin.purge_epochs import Began
from keepwarm.testing.kv import namespace

FULL = Group(0, "full", 32, 0, ("full 0", "full 1"))
WINDOW = Group(1, "window", 16, 40, ("window 0",))
STATE = Group(2, "state", 16, 0, ("state 0", "state 1"))
GROUPS = (FULL, WINDOW, STATE)
TOKENS = token_ids(range(160))
BEFORE = Began("another store", 0)
PAGES = 40


@pytest.mark.parametrize("page", [16, 48])
@pytest.mark.parametrize("span", [1, 16, 17, 64, 100, 1000])
def test_what_is_needed_is_what_vllm_keeps(span: int, page: int) -> None:
    """Of pages that end at or before a position vLLM's own managers say which are skipped."""
    window = SimpleNamespace(sliding_window=span, extra_retained_tokens=0)
    chunks = SimpleNamespace(attention_chunk_size=span)
    for end in range(page, 20 * page, page):
        for kind, skipped in (
            ("window", SlidingWindowManager.get_num_skipped_tokens(window, end)),
            ("chunks", ChunkedLocalAttentionManager.get_num_skipped_tokens(chunks, end)),
            ("state", MambaManager.get_num_skipped_tokens(None, end)),
        ):
            group = Group(0, kind, page, 0 if kind == "state" else span, ("layer",))  # type: ignore[arg-type]
            assert group.begin(end) == skipped // page * page
    assert FULL.begin(320) == 0


def spec(kind: type, **fields: Any) -> Any:
    return kind(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32, **fields)


def mamba(**fields: Any) -> Any:
    made = {"block_size": 32, "shapes": ((3, 8),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
    return MambaSpec(**made | fields)


def grouped(*specs: Any, sizes: Sequence[int] = (1, 1, 1), **fields: Any) -> tuple[Group, ...]:
    made = [KVCacheGroupSpec([f"layer {at}"], each, **fields) for at, each in enumerate(specs)]
    names = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    parallel = SimpleNamespace(**dict(zip(names, sizes, strict=True)))
    return groups_of(SimpleNamespace(kv_cache_groups=made), SimpleNamespace(parallel_config=parallel))


def test_groups_are_told_apart() -> None:
    assert is_plain(grouped(spec(FullAttentionSpec)))
    assert is_plain(grouped(spec(FullAttentionSpec), sizes=(2, 1, 1)))
    found = grouped(
        spec(FullAttentionSpec),
        spec(SlidingWindowSpec, sliding_window=100),
        spec(ChunkedLocalAttentionSpec, attention_chunk_size=64),
        mamba(block_size=48),
    )
    assert [group.kind for group in found] == ["full", "window", "chunks", "state"]
    assert [group.span for group in found] == [0, 100, 64, 0]
    assert unit_of(found) == 96
    assert not is_plain(grouped(spec(SlidingWindowSpec, sliding_window=100)))


@pytest.mark.parametrize(
    ("specs", "named", "why"),
    [
        ([spec(RSWASpec, rswa_window=64)], {}, "RSWASpec"),
        ([spec(FullAttentionSpec), mamba(mamba_cache_mode="none")], {}, "mamba_cache_mode 'align'"),
        ([spec(FullAttentionSpec), mamba(num_speculative_blocks=2)], {}, "speculative"),
        ([spec(FullAttentionSpec), mamba()], {"sizes": (2, 1, 1)}, "pipeline"),
        ([spec(FullAttentionSpec), mamba()], {"sizes": (1, 2, 1)}, "decode_context_parallel_size is 2"),
        ([spec(FullAttentionSpec)], {"sizes": (1, 2, 1)}, "decode_context_parallel_size is 2"),
        ([spec(FullAttentionSpec)], {"sizes": (1, 1, 2)}, "prefill_context_parallel_size is 2"),
        ([spec(FullAttentionSpec), mamba()], {"is_eagle_group": True}, "drafter"),
        ([spec(FullAttentionSpec), mamba()], {"host_resident": True}, "does not show some"),
        ([], {}, "keeps no KV"),
    ],
)
def test_what_was_never_tried_is_refused_with_the_reason(specs: list[Any], named: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        grouped(*specs, **named)


def memory(seed: int | None) -> dict[str, torch.Tensor]:
    """Per layer; blocks of full attention are cut into two pages, states are raw bytes with padding between them."""
    shapes = {
        "full 0": (2 * PAGES, 2, 16, 8),
        "full 1": (2 * PAGES, 2, 16, 8),
        "window 0": (PAGES, 1, 16, 8),
        "state 0": (PAGES, 1, 1, 24),
        "state 1": (PAGES, 1, 1, 40),
    }
    made: dict[str, torch.Tensor] = {}
    for at, (name, shape) in enumerate(shapes.items()):
        raw = torch.zeros((shape[0], *shape[1:3], shape[3] + 8), dtype=torch.int8)
        if seed is not None:
            raw.random_(-100, 100, generator=torch.Generator().manual_seed(seed + at))
        made[name] = raw[..., : shape[3]] if name.startswith("state") else raw[..., : shape[3]].contiguous()
    return made


class Worker:
    """A worker's half with memory of its own."""

    def __init__(self, archive: Archive, *, seed: int | None = None, timeout: float = 20.0) -> None:
        self.archive, self.views = archive, memory(seed)
        self.half = PartsWorker(archive, namespace(), 0, GROUPS, timeout=timeout, keeps=False)
        self.half.register(self.views)

    def save(self) -> None:
        parts = (
            Part(0, 0, 160, (3, 4, 9, 1, 2)),
            Part(1, 0, 160, (11, 12, 13, 14, 15, 16, 17, 18, 19, 20)),
            Part(2, 80, 96, (21,)),
        )
        self.half.save(PartsStep(saves=[PartsSave(prefix(160), parts)]))
        self.archive.flush()

    def load(self) -> tuple[set[str], set[str]]:
        """Bring what is needed to go on from 96 into other pages, as between two steps of vLLM."""
        finder = Finder(self.archive, [namespace()], GROUPS)
        found = finder.find(TOKENS[:159], {}, "none")
        assert found.end == 96  # there alone is a state
        begin = WINDOW.begin(96)
        assert begin == 48
        parts = (
            Part(0, 32, 96, (6, 5), found.of(FULL, 32, 96)),
            Part(1, begin, 96, (30, 32, 31), found.of(WINDOW, begin, 96)),
            Part(2, 80, 96, (7,), found.of(STATE, 80, 96)),
        )
        self.half.start(PartsStep(loads=[PartsLoad(prefix(96), 64, parts)]))
        deadline = time.monotonic() + 20
        while not (ended := self.half.take_arrived())[0]:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return ended

    def same(self, other: Worker) -> bool:
        """Whether the pages that were loaded hold what the other's do, and no other page was written to."""
        moved = {
            "full": ([12, 13, 10, 11], [8, 9, 18, 19]),
            "window": ([30, 32, 31], [14, 15, 16]),
            "state": ([7], [21]),
        }
        for name, mine in self.views.items():
            to, origin = moved[name.split()[0]]
            rest = sorted(set(range(len(mine))) - set(to))
            assert NULL in rest
            if not torch.equal(mine[to], other.views[name][origin]) or mine[rest].any():
                return False
        return True


def prefix(end: int) -> Prefix:
    return Prefix("request", TOKENS[:end], (), {}, "none", BEFORE)


def test_to_the_bit(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        writer, reader = Worker(archive, seed=1), Worker(archive)
        writer.save()
        assert len(archive.contents.entries()) == 3
        assert reader.load() == ({"request"}, set())
        assert reader.same(writer)


def test_one_damaged_state_fails_the_request(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        writer, reader = Worker(archive, seed=1), Worker(archive)
        writer.save()
        (state,) = (entry.id for entry in archive.contents.entries() if entry.tokens == 2)
        (path,) = (path for path in (tmp_path / "runs").iterdir() if path.name.startswith(state))
        content = bytearray(path.read_bytes())
        content[-10] ^= 1
        path.write_bytes(content)
        assert reader.load() == ({"request"}, {"request"})
        assert not reader.views["state 1"].any()  # what did not verify
        assert Finder(archive, [namespace()], GROUPS).find(TOKENS, {}, "none").end == 0  # it is not offered again


def test_nothing_is_written_after_a_load_was_given_up(tmp_path: Path) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 26) as archive:
        Worker(archive, seed=1).save()
        late = Worker(archive, timeout=0.0)
        assert late.load() == ({"request"}, {"request"})
        before = [view.clone() for view in late.views.values()]
        late.half.close()
        assert all(torch.equal(a, b) for a, b in zip(before, late.views.values(), strict=True))
