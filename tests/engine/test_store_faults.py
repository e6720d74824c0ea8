"""A store that fails never changes an answer: the request goes on uncached."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.models import tiny
from tests.helpers.prompts import ids

from keepwarm import Engine
from keepwarm.errors import StoreNotWritable, StoreTooNew

PROMPT = ids(90, 4)


def open_engine(tokenizer: Any, store: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained((tiny("llama"), tokenizer), store=store, step=16, min_step=4, **settings)


def run_files(store: Path) -> list[Path]:
    return [p for p in store.rglob("*") if p.is_file() and p.stat().st_size > 10_000 and "sqlite" not in p.name]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "swap"])
def test_a_damaged_run_is_recomputed(tokenizer: Any, tmp_path: Path, damage: str, caplog: Any) -> None:
    with open_engine(tokenizer, tmp_path) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=4, trace=True)
        engine.generate(ids(90, 5), max_new_tokens=1)
    one, other = (p for p in run_files(tmp_path) if ".db" not in p.name)
    for path in (one, other):
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
        elif damage == "truncate":
            path.write_bytes(content[:-100])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "remove":
            path.unlink()
    if damage == "swap":
        first = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(first)
    with caplog.at_level(logging.WARNING), open_engine(tokenizer, tmp_path) as engine:
        for cached in (False, True):
            again = engine.generate(PROMPT, max_new_tokens=4, trace=True)
            assert again.logits_digest == cold.logits_digest
            assert (again.cached_tokens > 0) is cached
    if damage != "remove":  # a file that is gone is found at opening
        assert "recomputed" in caplog.text


def test_out_of_disk_while_storing(tokenizer: Any, tmp_path: Path) -> None:
    """A really full device: a small tmpfs."""
    store = tmp_path / "small"
    store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(store)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with open_engine(tokenizer, store, max_ram=0) as engine:
            for seed in range(12):
                warm = engine.generate(ids(200, seed), max_new_tokens=2, trace=True)
                assert (
                    warm.logits_digest
                    == engine.generate(ids(200, seed), max_new_tokens=2, trace=True, reuse="off").logits_digest
                )
                engine.flush()
            stats = engine.stats()
            assert stats.store_errors + stats.dropped_writes + stats.evictions["disk"] > 0
    finally:
        subprocess.run(["umount", "-l", str(store)], check=True)


def test_a_store_too_small_for_a_run(tokenizer: Any, tmp_path: Path) -> None:
    with open_engine(tokenizer, tmp_path, max_disk="600KiB", max_ram=0) as engine:
        for seed in range(6):
            engine.generate(ids(600, seed), max_new_tokens=1)
        engine.flush()
        assert engine.pipeline.archive.contents.size_on_disk() <= 600 << 10
        assert engine.generate(ids(600, 0), max_new_tokens=1).prompt_tokens == 600


def test_a_store_that_vanishes_while_running(tokenizer: Any, tmp_path: Path) -> None:
    import shutil

    store = tmp_path / "store"
    with open_engine(tokenizer, store) as engine:
        cold = engine.generate(PROMPT, max_new_tokens=3, trace=True)
        engine.flush()
        shutil.rmtree(store)
        engine.pipeline.pool.forget()
        engine.pipeline.archive.clear_ram()
        assert engine.generate(PROMPT, max_new_tokens=3, trace=True).logits_digest == cold.logits_digest


def test_a_folder_that_cannot_be_written(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreNotWritable, match="file"):
        open_engine(tokenizer, tmp_path / "file" / "store")


def test_a_store_of_a_newer_version(tokenizer: Any, tmp_path: Path) -> None:
    open_engine(tokenizer, tmp_path).close()
    (catalogue,) = (p for p in tmp_path.iterdir() if p.suffix in (".db", ".sqlite", ".sqlite3"))
    with sqlite3.connect(catalogue) as connection:
        connection.execute("PRAGMA user_version = 9999")
    connection.close()
    with pytest.raises(StoreTooNew, match="newer"):
        open_engine(tokenizer, tmp_path)


def test_two_engines_share_one_store(tokenizer: Any, tmp_path: Path) -> None:
    with open_engine(tokenizer, tmp_path) as one, open_engine(tokenizer, tmp_path) as two:
        cold = one.generate(PROMPT, max_new_tokens=3, trace=True)
        one.flush()
        warm = two.generate(PROMPT, max_new_tokens=3, trace=True)
        assert warm.cached_by_tier == {"disk": 89 if two.pipeline.grid.inside else 80}
        assert warm.logits_digest == cold.logits_digest


def test_warm_names_what_it_stores(tokenizer: Any, tmp_path: Path) -> None:
    with open_engine(tokenizer, tmp_path) as engine:
        report, blocks = (
            engine.warm(PROMPT, name="greeting"),
            3 if engine.pipeline.grid.inside else 6,
        )  # pages of 32, or steps
        assert (report.tokens, report.new_blocks, report.reused_tokens) == (90, blocks, 0)
        engine.flush()
        again = engine.warm(PROMPT)
        assert (again.new_blocks, again.reused_tokens) == (0, 90)
    with open_engine(tokenizer, tmp_path) as engine:
        (entry,) = engine.pipeline.archive.contents.entries()
        assert (entry.name, entry.tokens, entry.blocks) == ("greeting", 90, blocks)
        assert engine.pipeline.archive.contents.show("greeting")
        # a declared cut at the end of what was warmed reaches all of it
        text = engine.pipeline.tokenizer.decode(PROMPT)
        engine.warm(segments=[text])
        assert engine.explain(segments=[text, " more"]).cached_tokens == len(engine.pipeline.tokenizer.encode(text)[0])
