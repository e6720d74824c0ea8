"""What is handed over to be stored is found by the next request, or waited for a moment; nothing is stored twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.archives import CAP, LENGTH, Prompt
from tests.helpers.pages import GRID, PAGE, Store, ids, joined

from keepwarm.core.blocks import chain
from keepwarm.core.ports import BlockRef, Bytes
from keepwarm.linker.prefix import matching_tokens, whole_blocks
from keepwarm.store.archive import Archive
from keepwarm.store.coming import Coming
from keepwarm.testing.kv import namespace


class Held:
    """A source that gives nothing away until it is let go of."""

    def __init__(self, prompt: Prompt) -> None:
        self.geometry = prompt.kv.geometry
        self.prompt = prompt
        self.go = threading.Event()

    def read(self, layer: int, kv: int, start: int, end: int) -> Bytes:
        assert self.go.wait(60)
        return self.prompt.kv.read(layer, kv, start, end)


@contextmanager
def slow_disk(archive: Archive) -> Iterator[None]:
    """Nothing is written meanwhile."""
    done = threading.Event()

    def rest() -> None:
        done.wait(60)

    assert archive._handover.writer.submit(rest)
    try:
        yield
    finally:
        done.set()


def test_who_begins_alike_waits_and_nobody_else() -> None:
    one, two = Prompt(0), Prompt(1)
    coming = Coming()
    expected = coming.expect(one.blocks)
    assert not coming.wait(two.blocks[0], 0)
    assert not coming.wait(one.blocks[1], 0)
    salted = one.blocks[0]._replace(salts=(b"s" * 32,))
    assert not coming.wait(salted, 0), "another tenant's clock tells nothing of it"
    threading.Timer(0.01, coming.arrived, [expected]).start()
    assert coming.wait(one.blocks[0], 0) or expected.there.is_set()
    coming.arrived(expected)
    assert not coming.wait(one.blocks[0], 0)


def test_a_put_is_found_although_the_disk_is_slow(tmp_path: Path) -> None:
    one = Prompt(0)
    source = Held(one)
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive, slow_disk(archive):
        archive.put(source, one.blocks, namespace())
        assert archive.lookup(one.ids) == ()
        threading.Timer(0.01, source.go.set).start()
        archive.arrives(one.blocks[0], 0)
        archive._handover.copier.flush()
        assert one.loads(archive) == {"ram": LENGTH}
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        assert one.loads(archive) == {"disk": LENGTH}


def test_what_waits_for_the_disk_is_not_written_twice(tmp_path: Path) -> None:
    one = Prompt(0)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        with slow_disk(archive):
            one.put(archive, 0, 1)
            one.put(archive)
            one.put(archive)
            archive._handover.copier.flush()
        archive.flush()
        runs = archive.contents.entries()
        assert sorted(run.tokens for run in runs) == [one.blocks[0].length, LENGTH - one.blocks[0].length]
        assert one.loads(archive) == {"disk": LENGTH}


def test_what_is_removed_does_not_come_back(tmp_path: Path) -> None:
    one = Prompt(0)
    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        one.put(archive)
        archive._handover.copier.flush()
        (run,) = archive._ram.runs()
        assert archive.remove(run.id) == 1
        archive.flush()
        assert archive.contents.entries() == []
        assert one.loads(archive) == {}


@pytest.mark.slow
@pytest.mark.hurried
def test_a_disk_that_hangs_costs_one_wait_and_no_copy_of_others(tmp_path: Path) -> None:
    prompts = [Prompt(seed) for seed in range(14)]
    copied: list[int] = []
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        with slow_disk(archive):
            for number, one in enumerate(prompts):
                archive.put(one.kv, one.blocks, namespace(), on_copied=lambda number=number: copied.append(number))
            archive._handover.copier.flush()
            assert copied == list(range(14))
            assert archive.stats()["dropped_writes"] == 14 - 7  # one rests, seven wait behind it
            assert not archive.arrives(prompts[0].blocks[0], 0)
            waited_for = archive._handover.coming._by_parent[prompts[0].blocks[0].parent_exact]
            assert prompts[0].ids[0] not in [each.first.exact for each in waited_for], "nobody waits for it again"
        archive.flush()
        assert [bool(one.loads(archive)) for one in prompts] == [True] * 7 + [False] * 7
        prompts[-1].put(archive)
        archive.flush()
        assert prompts[-1].loads(archive) == {"disk": LENGTH}


@pytest.mark.hurried
def test_what_waits_for_the_disk_is_found_by_name(tmp_path: Path) -> None:
    one = Prompt(0)
    with Archive.open(tmp_path, max_ram=0, max_disk=CAP) as archive:
        with slow_disk(archive):
            one.put(archive)
            archive._handover.copier.flush()
            assert archive.find(one.ids) == {}
        while not (found := archive.find(one.ids)):  # a disk may be slower than anybody waits
            pass
        assert set(found) == set(one.ids)


def test_what_arrives_while_it_is_looked_up_is_found_with_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    text = ids(2 * PAGE + 10, 1)
    asked = joined(text, ids(5, 2))
    lookup = Archive.lookup

    def late(archive: Archive, names: Sequence[bytes]) -> tuple[BlockRef, ...]:
        found = lookup(archive, names)
        monkeypatch.undo()
        store.put(joined(text, ids(3, 3)))
        return found

    monkeypatch.setattr(Archive, "lookup", late)
    _, reached = matching_tokens(chain(asked, GRID.cuts(len(asked)), namespace()), store.archive, 0, {})
    assert reached == len(text)
    store.archive.close()


@pytest.mark.parametrize("asked", ["before it follows", "after it follows"])
def test_what_arrives_between_two_looks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """It is not there when the page is looked up, nor is it on its way any more when that is asked."""
    store = Store(tmp_path)
    text = ids(2 * PAGE + 10, 1)
    store.put(joined(text[:5], ids(40, 4)))  # another prompt with the same first tokens
    name = "lookup" if asked == "before it follows" else "continuing"
    look = getattr(Archive, name)

    def late(*arguments: Any) -> Any:
        found = look(*arguments)
        monkeypatch.undo()
        store.put(text)
        return found

    monkeypatch.setattr(Archive, name, late)
    _, reached = matching_tokens(chain(text, GRID.cuts(len(text)), namespace()), store.archive, 0, {})
    assert reached == len(text) - 1
    store.archive.close()


def test_a_step_that_arrives_while_it_is_looked_up_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where cuts name blocks, and a match ends with a whole one."""
    one = Prompt(0)
    lookup = Archive.lookup

    def late(archive: Archive, names: Sequence[bytes]) -> tuple[BlockRef, ...]:
        found = lookup(archive, names)
        monkeypatch.undo()
        one.put(archive)
        archive.flush()
        return found

    with Archive.open(tmp_path, max_ram=CAP, max_disk=CAP) as archive:
        monkeypatch.setattr(Archive, "lookup", late)
        assert len(whole_blocks(one.blocks, archive, 0)) == len(one.blocks) - 1


@pytest.mark.parametrize("cut", [True, False])
def test_a_lookup_ends_though_others_never_stop_storing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    store = Store(tmp_path)
    text, lookup, looks = ids(2 * PAGE + 10, 1), Archive.lookup, list[int]()

    def busy(archive: Archive, names: Sequence[bytes]) -> tuple[BlockRef, ...]:
        looks.append(1)
        if len(looks) < 20:
            with monkeypatch.context() as others:
                others.setattr(Archive, "lookup", lookup)
                store.put(ids(PAGE, 10 + len(looks)))  # nothing of this prompt
        return lookup(archive, names)

    monkeypatch.setattr(Archive, "lookup", busy)
    blocks = chain(text, GRID.cuts(len(text)), namespace())
    if cut:
        assert whole_blocks(blocks, store.archive, 0) == ()
    else:
        assert matching_tokens(blocks, store.archive, 0, {}) == ((), 0)
    assert len(looks) < 10
    store.archive.close()
