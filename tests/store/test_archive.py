"""The archive: tiers together, and background writes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.archives import CAP, LENGTH, Prompt

from keepwarm.core.blocks import chain, derived_id
from keepwarm.core.ports import Bytes
from keepwarm.errors import CorruptRun, StoreError
from keepwarm.store import Archive
from keepwarm.store.catalog.rows import namespace_digest
from keepwarm.store.disk.tier import DiskTier
from keepwarm.store.handover import MAX_PENDING
from keepwarm.testing.kv import UNEVEN, MemoryKV, make_run, namespace


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    with Archive.open(tmp_path / "store", max_ram=CAP, max_disk=CAP) as opened:
        yield opened


def test_a_put_prompt_is_found_in_ram_and_after_reopening_on_disk(tmp_path: Path) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        assert one.loads(archive) == {"ram": LENGTH}
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        assert one.loads(archive) == {"disk": LENGTH}
        assert one.loads(archive, end=LENGTH - 3) == {"disk": LENGTH - 3}
        archive.promote([archive.lookup(one.ids)[0].run_id])
        archive.flush()
        assert one.loads(archive) == {"ram": LENGTH}


def test_another_process_finds_it(tmp_path: Path) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        code = f"""
from pathlib import Path
from keepwarm.store import Archive
from keepwarm.testing.kv import UNEVEN, MemoryKV, blocks_of, prompt
tokens = prompt({LENGTH}); wanted = MemoryKV.random(UNEVEN, {LENGTH}); sink = MemoryKV(UNEVEN, {LENGTH})
with Archive.open(Path({str(tmp_path)!r}), max_ram=0, max_disk={CAP}) as archive:
    refs = archive.lookup([block.exact for block in blocks_of(tokens)])
    print(archive.load(refs, tokens, {LENGTH}, sink), sink.same(wanted, 0, {LENGTH}))
