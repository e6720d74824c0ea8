"""Killed writers, full devices, and several processes under one cap."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepwarm.store import Archive
from keepwarm.store.disk.tier import DiskTier
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, make_run, namespace, prompt

LENGTH = 4096  # 0.7 MB per run
STEP = 512

_WRITER = """
import sys
from pathlib import Path
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, namespace, prompt
folder, first, count, cap = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with Archive.open(folder, max_ram=0, max_disk=cap) as archive:
    print("open", flush=True)
    for seed in range(first, first + count):
        tokens = prompt({length}, seed)
        archive.put(MemoryKV.random(UNEVEN, {length}, seed), blocks_of(tokens, {step}), namespace())
        archive.contents.count("written")
        archive.flush()
        print(seed, flush=True)
"""


def writer(folder: Path, first: int, count: int, cap: int) -> subprocess.Popen[str]:
    code = _WRITER.format(length=LENGTH, step=STEP)
    arguments = [sys.executable, "-c", code, str(folder), str(first), str(count), str(cap)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def stored(archive: Archive, seed: int) -> bool:
    """Whether a prompt is stored; if so, it must load equal to the bit."""
    tokens = prompt(LENGTH, seed)
    refs = archive.lookup([block.exact for block in blocks_of(tokens, STEP)])
    if not refs:
        return False
    sink = MemoryKV(UNEVEN, LENGTH)
    archive.load(refs, tokens, LENGTH, sink)
    assert sink.same(MemoryKV.random(UNEVEN, LENGTH, seed), 0, LENGTH)
    return True


@pytest.mark.slow
def test_a_killed_writer_leaves_everything_it_acknowledged(tmp_path: Path) -> None:
    generator = random.Random(0)
    acknowledged: set[int] = set()
    for turn in range(6):
        process = writer(tmp_path, turn * 100, 100, 1 << 30)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        if not turn:  # however slow the machine is, something was acknowledged
            acknowledged.add(int(process.stdout.readline()))
        time.sleep(generator.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate()
        acknowledged |= {int(line) for line in said.splitlines() if line}
        with Archive.open(tmp_path, max_ram=0, max_disk=1 << 30) as archive:
            assert all(stored(archive, seed) for seed in acknowledged)
            for seed in range(turn * 100, turn * 100 + 100):
                stored(archive, seed)
            assert archive.stats()["corrupt"] == 0
            files = {path.name for path in (tmp_path / "runs").iterdir()}
            assert files == {entry.id + ".safetensors" for entry in archive.contents.entries()}
    assert acknowledged


_REBUILDER = """
import os, sys
from pathlib import Path
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.catalog.index import Index
Index.adopt_all = lambda self, runs: os.kill(os.getpid(), 9)
DiskTier.open(Path(sys.argv[1]), 1 << 30)
"""


@pytest.mark.parametrize("damaged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_kill_while_the_catalogue_is_made_again_costs_no_run(tmp_path: Path, damaged: bool) -> None:
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 30) as archive:
        for seed in range(2):
            blocks = blocks_of(prompt(LENGTH, seed), STEP)
            archive.put(MemoryKV.random(UNEVEN, LENGTH, seed), blocks, namespace())
        archive.flush()
    (tmp_path / "catalogue.sqlite").unlink()
    if damaged:
        (tmp_path / "catalogue.sqlite").write_bytes(b"x" * 5000)
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", _REBUILDER, str(tmp_path)], capture_output=True)
        assert killed.returncode == -signal.SIGKILL
    with Archive.open(tmp_path, max_ram=0, max_disk=1 << 30) as archive:
        assert [stored(archive, seed) for seed in range(2)] == [True, True]


@pytest.mark.slow
def test_processes_share_one_cap(tmp_path: Path) -> None:
    run = make_run(MemoryKV(UNEVEN, LENGTH), blocks_of(prompt(LENGTH), STEP))
    cap = 5 * run.nbytes + (600 << 10)
    processes = [writer(tmp_path, first, 12, cap) for first in (0, 1000)]
    most = 0
    while any(process.poll() is None for process in processes):
        # What was evicted is unlinked right after its rows are gone; a second look tells a moment from a breach.
        sizes = []
        for _ in range(2):
            sizes.append(sum(size_of(path) for path in tmp_path.rglob("*")))
            time.sleep(0.02)
        most = max(most, min(sizes))
    assert [process.wait() for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    assert 3 * run.nbytes < most <= cap
    with Archive.open(tmp_path, max_ram=0, max_disk=cap) as archive:
        kept = [seed for first in (0, 1000) for seed in range(first, first + 12) if stored(archive, seed)]
        assert 3 <= len(kept) <= 5
        assert archive.contents.counters() == {"written": 24, "evicted_disk": 24 - len(kept)}


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A folder on its own 3 MB file system."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if mount is None or unmount is None:
        pytest.skip("no mount command")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount here")
    yield folder
    subprocess.run([unmount, folder], check=True)


def test_a_full_device_costs_only_what_does_not_fit(small_device: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Archive.open(small_device / "store", max_ram=1 << 26, max_disk=1 << 30) as archive:
        for seed in range(8):
            tokens = prompt(LENGTH, seed)
            blocks = blocks_of(tokens, STEP)
            archive.put(MemoryKV.random(UNEVEN, LENGTH, seed), blocks, namespace())
            archive.flush()
            assert len(archive.lookup([block.exact for block in blocks])) == len(blocks)
        assert archive.stats()["store_errors"] >= 4
        assert len([record for record in caplog.records if "storing a run on disk" in record.message]) == 1
        assert not list((small_device / "store" / "runs").glob("*.tmp"))
        assert {row.state for row in disk_of(archive).index.runs("1")} == {"live"}
    with Archive.open(small_device / "store", max_ram=0, max_disk=1 << 30) as archive:
        assert 2 <= sum(stored(archive, seed) for seed in range(8)) <= 4


def disk_of(archive: Archive) -> DiskTier:
    assert archive._disk is not None
    return archive._disk
