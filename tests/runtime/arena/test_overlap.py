"""Layers from disk arrive while earlier ones are computed with: the same answers, whatever goes wrong on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers import stalling as stalls
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.batching import Batcher
from keepwarm.core.geometry import KVGeometry
from keepwarm.core.reads import Arriving
from keepwarm.errors import StoreStalled
from keepwarm.runtime.native.reads import cached_reads
from keepwarm.store import Archive
from keepwarm.store.disk.prefetch import Fetch, described
from keepwarm.store.disk.timeouts import BoundedCalls
from keepwarm.store.runfile.header import read_header
from keepwarm.store.runfile.source import FileSource
from keepwarm.testing.kv import MemoryKV, blocks_of, namespace, prompt

PROMPT = ids(300, 4)
LAYERS = 6


def open_engine(tokenizer: Any, store: Path, family: str = "llama", **settings: Any) -> Engine:
    layers = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    return Engine.from_pretrained((tiny(family, **layers), tokenizer), store=store, step=64, min_step=16, **settings)


def from_disk(engine: Engine) -> None:
    engine.flush()
    engine.pipeline.archive.clear_ram()
    engine.pipeline.pool.forget()


def run_file(store: Path) -> Path:
    (path,) = (store / "runs").iterdir()
    return path


def drop_pages(path: Path, share: float = 1.0) -> None:
    """Take a file, or its last part, out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, int((1 - share) * os.fstat(fd).st_size), 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def flip(path: Path, layer: int) -> None:
    """Change one stored byte of a layer."""
    fd = os.open(path, os.O_RDWR)
    header = read_header(FileSource(fd))
    at = header.data_offset + (header.file_bytes - header.data_offset) * layer // LAYERS + 100
    old = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old[0] ^ 1]), at)
    os.close(fd)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the lean decoder, and a model that runs through transformers
@pytest.mark.parametrize(
    "cold_share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5, pytest.param(1.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_disk_hit_equals_a_cold_run(
    tokenizer: Any, tmp_path: Path, family: str, cold_share: float, in_place: bool
) -> None:
    with open_engine(tokenizer, tmp_path, family, map_files=in_place) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=6, trace=True)
        from_disk(engine)
        if cold_share:
            drop_pages(run_file(tmp_path), cold_share)
        hit = engine.generate(PROMPT, max_new_tokens=6, trace=True)
        assert hit.cached_by_tier == {"disk": 299 if engine.pipeline.grid.inside else 256}
        assert hit.logits_digest == cold.logits_digest
        assert hit.timings["load"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layer", [0, 3, LAYERS - 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_damage_in_any_layer_is_found_before_it_is_used(
    tokenizer: Any, tmp_path: Path, family: str, layer: int, in_place: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(tokenizer, tmp_path, family, map_files=in_place) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=6, trace=True)
        from_disk(engine)
        flip(run_file(tmp_path), layer)
        again = engine.generate(PROMPT, max_new_tokens=6, trace=True)
        assert again.cached_tokens == 0
        assert again.logits_digest == cold.logits_digest
        assert "recomputed" in caplog.text
        from_disk(engine)
        assert list((tmp_path / "quarantine").iterdir())
        assert engine.generate(PROMPT, max_new_tokens=6, trace=True).logits_digest == cold.logits_digest
        assert engine.stats().corrupt == 1


@pytest.mark.host_memory("files are attended to in place by the host alone")
def test_a_file_in_place_outlives_its_name(tokenizer: Any, tmp_path: Path) -> None:
    """The file goes while it is attended to."""
    other = [*PROMPT[:200], *ids(100, 7)]
    with open_engine(tokenizer, tmp_path / "cold") as engine:
        cold = engine.generate(other, max_new_tokens=6, trace=True, reuse="off")
    with open_engine(tokenizer, tmp_path / "store", map_files=True, max_ram=0) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        from_disk(engine)
        path = run_file(tmp_path / "store")
        pieces = engine.stream(other, max_new_tokens=6, trace=True)
        next(pieces)
        assert path.name in Path("/proc/self/maps").read_text(), "nothing was mapped"
        engine.pipeline.archive.remove(path.stem)
        (*_, last) = pieces
        assert last.result is not None
        assert last.result.cached_by_tier == {"disk": 200}
        assert last.result.logits_digest == cold.logits_digest


