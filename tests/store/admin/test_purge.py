"""Purging a tenant: a search over every byte of the folder finds nothing of it, and everything of the others."""

from __future__ import annotations

import gc
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash
from tests.helpers.archives import CAP, LENGTH

from keepwarm.core.blocks import Block, chain
from keepwarm.core.identity import canonical_json, salt_key, salt_tag
from keepwarm.errors import CorruptRun
from keepwarm.store import Archive
from keepwarm.store.disk.owner import Owner
from keepwarm.store.runfile.header import RunHeader
from keepwarm.testing.kv import UNEVEN, MemoryKV, namespace, prompt


class Tenant:
    """A prompt under a salt, or under none."""

    def __init__(self, salt: str | None, seed: int, public: int = 0) -> None:
        """The salted region begins at `public`."""
        self.salt = salt
        self.tokens = prompt(LENGTH, seed)
        extra = {} if salt is None else {public: salt_key(salt)}
        self.blocks: tuple[Block, ...] = chain(self.tokens, [*range(8, LENGTH + 1, 8)], namespace(), extra)
        self.ids = [block.exact for block in self.blocks]
        self.kv = MemoryKV.random(UNEVEN, LENGTH, seed)

    def put(self, archive: Archive, first: int = 0, last: int | None = None) -> None:
        archive.put(self.kv, self.blocks[first:last], namespace())
        archive.flush()

    def needles(self) -> list[bytes]:
        """Bytes that only this tenant's data holds: token ids, KV, and the blocks' names, raw and as text."""
        tokens = [self.tokens[at : at + 4].tobytes() for at in range(0, LENGTH, 4)]
        kv = [part[0, at].tobytes() for pair in self.kv.arrays for part in pair for at in range(LENGTH)]
        names = [name for block in self.blocks for name in (block.exact, block.prefix, block.content)]
        return [*tokens, *kv, *names, *(name.hex().encode() for name in names)]

    def traces(self, folder: Path) -> int:
        """How many of them the files hold (their names, too)."""
        everything = b"".join(str(path).encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file())
        return sum(needle in everything for needle in self.needles())

    def loads(self, archive: Archive) -> int:
        refs = archive.lookup(self.ids)
        if refs:
            sink = MemoryKV(UNEVEN, LENGTH)
            archive.load(refs, self.tokens[: refs[-1].end], refs[-1].end, sink)
            assert sink.same(self.kv, 0, refs[-1].end)
        return len(refs)


def store(folder: Path, ram: int = CAP, key: bytes | None = None) -> Archive:
    return Archive.open(folder, max_ram=ram, max_disk=CAP, key=key)


def key_of(salt: str) -> bytes:
    return salt_key(salt)


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_nothing_of_a_purged_tenant_is_left(tmp_path: Path, key: bytes | None) -> None:
    mine, theirs, nobodys = Tenant("mine", 1), Tenant("theirs", 2), Tenant(None, 3)
    # With names and rows of the same seed under another salt, only what is under this one may go.
    same = Tenant("other", 1)
    with store(tmp_path, key=key) as archive:
        for tenant in (mine, theirs, nobodys):
            tenant.put(archive, 0, 5)
            tenant.put(archive)
        archive.contents.name("my secret project", mine.ids[-1])
        archive.contents.name("their project", theirs.ids[-1])
        assert mine.traces(tmp_path) > len(mine.blocks)
        report = archive.purge(key_of("mine"))
        assert (report.runs, report.names) == (2, 1)
        assert report.nbytes > LENGTH * UNEVEN.bytes_per_token
        assert mine.traces(tmp_path) == 0
        assert b"my secret project" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
        assert mine.loads(archive) == 0
        assert [theirs.loads(archive), nobodys.loads(archive)] == [8, 8]
        assert archive.contents.names() == {"their project": theirs.ids[-1]}
        assert same.loads(archive) == 0
    assert mine.traces(tmp_path) == 0
    with store(tmp_path, key=key) as archive:
        assert [mine.loads(archive), theirs.loads(archive), nobodys.loads(archive)] == [0, 8, 8]
        again = archive.purge(key_of("mine"))
        assert (again.runs, again.names, again.nbytes) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["purged here", "purged by another", "removed"])
def test_no_header_that_was_read_is_left_in_memory(tmp_path: Path, how: str) -> None:
    mine = Tenant("mine", 1)

    def headers() -> int:
        gc.collect()
        return sum(type(each) is RunHeader for each in gc.get_objects())

    before = headers()
    with store(tmp_path, ram=0) as archive:
        mine.put(archive)
        assert mine.loads(archive) == 8
        assert headers() > before
        if how == "removed":
            archive.remove(archive.lookup(mine.ids)[0].run_id)
        elif how == "purged here":
            archive.purge(key_of("mine"))
        else:
            with store(tmp_path, ram=0) as other:
                other.purge(key_of("mine"))
            archive.flush()
        deadline = time.monotonic() + 10  # threads that read it are on their way out of that
        while headers() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert headers() == before


