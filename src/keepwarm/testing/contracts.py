"""What every storage tier, every replacement policy and every device promises, as test classes: derive one, implement
its hooks, and pytest runs it."""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from keepwarm.core.blocks import Chain, TokenIds
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.ports import BlockRef, KVSink, Policy
from keepwarm.errors import CorruptRun, Overloaded
from keepwarm.runtime.device.plane import Plane, Rows, fill, layout, make_planes
from keepwarm.runtime.device.port import DevicePort
from keepwarm.store.runfile.layout import Run
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, prompt


class Tier(Protocol):
    """What the contract asks of a tier itself; the rest goes through the suite's hooks."""

    def put(self, run: Run) -> bool: ...

    def lookup(self, ids: Sequence[bytes]) -> tuple[BlockRef, ...]: ...

    def children(self, prefix: bytes) -> tuple[BlockRef, ...]: ...


class TierContract(ABC):
    """Derive, implement the hooks, and every test below runs against the tier."""

    geometry: KVGeometry = UNEVEN
    length = 64  # tokens of a prompt
    step = 8  # tokens of a block

    @abstractmethod
    def make(self, folder: Path, cap: int) -> Any:
        """An empty tier with a byte cap."""

    @abstractmethod
    def close(self, tier: Any) -> None:
        """Close a tier that `make` made."""

    @abstractmethod
    def load(self, tier: Any, refs: Sequence[BlockRef], tokens: TokenIds, end: int, sink: KVSink) -> None:
        """Load consecutive blocks of one run, up to position `end`."""

    @abstractmethod
    def size(self, tier: Any) -> int:
        """Bytes that the cap bounds, measured without trusting the tier's own books where that is possible."""

    @abstractmethod
    def cap_for(self, runs: int) -> int:
        """A cap under which exactly this many runs of `self.length` tokens fit."""

    @abstractmethod
    def damage(self, tier: Any, run_id: str) -> bool:
        """Change one stored KV byte behind the tier's back. Return False when only the tier can write its bytes."""

    @abstractmethod
    def use(self, tier: Any, run_id: str) -> None:
        """Note enough uses of a run, the last one now, that every policy prefers it to what was never used."""

    @pytest.fixture
    def roomy(self, tmp_path: Path) -> Any:
        tier = self.make(tmp_path / "store", self.cap_for(100))
        yield tier
        self.close(tier)

    @pytest.fixture
    def tight(self, tmp_path: Path) -> Any:
        tier = self.make(tmp_path / "store", self.cap_for(3))
        yield tier
        self.close(tier)

    def prompt(self, seed: int = 0) -> tuple[MemoryKV, Chain, TokenIds]:
        """KV, blocks and token ids of a made-up prompt."""
        tokens = prompt(self.length, seed)
        return MemoryKV.random(self.geometry, self.length, seed), blocks_of(tokens, self.step), tokens

    def test_a_loaded_run_is_equal_to_the_bit(self, roomy: Tier) -> None:
        source, blocks, tokens = self.prompt()
        assert roomy.put(make_run(source, blocks))
        refs = roomy.lookup([block.exact for block in blocks])
        assert [(ref.id, ref.start, ref.end) for ref in refs] == [(b.exact, b.start, b.end) for b in blocks]
        sink = MemoryKV(self.geometry, self.length)
        self.load(roomy, refs, tokens, self.length, sink)
        assert sink.same(source, 0, self.length)
        assert sink.commits == [(layer, 0, self.length) for layer in range(len(self.geometry.layers))]

    @pytest.mark.parametrize(("first", "last", "left"), [(2, 4, 0), (0, 1, 3), (3, 3, 7), (7, 7, 0), (0, 7, 7)])
    def test_a_part_of_a_run_fills_only_its_positions(self, roomy: Tier, first: int, last: int, left: int) -> None:
        source, blocks, tokens = self.prompt()
        roomy.put(make_run(source, blocks))
        refs = roomy.lookup([block.exact for block in blocks])[first : last + 1]
        sink = MemoryKV(self.geometry, self.length)
        start, end = refs[0].start, refs[-1].end - left
        self.load(roomy, refs, tokens[start:end], end, sink)
        assert sink.same(source, start, end)
        untouched = MemoryKV(self.geometry, self.length)
        assert sink.same(untouched, 0, start)
        assert sink.same(untouched, end, self.length)

    def test_rows_that_are_not_contiguous_are_filled_too(self, roomy: Tier) -> None:
        source, blocks, tokens = self.prompt()
        roomy.put(make_run(source, blocks))

        class Interleaved(MemoryKV):
            def view(self, layer: int, kv: int, start: int, end: int) -> Any:
                return self.arrays[layer][kv][:, 2 * start : 2 * end : 2]

        sink = Interleaved(self.geometry, 2 * self.length)
        self.load(roomy, roomy.lookup([block.exact for block in blocks]), tokens, self.length, sink)
        for layer, pair in enumerate(sink.arrays):
            for kv, array in enumerate(pair):
                assert (array[:, ::2] == source.arrays[layer][kv]).all()

    def test_unknown_ids_miss_and_end_the_match(self, roomy: Tier) -> None:
        source, blocks, _ = self.prompt()
        assert roomy.lookup([blocks[0].exact]) == ()
        roomy.put(make_run(source, blocks[:3]))
        assert roomy.lookup([]) == ()
        assert len(roomy.lookup([block.exact for block in blocks])) == 3
        assert roomy.lookup([b"?" * 32, blocks[0].exact]) == ()

    def test_children_are_found_by_their_parents_prefix_name(self, roomy: Tier) -> None:
        source, blocks, _ = self.prompt()
        roomy.put(make_run(source, blocks))
        for block in blocks:
            assert [ref.id for ref in roomy.children(block.parent_prefix)] == [block.exact]
        assert roomy.children(blocks[-1].prefix) == ()

    def test_other_token_ids_are_corrupt(self, roomy: Tier) -> None:
        source, blocks, tokens = self.prompt()
        roomy.put(make_run(source, blocks))
        refs = roomy.lookup([block.exact for block in blocks])
        wrong = tokens.copy()
        wrong[-1] ^= 1
        with pytest.raises(CorruptRun):
            self.load(roomy, refs, wrong, self.length, MemoryKV(self.geometry, self.length))

    def test_changed_bytes_are_corrupt(self, roomy: Tier) -> None:
        source, blocks, tokens = self.prompt()
        run = make_run(source, blocks)
        roomy.put(run)
        refs = roomy.lookup([block.exact for block in blocks])
        if not self.damage(roomy, run.id):
            pytest.skip("nobody else can write this tier's bytes")
        with pytest.raises(CorruptRun, match=run.id):
            self.load(roomy, refs, tokens, self.length, MemoryKV(self.geometry, self.length))

    def test_the_cap_is_never_exceeded(self, tight: Tier) -> None:
        cap = self.cap_for(3)
        for seed in range(12):
            source, blocks, _ = self.prompt(seed)
            assert tight.put(make_run(source, blocks))
            assert self.size(tight) <= cap
        held = [seed for seed in range(12) if tight.lookup([self.prompt(seed)[1][0].exact])]
        assert held == [9, 10, 11]

    def test_what_cannot_fit_is_refused_and_nothing_is_given_up_for_it(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path / "store", self.cap_for(1))
        source, blocks, _ = self.prompt()
        assert tier.put(make_run(source, blocks))
        large = prompt(3 * self.length, 1)
        assert not tier.put(make_run(MemoryKV(self.geometry, 3 * self.length), blocks_of(large, self.step)))
        assert tier.lookup([blocks[0].exact])
        self.close(tier)

    def test_what_is_used_outlives_what_is_not(self, tight: Tier) -> None:
        made = [self.prompt(seed) for seed in range(4)]
        runs = [make_run(source, blocks) for source, blocks, _ in made]
        for run in runs[:3]:
            tight.put(run)
        self.use(tight, runs[0].id)
        tight.put(runs[3])
        held = [bool(tight.lookup([blocks[0].exact])) for _, blocks, _ in made]
        assert held == [True, False, True, True]

    def test_a_run_is_not_given_up_before_what_continues_it(self, tight: Tier) -> None:
        tokens = prompt(2 * self.length)
        source, blocks = MemoryKV.random(self.geometry, len(tokens)), blocks_of(tokens, self.step)
        half = self.length // self.step
        parent, child = make_run(source, blocks[:half]), make_run(source, blocks[half:])
        other, last = (make_run(*self.prompt(seed)[:2]) for seed in (7, 8))
        for run in (parent, child, other):
            assert tight.put(run)
        self.use(tight, child.id)
        self.use(tight, other.id)  # the parent is now the oldest, the child next
        assert tight.put(last)
        assert len(tight.lookup([block.exact for block in blocks])) == half
        assert tight.lookup([other.blocks[0].id])

    def test_what_a_new_run_stands_on_is_not_given_up_for_it(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path / "store", self.cap_for(1))
        tokens = prompt(2 * self.length)
        source, blocks = MemoryKV.random(self.geometry, len(tokens)), blocks_of(tokens, self.step)
        half = self.length // self.step
        assert tier.put(make_run(source, blocks[:half]))
        assert not tier.put(make_run(source, blocks[half:]))
        assert len(tier.lookup([block.exact for block in blocks])) == half
        self.close(tier)