def test_a_batch_computes_what_turned_out_damaged(tokenizer: Any, tmp_path: Path) -> None:
    with open_engine(tokenizer, tmp_path) as engine, Batcher(engine, max_prefill_tokens=32) as batcher:
        cold = engine.generate(PROMPT, max_new_tokens=6, trace=True)
        from_disk(engine)
        hit = batcher.submit(PROMPT, max_new_tokens=6, trace=True).result(60)
        assert hit.cached_by_tier == {"disk": 299 if engine.pipeline.grid.inside else 256}
        batcher.pool.forget_all()
        from_disk(engine)
        flip(run_file(tmp_path), 4)
        again = batcher.submit(PROMPT, max_new_tokens=6, trace=True).result(60)
        assert again.cached_tokens == 0
        assert hit.logits_digest == again.logits_digest == cold.logits_digest


def test_a_request_that_is_dropped_leaves_nothing_on_its_way(tokenizer: Any, tmp_path: Path) -> None:
    with open_engine(tokenizer, tmp_path) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=2, trace=True)
        from_disk(engine)
        prepared = engine.pipeline.prepare(PROMPT, {"max_new_tokens": 2})
        with engine.pipeline.open(prepared, engine.pipeline.linked(prepared.compiled), 302, "") as opened:
            assert opened.placed is not None
            arena = opened.placed.arena
            assert arena.arrivals
        assert not arena.arrivals
        open_files = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if fd.isdigit() and os.path.exists(f"/proc/self/fd/{fd}")
        ]
        assert str(run_file(tmp_path)) not in open_files
        assert engine.generate(PROMPT, max_new_tokens=2, trace=True).logits_digest == cold.logits_digest


class Later(MemoryKV):
    """Puts off what comes from disk."""

    arriving: Arriving

    def defer(self, arriving: Arriving) -> bool:
        self.arriving = arriving
        return True


@pytest.fixture
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Archive, MemoryKV, Any]]:
    """A stored prompt. The parameter is how many seconds the folder may take to answer."""
    geometry, tokens = KVGeometry.uniform(LAYERS, 3, 32, "float32"), prompt(700)
    source = MemoryKV.random(geometry, 700)
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 28, timeout=getattr(request, "param", 20.0)) as archive:
        blocks = blocks_of(tokens, 96)
        archive.put(source, blocks, namespace())
        archive.flush()
        yield archive, source, blocks


def start(archive: Archive, source: MemoryKV, first: int, end: int, blocks: Any) -> Later:
    sink = Later(source.geometry, 700)
    refs = archive.lookup([block.exact for block in blocks])[first:]
    refs = tuple(ref for ref in refs if ref.start < end)
    archive.load(refs, prompt(700)[refs[0].start : end], end, sink)
    return sink


@pytest.mark.skipif(cached_reads() is None, reason="no compiler, or the xxHash library hides its functions")
@pytest.mark.parametrize(("first", "end"), [(0, 700), (2, 672), (7, 700), (3, 384)])
def test_the_compiled_reader_reads_and_verifies(stored: Any, first: int, end: int) -> None:
    archive, source, blocks = stored
    sink = start(archive, source, first, end, blocks)
    fetch = sink.arriving
    assert isinstance(fetch, Fetch)
    for layer in range(LAYERS):
        fetch.ready(layer, cached_reads())
    assert sink.same(source, blocks[first].start, end)
    assert not fetch._arrived  # no thread of the store was needed
    assert sink.commits == [(layer, blocks[first].start, end) for layer in range(LAYERS)]


@pytest.mark.skipif(cached_reads() is None, reason="no compiler, or the xxHash library hides its functions")
def test_every_flipped_bit_is_found_by_the_compiled_reader(stored: Any, tmp_path: Path) -> None:
    archive, source, blocks = stored
    path = run_file(tmp_path)
    content = path.read_bytes()
    header = read_header(FileSource(os.open(path, os.O_RDONLY)))
    read = cached_reads()
    assert read is not None
    generator = np.random.default_rng(5)
    for place in [0, len(content) - header.data_offset - 1, *generator.integers(0, 700_000, 40).tolist()]:
        at = header.data_offset + int(place)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ (1 << int(generator.integers(8)))]))
        fetch = start(archive, source, 0, 700, blocks).arriving
        assert isinstance(fetch, Fetch)
        reads = described(fetch._reader, fetch._taken, fetch._views)
        assert reads is not None
        assert not all(read(reads, layer) for layer in range(LAYERS))
        fetch.close()
        path.write_bytes(content)


