"""Failures of the archive: none of them reaches a request."""

from __future__ import annotations

import logging
import resource
import shutil
import threading
import time
from pathlib import Path

import pytest
from tests.helpers.archives import CAP, LENGTH, Prompt, only_run

from keepwarm.errors import CorruptRun, StoreError
from keepwarm.store import Archive
from keepwarm.store.catalog import schema
from keepwarm.store.disk.tier import DiskTier
from keepwarm.testing.kv import UNEVEN, MemoryKV, make_run


@pytest.mark.parametrize("how", ["flip", "truncate", "swap", "unlink"])
def test_a_damaged_run_is_quarantined_and_then_a_miss(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Prompt(0), Prompt(1)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        path = only_run(tmp_path)
        two.put(archive)
        archive.flush()
        good = path.read_bytes()
        if how == "flip":
            path.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
        elif how == "truncate":
            path.write_bytes(good[:-100])
        elif how == "swap":
            shutil.copy(next(other for other in path.parent.iterdir() if other != path), path)
        else:
            path.unlink()
        with caplog.at_level(logging.WARNING, "keepwarm.store"), pytest.raises(CorruptRun, match=path.stem):
            one.loads(archive)
        assert len(caplog.records) == 1
        assert one.loads(archive) == {}
        assert two.loads(archive) == {"disk": LENGTH}
        assert archive.stats()["corrupt"] == 1
        assert not path.exists()
        assert (tmp_path / "quarantine" / path.name).exists() == (how != "unlink")
        one.put(archive)
        archive.flush()
        assert one.loads(archive) == {"disk": LENGTH}
    assert len(list((tmp_path / "quarantine").iterdir())) == (how != "unlink")


def test_running_out_of_file_handles_is_no_fault_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwarm.store.disk.tier._REFUSED_SECONDS", 1.0)
    one = Prompt()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        refs = archive.lookup(one.ids)
        sink = MemoryKV(UNEVEN, LENGTH)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(CorruptRun):
                archive.load(refs, one.tokens, LENGTH, sink)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert archive.lookup(one.ids) == ()  # not again at once, or a request could ask for ever
        assert (archive.stats()["corrupt"], archive.stats()["store_errors"]) == (0, 1)
        time.sleep(1.0)
        assert one.loads(archive) == {"disk": LENGTH}
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        assert one.loads(archive) == {"disk": LENGTH}


def test_quarantined_files_count_under_the_cap_and_go_first(tmp_path: Path) -> None:
    made = [Prompt(seed, length=4096, step=512) for seed in range(3)]
    size = make_run(made[0].kv, made[0].blocks).nbytes + 8192
    with Archive.open(tmp_path, max_ram=0, max_disk=2 * size + schema.WAL_BYTES + (352 << 10)) as archive:
        made[0].put(archive)
        archive.flush()
        path = only_run(tmp_path)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(CorruptRun):
            made[0].loads(archive)
        for one in made[1:]:
            one.put(archive)
            archive.flush()
        assert not list((tmp_path / "quarantine").iterdir())
        assert [bool(archive.lookup(one.ids)) for one in made] == [False, True, True]
        assert archive.stats()["evictions"]["disk"] == 0


def test_closing_while_the_catalogue_is_rewritten_does_not_lock_up(tmp_path: Path) -> None:
    index = DiskTier.open(tmp_path, CAP).index
    writing = threading.Event()

    def write() -> None:
        with index.database.transaction():
            writing.set()
            time.sleep(0.3)

    threads = [
        threading.Thread(target=each, daemon=True) for each in (write, index.database.rewrite, index.database.close)
    ]
    for thread in threads:  # the others queue up behind the first, one after another
        thread.start()
        assert writing.wait(10)
        time.sleep(0.1)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_store_that_vanishes_costs_only_its_hits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    one, two, three = Prompt(0), Prompt(1), Prompt(2)
    run_bytes = make_run(one.kv, one.blocks).nbytes
    with Archive.open(folder, max_ram=run_bytes, max_disk=CAP) as archive:
        one.put(archive)
        two.put(archive)
        archive.flush()
        shutil.rmtree(folder)
        with pytest.raises(CorruptRun):
            one.loads(archive)
        assert one.loads(archive) == {}
        assert two.loads(archive) == {"ram": LENGTH}
        three.put(archive)
        archive.flush()
        assert three.loads(archive) == {"ram": LENGTH}
        assert archive.stats()["store_errors"] > 0


def test_a_catalogue_that_fails_is_a_miss_with_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = Prompt(0), Prompt(1)
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        assert archive._disk is not None
        archive._disk.index.database.close()
        with caplog.at_level(logging.WARNING, "keepwarm.store"):
            for _ in range(5):
                assert one.loads(archive) == {"ram": LENGTH}
                assert two.loads(archive) == {}
        assert len(caplog.records) == 1
        assert archive.stats()["store_errors"] >= 5
        two.put(archive)
        archive.flush()
        assert two.loads(archive) == {"ram": LENGTH}
        assert archive.contents.entries() == []
        with pytest.raises(StoreError):
            archive.contents.show("00000000")
