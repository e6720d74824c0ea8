"""KV that stays encoded in memory: attention decodes it page by page, and gives what decoding it beforehand gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.models import tiny

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.config import EngineConfig
from keepwarm.core.blocks import chain, token_ids
from keepwarm.core.codecs import codec
from keepwarm.core.levels import NATIVE
from keepwarm.core.request import Request
from keepwarm.errors import ConfigError, UnsupportedModel
from keepwarm.runtime.arena.arena import Arena
from keepwarm.runtime.codecs import TorchCodec
from keepwarm.runtime.device.host import HostPort
from keepwarm.runtime.loader import load
from keepwarm.runtime.native import build
from keepwarm.runtime.native.decoder import LeanDecoder
from keepwarm.runtime.probe import probe
from keepwarm.runtime.runner import Runner
from keepwarm.store.ram.tier import RamTier
from keepwarm.store.runfile.codec import Coding, coded_runs
from keepwarm.store.runfile.layout import Run, stored_blocks
from keepwarm.testing.kv import namespace

CODECS = ("int8", "int4", "fp8")
LENGTH, CUTS = 700, (100, 203, 211, 467, 700)  # blocks that begin within a page, and one that is shorter than a page
IDS = np.random.default_rng(0).integers(5, 9999, LENGTH).tolist()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.kernels() is None, reason="no C++ compiler: nothing attends to encoded KV"),
    pytest.mark.host_memory("the lean decoder alone attends to encoded KV"),
]


def portable() -> build.Kernels | None:
    """As on a processor with the least that has a level of its own: without AVX-512, say."""
    return build.compiled_for([*build.levels_here(), NATIVE][-2:][0], build._KERNELS)


KERNELS: dict[str, tuple[Callable[[], build.Kernels | None], torch.dtype]] = {
    "tiles": (build.kernels, torch.bfloat16),  # where there are matrix units
    "vectors": (lambda: build.compiled(build._KERNELS), torch.bfloat16),
    "float32": (build.kernels, torch.float32),
    "portable": (portable, torch.bfloat16),
    "portable-float32": (portable, torch.float32),
}


class Twins:
    """One model's prefix encoded, in an arena that keeps it so and in one that decodes it."""

    def __init__(self, kernels: build.Kernels, dtype: torch.dtype, dim: int) -> None:
        self.model = tiny("llama", dtype, head_dim=dim)
        self.decoder = LeanDecoder(self.model, kernels, [None] * len(self.model.model.layers))
        self.geometry = probe(Runner(self.model, None)).geometry
        self.source = self.arena()
        self.decoder.step([token_ids(IDS)], [0], [self.source.sequenced()], [])

    def arena(self, *, keep_encoded: bool = False) -> Arena:
        return Arena(self.geometry, LENGTH + 100, HostPort(), keep_encoded=keep_encoded)

    def loaded(self, name: str, end: int, *, keep_encoded: bool) -> Arena:
        """The first `end` positions, from runs in RAM."""
        coding, arena = Coding(TorchCodec(codec(name)), self.geometry), self.arena(keep_encoded=keep_encoded)
        blocks = [block for block in chain(token_ids(IDS), CUTS, namespace()) if block.start < end]
        run = Run.copy_from(
            self.source, stored_blocks(blocks), token_ids(IDS[: blocks[-1].end]), namespace().describe()
        )
        tier = RamTier(1 << 30)
        for part in coded_runs(run, coding.codec):
            tier.put(part)
            sink = coding.sink(arena, part.geometry, part.blocks, min(end, part.blocks[-1].end))
            tokens = token_ids(IDS[part.start : part.blocks[-1].end])
            tier.load(part, 0, len(part.blocks) - 1, tokens, part.blocks[-1].end, sink)
        if not keep_encoded:
            arena.materialize()
        arena.seek(end)
        return arena


WIDTHS = ("tiles", 64), ("tiles", 16), ("vectors", 64), ("float32", 128), ("portable", 32), ("portable-float32", 64)


@pytest.fixture(scope="module", params=WIDTHS, ids=lambda p: f"{p[0]}-{p[1]}")
def twins(request: pytest.FixtureRequest) -> Twins:
    make, dtype = KERNELS[request.param[0]]
    kernels = make()
    assert kernels is not None
    return Twins(kernels, dtype, request.param[1])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("end", [LENGTH, 205])