@pytest.mark.parametrize("stored", [3.0], indirect=True)
def test_a_read_that_hangs_is_waited_for_in_bounded_time(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, source, blocks = stored
    released = threading.Event()
    sink = start(archive, source, 0, 700, blocks)
    load_layer = sink.arriving._reader.load_layer  # type: ignore[attr-defined]

    def hanging(layer: int, *rest: Any) -> None:
        if layer == 2:
            released.wait()
        load_layer(layer, *rest)

    monkeypatch.setattr(sink.arriving._reader, "load_layer", hanging)  # type: ignore[attr-defined]
    sink.arriving.ready(0, None)
    sink.arriving.ready(1, None)
    with pytest.raises(StoreStalled, match="did not answer within 3 s"):
        sink.arriving.ready(2, None)
    assert archive.lookup([block.exact for block in blocks]) == ()  # nobody else waits in vain
    assert archive.stats()["corrupt"] == 0
    released.set()
    sink.arriving.close()
    assert len(archive.lookup([block.exact for block in blocks])) == len(blocks)  # it answers again


def test_a_wait_ends_and_calls_are_taken_again() -> None:
    bounded, released = BoundedCalls(0.05), threading.Event()
    assert bounded.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        bounded.call(lambda: 1 // 0)
    hanging = bounded.start(released.wait)
    with pytest.raises(StoreStalled):
        bounded.wait(hanging)
    assert bounded.stalled
    with pytest.raises(StoreStalled):
        bounded.call(lambda: 3)
    released.set()
    hanging.result(10)
    assert bounded.call(lambda: 4) == 4
    with ThreadPoolExecutor(8) as callers:
        assert sum(callers.map(lambda n: bounded.call(lambda: n), range(200))) == 19900


@pytest.fixture
def stalling(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A store whose run files lie on a mount that hangs while a file is there: the store, and that file."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting needs root and /dev/fuse")
    yield tmp_path / "store", tmp_path / "stall"
    (tmp_path / "stall").unlink(missing_ok=True)
    subprocess.run(["umount", "-l", str(tmp_path / "store" / "runs")], check=False, capture_output=True)


@pytest.mark.slow
def test_answers_go_on_while_a_mount_hangs(tokenizer: Any, stalling: tuple[Path, Path], tmp_path: Path) -> None:
    store, stall = stalling
    with open_engine(tokenizer, store) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=4, trace=True)
    behind, path = tmp_path / "behind", run_file(store)
    (store / "runs").rename(behind)
    (store / "runs").mkdir()
    server = subprocess.Popen(
        [sys.executable, Path(stalls.__file__), store / "runs", behind, stall], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            pytest.skip("this system lets nobody mount")
        with open_engine(tokenizer, store, store_timeout=5.0) as engine:
            hit = engine.generate(PROMPT, max_new_tokens=4, trace=True)
            assert hit.cached_by_tier == {"disk": 299 if engine.pipeline.grid.inside else 256}
            assert hit.logits_digest == cold.logits_digest
            from_disk(engine)
            drop_pages(path)
            stall.touch()
            for _ in range(2):  # the first waits in vain, the second does not even ask
                stalled = engine.generate(PROMPT, max_new_tokens=4, trace=True, reuse="exact")
                assert stalled.logits_digest == cold.logits_digest
                assert "disk" not in stalled.cached_by_tier
            assert engine.stats().store_errors > 0
            assert engine.stats().corrupt == 0
            stall.unlink()
    finally:
        stall.unlink(missing_ok=True)
        server.kill()
        server.wait()


@pytest.mark.host_memory("a batch decodes from pages through the lean decoder")
def test_a_purge_reaches_the_pages_of_a_batch(tokenizer: Any, tmp_path: Path) -> None:
    with open_engine(tokenizer, tmp_path) as engine, Batcher(engine) as batcher:
        for salt in ("mine", "theirs"):
            batcher.submit(PROMPT, max_new_tokens=2, salt=salt).result(60)
        engine.flush()
        assert batcher.pool.counts.cached > 0
        engine.purge("mine")
        assert batcher.pool.counts.cached == 0
    assert engine.pipeline.on_purge == []