def test_tenants_with_different_salts_share_no_block_and_the_same_salt_does(tmp_path: Path) -> None:
    one, same, other, none = Tenant("a", 1), Tenant("a", 1), Tenant("b", 1), Tenant(None, 1)
    with store(tmp_path) as archive:
        one.put(archive)
        assert same.loads(archive) == 8
        for stranger in (other, none):
            assert not set(stranger.ids) & set(one.ids)
            assert stranger.loads(archive) == 0
            for block in stranger.blocks:
                assert archive.children(block.parent_prefix) == ()
    assert one.blocks[0].salts == (salt_tag(salt_key("a")),)
    assert none.blocks[0].salts == ()


def test_what_was_given_up_before_is_gone_from_free_pages_too(tmp_path: Path) -> None:
    """Rows that an eviction deleted lie in free pages until they are written over."""
    mine = Tenant("mine", 1)
    with store(tmp_path, ram=0) as archive:
        for seed in range(2, 20):
            Tenant("theirs", seed).put(archive)
        mine.put(archive)
        archive.contents.name("mine", mine.ids[-1])
        for entry in archive.contents.entries()[:1]:
            assert archive.remove(entry.id) == 1
        assert archive.purge(key_of("mine")).names == 1
        assert mine.traces(tmp_path) == 0
        assert len(archive.contents.entries()) == 18


@pytest.mark.parametrize("owner", ["elsewhere", "alive"])
@pytest.mark.parametrize("how", ["purge", "open"])
def test_what_another_process_gave_up_and_did_not_unlink_goes_too(tmp_path: Path, owner: str, how: str) -> None:
    mine = Tenant("mine", 1)
    with store(tmp_path, ram=0) as archive:
        mine.put(archive)
        disk = archive._disk
        assert disk is not None
        gone = disk.index.forget([archive.lookup(mine.ids)[0].run_id])  # and was killed before it unlinked the file
        holder = Owner("another pod", 7, "1")
        if owner == "alive":  # about to unlink it, as far as anybody can tell
            init = Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]
            holder = Owner(Owner.current().host, 1, init)
        with disk.index.database.transaction() as db:
            db.execute("UPDATE doomed SET owner = ?", [str(holder)])
        assert mine.traces(tmp_path) > 0
        if how == "purge":
            assert archive.purge(key_of("mine")).nbytes == gone[0].nbytes
            assert mine.traces(tmp_path) == 0
        else:
            store(tmp_path, ram=0).close()
        assert not list((tmp_path / "runs").iterdir())
        assert disk.index.database.read("SELECT value FROM facts WHERE name = 'bytes'") == [(0,)]


def test_quarantined_bytes_go_too(tmp_path: Path) -> None:
    mine = Tenant("mine", 1)
    with store(tmp_path, ram=0) as archive:
        mine.put(archive)
        path = next((tmp_path / "runs").iterdir())
        path.write_bytes(path.read_bytes()[:-3] + b"bad")
        with pytest.raises(CorruptRun):
            mine.loads(archive)
        shutil.copy(tmp_path / "catalogue.sqlite", tmp_path / "quarantine" / "catalogue-1.sqlite")
        (tmp_path / "runs" / "stray").write_bytes(mine.tokens.tobytes())
        assert mine.traces(tmp_path) > 0
        archive.purge(key_of("mine"))
        assert mine.traces(tmp_path) == 0


def test_a_chain_that_lost_its_beginning_is_found_by_its_salt(tmp_path: Path) -> None:
    mine = Tenant("mine", 1)
    with store(tmp_path, ram=0) as archive:
        mine.put(archive, 0, 5)
        mine.put(archive)
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        db.execute("DELETE FROM runs WHERE start = 0")
        db.execute("DELETE FROM blocks WHERE start < 40")
    db.close()
    with store(tmp_path, ram=0) as archive:
        assert mine.traces(tmp_path) > 0
        archive.purge(key_of("mine"))
        assert mine.traces(tmp_path) == 0


def test_a_region_that_begins_later_goes_with_what_continues_it(tmp_path: Path) -> None:
    public, mine = Tenant(None, 1), Tenant("mine", 1, public=24)
    assert public.ids[:3] == mine.ids[:3]
    with store(tmp_path) as archive:
        mine.put(archive, 0, 3)
        mine.put(archive, 0, 6)
        mine.put(archive)
        public.put(archive)
        assert archive.purge(key_of("mine")).runs == 2
        assert [mine.loads(archive), public.loads(archive)] == [3, 8]


