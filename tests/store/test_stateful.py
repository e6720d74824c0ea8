"""The archive against a dict: whatever is done to it in whatever order, it serves what was put, or nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepwarm.core.blocks import Block
from keepwarm.errors import CorruptRun, StoreError
from keepwarm.store import Archive
from keepwarm.store.disk.recovery import RUNS
from keepwarm.store.retention import Rules
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt

STEP, LENGTH = 16, 96
CAP = 1_000_000  # some of it for the catalogue: eviction begins after about twenty runs
RAM = 60_000
PROMPTS = 6

KV = [MemoryKV.random(UNEVEN, LENGTH, seed) for seed in range(PROMPTS)]
TOKENS = [prompt(LENGTH, seed) for seed in range(PROMPTS)]
# Prompts 0 to 2 share their first half, and so its KV.
for other in (1, 2):
    TOKENS[other] = TOKENS[other].copy()
    TOKENS[other][: LENGTH // 2] = TOKENS[0][: LENGTH // 2]
    for mine, first in zip(KV[other].arrays, KV[0].arrays, strict=True):
        for array, shared in zip(mine, first, strict=True):
            array[:, : LENGTH // 2] = shared[:, : LENGTH // 2]
BLOCKS: list[tuple[Block, ...]] = [blocks_of(tokens, STEP) for tokens in TOKENS]

prompts = st.integers(0, PROMPTS - 1)
lengths = st.integers(1, LENGTH // STEP)


class AgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="keepwarm-stateful-"))
        self.model: dict[bytes, tuple[int, Block]] = {}  # every block ever put, and whose KV it is
        self.damaged = 0

    @initialize(policy=st.sampled_from(["lru", "lfu", "s3fifo"]), ram=st.sampled_from([0, RAM]))
    def begin(self, policy: str, ram: int) -> None:
        self.rules = Rules(ram_policy=policy, disk_policy=policy)  # type: ignore[arg-type]
        self.ram = ram
        self.archive = Archive.open(self.folder, max_ram=ram, max_disk=CAP, rules=self.rules)

    def teardown(self) -> None:
        if hasattr(self, "archive"):
            self.archive.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(which=prompts, first=st.integers(0, 3), turns=lengths)
    def put(self, which: int, first: int, turns: int) -> None:
        blocks = BLOCKS[which][first:turns]
        self.archive.put(KV[which], blocks, namespace())
        self.archive.flush()
        self.model |= {block.exact: (which, block) for block in blocks}

    @rule(which=prompts, turns=lengths, cut=st.integers(0, STEP - 1))
    def load(self, which: int, turns: int, cut: int) -> None:
        ids = [block.exact for block in BLOCKS[which][:turns]]
        refs = self.archive.lookup(ids)
        assert [ref.id for ref in refs] == ids[: len(refs)]
        assert all(ref.id in self.model for ref in refs)
        if not refs:
            return
        end = refs[-1].end - cut
        sink = MemoryKV(UNEVEN, LENGTH)
        try:
            taken = self.archive.load(refs, TOKENS[which][:end], end, sink)
        except CorruptRun:
            assert self.damaged, "nothing was damaged"
            return
        assert sum(taken.values()) == end
        assert sink.same(KV[which], 0, end)

    @rule(which=prompts, at=st.integers(0, LENGTH // STEP - 1))
    def children(self, which: int, at: int) -> None:
        block = BLOCKS[which][at]
        found = self.archive.children(block.parent_prefix)
        assert {ref.id for ref in found} <= set(self.model)

    @rule(which=prompts)
    def remove(self, which: int) -> None:
        refs = self.archive.lookup([BLOCKS[which][0].exact])
        if refs:
            assert self.archive.remove(refs[0].run_id) >= 1

    @rule(which=prompts, turns=lengths, ttl=st.floats(0.001, 60), priority=st.integers(0, 2))
    def retain(self, which: int, turns: int, ttl: float, priority: int) -> None:
        leaf = BLOCKS[which][turns - 1].exact
        try:
            assert self.archive.contents.retain(leaf, ttl, priority) >= 1
        except StoreError:
            assert not self.archive.lookup([block.exact for block in BLOCKS[which][:turns]])[turns - 1 :]

    @rule(which=prompts)
    def promote(self, which: int) -> None:
        refs = self.archive.lookup([block.exact for block in BLOCKS[which]])
        self.archive.promote(dict.fromkeys(ref.run_id for ref in refs if ref.tier == "disk"))
        self.archive.flush()

    @rule()
    def compact(self) -> None:
        self.archive.compact()

    @rule()
    def forget_ram(self) -> None:
        self.archive.clear_ram()

    @rule()
    def reopen(self) -> None:
        self.archive.close()
        self.archive = Archive.open(self.folder, max_ram=self.ram, max_disk=CAP, rules=self.rules)

    @rule(which=st.integers(0, 63), where=st.integers(0, 2**20), bit=st.integers(0, 7))
    def damage(self, which: int, where: int, bit: int) -> None:
        """Flips one bit of one file; what is drawn does not depend on the files, which differ from run to run."""
        paths = sorted((self.folder / RUNS).iterdir())
        if not paths:
            return
        path = paths[which % len(paths)]
        content = bytearray(path.read_bytes())
        content[where % len(content)] ^= 1 << bit
        path.write_bytes(content)
        self.damaged += 1

    @invariant()
    def caps_hold(self) -> None:
        if hasattr(self, "archive"):
            assert sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) <= CAP
            assert sum(run.data.nbytes + run.tokens.nbytes for run in self.archive._ram.runs()) <= self.ram


TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