"""
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout == f"{{'disk': {LENGTH}}} True\n"


def test_without_a_folder_everything_stays_in_ram() -> None:
    one = Prompt()
    with Archive.open(None, max_ram=CAP, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        assert one.loads(archive) == {"ram": LENGTH}
        archive.contents.name("greeting", one.ids[-1])
        assert archive.contents.show("greeting")["file"] is None
        assert archive.contents.entries()[0].name == "greeting"
        assert archive.contents.size_on_disk() == 0
        archive.promote(["nothing"])
        assert archive.stats()["blocks"] == {"ram": 8}


def test_a_prompt_that_continues_another_stores_only_what_is_new(archive: Archive) -> None:
    one = Prompt()
    one.put(archive, 0, 5)
    one.put(archive)
    one.put(archive)
    archive.flush()
    assert [entry.blocks for entry in archive.contents.entries()] == [3, 5]
    assert one.loads(archive) == {"ram": LENGTH}
    archive._ram.remove(archive.lookup(one.ids)[-1].run_id)
    assert one.loads(archive) == {"ram": 40, "disk": 24}
    archive._ram.remove(archive.lookup(one.ids)[0].run_id)
    assert one.loads(archive) == {"disk": LENGTH}


def test_what_stands_on_nothing_stored_is_dropped(archive: Archive) -> None:
    one = Prompt()
    one.put(archive, 3)
    archive.flush()
    assert archive.contents.entries() == []
    assert archive.stats()["dropped_writes"] == 1


def test_an_evicted_parent_that_ram_still_holds_is_written_again(archive: Archive) -> None:
    one = Prompt()
    one.put(archive, 0, 5)
    archive.flush()
    assert archive._disk is not None
    archive._disk.remove([archive.lookup(one.ids)[0].run_id])
    one.put(archive, 5)
    archive.flush()
    archive._ram.cap = 0
    for run in archive._ram.runs():
        archive._ram.remove(run.id)
    assert one.loads(archive) == {"disk": LENGTH}


def test_derived_blocks_are_found_by_their_own_ids_and_prefix_names(archive: Archive) -> None:
    one = Prompt()
    names = []
    above = one.blocks[0].parent_exact
    for block in one.blocks:
        above = derived_id(above, block)
        names.append(above)
    archive.put(one.kv, one.blocks[:4], namespace(), names[:4])
    archive.put(one.kv, one.blocks[4:], namespace(), names[4:], parent=names[3])
    archive.flush()
    assert archive.lookup(one.ids) == ()
    assert len(archive.lookup(names)) == 8
    assert [ref.id for ref in archive.children(one.blocks[3].prefix)] == [names[4]]
    assert archive.stats()["blocks"]["disk"] == 8


def test_children_and_token_ids_in_both_tiers(archive: Archive) -> None:
    one = Prompt()
    one.put(archive)
    archive.flush()
    for _ in range(2):
        for block in one.blocks:
            (ref,) = archive.children(block.parent_prefix)
            assert ref.id == block.exact
            found = archive.token_ids(ref)
            assert found is not None
            assert np.array_equal(found, block.tokens)
        archive._ram.remove(ref.run_id)
    assert ref.tier == "disk"


def test_a_ref_that_left_ram_is_loaded_from_disk(archive: Archive) -> None:
    one = Prompt()
    one.put(archive)
    archive.flush()
    refs = archive.lookup(one.ids)
    assert refs[0].tier == "ram"
    archive._ram.remove(refs[0].run_id)
    sink = MemoryKV(UNEVEN, LENGTH)
    assert archive.load(refs, one.tokens, LENGTH, sink) == {"disk": LENGTH}
    assert sink.same(one.kv, 0, LENGTH)


def test_an_evicted_ref_is_corrupt_but_not_counted(archive: Archive) -> None:
    one = Prompt()
    one.put(archive)
    archive.flush()
    refs = archive.lookup(one.ids)
    assert archive.remove(refs[0].run_id) == 1
    for ref in (refs, [ref._replace(tier="disk") for ref in refs]):
        with pytest.raises(CorruptRun):
            archive.load(ref, one.tokens, LENGTH, MemoryKV(UNEVEN, LENGTH))
    assert archive.stats()["corrupt"] == 0


def test_arguments_that_do_not_fit_are_refused(archive: Archive) -> None:
    one = Prompt()
    one.put(archive)
    archive.flush()
    refs, sink = archive.lookup(one.ids), MemoryKV(UNEVEN, LENGTH)
    for bad_refs, tokens, end in [
        ((), one.tokens, LENGTH),
        (refs[::2], one.tokens, LENGTH),
        (refs, one.tokens, LENGTH + 1),
        (refs, one.tokens[:8], 8),
        (refs, one.tokens[:9], LENGTH),
    ]:
        with pytest.raises(ValueError, match=r"consecutive|position|token ids"):
            archive.load(bad_refs, tokens, end, sink)


def test_the_callback_comes_always_and_once(tmp_path: Path) -> None:
    one, calls = Prompt(), []

    class Failing(MemoryKV):
        def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
            raise RuntimeError("the source went away")

    def fail() -> None:
        calls.append("raises")
        raise RuntimeError("a callback that fails")

    archive = Archive.open(tmp_path, max_ram=CAP, max_disk=CAP)
    archive.put(Failing(UNEVEN, LENGTH), one.blocks, namespace(), on_copied=lambda: calls.append("failed"))
    archive.put(one.kv, one.blocks, namespace(), on_copied=fail)
    archive.put(one.kv, one.blocks, namespace(), on_copied=lambda: calls.append("stored already"))
    archive.put(one.kv, (), namespace(), on_copied=lambda: calls.append("nothing"))
    archive.put(one.kv, (one.blocks[0], one.blocks[2]), namespace(), on_copied=lambda: calls.append("gap"))
    archive.flush()
    assert sorted(calls) == ["failed", "gap", "nothing", "raises", "stored already"]
    assert archive.stats()["store_errors"] == 3
    assert one.loads(archive) == {"ram": LENGTH}
    archive.close()
    archive.close()
    archive.put(one.kv, one.blocks, namespace(), on_copied=lambda: calls.append("closed"))
    assert calls[-1] == "closed"


def test_put_returns_at_once_and_drops_what_piles_up(archive: Archive) -> None:
    gate, entered, done = threading.Event(), threading.Event(), []

    class Slow(MemoryKV):
        def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
            entered.set()
            gate.wait(10)
            return super().read(layer, kv, start, end)

    one = Prompt()
    archive.put(Slow(UNEVEN, LENGTH), one.blocks, namespace(), on_copied=lambda: done.append(0))
    assert entered.wait(10)
    for seed in range(1, MAX_PENDING + 4):
        other = Prompt(seed)
        archive.put(other.kv, other.blocks, namespace(), on_copied=lambda seed=seed: done.append(seed))
    assert done == [MAX_PENDING + more for more in range(4)]  # dropped: the callback came from put itself
    gate.set()
    archive.flush()
    assert sorted(done) == list(range(MAX_PENDING + 4))
    assert archive.stats()["dropped_writes"] == 4
    assert len(archive.contents.entries()) == MAX_PENDING


def test_ram_never_holds_more_than_its_cap(tmp_path: Path) -> None:
    one = Prompt()
    cap = make_run(one.kv, one.blocks).nbytes * 2
    with Archive.open(tmp_path, max_ram=cap, max_disk=CAP) as archive:
        for seed in range(6):
            Prompt(seed).put(archive)
            archive.flush()
            assert archive.stats()["bytes"]["ram"] <= cap
        assert archive.stats()["evictions"]["ram"] == 4
        assert Prompt(0).loads(archive) == {"disk": LENGTH}
        archive.promote([archive.lookup(one.ids)[0].run_id])
        archive.flush()
        assert one.loads(archive) == {"ram": LENGTH}
        assert archive.stats()["bytes"]["ram"] <= cap


def test_hits_write_nothing_until_they_are_merged(tmp_path: Path) -> None:
    one = Prompt()
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        one.put(archive)
        archive.flush()
        before = {path.name: path.read_bytes() for path in tmp_path.glob("catalogue*") if not path.match("*-shm")}
        used = archive.contents.entries()[0].last_used
        one.loads(archive)
        after = {path.name: path.read_bytes() for path in tmp_path.glob("catalogue*") if not path.match("*-shm")}
        assert after == before
        archive.flush()
        assert archive.contents.entries()[0].last_used > used


def test_names_entries_and_show(archive: Archive, tmp_path: Path) -> None:
    one = Prompt()
    one.put(archive, 0, 5)
    one.put(archive)
    other = chain(one.tokens, [32, LENGTH], namespace("others"))
    archive.put(one.kv, other, namespace("others"))
    archive.flush()
    archive.contents.name("support bot", one.ids[-1])
    assert archive.contents.names() == {"support bot": one.ids[-1]}
    third, second, first = archive.contents.entries()
    assert (second.name, second.tokens, second.start, second.blocks, second.tier) == ("support bot", 24, 40, 3, "ram")
    assert (first.name, first.model, first.model == third.model) == ("", namespace().model.digest.hex()[:12], False)
    shown = archive.contents.show("support bot")
    assert shown["id"] == second.id
    assert shown["chain"] == [first.id, second.id]
    assert shown["identity"] == namespace().describe()
    assert shown["geometry"] == UNEVEN.describe()
    assert shown["token_ids"] == one.tokens[40:].tolist()
    assert Path(shown["file"]).stat().st_size == shown["bytes"] == shown["file_bytes"]
    assert archive.contents.show(first.id[:8])["id"] == archive.contents.show(one.ids[2].hex()[:9])["id"] == first.id
    for run in archive._ram.runs():
        archive._ram.remove(run.id)
    assert archive.contents.show("support bot") == shown | {"tier": "disk"}
    for wanted, message in [("nobody", "nothing is named"), ("ffffffffffffffff", "no run or block")]:
        with pytest.raises(StoreError, match=message):
            archive.contents.show(wanted)
    described = [namespace(weights).describe() for weights in ("weights", "others")]
    assert archive.namespaces() == {namespace_digest(each): each for each in described}
    rows = archive.find_content(one.blocks[1].content)
    assert [(row["start"], row["parent_exact"], row["namespace"]) for row in rows] == [
        (8, one.ids[0], namespace().describe())
    ]
    assert archive.remove(first.id) == 2
    assert [entry.id for entry in archive.contents.entries()] == [third.id]
    with pytest.raises(StoreError, match="not stored any more"):
        archive.contents.show("support bot")
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert archive.contents.size_on_disk() == sum(path.stat().st_size for path in files)


def test_counters_add_up_over_archives(tmp_path: Path) -> None:
    archives = [Archive.open(tmp_path, max_ram=0, max_disk=CAP) for _ in range(3)]
    for turn in range(4):
        for at, archive in enumerate(archives):
            archive.contents.count("hits", at + turn)
            archive.flush()
    for archive in archives:
        archive.close()
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        assert archive.contents.counters() == {"hits": sum(at + turn for at in range(3) for turn in range(4))}


def test_two_archives_of_one_store_share_what_they_write(tmp_path: Path) -> None:
    one = Prompt()
    with (
        Archive.open(tmp_path, max_ram=0, max_disk=CAP) as mine,
        Archive.open(tmp_path, max_ram=0, max_disk=CAP) as theirs,
    ):
        one.put(mine)
        mine.flush()
        one.put(theirs)
        theirs.flush()
        assert one.loads(theirs) == {"disk": LENGTH}
        assert len(theirs.contents.entries()) == 1


def test_blocks_that_another_process_wrote_meanwhile_are_stored_once(tmp_path: Path) -> None:
    one = Prompt()
    tier = DiskTier.open(tmp_path, CAP)
    assert tier.put(make_run(one.kv, one.blocks[:5]))
    assert tier.put(make_run(one.kv, one.blocks[:5]))
    assert tier.put(make_run(one.kv, one.blocks))
    assert sorted(tier.index.block_counts().values()) == [3, 5]
    assert len(list((tmp_path / "runs").iterdir())) == 2
    tier.close()