class PolicyContract(ABC):
    """Derive, implement `make`, and every test below runs against the policy."""

    @abstractmethod
    def make(self) -> Policy:
        """An empty policy, for a tier of 100 bytes."""

    @pytest.fixture
    def policy(self) -> Policy:
        return self.make()

    def drain(self, policy: Policy) -> list[Any]:
        """Evict until nothing is left."""
        return list(iter(policy.evict, None))

    def test_an_empty_one_gives_up_nothing(self, policy: Policy) -> None:
        assert policy.evict() is None

    def test_every_key_goes_once(self, policy: Policy) -> None:
        for key in range(20):
            policy.add(key, 5)
        for key in range(0, 20, 3):
            policy.touch(key)
        assert sorted(self.drain(policy)) == list(range(20))
        assert policy.evict() is None

    def test_what_is_not_used_goes_in_the_order_it_came(self, policy: Policy) -> None:
        for key in range(20):
            policy.add(key, 5)
        assert self.drain(policy) == list(range(20))

    def test_what_is_used_outlives_what_came_with_it(self, policy: Policy) -> None:
        for key in range(20):
            policy.add(key, 5)
        for _ in range(3):
            policy.touch(7)
        assert self.drain(policy).index(7) >= 17

    def test_a_held_key_stays_until_it_is_released_as_often(self, policy: Policy) -> None:
        for key in range(3):
            policy.add(key, 5)
        policy.hold(0)
        policy.hold(0)
        assert self.drain(policy) == [1, 2]
        policy.release(0)
        assert policy.evict() is None
        policy.release(0)
        assert self.drain(policy) == [0]

    def test_a_released_key_has_kept_its_place(self, policy: Policy) -> None:
        for key in range(4):
            policy.add(key, 5)
        policy.hold(0)
        assert policy.evict() == 1
        policy.release(0)
        assert self.drain(policy) == [0, 2, 3]

    def test_a_removed_key_is_forgotten(self, policy: Policy) -> None:
        for key in range(3):
            policy.add(key, 5)
        policy.hold(1)
        policy.remove(1)
        assert self.drain(policy) == [0, 2]

    def test_unknown_keys_are_ignored(self, policy: Policy) -> None:
        policy.touch("nobody")
        policy.hold("nobody")
        policy.release("nobody")
        policy.remove("nobody")
        policy.add("somebody", 5)
        assert self.drain(policy) == ["somebody"]

    def test_many_turns_stay_small(self, policy: Policy) -> None:
        """Bookkeeping does not grow with uses."""
        for key in range(10):
            policy.add(key, 5)
        for turn in range(5000):
            policy.touch(turn % 10)
        assert len(pickle.dumps(policy)) < 20_000
        assert sorted(self.drain(policy)) == list(range(10))