def test_logits_are_those_on_decoded_kv(twins: Twins, name: str, end: int) -> None:
    """One row, some, and many; each attends to all blocks before it."""
    kept, decoded = (twins.loaded(name, end, keep_encoded=keep) for keep in (True, False))
    assert kept.holds_encoded
    fresh, position = token_ids(list(range(300, 390))), end
    for rows in (1, 3, 80, 1):
        steps = [
            twins.decoder.step([fresh[:rows]], [position], [arena.sequenced()], range(rows))
            for arena in (kept, decoded)
        ]
        assert torch.equal(*steps)
        for arena in (kept, decoded):
            arena.advance(position + rows)
        position += rows
    own = [np.abs(layer.values[0, :, :end].float().numpy()).max(axis=(0, 2)) for layer in kept.layers]  # type: ignore[index]
    written = {int(at) for part in own for at in np.flatnonzero(part)}
    across = {at // 8 for cut in (*CUTS, end) if cut % 8 for at in (cut,)}
    assert {at // 8 for at in written} <= across  # but for pages that lie across, its own memory was never touched


@pytest.mark.parametrize("name", CODECS)
def test_it_decodes_itself_where_something_else_needs_it(twins: Twins, name: str) -> None:
    kept, decoded = (twins.loaded(name, 640, keep_encoded=keep) for keep in (True, False))
    kept.materialize()
    assert not kept.holds_encoded
    for layer in range(2):
        for kv in (0, 1):
            assert np.array_equal(kept.read(layer, kv, 0, 640), decoded.read(layer, kv, 0, 640))


# ---- engines ----


@pytest.fixture(scope="module")
def folder(saved: Callable[..., Path]) -> Path:
    return saved("llama")


def opened(folder: Path | tuple[Any, Any], kept: str, store: Path | None = None, **settings: Any) -> Engine:
    settings = {"reuse": "prefix", "step": 128, "min_step": 8, "kv_codec": "int4"} | settings
    return Engine.from_pretrained(folder, kv_in_memory=kept, store=store, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "int8"), ("bfloat16", "int4")])
def test_smollm2_answers_alike_from_ram_and_disk(demo_folder: Path, tmp_path: Path, dtype: str, name: str) -> None:
    found = {}
    loaded = load(demo_folder, EngineConfig.build(dtype=dtype))  # once
    model = loaded.model, loaded.tokenizer
    for kept in ("decoded", "encoded"):
        for tier in ("disk", "ram"):
            store = tmp_path / kept / tier
            with opened(model, kept, store, kv_codec=name) as engine:
                engine.warm(IDS[:300])
            with opened(model, kept, store, kv_codec=name) as engine:
                if tier == "ram":
                    engine.warm(IDS[:300])
                    engine.flush()
                    engine.pipeline.pool.forget()
                result = engine.generate([*IDS[:300], *range(40, 70)], max_new_tokens=4, trace=True)
                assert result.cached_by_tier == {tier: 300}
                assert result.exactness == "quantized"
                found[kept, tier] = result.logits_digest
    assert len(set(found.values())) == 1, found


def test_no_prefix_in_full_precision_is_left_behind(folder: Path) -> None:
    with opened(folder, "encoded") as engine:
        engine.generate(IDS, max_new_tokens=4)
        engine.flush()
        assert engine.pipeline.pool._idle == []
        linked = engine.pipeline.linked(engine.pipeline.prompts.compile(Request([*IDS, 7, 7]), 1))
        with engine.pipeline.lease(linked, engine.pipeline.config.reuse, LENGTH + 9) as placed:
            assert placed.by_tier == {"ram": LENGTH}
            assert placed.arena.holds_encoded
            assert not placed.arena.read(1, 1, 0, LENGTH - 8).any()
        assert engine.pipeline.pool._idle == []