def test_a_catalogue_made_again_still_knows_whose_runs_are_whose(tmp_path: Path) -> None:
    mine, theirs = Tenant("mine", 1), Tenant("theirs", 2)
    with store(tmp_path) as archive:
        mine.put(archive)
        theirs.put(archive)
    (tmp_path / "catalogue.sqlite").unlink()
    with store(tmp_path) as archive:
        assert archive.purge(key_of("mine")).runs == 1
        assert mine.traces(tmp_path) == 0
        assert theirs.loads(archive) == 8


def test_runs_of_a_version_without_salts_go_with_any_purge(tmp_path: Path) -> None:
    """Whose they are is not known: keeping them could keep what was to go."""
    mine = Tenant("mine", 1)
    with store(tmp_path) as archive:
        mine.put(archive)
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as db:
        db.execute("UPDATE salts SET tag = x''")
    db.close()
    with store(tmp_path) as archive:
        assert archive.purge(key_of("somebody")).runs == 1
        assert mine.traces(tmp_path) == 0


def first_version(path: Path) -> None:
    """Rewrite a run file as version 1 wrote it: without salts."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = json.loads(raw[8 : 8 + length])
    meta = text["__metadata__"]
    blocks = [{k: v for k, v in block.items() if k != "salts"} for block in json.loads(meta["blocks"])]
    meta |= {"blocks": canonical_json(blocks), "keepwarm_format": "1"}
    del meta["header_xxh3"]
    hasher = xxhash.xxh3_128(canonical_json(meta).encode())
    hasher.update(raw[8 + length : 8 + length + 4 * LENGTH])
    meta["header_xxh3"] = hasher.hexdigest()
    head = json.dumps(text, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-(8 + len(head)) % 4096)
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])


def test_files_of_the_first_version_are_read_and_keep_being_nobodys(tmp_path: Path) -> None:
    mine, theirs = Tenant("mine", 1), Tenant(None, 2)
    for tenant in (mine, theirs):
        with store(tmp_path) as archive:
            tenant.put(archive)
        if tenant is mine:
            first_version(next((tmp_path / "runs").iterdir()))
    (tmp_path / "catalogue.sqlite").unlink()
    with store(tmp_path) as archive:
        assert [mine.loads(archive), theirs.loads(archive)] == [8, 8]
        archive.promote(entry.id for entry in archive.contents.entries())
        archive.flush()
        assert archive.stats()["blocks"]["ram"] == 16
        assert archive.purge(key_of("mine")).runs == 1
        assert [mine.loads(archive), theirs.loads(archive)] == [0, 8]
        assert mine.traces(tmp_path) == 0


def test_in_memory_archives_purge_as_well() -> None:
    mine, theirs = Tenant("mine", 1), Tenant("theirs", 2)
    with Archive.open(None, max_ram=CAP, max_disk=0) as archive:
        for tenant, name in ((mine, "mine"), (theirs, "theirs")):
            tenant.put(archive)
            archive.contents.name(name, tenant.ids[-1])
        report = archive.purge(key_of("mine"))
        assert (report.runs, report.names) == (1, 1)
        assert archive.contents.names() == {"theirs": theirs.ids[-1]}
        assert [mine.loads(archive), theirs.loads(archive)] == [0, 8]


def test_another_process_gives_up_what_it_holds_in_ram(tmp_path: Path) -> None:
    mine, theirs, nobodys = Tenant("mine", 1), Tenant("theirs", 2), Tenant(None, 3)
    told: list[str] = []
    with store(tmp_path) as archive:
        for tenant in (mine, theirs, nobodys):
            tenant.put(archive)
        archive.on_purge(lambda tags: told.append("purged"))
        code = f"""
from pathlib import Path
from keepwarm.core.identity import salt_key
from keepwarm.store import Archive
with Archive.open(Path({str(tmp_path)!r}), max_ram=0, max_disk={CAP}) as archive:
    print(archive.purge(salt_key("mine")).runs)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "1\n"
        assert mine.traces(tmp_path) == 0
        archive.flush()
        assert told == ["purged"]
        assert [mine.loads(archive), theirs.loads(archive), nobodys.loads(archive)] == [0, 8, 8]
        assert archive.stats()["blocks"]["ram"] == 16
        archive.flush()
        assert told == ["purged"]


def test_a_write_under_way_in_another_process_is_undone(tmp_path: Path) -> None:
    mine = Tenant("mine", 1)
    with store(tmp_path, ram=0) as archive, store(tmp_path, ram=0) as writer:
        disk = writer._disk
        assert disk is not None
        write = disk.index.publish

        def publish(*arguments: object, **named: object) -> int | None:
            archive.purge(key_of("mine"))
            return write(*arguments, **named)  # type: ignore[arg-type]

        disk.index.publish = publish  # type: ignore[method-assign]
        mine.put(writer)
        assert mine.traces(tmp_path) == 0
        assert mine.loads(writer) == 0
        assert not list((tmp_path / "runs").iterdir())