class DeviceContract(ABC):
    """What a port to a device promises, seen through the planes that arenas use. Derive and implement `make`."""

    geometry = KVGeometry.uniform(2, 3, 16, "float32")  # layers, heads, dim
    capacity = 96

    @abstractmethod
    def make(self) -> DevicePort:
        """A port to a device that nothing else uses."""

    @pytest.fixture
    def port(self) -> DevicePort:
        return self.make()

    def planes(self, port: DevicePort) -> list[Plane]:
        """Return the planes of keys and of values of each layer, alternating."""
        memory = port.allocate(layout(self.geometry, self.capacity)[1][-1])
        return [plane for pair in make_planes(port, memory, self.geometry, self.capacity) for plane in pair]

    def rows(self, count: int, seed: int) -> torch.Tensor:
        return torch.randn(3, count, 16, generator=torch.Generator().manual_seed(seed))

    def test_what_is_staged_is_there_for_what_is_computed_next(self, port: DevicePort) -> None:
        for number, plane in enumerate(self.planes(port)):
            wanted = self.rows(40, number)
            staged = plane.stage(40)
            staged.numpy()[...] = wanted.view(torch.uint8).numpy()
            plane.load(20, staged)
            del staged
            assert torch.equal(plane.tensor()[:, 20:60].cpu(), wanted)

    def test_what_is_filled_may_change_at_once(self, port: DevicePort) -> None:
        for number, plane in enumerate(self.planes(port)):
            wanted = self.rows(30, number)
            data = wanted.view(torch.uint8).numpy().copy()
            plane.fill(7, data[:, 3:])
            data[...] = 0
            assert torch.equal(plane.tensor()[:, 7:34].cpu(), wanted[:, 3:])

    def test_rows_of_a_layer_go_together(self, port: DevicePort) -> None:
        keys, values = self.planes(port)[2:]
        new = [self.rows(30, 2), self.rows(20, 3), self.rows(25, 4)]
        data = [rows.view(torch.uint8).numpy().copy() for rows in new]
        fill([Rows(keys, 0, data[0]), Rows(values, 50, data[1]), Rows(keys, 35, data[2][:, 5:])])
        data[0][...] = data[1][...] = data[2][...] = 0
        for plane, start, rows in ((keys, 0, new[0]), (values, 50, new[1]), (keys, 35, new[2][:, 5:])):
            assert torch.equal(plane.tensor()[:, start : start + rows.shape[1]].cpu(), rows)

    def test_what_is_loaded_comes_after_what_was_computed(self, port: DevicePort) -> None:
        for number, plane in enumerate(self.planes(port)):
            old, new = self.rows(96, number), self.rows(40, 10 + number)
            plane.put(0, old.to(port.device))
            plane.fill(20, new.view(torch.uint8).numpy())
            assert torch.equal(plane.tensor().cpu(), torch.cat([old[:, :20], new, old[:, 60:]], 1))

    def test_what_was_computed_is_saved_whole_by_another_thread(self, port: DevicePort) -> None:
        planes, wanted = self.planes(port), [self.rows(96, seed) for seed in range(4)]
        saved: list[Any] = []
        with port.on(port.stream()):
            for plane, rows in zip(planes, wanted, strict=True):
                plane.put(0, rows[:, :50].to(port.device))
                plane.scatter(torch.arange(50, 96, device=port.device), rows[:, 50:].to(port.device))
            thread = threading.Thread(target=lambda: saved.extend(plane.save(5, 90).copy() for plane in planes))
            thread.start()
            thread.join()
        for data, rows in zip(saved, wanted, strict=True):
            assert np.array_equal(data, rows[:, 5:90].contiguous().view(torch.uint8).numpy())

    def test_streams_take_turns_with_the_same_memory(self, port: DevicePort) -> None:
        plane = self.planes(port)[0]
        plane.fill(0, self.rows(96, 0).view(torch.uint8).numpy())
        for turn in range(8):
            with port.on(port.stream()):
                plane.put(turn, plane.tensor()[:, turn : turn + 50] + 1)
        expected = self.rows(96, 0)
        for turn in range(8):
            expected[:, turn : turn + 50] += 1
        assert torch.equal(plane.tensor().cpu(), expected)

    def test_a_freed_memory_is_gone_and_may_be_freed_again(self, port: DevicePort) -> None:
        memory = port.allocate(1 << 16)
        memory.used_by(port.current())
        assert memory.tensor.shape == (1 << 16,)
        memory.free()
        memory.free()

    def test_memory_that_is_not_there_is_our_error(self, port: DevicePort) -> None:
        with pytest.raises(Overloaded, match="no memory left for 1152921504606846976 bytes of KV"):
            port.allocate(1 << 60)
        port.reclaim()
        assert port.allocate(4096).tensor.shape == (4096,)

    def test_what_is_allocated_is_not_free(self, port: DevicePort) -> None:
        before, memory, within = port.free_memory(), port.allocate(64 << 20), port.free_memory()
        memory.free()
        port.reclaim()
        after = port.free_memory()
        assert {before, within, after} == {None} or (before or 0) - (64 << 20) >= (within or 0) < (after or 0)

    def test_events_tell_time_in_order(self, port: DevicePort) -> None:
        stream = port.current()
        first = stream.record(timed=True)
        self.planes(port)[0].put(0, self.rows(96, 1).to(port.device))
        last = stream.record(timed=True)
        assert last.seconds_since(first) >= 0
        port.synchronize()