def test_conversations_and_partial_blocks_answer_as_decoded_ones(folder: Path, tmp_path: Path) -> None:
    answers = {}
    for kept in ("decoded", "encoded"):
        with opened(folder, kept, tmp_path / kept) as engine:
            digests = []
            for prompt in (IDS[:500], IDS[:500] + [9] * 40, [*IDS[:333], 5, 5, 5], [*IDS[:333], 5, 5, 5, 6] + [4] * 90):
                result = engine.generate(prompt, max_new_tokens=6, trace=True)
                digests.append((result.cached_tokens, result.exactness, result.logits_digest))
                engine.flush()
                engine.pipeline.pool.forget()
            answers[kept] = digests
            session = engine.sessions.open("s", system="Be brief.")
            for said in ("One.", "Two, and a little more.", "Three."):
                answers[kept].append((session.say(said, max_new_tokens=8).exactness, "", None))
                engine.flush()
                engine.pipeline.pool.forget()
    assert answers["decoded"] == answers["encoded"]
    assert {label for _, label, _ in answers["encoded"][1:4]} == {"quantized"}


@pytest.mark.slow
def test_a_batch_shares_what_is_encoded_and_takes_no_pages_for_it(folder: Path) -> None:
    prompts = [[*IDS, *range(50 + 20 * i, 50 + 20 * i + 5 + i)] for i in range(4)]
    with opened(folder, "encoded") as engine:
        engine.warm(IDS)
        engine.flush()
        solo = [engine.generate(prompt, max_new_tokens=5, trace=True) for prompt in prompts]
    with opened(folder, "encoded") as engine:
        engine.warm(IDS)
        engine.flush()
        with Batcher(engine, max_batch=4) as batch:
            tickets = [batch.submit(prompt, max_new_tokens=5, trace=True) for prompt in prompts]
            for ticket, alone in zip(tickets, solo, strict=True):
                result = ticket.result(60)
                assert result.cached_tokens == alone.cached_tokens >= LENGTH
                assert result.logits_digest == alone.logits_digest
            stats = batch.stats()
            assert 0 < stats.peak_pages <= 4 * (3 + len(CUTS) + 6)  # the whole prompts are 4 * 88 pages
            assert stats.pages.referenced == 0
            assert 0 < stats.slots_used <= 1


def test_damage_on_disk_is_a_miss(folder: Path, tmp_path: Path) -> None:
    with opened(folder, "encoded", tmp_path) as engine:
        cold = engine.generate(IDS, max_new_tokens=1, trace=True)
    (file,) = (tmp_path / "runs").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 4
    file.write_bytes(data)
    with opened(folder, "encoded", tmp_path) as engine:
        again = engine.generate(IDS, max_new_tokens=1, trace=True)
        assert (again.cached_tokens, again.exactness, again.logits_digest) == (0, "exact", cold.logits_digest)


def test_what_came_from_disk_is_kept_in_ram_as_it_is(folder: Path, tmp_path: Path) -> None:
    with opened(folder, "encoded", tmp_path) as engine:
        engine.warm(IDS)
    with opened(folder, "encoded", tmp_path) as engine:
        tiers = []
        for at in range(2):
            tiers.append(engine.generate([*IDS, 50 + at, 60], max_new_tokens=1).cached_by_tier)
            engine.flush()
        assert tiers == [{"disk": LENGTH}, {"ram": LENGTH}]


def test_chunks_are_decoded_to_be_moved(folder: Path) -> None:
    documents = [" ".join(f"Pier {n} of harbour {h} takes boats." for n in range(20)) for h in range(2)]
    answers = []
    for kept in ("decoded", "encoded"):
        with opened(folder, kept, reuse="chunks", step=2048) as engine:
            for order in ((0, 1), (1, 0)):
                segments = [documents[at] for at in order]
                result = engine.generate(segments=segments, max_new_tokens=3, trace=True)
                assert engine.pipeline.chunks.wait_until_idle(60)
                engine.flush()
                engine.pipeline.pool.forget()
            answers.append((result.exactness, result.blended_tokens, result.logits_digest))
    assert answers[0][1] > 0
    assert answers[0] == answers[1]


def test_it_is_refused_where_nothing_attends_to_it(saved: Callable[..., Path], folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_codec"):
        opened(folder, "encoded", kv_codec="raw")
    with pytest.raises(UnsupportedModel, match="kv_in_memory='decoded'"):
        opened(saved("gpt2"), "encoded")
